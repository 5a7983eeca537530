"""Exercises of the notebook on fp16's bit layout."""

import functools
import math

from halfbits.formats import FORMATS
from helpers.bitview import BitView
from helpers.check.exercise import Case, Reply, exercise


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
