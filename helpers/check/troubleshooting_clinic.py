"""Exercises of the clinic."""

import copy
import functools
import math
import warnings

import torch
from torch import nn
from torch.nn import functional as F

from helpers.check.exercise import Reply, exercise


def _put(number):
    """A module that replaces every number by this one."""
    return nn.Threshold(math.inf, number)


class _Backwards(nn.Sequential):
    """Its modules run in the reverse order."""

    def forward(self, x):
        for module in reversed(self):
            x = module(x)
        return x


def _patients():
    inner = nn.Sequential(nn.Linear(4, 4), _put(-math.inf), nn.ReLU())
    return [
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()),),
        (nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 4)),),
        (nn.Sequential(_put(math.inf), nn.Linear(4, 4)),),
        (_Backwards(nn.Linear(4, 4), _put(math.nan)),),
    ]


def _named(answer, model):
    model = copy.deepcopy(model)  # what an answer leaves behind is not the next one's
    name = answer(model, torch.rand(2, 4))
    if any(module._forward_hooks for module in model.modules()):
        raise Reply("a hook was left behind. Keep the handles, and remove() each.")
    return name


@exercise(
    cases=_patients,
    mistakes={
        "What comes after a bad module is bad too: note the first.": ("bad[0]", "bad[-1]"),
        "Keep the handles, and remove() each.": ("handle.remove()", "pass"),
        "Modules need not run in the order of their names.": ("bad[0]", "min(bad)"),
        "That one has children; ask its leaves.": ("append(name)", 'append(name.split(".")[0])'),
    },
    observe=_named,
    show=lambda model: f"the modules {', '.join(name for name, _ in model.named_modules() if name)}",
)
def first_bad(model, batch):
    """`first_bad(model, batch)` names the first leaf module whose output is not finite, "" if there is none."""
    bad, handles = [], []

    def look(name, module, inputs, output):
        if not output.isfinite().all():
            bad.append(name)

    for name, module in model.named_modules():
        if not list(module.children()):
            handles.append(module.register_forward_hook(functools.partial(look, name)))
    model(batch)
    for handle in handles:
        handle.remove()
    return bad[0] if bad else ""


_LOGS = {
    "A": ("The scale that only falls", "Infinities would end when the scale is low enough; this scale never recovers."),
    "B": ("Skipped first steps", "The scale finds its place, and the loss falls: what is wrong with that?"),
    "C": ("The loss that stands still", "The weights change: nothing is skipped. Which weights does forward see?"),
    "D": ("Clipped to a small norm", "A norm of 80,000 before clipping: of which gradients?"),
    "E": ("A loss of squares", "The modules are well. What comes after them?"),
}


def _diagnosed(answer, patient):
    given, (case, hint) = answer(patient), _LOGS[patient]
    if given != case and (patient, given) != ("D", "The clipping hook"):
        raise Reply(f"patient {patient} is not {given!r}. {hint}")
    return "found"


@exercise(cases=[(patient,) for patient in _LOGS], observe=_diagnosed)
def case_of(patient):
    """`case_of(patient)` is the name of the case for each of the logs A to E."""
    return _LOGS[patient][0]


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


@exercise(
    cases=[(1024.0, 2000), (2.0**24, 2000), (1024.0, 2)],
    mistakes={
        "`zero_grad` without brackets calls nothing.": ("zero_grad()", "zero_grad"),
        "Scaled gradients were clipped: *Clipped to a small norm*.": ("scaler.unscale_(optimizer)", "pass"),
        "The step was skipped: *A warning of the scheduler*.": ("scaler.get_scale() >= before", "True"),
        "When the scale has grown, the step was taken too: only one that fell tells of a skip.": (">=", "=="),
        "Backward stands outside of autocast: *The layer taken out*.": ("    scaler.scale", "        scaler.scale"),
    },
    observe=_treated,
    show=lambda scale, growth: f"four steps from a scale of {scale:g}, growing after {growth} clean steps,",
)
def mended_step(model, optimizer, scaler, schedule, images, labels, max_norm):
    """`mended_step(...)` is one right step in fp16 on the CPU, with clipping and a schedule."""
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= before:
        schedule.step()
    return loss.detach()
