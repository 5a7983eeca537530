"""Exercise of the notebook on inference."""

import torch

from helpers.check.exercise import Case, exercise


def _four_bits(weight, group, top=7.0, rounding=torch.round):
    """`weight` as it comes back from 4 bits, with a scale for each `group` neighbours of a row."""
    groups = weight.reshape(-1, group)
    scale = groups.abs().amax(1, keepdim=True) / top
    scale[scale == 0] = 1
    return (rounding(groups / scale).clamp(-8, 7) * scale).reshape(weight.shape)


def _without_care(weight, group):
    groups = weight.reshape(-1, group)
    scale = groups.abs().amax(1, keepdim=True) / 7
    return ((groups / scale).round() * scale).reshape(weight.shape)


def _weights():
    """A weight, the same with an outlier, and the same with a group of zeros."""
    random = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    outlier, empty = random.clone(), random.clone()
    outlier[2, 5] = 40.0
    empty[1, 32:] = 0
    return random, outlier, empty


def _cases():
    random, outlier, empty = _weights()
    return [
        Case((random, 32), "Reshape to (-1, group), round, and reshape back."),
        Case((random, 8), "The group's size is an argument."),
        Case((outlier, 16), "An outlier spoils its own group, and no other."),
        Case((empty, 32), "A group of zeros comes back as zeros."),
    ]


@exercise(
    cases=_cases,
    mistakes={
        "A group of zeros divides 0 by 0. Give it another scale.": _without_care,
        "That is one scale per row.": lambda weight, group: _four_bits(weight, weight.shape[1]),
        "That is one scale for the whole tensor.": lambda weight, group: _four_bits(weight, weight.numel()),
        "Round to the nearest code; that cuts off.": lambda weight, group: _four_bits(weight, group, 7, torch.trunc),
        "The largest code is 7, so the scale is amax / 7.": lambda weight, group: _four_bits(weight, group, 8),
        "The neighbours are those of a row, not of a column.": lambda weight, group: _four_bits(
            weight.T.contiguous(), group
        ).T.contiguous(),
        "Multiply the codes by the scale again.": lambda weight, group: (
            (weight.reshape(-1, group) / (weight.reshape(-1, group).abs().amax(1, keepdim=True).clamp(min=1e-9) / 7))
            .round()
            .reshape(weight.shape)
        ),
    },
    same=lambda given, right: torch.allclose(given, right, rtol=1e-5, atol=1e-6),
    show=lambda weight, group: f"a weight of 6 x 64 and groups of {group}",
)
def in_four_bits(weight, group):
    """`in_four_bits(weight, group)` is a weight as it comes back from 4 bits, with one scale per group."""
    return _four_bits(weight, group)
