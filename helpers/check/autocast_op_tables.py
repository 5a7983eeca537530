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
    cases=[(*dtypes, enabled) for dtypes in itertools.product(_DTYPES, _DTYPES) for enabled in (False, True)],
    mistakes={
        "Write into x.clone().": lambda x, mask, y: x.masked_scatter_(mask, y[mask].to(x.dtype)),
        "Cast y to the dtype of x.": lambda x, mask, y: torch.where(mask, y, x),
        "Where the mask is true, y belongs.": lambda x, mask, y: x.clone(),
        "You have x and y the wrong way round.": lambda x, mask, y: torch.where(mask, x, y.to(x.dtype)),
    },
    observe=_pasted,
    show=lambda into, source, enabled: f"{source} into {into}{', under autocast,' if enabled else ','}",
)
def paste(x, mask, y):
    """`paste(x, mask, y)` is a copy of x, in its dtype, with the elements of y where mask is true."""
    return torch.where(mask, y.to(x.dtype), x)


def _normed(answer, dtype, size, x, weight):
    with torch.autocast("cpu", torch.bfloat16):
        return answer(x, weight, 1e-6)


def _to_norm():
    generator = torch.Generator().manual_seed(0)
    for dtype, size in [(torch.float32, 1), (torch.float16, 1), (torch.float16, 1000), (torch.bfloat16, 1)]:
        x = (size * torch.randn(4, 64, generator=generator)).to(dtype)
        yield dtype, size, x, torch.rand(64, generator=generator)


def _in_16_bits(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _close(given, right):
    """Whether two results differ by four rounding errors of their dtype at most."""
    return (given.double() - right.double()).abs().max().item() <= 4 * torch.finfo(right.dtype).eps


@exercise(
    cases=_to_norm,
    mistakes={
        "The product with a float32 weight is float32: return the dtype of x.": _in_16_bits,
        "In 16 bits the squares overflow, or lose their bits: compute them in float32.": lambda x, weight, eps: (
            _in_16_bits(x, weight, eps).to(x.dtype)
        ),
        "x is not divided by its root mean square.": lambda x, weight, eps: (x.float() * weight).to(x.dtype),
        "The weight is missing.": lambda x, weight, eps: _in_16_bits(x.float(), 1, eps).to(x.dtype),
    },
    observe=_normed,
    same=_close,
    show=lambda dtype, size, x, weight: f"x in {dtype} with elements near {size}",
)
def rms_norm(x, weight, eps):
    """`rms_norm(x, weight, eps)` is x / sqrt(mean(x^2) + eps) * weight over the last dimension, safe in 16 bits."""
    return _in_16_bits(x.double(), weight.double(), eps).to(x.dtype)
