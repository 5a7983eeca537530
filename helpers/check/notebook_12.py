"""Checks of notebook 12, the clinic."""

import functools
import math
import warnings

import torch
from torch import nn
from torch.nn import functional as F

from helpers.check.replies import says


class _Put(nn.Module):
    """Writes a number into the first column."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x):
        return x.index_fill(1, torch.tensor([0]), self.number)


class _Backwards(nn.Module):
    """Its modules run in another order than they stand in."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(4, 4), _Put(math.nan)

    def forward(self, x):
        return self.last(self.first(x))


def _hooks(model):
    everywhere = [nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks]
    return [*everywhere, *(hooks for m in model.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks))]


@says
def first_bad(answer):
    """`answer(model, batch)` names the first leaf module whose output is not finite, "" if there is none."""
    inner = nn.Sequential(nn.Linear(4, 4), _Put(-math.inf), nn.ReLU())
    patients = [
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), ""),
        (nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 4)), "1.1"),
        (nn.Sequential(_Put(math.inf), nn.Linear(4, 4)), "0"),
        (_Backwards(), "first"),
    ]
    for model, right in patients:
        given = answer(model, torch.rand(2, 4))
        if any(_hooks(model)):
            return "a hook was left behind: keep the handles, and remove() each"
        if given != right:
            names = ", ".join(name for name, _ in model.named_modules() if name)
            case = f"among {names} the first bad one is {right!r}, and you say {given!r}"
            parts = dict(model.named_modules()).get(given) if given else None
            return f"{case}. That one has children; ask its leaves" if parts and list(parts.children()) else case
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


def _treated(step, scale, growth=2000, inside=None):
    """Weights, learning rate and scale after four steps; notes whether backward sees autocast in the list `inside`."""
    torch.manual_seed(0)
    images, labels = torch.rand(32, 8), torch.arange(32) % 3
    model = nn.Linear(8, 3)
    if inside is not None:
        model.weight.register_hook(lambda gradient: inside.append(torch.is_autocast_enabled("cpu")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with warnings.catch_warnings(action="ignore"):  # a schedule that is ahead warns, and is found anyway
        for _ in range(4):
            step(model, optimizer, scaler, schedule, images, labels, 0.1)
    return [*nn.utils.parameters_to_vector(model.parameters()).tolist(), schedule.get_last_lr()[0], scaler.get_scale()]


@says
def mended_step(answer):
    """`answer(model, optimizer, scaler, schedule, images, labels, max_norm)` is one right step in fp16 on the CPU."""
    for scale, growth in [(1024.0, 2000), (2.0**24, 2000), (1024.0, 2)]:
        inside = []
        given, right = _treated(answer, scale, growth, inside), _treated(_step, scale, growth)
        if any(inside):
            return "backward runs inside the autocast region (Case 15)"
        for fault, words in _FAULTS.items():
            if given == _treated(functools.partial(_step, fault=fault), scale, growth) != right:
                return words
        if given != right and growth == 2:
            return "when the scale has grown, the step was taken too: only a scale that fell tells of a skipped one"
        if given != right:
            return f"after four steps from a scale of {scale:g}, weights, learning rate or scale are not the right ones"
    return None
