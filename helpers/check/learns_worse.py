"""Exercises of the clinic's drawer on runs that learn worse."""

import functools
import warnings

import torch
from torch import nn
from torch.nn import functional as F

from helpers.check.exercise import exercise


def _step(model, optimizer, scaler, schedule, images, labels, max_norm, fault=None):
    """The right step, or one with a fault."""
    if fault != "no zero_grad":
        optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(images), labels)
    with torch.autocast("cpu", torch.float16, enabled=fault == "backward inside"):
        scaler.scale(loss).backward()
    if fault != "not unscaled":
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    moves_on = {"ahead": True, "only if equal": scaler.get_scale() == before}
    if moves_on.get(fault, scaler.get_scale() >= before):
        schedule.step()
    return True


def _treated(step, scale, growth):
    """What four steps leave behind, by words."""
    torch.manual_seed(0)
    images, labels = torch.rand(32, 8), torch.arange(32) % 3
    model, inside = nn.Linear(8, 3), []
    model.weight.register_hook(lambda gradient: inside.append(torch.is_autocast_enabled("cpu")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with warnings.catch_warnings(action="ignore"):  # a schedule that is ahead warns, and is found anyway
        for _ in range(4):
            step(model, optimizer, scaler, schedule, images, labels, 0.1)
    return {
        "backward inside the autocast region": any(inside),
        "the learning rate": schedule.get_last_lr()[0],
        "the scale": scaler.get_scale(),
        "the vector of all weights": nn.utils.parameters_to_vector(model.parameters()).detach(),
    }


def _with(fault):
    return functools.partial(_step, fault=fault)


@exercise(
    cases=[(1024.0, 2000), (2.0**24, 2000), (1024.0, 2)],
    mistakes={
        "The gradients of the last step are still there: `zero_grad` without brackets calls nothing.": (
            _with("no zero_grad")
        ),
        "The clipped norm is that of scaled gradients: *Loss hardly falls with clipping*.": _with("not unscaled"),
        "The schedule moves on where a step was skipped: *lr_scheduler step before optimizer step*.": _with("ahead"),
        "When the scale has grown, the step was taken too: only a scale that fell tells of a skipped one.": (
            _with("only if equal")
        ),
        "Leave the autocast region before backward: *Gradients are inf in a float32 layer*.": _with("backward inside"),
        "Take one training step.": lambda *arguments: 0.5,
    },
    observe=_treated,
    show=lambda scale, growth: f"four steps from a scale of {scale:g}, growing after {growth} clean steps,",
)
def mended_step(model, optimizer, scaler, schedule, images, labels, max_norm):
    """`mended_step(...)` is one right step in fp16 on the CPU, with clipping and a schedule."""
    return _step(model, optimizer, scaler, schedule, images, labels, max_norm)
