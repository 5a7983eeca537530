"""Exercises of the notebook on rounding and range."""

import math

import torch

from halfbits.formats import FORMATS
from helpers.bitview import BitView
from helpers.check.exercise import Reply, exercise


def _power(answer, code, name):
    weight = float(FORMATS[name].decode(code))
    step = answer(weight, name)
    if math.frexp(step)[0] != 0.5:
        raise Reply(f"{weight} and {name} give {step}. That is no power of two.")
    return {f"in {name} the smallest step from {weight}": step}


def _half_spacing(weight, name):
    return FORMATS[name].spacing(weight) / 2


def _what_the_step_does(given, right, code, name):
    """Where a step too small leads to, or the smaller one that is enough."""
    weight = float(FORMATS[name].decode(code))
    return [BitView(weight + min(*given.values(), *right.values()), name)]


@exercise(
    cases=[(0x3C00, "fp16"), (0x3C01, "fp16"), (0x3C02, "fp16"), (0x3F81, "bf16"), (0x3801, "fp16")],
    mistakes={
        "That is the spacing. Half of it moves an odd significand, as the tie goes to the even one.": lambda w, name: (
            FORMATS[name].spacing(w)
        ),
        "With half of the spacing a tie stays where the significand is even.": _half_spacing,
        "It moves the weight, but a smaller one does too.": lambda weight, name: 1.0,
        "Only a weight that is a power of two has an even significand for certain.": lambda weight, name: (
            FORMATS[name].spacing(weight) * (1 if math.frexp(weight)[0] == 0.5 else 0.5)
        ),
        "That is no power of two.": lambda weight, name: 0.6 * FORMATS[name].spacing(weight),
    },
    observe=_power,
    show=lambda code, name: "",
    draw=_what_the_step_does,
)
def smallest_step(weight, name):
    """`smallest_step(weight, name)` is the smallest power of two that moves `weight` when added to it in a format."""
    spacing = FORMATS[name].spacing(weight)
    return spacing / 2 if FORMATS[name].encode(weight) % 2 else spacing


def _within(spacings):
    """Whether a number is so many of fp16's spacings away at most."""

    def same(given, right):
        given, right = float(given), float(right)
        return abs(given - right) <= spacings * FORMATS["fp16"].spacing(right) or given == right

    return same


def _scaled_by(size):
    """The root mean square, after and before a division by `size(x)`."""
    return lambda x: size(x) * (x / size(x)).square().mean().sqrt()


@exercise(
    cases=lambda: [
        (torch.tensor(numbers, dtype=torch.float16),)
        for numbers in (
            [3.0, 4.0],
            [300.0] * 5,
            [65504.0, 65504.0],
            [1e-4] * 3,
            [6e-8, 6e-8],
            [0.0, 0.0],
            [[-2.0, 0.0], [0.0, 0.0]],
            [1.0] * 70_000,
        )
    ],
    mistakes={
        "A square, or the sum of squares, overflowed.": lambda x: x.square().mean().sqrt(),
        "The squares underflowed.": _scaled_by(lambda x: 65504),
        "0/0 is NaN.": _scaled_by(lambda x: x.abs().max()),
        "The root is missing.": lambda x: x.float().square().mean().half(),
        "The mean is over the last dimension only.": lambda x: x.float().square().mean(-1).sqrt().half(),
        "Come back to float16 in the end.": lambda x: x.float().square().mean().sqrt(),
    },
    same=_within(2),
)
def rms(x):
    """`rms(x)` is the root mean square of an fp16 tensor of any shape, as an fp16 scalar."""
    return x.double().square().mean().sqrt().half()
