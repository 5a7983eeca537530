"""Checks of notebook 02, rounding and range."""

import math

import torch

from helpers.bitview import BitView
from helpers.check.replies import says
from helpers.formats import FORMATS


@says
def smallest_step(answer):
    """`answer(weight, name)` is the smallest power of two that moves `weight` when added to it in a format."""
    for name, code in [("fp16", 0x3C00), ("fp16", 0x3C01), ("fp16", 0x3C02), ("bf16", 0x3F81), ("fp16", 0x3801)]:
        each = FORMATS[name]
        weight = float(each.decode(code))
        given, half = answer(weight, name), each.spacing(weight) / 2
        right = half if code % 2 else 2 * half
        if given == right:
            continue
        if math.frexp(given)[0] != 0.5:
            return f"{given} is not a power of two"
        if each.encode(weight + given) == code:
            return f"{weight} + {given} is still {weight} in {name}", BitView(weight + given, name)
        return f"{given} moves {weight} in {name}, but so does {right}", BitView(weight + right, name)
    return None


@says
def kahan_sum(answer):
    """`answer(terms)` is the sum of a 1-d fp16 tensor, an fp16 scalar. How it was found cannot be told."""
    ones = torch.ones(4096, dtype=torch.float16)
    given = answer(ones)
    if getattr(given, "dtype", None) != torch.float16:
        return f"the total is {getattr(given, 'dtype', type(given).__name__)}. Keep it in torch.float16."
    if given == 2048:
        return "4,096 ones give 2048: the total stalls. The correction is missing, or has the wrong sign."
    if given != 4096:
        return f"4,096 ones give {given.item()}; their sum is 4096"
    for terms, total in [([1000.0, 1.0], 1001), ([1.0, 1000.0, 2.0], 1003)]:
        given = answer(torch.tensor(terms, dtype=torch.float16))
        if given != total:
            return f"{terms} give {given.item()}, not {total}"
    terms = torch.rand(3000, generator=torch.Generator().manual_seed(0)).half()
    exact, given = terms.double().sum().item(), answer(terms)
    if given.dtype != torch.float16 or given.dim():
        return f"the total of 3,000 numbers is {given.dtype} of shape {tuple(given.shape)}, not a torch.float16 scalar"
    if abs(given.item() - exact) > FORMATS["fp16"].spacing(exact):
        return f"3,000 random numbers give {given.item()}; their sum is {exact:.2f}, and the spacing there 1"
    return None


@says
def rms(answer):
    """`answer(x)` is the root mean square of an fp16 tensor of any shape, as an fp16 scalar."""
    cases = [
        [3.0, 4.0],
        [300.0] * 5,
        [65504.0, 65504.0],
        [1e-4] * 3,
        [6e-8, 6e-8],
        [0.0, 0.0],
        [[-2.0, 0.0], [0.0, 0.0]],
        [1.0] * 70_000,
    ]
    for case in cases:
        x = torch.tensor(case, dtype=torch.float16)
        right = x.double().square().mean().sqrt().item()
        given = answer(x.clone())
        of = f"of {case[:3]}{' ...' if len(case) > 3 else ''}"
        if getattr(given, "dtype", None) != torch.float16:
            return f"the result {of} is {getattr(given, 'dtype', type(given).__name__)}, and should be torch.float16"
        if given.dim():
            return f"the result {of} has the shape {tuple(given.shape)}; it should be a scalar"
        if given.isnan() and not right:
            return f"the rms {of} is nan: 0/0. It is 0"
        if not abs(given.item() - right) <= 2 * FORMATS["fp16"].spacing(right):
            what = {math.inf: "a square, or their sum, overflowed", 0.0: "the squares underflowed"}.get(
                given.item(), ""
            )
            return f"the rms {of} is {given.item():.6g}; it should be {right:.6g}. {what}"
    return None
