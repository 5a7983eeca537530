"""Checks of notebook 03, loss scaling."""

import math

import numpy as np
import torch

from helpers.check.replies import says


@says
def next_state(answer):
    """`answer(scale, tracker, found_inf, growth_interval)` is the next (scale, tracker), as GradScaler's."""
    rng = np.random.default_rng(0)
    cases = [(65536.0, 5, True, 2000), (65536.0, 5, False, 2000), (65536.0, 1999, False, 2000), (0.5, 0, True, 3)]
    cases += [
        (2.0 ** int(power), int(rng.integers(interval)), bool(inf), int(interval))
        for power, interval, inf in zip(rng.integers(-9, 20, 500), rng.integers(1, 9, 500), rng.integers(0, 2, 500))
    ]
    for scale, tracker, found_inf, interval in cases:
        right = torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32)
        torch._amp_update_scale_(*right, torch.tensor(float(found_inf)), 2.0, 0.5, interval)
        given, right = answer(scale, tracker, found_inf, interval), (right[0].item(), right[1].item())
        if not isinstance(given, tuple) or len(given) != 2:
            return f"you return {given!r}; asked for are two values, (scale, tracker)"
        if given != right:
            why = "an infinity was found" if found_inf else f"this is clean step {tracker + 1} of {interval}"
            return f"from scale {scale}, tracker {tracker}, you go to {given}; {why}, so it is {right}"
    return None


@says
def largest_scale(answer):
    """`answer(gradients)` is the largest power of two that keeps a float32 tensor finite in fp16."""
    for values in ([1.0, -2.0], [1e-6, 1e-9], [-0.3, 0.1], [65519.0], [65520.0], [4095.0] * 99, [3e-20], [1e30]):
        gradients = torch.tensor(values)
        given = float(answer(gradients.clone()))
        fits = lambda scale, gradients=gradients: (gradients.double() * scale).half().isfinite().all().item()
        if given <= 0 or math.frexp(given)[0] != 0.5:
            return f"for {values[:3]} you give {given}, which is not a power of two"
        if not fits(given):
            return f"{values[:3]} times your {given} is {(gradients[:3].double() * given).half().tolist()} in fp16"
        if fits(2 * given):
            return f"{values[:3]} times your {given} is finite, but so it is times {2 * given}"
    return None
