"""Exercises of the clinic."""

import math

import torch
from torch import nn

from helpers.check.exercise import Reply, exercise


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


def _patients():
    inner = nn.Sequential(nn.Linear(4, 4), _Put(-math.inf), nn.ReLU())
    return [
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()),),
        (nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 4)),),
        (nn.Sequential(_Put(math.inf), nn.Linear(4, 4)),),
        (_Backwards(),),
    ]


def _hooks(model):
    everywhere = [nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks]
    return [*everywhere, *(hooks for m in model.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks))]


def _named(answer, model):
    name = answer(model, torch.rand(2, 4))
    hooks = _hooks(model)
    if any(hooks):
        for each in hooks:
            each.clear()
        raise Reply("a hook was left behind. Keep the handles, and remove() each.")
    return name


def _first_bad(model, batch, leaves=True, remove=True, last=False):
    bad, handles = [], []
    for name, module in model.named_modules():
        if not leaves or not list(module.children()):

            def look(module, inputs, output, name=name):
                if not output.isfinite().all():
                    bad.append(name)

            handles.append(module.register_forward_hook(look))
    model(batch)
    for handle in handles if remove else ():
        handle.remove()
    return bad[-1 if last else 0] if bad else ""


def _in_order_of_names(model, batch):
    bad = [name for name, _ in model.named_modules() if name in ("last", "first")]
    return bad[0] if bad else _first_bad(model, batch)


def _parent(model, batch):
    return _first_bad(model, batch).split(".")[0]


@exercise(
    cases=_patients,
    mistakes={
        "What comes after a bad module is bad too: note the first.": lambda model, batch: _first_bad(
            model, batch, last=True
        ),
        "Keep the handles, and remove() each.": lambda model, batch: _first_bad(model, batch, remove=False),
        "Modules need not run in the order of their names.": _in_order_of_names,
        "That one has children; ask its leaves.": _parent,
    },
    observe=_named,
    show=lambda model: f"the modules {', '.join(name for name, _ in model.named_modules() if name)}",
)
def first_bad(model, batch):
    """`first_bad(model, batch)` names the first leaf module whose output is not finite, "" if there is none."""
    return _first_bad(model, batch)


_LOGS = {
    "A": (["Loss scale falls in every step"], "Infinities would end when the scale is low enough; this goes on."),
    "B": (["Loss scale falls in the first steps"], "The scale finds its place, and the loss falls: what is wrong?"),
    "C": (
        ["Loss stays the same in every step"],
        "The weights change, so nothing is absorbed or skipped. Which weights does forward see?",
    ),
    "D": (
        ["Loss hardly falls with clipping", "Clipping fails with a fused optimizer"],
        "A norm of 80,000 before clipping: of which gradients?",
    ),
    "E": (["Loss is inf but every output is finite"], "The modules are well. What comes after them?"),
}


def _diagnosed(answer, patient):
    given, (cases, hint) = answer(patient), _LOGS[patient]
    if given not in cases:
        raise Reply(f"patient {patient} is not {given!r}. {hint}")
    return "found"


def _but(patient, case):
    """All cases right but for one patient's."""
    return lambda each: case if each == patient else _LOGS[each][0][0]


@exercise(
    cases=[(patient,) for patient in _LOGS],
    mistakes={hint: _but(patient, "Attempting to unscale FP16 gradients") for patient, (_, hint) in _LOGS.items()},
    observe=_diagnosed,
)
def case_of(patient):
    """`case_of(patient)` is the name of the case for each of the logs A to E."""
    return _LOGS[patient][0][0]
