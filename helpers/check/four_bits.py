"""Exercises of the notebook on formats of four bits."""

import math

import torch

from halfbits.formats import FORMATS
from helpers.check.exercise import Reply, exercise

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
