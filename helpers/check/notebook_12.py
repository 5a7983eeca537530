"""Checks of notebook 12, the clinic."""

import functools
import math
import warnings

import torch
from torch import nn
from torch.nn import functional as F

from helpers.check.replies import says


class _Inf(nn.Module):
    def forward(self, x):
        return x * math.inf


@says
def first_bad(answer):
    """`answer(model, batch)` names the first leaf module whose output is not finite, "" if there is none."""
    inner = nn.Sequential(nn.Linear(4, 4), _Inf(), nn.ReLU())
    patients = [
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), ""),
        (nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 4)), "1.1"),
        (nn.Sequential(_Inf(), nn.Linear(4, 4)), "0"),
    ]
    for model, right in patients:
        given = answer(model, torch.rand(2, 4))
        if any(module._forward_hooks for module in model.modules()):
            return "a hook was left behind: keep the handles, and remove() each"
        if given != right:
            names = ", ".join(name for name, _ in model.named_modules() if name)
            case = f"among {names} the first bad one is {right!r}, and you say {given!r}"
            return f"{case}. That one has children; ask its leaves" if given == "1" else case
    return None


_PATIENTS = {
    "A": ({10}, "infinities would end when the scale is low enough; this scale never recovers"),
    "B": ({9}, "the scale finds its place, and the loss falls: what is wrong with that?"),
    "C": ({20}, "the weights change, so nothing is absorbed or skipped. Which weights does forward see?"),
    "D": ({18, 19}, "a norm of 80,000 before clipping: of which gradients?"),
    "E": ({11, 12}, "the modules are well. What comes after them?"),
}


@says
def case_of(answer):
    """`answer(patient)` is the number of the case for each of the logs A to E."""
    for patient, (right, hint) in _PATIENTS.items():
        given = answer(patient)
        if given not in right:
            return f"patient {patient} is not case {given}: {hint}"
    return None


def _step(model, optimizer, scaler, schedule, images, labels, max_norm, fault=None):
    """The right step, or one with a fault."""
    if fault != "zero_grad":
        optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    if fault != "unscale":
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if fault == "schedule" or scaler.get_scale() >= before:
        schedule.step()


_FAULTS = {
    "zero_grad": "the gradients of the last step are still there: `zero_grad` without brackets calls nothing",
    "unscale": "the clipped norm is that of scaled gradients (Case 18)",
    "schedule": "the schedule moves on where the optimizer's step was skipped (Case 22)",
}


def _treated(step, scale, inside=None):
    """Weights, learning rate and scale after four steps; notes whether backward sees autocast in the list `inside`."""
    torch.manual_seed(0)
    images, labels = torch.rand(32, 8), torch.arange(32) % 3
    model = nn.Linear(8, 3)
    if inside is not None:
        model.weight.register_hook(lambda gradient: inside.append(torch.is_autocast_enabled("cpu")))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.5), torch.amp.GradScaler("cpu", init_scale=scale)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with warnings.catch_warnings(action="ignore"):  # a schedule that is ahead warns, and is found anyway
        for _ in range(4):
            step(model, optimizer, scaler, schedule, images, labels, 0.1)
    return [*nn.utils.parameters_to_vector(model.parameters()).tolist(), schedule.get_last_lr()[0], scaler.get_scale()]


@says
def mended_step(answer):
    """`answer(model, optimizer, scaler, schedule, images, labels, max_norm)` is one right step in fp16 on the CPU."""
    for scale in (1024.0, 2.0**24):
        inside = []
        given = _treated(answer, scale, inside)
        if any(inside):
            return "backward runs inside the autocast region (Case 15)"
        for fault, words in _FAULTS.items():
            if given == _treated(functools.partial(_step, fault=fault), scale) != _treated(_step, scale):
                return words
        if given != _treated(_step, scale):
            return f"after four steps from a scale of {scale:g}, weights, learning rate or scale are not the right ones"
    return None
