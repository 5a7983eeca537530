"""Exercises of the notebook on inference."""

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
        "That is one scale a row.": lambda weight, group: _four_bits(weight, weight.shape[1]),
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
    """`in_four_bits(weight, group)` is a weight as it comes back from 4 bits, with a scale a group."""
    return _four_bits(weight, group)


def _ratio(trained, sampled, drawn):
    return torch.where(drawn, trained - sampled, 0).sum(1).exp()


def _sequences():
    """Log-probabilities of two programs in float32, and which tokens were drawn: a prompt of three is given."""
    generator = torch.Generator().manual_seed(0)
    trained = -3 * torch.rand(4, 64, generator=generator)
    sampled = trained + 0.02 * torch.randn(4, 64, generator=generator)
    drawn = (torch.arange(64) >= 3).expand(4, 64).clone()
    drawn[1, 40:] = False  # a shorter answer, padded
    return trained, sampled, drawn


def _padded():
    """The same, with -inf where nothing was drawn."""
    trained, sampled, drawn = _sequences()
    return trained.masked_fill(~drawn, -torch.inf), sampled.masked_fill(~drawn, -torch.inf), drawn


@exercise(
    cases=lambda: [
        Case((torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.25]]), torch.tensor([[True, True]]))),
        Case((torch.tensor([[-9.0, -2.0]]), torch.tensor([[-1.0, -2.5]]), torch.tensor([[False, True]]))),
        Case(_sequences(), "Add up in float32."),
        Case(_padded(), "Where nothing was drawn, both may be -inf: choose with torch.where."),
    ],
    mistakes={
        "The trainer's probability is on top.": lambda trained, sampled, drawn: _ratio(sampled, trained, drawn),
        "A sequence's probability is a product: add up all the logarithms, do not average.": (
            lambda trained, sampled, drawn: (torch.where(drawn, trained - sampled, 0).sum(1) / drawn.sum(1)).exp()
        ),
        "Only what was drawn counts: leave out the prompt and the padding.": lambda trained, sampled, drawn: _ratio(
            trained, sampled, torch.ones_like(drawn)
        ),
        "-inf less -inf is NaN, and NaN times 0 too: choose with torch.where.": lambda trained, sampled, drawn: (
            ((trained - sampled) * drawn).sum(1).exp()
        ),
        "That is its logarithm.": lambda trained, sampled, drawn: _ratio(trained, sampled, drawn).log(),
        "One ratio a sequence: add up along the tokens.": lambda trained, sampled, drawn: _ratio(
            trained.reshape(1, -1), sampled.reshape(1, -1), drawn.reshape(1, -1)
        ).expand(len(trained)),
    },
    same=lambda given, right: torch.allclose(given, right, rtol=1e-4, atol=0, equal_nan=True),
    show=lambda trained, sampled, drawn: f"{len(trained)} sequences of {trained.shape[1]} tokens",
)
def importance_ratio(trained, sampled, drawn):
    """`importance_ratio(trained, sampled, drawn)` is a ratio of probabilities for each sequence, in float32."""
    return _ratio(trained, sampled, drawn)
