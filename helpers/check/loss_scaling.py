"""Exercises of the notebook on loss scaling."""

import math

import numpy as np
import torch

from helpers.check.exercise import Case, exercise


def _steps():
    """Scale, tracker, whether an infinity was found, and the growth interval: four by hand, 500 at random."""
    rng = np.random.default_rng(0)
    random = zip(rng.integers(-9, 20, 500), rng.integers(1, 9, 500), rng.integers(0, 2, 500), rng.random(500))
    return [
        Case((65536.0, 5, True, 2000), "After an infinity the count begins anew, and the scale halves."),
        Case((65536.0, 5, False, 2000), "A clean step adds 1 to the count."),
        Case((65536.0, 1999, False, 2000), "This is clean step 2000 of 2000: the scale grows, the count begins anew."),
        Case((0.5, 0, True, 3), "The scale has no floor."),
        *((2.0 ** int(p), int(n * share), bool(inf), int(n)) for p, n, inf, share in random),
    ]


@exercise(cases=_steps)
def next_state(scale, tracker, found_inf, growth_interval):
    """`next_state(scale, tracker, found_inf, growth_interval)` is the next (scale, tracker), as GradScaler's."""
    state = torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32)
    torch._amp_update_scale_(*state, torch.tensor(float(found_inf)), 2.0, 0.5, growth_interval)
    return state[0].item(), state[1].item()


@exercise(
    cases=lambda: [
        (torch.tensor(numbers),)
        for numbers in ([1.0, -2.0], [1e-6, 1e-9], [-0.3, 0.1], [65519.0], [65520.0], [4095.0] * 99, [3e-20], [1e30])
    ],
    mistakes={
        "Times this scale an infinity appears in fp16.": lambda gradients: 2.0**16,
        "The largest by absolute value decides: a negative one too.": (".abs()", ""),
        "A larger one is finite too: up to 65519 rounds to 65504.": ("65520 / largest", "32768 / largest"),
        "One more is finite: a number below 65520 is rounded to 65504.": ("65520 / largest", "65504 / largest"),
        "65520 itself becomes infinite.": ("scale / 2 if", "scale if"),
        "Each gradient has to fit, not their norm.": ("abs().max()", "norm()"),
        "That is no power of two.": lambda gradients: 65504 / gradients.abs().max(),
    },
)
def largest_scale(gradients):
    """`largest_scale(gradients)` is the largest power of two that keeps a float32 tensor finite in fp16."""
    largest = gradients.abs().max().item()
    scale = 2.0 ** math.floor(math.log2(65520 / largest))
    return scale / 2 if largest * scale >= 65520 else scale
