"""Exercises of the notebook on rounding and range."""

import functools

import torch

from helpers.bitview import BitView
from helpers.check.exercise import exercise
from helpers.formats import FORMATS


@exercise(
    cases=[(1.0, "fp16"), (1 + 2**-10, "fp16"), (1 + 2**-9, "fp16"), (1 + 2**-7, "bf16"), (0.5 + 2**-11, "fp16")],
    mistakes={
        "Half of the spacing moves an odd significand: the tie goes to the even one.": ("spacing / 2", "spacing"),
        "With half of the spacing a tie stays where the significand is even.": ("else spacing", "else spacing / 2"),
        "It moves the weight, but a smaller one does too.": lambda weight, name: 1.0,
        "Only a power of two has an even significand for certain.": ("if odd", "if weight not in (0.5, 1.0)"),
    },
    show=lambda weight, name: f"{weight} and {name}",
    draw=lambda given, right, weight, name: [BitView(weight + min(given, right), name)],
)
def smallest_step(weight, name):
    """`smallest_step(weight, name)` is the smallest power of two that moves `weight` when added to it in a format."""
    spacing = FORMATS[name].spacing(weight)
    odd = FORMATS[name].encode(weight) % 2
    return spacing / 2 if odd else spacing


def _to_sum():
    random = torch.rand(3000, generator=torch.Generator().manual_seed(0))
    some = torch.ones(4096), torch.tensor([1000, 1]), torch.tensor([1, 1000, 2]), random
    return [(terms.half(),) for terms in some]


@exercise(
    cases=_to_sum,
    mistakes={
        "The total stalls: the correction is missing, or wrong.": lambda terms: functools.reduce(torch.add, terms),
    },
    rel=2**-10,  # a spacing of fp16
)
def kahan_sum(terms):
    """`kahan_sum(terms)` is the sum of a 1-d fp16 tensor, an fp16 scalar. How it was found cannot be told."""
    return terms.double().sum().half()


@exercise(
    cases=lambda: [
        (torch.tensor(numbers, dtype=torch.float16),)
        for numbers in ([3, 4], [300] * 5, [65504] * 2, [1e-4] * 3, [6e-8] * 2, [0, 0], [[-2, 0], [0, 0]], [1] * 70_000)
    ],
    mistakes={
        "A square, or the sum of squares, overflowed.": (".float()", ""),
        "The squares underflowed.": lambda x: 65504 * (x / 65504).square().mean().sqrt(),
        "0/0 is NaN.": lambda x: x.abs().max() * (x / x.abs().max()).square().mean().sqrt(),
        "The root is missing.": (".sqrt()", ""),
    },
    rel=2**-9,  # two spacings of fp16
)
def rms(x):
    """`rms(x)` is the root mean square of an fp16 tensor of any shape, as an fp16 scalar."""
    return x.float().square().mean().sqrt().half()
