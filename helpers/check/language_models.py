"""Exercises of the notebook on language models."""

import functools

import torch
from torch.nn import functional as F

from helpers.check.exercise import equal, exercise


def _turned(x, angle):
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def _angles(positions, frequencies):
    return positions.float()[:, None] * frequencies


def _rotations():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, generator=generator).bfloat16()
    frequencies = torch.tensor([1.0, 0.01])
    return [(x[:2, :2], torch.tensor([0, 1]), frequencies[:1]), (x, torch.tensor([0, 301, 5001]), frequencies)]


@exercise(
    cases=_rotations,
    mistakes={
        "The angles are rounded: compute them in float32.": lambda x, positions, frequencies: _turned(
            x.float(), (positions.bfloat16()[:, None] * frequencies.bfloat16()).float()
        ).bfloat16(),
        "The frequencies are rounded.": lambda x, p, f: _turned(x.float(), _angles(p, f.bfloat16())).bfloat16(),
        "Return the dtype of x.": lambda x, positions, frequencies: _turned(x.float(), _angles(positions, frequencies)),
        "The sine and cosine are rounded: rotate in float32, and cast once, at the end.": (
            lambda x, positions, frequencies: _turned(x, _angles(positions, frequencies).bfloat16())
        ),
        "The first half is a * cos - b * sin.": lambda x, p, f: _turned(x.float(), -_angles(p, f)).bfloat16(),
    },
    same=functools.partial(equal, rel=0.02),  # two spacings of bf16
    show=lambda x, positions, frequencies: f"positions {positions.tolist()}",
)
def rotated(x, positions, frequencies):
    """`rotated(x, positions, frequencies)` is RoPE of a bf16 tensor, computed in float32, in bf16."""
    return _turned(x.float(), _angles(positions, frequencies)).to(x.dtype)


@exercise(
    cases=[
        (1.0, 0.99, torch.bfloat16),
        (1.0, 0.999, torch.bfloat16),
        (1.9921875, 0.997, torch.bfloat16),
        (1.0, 0.997, torch.bfloat16),
        (1.0, 0.999, torch.float16),
        (0.5, 0.999, torch.float32),
        (0.0, 0.5, torch.bfloat16),
    ],
    mistakes={
        "The product must be rounded to the dtype: multiply a tensor of it.": lambda moment, beta, dtype: bool(
            moment * beta != moment
        ),
        "True where it moves, not where it stays.": lambda moment, beta, dtype: bool(
            torch.tensor(moment, dtype=dtype) * beta == moment
        ),
        "The spacing is not the same everywhere: multiply and compare.": lambda moment, beta, dtype: (
            1 - beta > torch.finfo(dtype).eps / 2
        ),
    },
    observe=lambda answer, moment, beta, dtype: bool(answer(moment, beta, dtype)),
    show=lambda moment, beta, dtype: f"{moment:g} times {beta:g} in {dtype}",
)
def moves(moment, beta, dtype):
    """`moves(moment, beta, dtype)` is whether a decay by `beta` changes a number of that dtype."""
    stored = torch.tensor(moment, dtype=dtype)
    return bool(stored * beta != stored)


def _chunks():
    generator = torch.Generator().manual_seed(0)
    logits = (8 * torch.randn(7, 5, generator=generator)).bfloat16()
    targets = torch.tensor([0, 4, 2, 3, 1, 1, -100])
    return [
        ([(logits[:2], targets[:2]), (logits[2:4], targets[2:4])],),
        ([(logits[:4], targets[:4]), (logits[4:5], targets[4:5])],),
        ([(logits[:3], targets[:3]), (logits[3:], targets[3:])],),
    ]


def _mean(chunks, cast=torch.Tensor.float, count=lambda targets: (targets != -100).sum()):
    sums = [F.cross_entropy(cast(logits), targets, reduction="sum").float() for logits, targets in chunks]
    return sum(sums) / sum(count(targets) for _, targets in chunks)


@exercise(
    cases=_chunks,
    mistakes={
        "A mean of means: add sums, and divide once.": lambda chunks: torch.stack(
            [F.cross_entropy(logits.float(), targets) for logits, targets in chunks]
        ).mean(),
        "The loss is rounded to bf16: take it of float32 logits.": lambda chunks: _mean(chunks, cast=lambda x: x),
        "Targets of -100 do not count.": lambda chunks: _mean(chunks, count=len),
        "Divide by the number of tokens.": lambda chunks: sum(
            F.cross_entropy(logits.float(), targets, reduction="sum") for logits, targets in chunks
        ),
    },
    same=functools.partial(equal, rel=1e-5),
    show=lambda chunks: f"chunks of {' and '.join(str(len(targets)) for _, targets in chunks)} tokens",
)
def token_loss(chunks):
    """`token_loss(chunks)` is the mean cross-entropy over all tokens of all chunks that count."""
    return _mean(chunks)
