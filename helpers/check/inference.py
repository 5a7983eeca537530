"""Exercises of the notebook on inference."""

import torch

from helpers.check.exercise import Case, exercise


def _weights():
    """A weight, the same with an outlier, and the same with a group of zeros, each with sizes of groups."""
    random = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    outlier, empty = random.clone(), random.clone()
    outlier[2, 5] = 40.0
    empty[1, 32:] = 0
    return [
        Case((random, 32), "Reshape to (-1, group), round, and reshape back."),
        Case((random, 8), "The group's size is an argument."),
        Case((outlier, 16), "An outlier spoils its own group, and no other."),
        Case((empty, 32), "A group of zeros comes back as zeros."),
    ]


@exercise(
    cases=_weights,
    mistakes={
        "A group of zeros divides 0 by 0. Give it another scale.": ("torch.where(scale == 0, 1, scale)", "scale"),
        "That is one scale a row.": ("(-1, group)", "(len(weight), -1)"),
        "That is one scale for the whole tensor.": ("amax(1, keepdim=True)", "amax()"),
        "Round to the nearest code; that cuts off.": ("round()", "trunc()"),
        "The largest code is 7, so the scale is amax / 7.": ("/ 7", "/ 8"),
        "Multiply the codes by the scale again.": ("codes * scale", "codes"),
    },
    rel=1e-5,
    show=lambda weight, group: f"a weight of 6 x 64 and groups of {group}",
)
def in_four_bits(weight, group):
    """`in_four_bits(weight, group)` is a weight as it comes back from 4 bits, with a scale a group."""
    groups = weight.reshape(-1, group)
    scale = groups.abs().amax(1, keepdim=True) / 7
    scale = torch.where(scale == 0, 1, scale)
    codes = (groups / scale).round().clamp(-8, 7)
    return (codes * scale).reshape(weight.shape)


def _sequences():
    """Log-probabilities of two programs in float32, and which tokens were drawn: a prompt of three is given."""
    generator = torch.Generator().manual_seed(0)
    trained = -3 * torch.rand(4, 64, generator=generator)
    sampled = trained + 0.02 * torch.randn(4, 64, generator=generator)
    drawn = (torch.arange(64) >= 3).expand(4, 64).clone()
    drawn[1, 40:] = False  # a shorter answer, padded
    padded = trained.masked_fill(~drawn, -torch.inf), sampled.masked_fill(~drawn, -torch.inf), drawn
    return [
        (torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.25]]), torch.tensor([[True, True]])),
        (torch.tensor([[-9.0, -2.0]]), torch.tensor([[-1.0, -2.5]]), torch.tensor([[False, True]])),
        Case((trained, sampled, drawn), "Add up in float32."),
        Case(padded, "Where nothing was drawn, both may be -inf: choose with torch.where."),
    ]


@exercise(
    cases=_sequences,
    mistakes={
        "The trainer's probability is on top.": ("trained - sampled", "sampled - trained"),
        "Add up all the logarithms, do not average.": ("sum(1)", "sum(1).div(drawn.sum(1))"),
        "Leave out the prompt and the padding.": ("differences.sum", "(trained - sampled).sum"),
        "NaN times 0 is NaN: choose with torch.where.": ("differences.sum", "((trained - sampled) * drawn).sum"),
        "That is its logarithm.": (".exp()", ""),
    },
    rel=1e-4,
    show=lambda trained, sampled, drawn: f"{len(trained)} sequences of {trained.shape[1]} tokens",
)
def importance_ratio(trained, sampled, drawn):
    """`importance_ratio(trained, sampled, drawn)` is a ratio of probabilities for each sequence, in float32."""
    differences = torch.where(drawn, trained - sampled, 0)
    return differences.sum(1).exp()
