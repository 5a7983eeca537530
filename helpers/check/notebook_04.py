"""Checks of notebook 04, op tables."""

import torch

from helpers.check.replies import says


@says
def paste(answer):
    """`answer(x, mask, y)` is a copy of x, in its dtype, with the elements of y where mask is true."""
    mask = torch.tensor([True, False, True])
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for into, source in [(a, b) for a in dtypes for b in dtypes]:
        x, y = torch.full((3,), 5.0, dtype=into), torch.tensor([1.0, 2.0, 3.0], dtype=source)
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                given = answer(x, mask, y)
            if not (x == 5).all():
                return "x itself was changed. Write into x.clone()."
            if given.dtype != into:
                return f"for {source} into {into} your result is {given.dtype}; it should keep the dtype of x"
            if given.tolist() != [1, 5, 3]:
                return f"with the mask {mask.tolist()} and y {y.tolist()}, fives become {given.tolist()}, not [1, 5, 3]"
    return None


@says
def rms_norm(answer):
    """`answer(x, weight, eps)` is x / sqrt(mean(x^2) + eps) * weight over the last dimension, safe in 16 bits."""
    generator = torch.Generator().manual_seed(0)
    for dtype, size in [(torch.float32, 1), (torch.float16, 1), (torch.float16, 1000), (torch.bfloat16, 1)]:
        x = (size * torch.randn(4, 64, generator=generator)).to(dtype)
        weight = torch.rand(64, generator=generator)
        right = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * weight.double()
        with torch.autocast("cpu", torch.bfloat16):
            given = answer(x, weight, 1e-6)
        if given.dtype != dtype:
            return f"for x in {dtype} you return {given.dtype}; it should be the dtype of x"
        if not given.isfinite().all():
            return f"for x in {dtype} with elements near {size} the result is not finite: the squares overflow"
        off = (given.double() - right).abs().max().item()
        if off > 4 * torch.finfo(dtype).eps:
            return f"for x in {dtype} you are off by {off:.2g}; computed in float32 it is {torch.finfo(dtype).eps:.1g}"
    return None
