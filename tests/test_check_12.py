"""Typical wrong answers to the exercises of notebook 12, and what `diagnose` says of sick and healthy steps."""

import functools
import math

import pytest
import torch
from torch import nn

from helpers import check
from helpers.check import notebook_12


def hooked(model, batch, first=True, leaves=True, remove=True):
    bad, handles = [], []
    for name, module in model.named_modules():
        if not leaves or not list(module.children()):
            hook = lambda module, inputs, output, name=name: None if output.isfinite().all() else bad.append(name)
            handles.append(module.register_forward_hook(hook))
    model(batch)
    for handle in handles if remove else []:
        handle.remove()
    return bad[0 if first else -1] if bad else ""


def registered_first(model, batch):
    """Looks at each module by itself, in the order of `named_modules`."""
    name = hooked(model, batch)
    return "last" if name == "first" else name


def inside(model, optimizer, scaler, schedule, images, labels, max_norm):
    with torch.autocast("cpu", torch.float16):
        notebook_12._step(model, optimizer, scaler, schedule, images, labels, max_norm)
        nn.functional.cross_entropy(model(images), labels).backward()
    return True


def only_if_equal(model, optimizer, scaler, schedule, *more):
    before, rate = scaler.get_scale(), schedule.state_dict()
    notebook_12._step(model, optimizer, scaler, schedule, *more)
    if scaler.get_scale() > before:
        schedule.load_state_dict(rate)
        optimizer.param_groups[0]["lr"] = rate["_last_lr"][0]
    return True


def with_fault(fault):
    return lambda *arguments: notebook_12._step(*arguments, fault=fault) or True


@pytest.mark.parametrize(
    ("name", "answer", "reply"),
    [
        ("first_bad", functools.partial(hooked, first=False), "is '0', and you say '1'"),
        ("first_bad", functools.partial(hooked, remove=False), "a hook was left behind"),
        ("first_bad", registered_first, "the first bad one is 'first', and you say"),
        ("first_bad", lambda model, batch: "1" if len(model) == 3 else "", "ask its leaves"),
        ("case_of", lambda patient: 10, "patient B is not case 10: the scale finds its place"),
        ("case_of", {"A": 9, "B": 9}.get, "patient A is not case 9: infinities would end"),
        ("mended_step", with_fault("zero_grad"), "the gradients of the last step are still there"),
        ("mended_step", with_fault("unscale"), "the clipped norm is that of scaled gradients"),
        ("mended_step", with_fault("schedule"), "the schedule moves on"),
        ("mended_step", only_if_equal, "a scale that fell"),
        ("mended_step", inside, "backward runs inside"),
        ("mended_step", lambda *arguments: 0.5, "are not the right ones"),
    ],
)
def test_wrong_answer_gets_a_reply_that_fits(name, answer, reply, capsys):
    getattr(check, name)(answer)
    said = capsys.readouterr().out
    assert said.startswith("Not right yet: ") and reply in said


@pytest.mark.parametrize("case", [18, 19])
def test_patient_d_fits_two_cases(case, capsys):
    check.case_of(lambda patient: {"A": 10, "B": 9, "C": 20, "D": case, "E": 11}[patient])
    assert capsys.readouterr().out == "Right.\n"


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
    table = check.diagnose(model, step, scaler, steps=1)
    said = capsys.readouterr().out
    assert said == "step 1: all finite; scale 65,536 -> 65,536\ndtypes of outputs: float16\n"
    assert table["finite"].all() and list(table["where"][:3]) == ["0", "1.0", "1.1"]
    assert set(table["what"]) == {"output of", "gradient at output of", "gradient of"}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_first_overflow_and_skipped_step_are_named(capsys):
    model, step, scaler = stepper(1e5)
    table = check.diagnose(model, step, scaler, steps=2)
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("step 1: output of 0 (float16) is the first that is not finite; scale 65,536 -> 32,768")
    assert second.endswith("32,768 -> 16,384, step skipped") and not table["finite"].all()


def test_dtypes_and_sizes_are_those_of_float32(capsys):
    model, step, _ = stepper(2.0, mixed=False)
    table = check.diagnose(model, step, steps=1)
    assert capsys.readouterr().out == "step 1: all finite\ndtypes of outputs: float32\n"
    assert set(table["dtype"]) == {"float32"}
    expected = model[0](torch.full((1, 4), 2.0)).abs().max().item()
    assert math.isclose(table["largest"][0], expected, rel_tol=0.1)


def test_an_error_of_the_step_comes_after_what_was_seen(capsys):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 1))
    with pytest.raises(RuntimeError, match="shapes"):
        check.diagnose(model, lambda: model(torch.full((2, 4), math.inf)), steps=1)
    assert "output of 0 (float32) is the first that is not finite" in capsys.readouterr().out
    assert not model[0]._forward_hooks


def test_a_loss_that_is_not_finite_is_told(capsys):
    model = nn.Linear(2, 1)
    check.diagnose(model, lambda: model(torch.ones(1, 2)).sum() * math.inf, steps=1)
    assert capsys.readouterr().out.startswith("step 1: returned ")
