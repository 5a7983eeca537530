"""Exercises of the notebook on language models."""

import torch

from helpers.check.exercise import exercise


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
