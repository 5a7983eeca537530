"""Checks of notebook 01, sixteen bits."""

import math

import numpy as np

from helpers.bitview import BitView
from helpers.check.replies import same, says
from helpers.formats import FORMATS

_DECODED = [  # codes that tell faults apart, and what to think of when one is decoded wrongly
    (0x3C00, "Its exponent field is 15, its fraction 0."),
    (0x3E00, "The fraction counts in 1024ths, on top of the implicit 1."),
    (0xC000, "The highest bit is the sign."),
    (0x0001, "With exponent field 0 there is no implicit 1, and the power is 2^(1 - 15)."),
    (0x7C00, "Exponent field 31 with fraction 0 is infinity."),
    (0x7E00, "Exponent field 31 with any other fraction is NaN."),
    (0x8000, "Zero has a sign too."),
]


@says
def decode_fp16(answer):
    """`answer(code)` is the value, a float, of a 16-bit code."""
    values = FORMATS["fp16"].decode(range(65_536)).tolist()
    for code, why in [*_DECODED, *((code, "") for code in range(65_536))]:
        given, right = answer(code), values[code]
        if same(given, right):
            continue
        if code == 0x3C00 and given > 0 and math.frexp(given)[0] == 0.5:
            return f"your exponent bias is {15 - math.log2(given):.0f}; for fp16 it is 15"
        return f"for {code:#06x} you say {given!r}; it is {right!r}. {why}", BitView(code, "fp16")
    return None


_ENCODED = [  # values that tell faults apart
    (1.0, "2^0 needs the exponent field 15, and the 1 in front is not stored."),
    (-2.0, "A negative number has the highest bit set."),
    (0.0, "All bits of zero are 0. Take care that it has no leading 1 to be found."),
    (1.0009, "The nearest is the next number above 1: round, do not cut off."),
    (2049.0, "2048 and 2050 are equally near. Of two such numbers, the one with the even fraction wins."),
    (2051.0, "2050 and 2052 are equally near. Of two such numbers, the one with the even fraction wins."),
    (1 + 2**-11 + 2**-30, "It is nearer to the next number above 1. Round once, not first to float32."),
    (2047.9, "It rounds up to 2048: the fraction is full, and the exponent grows by 1."),
    (2.0**-24, "Below 2^-14 numbers are subnormal: the spacing stays 2^-24."),
    (2.0**-26, "It is nearer to 0 than to 2^-24."),
    (65519.0, "It is nearer to 65504 than to 65536, which would be the next number."),
    (65520.0, "From the middle between 65504 and 65536 on, numbers become infinity, exponent field 31."),
    (-math.inf, "Infinity has exponent field 31 and fraction 0."),
    (-0.0, "Zero has a sign too: math.copysign(1, value) tells."),
]


@says
def encode_fp16(answer):
    """`answer(value)` is the 16-bit code nearest to a float; of two as near, the even one. NaN: any NaN's code."""
    half, rng = FORMATS["fp16"], np.random.default_rng(0)
    finite = half.decode(rng.integers(0, 0x7BFF, 1000))
    ties = finite + half.spacing(finite) / 2
    random = rng.choice([-1, 1], 1000) * 2 ** rng.uniform(-27, 17, 1000)
    cases = _ENCODED + [(value, "") for value in [*ties.tolist(), *random.tolist(), math.nan]]
    for (value, why), right in zip(cases, half.encode([value for value, _ in cases]).tolist()):
        given = answer(value)
        given = given.item() if hasattr(given, "item") else given
        if not isinstance(given, int) or not 0 <= given <= 0xFFFF:
            return f"for {value!r} you give {given!r}. A code is an integer from 0 to 0xffff."
        if given == right or (math.isnan(value) and half.kind(given) == "NaN"):
            continue
        yours, nearest = BitView(given, "fp16"), BitView(value, "fp16")
        return f"for {value!r} you give {yours.value!r}; right is {nearest.value!r}. {why}", yours, nearest
    return None


@says
def limits(answer):
    """`answer(exponent_bits, mantissa_bits)` is (max, smallest normal, smallest subnormal, eps), IEEE style."""
    for name in ("fp16", "bf16", "fp32", "fp8_e5m2"):
        each = FORMATS[name]
        given = answer(each.exponent_bits, each.mantissa_bits)
        if len(given) != 4:
            return (
                f"you return {len(given)} values; asked for are four: (max, smallest normal, smallest subnormal, eps)"
            )
        for what, right, value in zip(
            ("max", "smallest normal", "smallest subnormal", "eps"),
            (each.max, each.smallest_normal, each.smallest_subnormal, each.eps),
            given,
        ):
            if value != right:
                times = f", which is {value / right:.6g} times as much" if value else ""
                return f"{what} of {name}: you say {value!r}{times}. It is {right!r}"
    return None
