"""What `diagnose` says of sick and healthy steps."""

import math

import pytest
import torch
from torch import nn

from helpers.diagnose import diagnose


def stepper(factor, mixed=True):
    """A model, its scaler, and a step on inputs of the size `factor`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 1)))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu")

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=mixed):
            loss = model(torch.full((8, 4), factor)).float().mean() / 8
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return model, step, scaler


def test_healthy_step_is_told_healthy_and_leaves_no_hook(capsys):
    model, step, scaler = stepper(1.0)
    table = diagnose(model, step, scaler, steps=1)
    said = capsys.readouterr().out
    assert said == "step 1: all finite; scale 65,536 -> 65,536\ndtypes of outputs: float16\n"
    assert table["finite"].all() and list(table["where"][:3]) == ["0", "1.0", "1.1"]
    assert set(table["what"]) == {"output of", "gradient at output of", "gradient of"}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_first_overflow_and_skipped_step_are_named(capsys):
    model, step, scaler = stepper(1e5)
    table = diagnose(model, step, scaler, steps=2)
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("step 1: output of 0 (float16) is the first that is not finite; scale 65,536 -> 32,768")
    assert second.endswith("32,768 -> 16,384, step skipped") and not table["finite"].all()


def test_dtypes_and_sizes_are_those_of_float32(capsys):
    model, step, _ = stepper(2.0, mixed=False)
    table = diagnose(model, step, steps=1)
    assert capsys.readouterr().out == "step 1: all finite\ndtypes of outputs: float32\n"
    assert set(table["dtype"]) == {"float32"}
    expected = model[0](torch.full((1, 4), 2.0)).abs().max().item()
    assert math.isclose(table["largest"][0], expected, rel_tol=0.1)


def test_an_error_of_the_step_comes_after_what_was_seen(capsys):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 1))
    with pytest.raises(RuntimeError, match="shapes"):
        diagnose(model, lambda: model(torch.full((2, 4), math.inf)), steps=1)
    assert "output of 0 (float32) is the first that is not finite" in capsys.readouterr().out
    assert not model[0]._forward_hooks


def test_a_loss_that_is_not_finite_is_told(capsys):
    model = nn.Linear(2, 1)
    diagnose(model, lambda: model(torch.ones(1, 2)).sum() * math.inf, steps=1)
    assert capsys.readouterr().out.startswith("step 1: returned ")


def test_the_share_of_zeros_is_a_percentage():
    model = nn.Sequential(nn.Linear(1, 4, bias=False), nn.ReLU())
    nn.init.constant_(model[0].weight, 2.0)
    model[0].weight.data[0] = -1.0
    table = diagnose(model, lambda: model(torch.ones(2, 1)).sum().backward(), steps=1)
    zeros = dict(zip(table.what + " " + table["where"], table["% zero"]))
    assert zeros["output of 0"] == 0 and zeros["output of 1"] == 25
    assert zeros["gradient at output of 0"] == 25 and zeros["gradient of 0.weight"] == 25
