"""Exercises of the notebook on formats beyond fp16."""

import functools
import math

import torch

from helpers.check.exercise import Reply, equal, exercise
from helpers.formats import FORMATS

_E4M3, _FP4 = "fp8_e4m3fn", "fp4_e2m1fn"


def _exponent(answer, amax, name):
    exponent = answer(amax, name)
    if not -127 <= exponent <= 127:
        raise Reply(f"for amax {amax:g} in {name} you give {exponent}. E8M0 holds -127 to 127.")
    return exponent


def _rounded_up(amax, name, add=0):
    return min(max(math.ceil(math.log2(amax / FORMATS[name].max)) + add, -127), 127) if amax else -127


def _floor_rule(amax, name):
    return math.frexp(amax)[1] - math.frexp(FORMATS[name].max)[1] if amax else -127


@exercise(
    cases=[
        (448.0, _E4M3),
        (449.0, _E4M3),
        (512.0, _E4M3),
        (0.01, _E4M3),
        (5.0, _FP4),
        (0.4, _FP4),
        (0.0, _FP4),
        (1e-40, _E4M3),
        (1e39, _FP4),
    ],
    mistakes={
        "The largest numbers are cut off: round the exponent up.": _floor_rule,
        "A smaller scale keeps more of the small numbers.": lambda amax, name: _rounded_up(amax, name, add=1),
        "E8M0 holds -127 to 127.": lambda amax, name: math.ceil(math.log2(amax / FORMATS[name].max)) if amax else -127,
    },
    observe=_exponent,
    show=lambda amax, name: f"amax {amax:g} in {name}",
)
def block_exponent(amax, name):
    """`block_exponent(amax, name)` is the smallest exponent of an E8M0 scale that leaves nothing past the end."""
    return _rounded_up(amax, name)


def _clamped(x):
    return x.clamp(-57344, 57344)


def _with_noise(x, noise):
    return ((x.view(torch.int16) + noise) & -256).view(torch.float16)


@exercise(
    cases=lambda: [
        (torch.tensor([number], dtype=torch.float16), torch.tensor([noise], dtype=torch.int16))
        for noise in (0, 100, 255)
        for number in (1.0, 1.1, -1.1, 1.24, 3e-6, -40000.0, 57344.0, 65504.0, -60000.0, 0.0)
    ],
    mistakes={
        "That is rounding to nearest.": lambda x, noise: _clamped(x).to(torch.float8_e5m2).half(),
        "Clamp to 57344 first.": _with_noise,
        "The low byte is still there: cut it off.": lambda x, noise: (_clamped(x).view(torch.int16) + noise).view(
            torch.float16
        ),
        "Return fp16.": lambda x, noise: x.float(),
    },
    show=lambda x, noise: f"{x.item():g} with noise {noise.item()}",
)
def to_e5m2(x, noise):
    """`to_e5m2(x, noise)` rounds fp16 to E5M2 numbers stochastically, adding `noise` to the bits."""
    return _with_noise(_clamped(x), noise)


def _is_of_use(history):
    return max(history) > 0 and all(map(math.isfinite, history))


@exercise(
    cases=[
        ([1.0, 7.0, 2.0], 0),
        ([0.5], 0),
        ([3.0, 0.0], 2),
        ([1.0, math.inf], 0),
        ([math.nan, 2.0], 0),
        ([2.0, math.nan], 0),
        ([0.0, 0.0], 0),
    ],
    mistakes={
        "Keep the old scale where the history holds an infinity, NaN or nothing but zeros.": (
            lambda history, scale, margin: 448 / 2**margin / max(history) if max(history) else scale
        ),
        "That is the way back: 448 over the amax.": lambda history, scale, margin: (
            max(history) / 448 * 2**margin if _is_of_use(history) else scale
        ),
        "The margin leaves room: divide by 2^margin.": lambda history, scale, margin: (
            448 / max(history) if _is_of_use(history) else scale
        ),
        "The largest of the history counts, not the last.": lambda history, scale, margin: (
            448 / 2**margin / history[-1] if _is_of_use(history) and history[-1] else scale
        ),
    },
    observe=lambda answer, history, margin: float(answer(list(history), 7.0, margin)),
    same=functools.partial(equal, rel=1e-6),
    show=lambda history, margin: f"the history {history}, the old scale 7 and the margin {margin}",
)
def next_scale(history, scale, margin):
    """`next_scale(history, scale, margin)` is the next scale for E4M3; the old one if the history is of no use."""
    return 448 / 2**margin / max(history) if _is_of_use(history) else scale
