"""Exercises of the notebook on loss scaling."""

import math

import numpy as np
import torch

from helpers.check.exercise import Case, Reply, called, exercise


def _steps():
    """Scale, tracker, whether an infinity was found, and the growth interval: four by hand, 500 at random."""
    rng = np.random.default_rng(0)
    random = zip(rng.integers(-9, 20, 500), rng.integers(1, 9, 500), rng.integers(0, 2, 500), rng.random(500))
    return [
        Case((65536.0, 5, True, 2000), "After an infinity the count begins anew."),
        Case((65536.0, 5, False, 2000), "A clean step adds 1 to the count."),
        Case((65536.0, 1999, False, 2000), "This is clean step 2000 of 2000: the scale grows."),
        Case((0.5, 0, True, 3), "The scale has no floor."),
        *((2.0 ** int(p), int(n * share), bool(inf), int(n)) for p, n, inf, share in random),
    ]


def _next(scale, tracker, found_inf, interval, keeps_count=False, grows=True, floor=0.0):
    if found_inf:
        return max(floor, scale / 2), tracker if keeps_count else 0
    return (2 * scale, 0) if grows and tracker + 1 == interval else (scale, tracker + 1)


@exercise(
    cases=_steps,
    mistakes={
        "After an infinity the count begins anew.": lambda *state: _next(*state, keeps_count=True),
        "After the last clean step of the interval the scale grows.": lambda *state: _next(*state, grows=False),
        "The scale has no floor.": lambda *state: _next(*state, floor=1.0),
        "Return both, the scale and the tracker.": lambda scale, *state: scale,
    },
    show=lambda scale, tracker, inf, n: (
        f"scale {scale:g}, tracker {tracker}, {'an infinity' if inf else f'a clean step, {tracker + 1} of {n}'}"
    ),
)
def next_state(scale, tracker, found_inf, growth_interval):
    """`next_state(scale, tracker, found_inf, growth_interval)` is the next (scale, tracker), as GradScaler's."""
    state = torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32)
    torch._amp_update_scale_(*state, torch.tensor(float(found_inf)), 2.0, 0.5, growth_interval)
    return state[0].item(), state[1].item()


def _power(answer, gradients):
    scale = float(called(answer, gradients))
    if math.frexp(scale)[0] != 0.5:  # of a negative number and of 0 too
        raise Reply(f"for {gradients.tolist()[:3]} you give {scale:g}. That is no power of two.")
    return scale


def _below(limit, size):
    """The largest power of two that keeps `size(gradients)` at or below `limit`."""
    return lambda gradients: 2.0 ** math.floor(math.log2(limit / size(gradients)))


def _largest(gradients):
    return gradients.abs().max().item()


@exercise(
    cases=lambda: [
        (torch.tensor(numbers),)
        for numbers in ([1.0, -2.0], [1e-6, 1e-9], [-0.3, 0.1], [65519.0], [65520.0], [4095.0] * 99, [3e-20], [1e30])
    ],
    mistakes={
        "Times this scale an infinity appears in fp16.": lambda gradients: 2.0**16,
        "The largest by absolute value decides: a negative one too.": _below(65519, lambda g: g.max().item()),
        "A larger one is finite too: up to 65519 rounds to 65504.": _below(32768, _largest),
        "One more is finite: a number below 65520 is rounded to 65504.": _below(65504, _largest),
        "65520 itself becomes infinite.": _below(65520, _largest),
        "Each gradient has to fit, not their norm.": _below(65519, lambda g: g.norm().item()),
        "That is no power of two.": lambda gradients: 65504 / gradients.abs().max(),
    },
    observe=_power,
)
def largest_scale(gradients):
    """`largest_scale(gradients)` is the largest power of two that keeps a float32 tensor finite in fp16."""
    scale = 2.0 ** math.floor(math.log2(65520 / _largest(gradients)))
    return scale if _largest(gradients.double()) * scale < 65520 else scale / 2
