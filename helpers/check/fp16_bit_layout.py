"""Exercises of the notebook on fp16's bit layout."""

import functools
import math

import numpy as np

from halfbits.formats import FORMATS
from helpers.bitview import BitView
from helpers.check.exercise import Case, Reply, exercise

_HALF = FORMATS["fp16"]


def _decoded(code, bias=15, implicit=1, subnormals=True):
    sign, exponent, fraction = (-1.0 if code >> 15 else 1.0), code >> 10 & 31, code & 1023
    if exponent == 31:
        return math.nan if fraction else sign * math.inf
    if exponent == 0 and subnormals:
        return sign * 2.0**-14 * fraction / 1024
    return sign * 2.0 ** (exponent - bias) * (implicit + fraction / 1024)


def _biased(bias):
    return functools.partial(_decoded, bias=bias)


@exercise(
    cases=[
        Case((0x3C00,), "Its exponent field is 15, its fraction 0."),
        Case((0x3E00,), "The fraction counts in 1024ths, on top of the implicit 1."),
        Case((0xC000,), "The highest bit is the sign."),
        Case((0x0001,), "With exponent field 0 there is no implicit 1, and the power is 2^(1 - 15)."),
        Case((0x7C00,), "Exponent field 31 with fraction 0 is infinity."),
        Case((0x7E00,), "Exponent field 31 with any other fraction is NaN."),
        Case((0x8000,), "Zero has a sign too."),
        *((code,) for code in range(65_536)),
    ],
    mistakes={
        **{f"Your exponent bias is {bias}; for fp16 it is 15.": _biased(bias) for bias in (0, 1, 14, 16, 31, 127)},
        "The 1 in front of the fraction is implicit: add it.": lambda code: _decoded(code, implicit=0),
        "There is no implicit 1 where the exponent field is 0.": lambda code: _decoded(code, subnormals=False),
        "You have left the sign out.": lambda code: abs(_decoded(code)),
        "Exponent field 31 is no ordinary one.": lambda code: (
            _decoded(code) if code & 0x7C00 != 0x7C00 else _decoded(code & 0xBFFF) * 65536
        ),
        "Adding 0.0 takes the sign of -0.0 away.": lambda code: _decoded(code) + 0.0,
    },
    show=lambda code: f"{code:#06x}",
    draw=lambda given, right, code: [BitView(code, "fp16")],
)
def decode_fp16(code):
    """`decode_fp16(code)` is the value, a float, of a 16-bit code."""
    return _decoded(code)


def _value_of_code(answer, value):
    code = answer(value)
    code = code.item() if hasattr(code, "item") else code
    if not isinstance(code, int) or not 0 <= code <= 0xFFFF:
        raise Reply(f"for {value!r} you give {code!r}. A code is an integer from 0 to 0xffff.")
    return _decoded(code)


def _to_encode():
    """Numbers that tell mistakes apart, a thousand ties, a thousand numbers of any size, and NaN."""
    rng = np.random.default_rng(0)
    finite = _HALF.decode(rng.integers(0, 0x7BFF, 1000))
    ties = finite + _HALF.spacing(finite) / 2
    random = rng.choice([-1, 1], 1000) * 2 ** rng.uniform(-27, 17, 1000)
    return [
        Case((1.0,), "2^0 needs the exponent field 15, and the 1 in front is not stored."),
        Case((-2.0,), "A negative number has the highest bit set."),
        Case((0.0,), "All bits of zero are 0. Take care that it has no leading 1 to be found."),
        Case((1.0009,), "The nearest is the next number above 1: round, do not cut off."),
        Case((2049.0,), "2048 and 2050 are equally near. Of two such numbers, the one with the even fraction wins."),
        Case((2051.0,), "2050 and 2052 are equally near. Of two such numbers, the one with the even fraction wins."),
        Case((1 + 2**-11 + 2**-30,), "It is nearer to the next number above 1. Round once, not first to float32."),
        Case((2047.9,), "It rounds up to 2048: the fraction is full, and the exponent grows by 1."),
        Case((2.0**-24,), "Below 2^-14 numbers are subnormal: the spacing stays 2^-24."),
        Case((2.0**-26,), "It is nearer to 0 than to 2^-24."),
        Case((65519.0,), "It is nearer to 65504 than to 65536, which would be the next number."),
        Case((65520.0,), "From the middle between 65504 and 65536 on, numbers become infinity, exponent field 31."),
        Case((-math.inf,), "Infinity has exponent field 31 and fraction 0."),
        Case((-0.0,), "Zero has a sign too: math.copysign(1, value) tells."),
        *((value,) for value in [*ties.tolist(), *random.tolist(), math.nan]),
    ]


def _cut_off(value):
    code = int(_HALF.encode(value))
    return code - bool(abs(_HALF.decode(code)) > abs(value))


def _ties_away(value):
    code, spacing = int(_HALF.encode(value)), _HALF.spacing(value)
    return code + bool(abs(value) < 65504 and abs(_HALF.decode(code)) == abs(value) - spacing / 2)


@exercise(
    cases=_to_encode,
    mistakes={
        "Round to the nearest, do not cut off.": _cut_off,
        "Of two numbers as near, take the one with the even fraction.": _ties_away,
        "Numbers too large become infinity, not 65504.": lambda value: int(_HALF.encode(value, saturate=True)),
        "A negative number has the highest bit set.": lambda value: int(_HALF.encode(abs(value))),
        "Zero has a sign too": lambda value: int(_HALF.encode(value)) if value else 0,
        "Round once, not first to float32.": lambda value: int(_HALF.encode(np.float32(value))),
        "NaN's fraction is not 0.": lambda value: int(_HALF.encode(value)) if value == value else 0x7C00,
        "A code is an integer from 0 to 0xffff.": lambda value: value.hex(),
    },
    observe=_value_of_code,
    show=repr,
    draw=lambda given, right, value: [BitView(given, "fp16"), BitView(value, "fp16")],
)
def encode_fp16(value):
    """`encode_fp16(value)` is the 16-bit code nearest to a float; of two as near, the even one. NaN: any NaN's code."""
    return int(_HALF.encode(value))


def _four(answer, name):
    given = answer(FORMATS[name].exponent_bits, FORMATS[name].mantissa_bits)
    if len(given) != 4:
        raise Reply(f"you return {len(given)} values; asked for are (max, smallest normal, smallest subnormal, eps)")
    return dict(zip(("max", "the smallest normal", "the smallest subnormal", "eps"), given))


def _limits(exponent_bits, mantissa_bits, bias_off=0, full=1):
    bias, eps = 2 ** (exponent_bits - 1) - 1 + bias_off, 2.0**-mantissa_bits
    smallest = 2.0 ** (1 - bias)
    return (2 - eps * full) * 2.0 ** (bias - bias_off), smallest, smallest * eps, eps


@exercise(
    cases=[("fp16",), ("bf16",), ("fp32",), ("fp8_e5m2",)],
    mistakes={
        "The largest fraction falls short of the next power of two by eps.": lambda e, m: _limits(e, m, full=0),
        "The lowest exponent field of a normal number is 1, not 0.": lambda e, m: _limits(e, m, bias_off=1),
        "These are fp16's; compute them from the two widths.": lambda e, m: _limits(5, 10),
    },
    observe=_four,
)
def limits(exponent_bits, mantissa_bits):
    """`limits(exponent_bits, mantissa_bits)` is (max, smallest normal, smallest subnormal, eps), IEEE style."""
    return _limits(exponent_bits, mantissa_bits)
