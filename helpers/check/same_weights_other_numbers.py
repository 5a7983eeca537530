"""Exercise of the notebook on numbers that change although the weights do not."""

import torch

from helpers.check.exercise import Case, exercise


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
        "One ratio per sequence: add up along the tokens.": lambda trained, sampled, drawn: _ratio(
            trained.reshape(1, -1), sampled.reshape(1, -1), drawn.reshape(1, -1)
        ).expand(len(trained)),
    },
    same=lambda given, right: torch.allclose(given, right, rtol=1e-4, atol=0, equal_nan=True),
    show=lambda trained, sampled, drawn: f"{len(trained)} sequences of {trained.shape[1]} tokens",
)
def importance_ratio(trained, sampled, drawn):
    """`importance_ratio(trained, sampled, drawn)` is a ratio of probabilities for each sequence, in float32."""
    return _ratio(trained, sampled, drawn)
