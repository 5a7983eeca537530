"""Exercises of the notebook on autocast's op tables."""

import itertools

import torch

from helpers.check.exercise import exercise

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _pasted(answer, into, source, enabled):
    x, y = torch.full((3,), 5.0, dtype=into), torch.tensor([1.0, 2.0, 3.0], dtype=source)
    mask = torch.tensor([True, False, True])
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        given = answer(x, mask, y)
    return {"x, afterwards,": x, "the result": given}


@exercise(
    cases=list(itertools.product(_DTYPES, _DTYPES, (False, True))),
    mistakes={
        "Write into x.clone().": lambda x, mask, y: x.masked_scatter_(mask, y[mask].to(x.dtype)),
        "Cast y to the dtype of x.": (".to(x.dtype)", ""),
        "Where the mask is true, y belongs.": lambda x, mask, y: x.clone(),
        "You have x and y the wrong way round.": ("(mask, y.to", "(~mask, y.to"),
    },
    observe=_pasted,
    show=lambda into, source, enabled: f"{source} into {into}{', under autocast,' if enabled else ','}",
)
def paste(x, mask, y):
    """`paste(x, mask, y)` is a copy of x, in its dtype, with the elements of y where mask is true."""
    return torch.where(mask, y.to(x.dtype), x)


def _normed(answer, x, weight):
    with torch.autocast("cpu", torch.bfloat16):
        return answer(x, weight, 1e-6)


def _to_norm():
    generator = torch.Generator().manual_seed(0)
    for dtype, size in [(torch.float32, 1), (torch.float16, 1), (torch.float16, 1000), (torch.bfloat16, 1)]:
        x = (size * torch.randn(4, 64, generator=generator)).to(dtype)
        yield x, torch.rand(64, generator=generator)


@exercise(
    cases=_to_norm,
    mistakes={
        "In 16 bits the squares overflow, or lose their bits: compute them in float32.": ("x.float()", "x"),
        "x is not divided by its root mean square.": (" * scale", ""),
        "The weight is missing.": (" * weight)", ")"),
    },
    observe=_normed,
    rel=1e-6,
    show=lambda x, weight: f"x in {x.dtype} with elements up to {x.abs().max():.0f}",
)
def rms_norm(x, weight, eps):
    """`rms_norm(x, weight, eps)` is x / sqrt(mean(x^2) + eps) * weight over the last dimension, safe in 16 bits."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)
