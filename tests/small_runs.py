"""What the tests of `audit` and `watch` share: small networks, their training, and questions to a report."""

import pytest
import torch
from torch import nn

from halfbits import NonFinite, watch

FP16, BF16 = torch.float16, torch.bfloat16


def network(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), *more)


class Op(nn.Module):
    """A module that only computes."""

    def __init__(self, forward):
        super().__init__()
        self.forward = forward


def large(factor=1e4, *more):
    model = network(*more)
    with torch.no_grad():
        model[2].weight.mul_(factor)
    return model


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1} | options)


def scaler(**options):
    return torch.amp.GradScaler("cpu", **options)


def squares(output):
    return output.float().square().mean()


def train(model, optimizer, mine=None, factors=(1.0,), dtype=None, loss=squares):
    """A step for each of `factors`, by which the batch is multiplied."""
    mine = mine or scaler(enabled=False)
    torch.manual_seed(1)
    for factor in factors:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            made = loss(model(factor * torch.rand(4, 8)))
        mine.scale(made).backward()
        mine.step(optimizer)
        mine.update()


def found(report, words, severity=None):
    rows = report.findings[report.findings.what.str.contains(words, regex=False)]
    assert len(rows) == 1, f"{words!r} is not found once in:\n{report}"
    assert severity is None or rows.iloc[0].severity == severity, rows
    return rows.iloc[0]


def worst(report):
    return set(report.findings.severity) - {"note"}


def stopped(model, optimizer=None, *arguments, every=100, save=None, **options):
    """What is raised, and by whom."""
    optimizer = optimizer or sgd(model)
    with pytest.raises(NonFinite) as raised, watch(model, optimizer, *arguments[:1], every=every, save=save) as seen:
        train(model, optimizer, *arguments, **options)
    assert torch.autograd.backward.__module__ == "torch.autograd"
    return raised.value, seen


def after(steps=8, dtype=None, mine=None, model=None, loss=squares, every=1, **options):
    """What a watch says of a run."""
    model = model or network()
    optimizer = sgd(model, **options)
    with watch(model, optimizer, mine, every=every, save=None) as seen:
        train(model, optimizer, mine, [1.0] * steps, dtype, loss)
    return seen
