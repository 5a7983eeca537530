"""Exercises of the notebook on language models."""

import torch
from torch.nn import functional as F

from helpers.check.exercise import exercise


def _rotations():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, generator=generator).bfloat16()
    frequencies = torch.tensor([1.0, 0.01]).bfloat16()
    return [(x[:2, :2], torch.tensor([0, 1]), frequencies[:1]), (x, torch.tensor([0, 301, 5001]), frequencies)]


@exercise(
    cases=_rotations,
    mistakes={
        "The angles are rounded: compute in float32, and cast once, at the end.": (".float()", ""),
        "It turns the other way: the first half is a * cos - b * sin.": ("angle = ", "angle = -"),
    },
    rel=0.02,  # two spacings of bf16
    show=lambda x, positions, frequencies: f"positions {positions.tolist()}",
)
def rotated(x, positions, frequencies):
    """`rotated(x, positions, frequencies)` is RoPE of a bf16 tensor, computed in float32, in bf16."""
    angle = positions.float()[:, None] * frequencies.float()
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


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
        "The product must be rounded to the dtype.": ("torch.tensor(moment, dtype=dtype)", "moment"),
        "True where it moves, not where it stays.": ("!=", "=="),
        "The spacing is not the same everywhere.": ("stored * beta != stored", "1 - beta > torch.finfo(dtype).eps / 2"),
    },
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
    parts = [(0, 2, 4), (0, 4, 5), (0, 3, 7)]
    return [([(logits[a:b], targets[a:b]), (logits[b:c], targets[b:c])],) for a, b, c in parts]


@exercise(
    cases=_chunks,
    mistakes={
        "A mean of means: add sums, and divide once.": lambda chunks: (
            sum(F.cross_entropy(logits.float(), targets) for logits, targets in chunks) / len(chunks)
        ),
        "The loss is rounded to bf16: take it of float32 logits.": ("logits.float()", "logits"),
        "Targets of -100 do not count.": ("(targets != -100).sum()", "len(targets)"),
        "Divide by the number of tokens.": ("total / count", "total"),
    },
    rel=1e-5,
    show=lambda chunks: f"chunks of {' and '.join(str(len(targets)) for _, targets in chunks)} tokens",
)
def token_loss(chunks):
    """`token_loss(chunks)` is the mean cross-entropy over all tokens of all chunks that count."""
    total, count = torch.zeros(()), 0
    for logits, targets in chunks:
        total = total + F.cross_entropy(logits.float(), targets, reduction="sum")
        count += (targets != -100).sum()
    return total / count
