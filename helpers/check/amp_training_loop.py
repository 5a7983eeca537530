"""Exercises of the notebook on the training loop."""

import functools
import math

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from helpers.check.exercise import equal, exercise


def _fp16_training(infinite):
    """A small layer with old gradients, its optimizer and scaler, the dtypes of its outputs (a list), and a batch."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model, images, dtypes = torch.nn.Linear(4, 1), torch.randn(8, 4), []
    model.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    images[0] *= math.inf if infinite else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", 1024.0)
    return model, optimizer, scaler, dtypes, images, torch.tensor([[0.0], [1.0]] * 4)


def _seen(step, infinite):
    """What one call of `step(model, optimizer, scaler, images, labels)` does, by words."""
    model, optimizer, scaler, dtypes, images, labels = _fp16_training(infinite)
    before = model.weight.detach().clone()
    norm = step(model, optimizer, scaler, images, labels)
    seen = {
        "the dtype of the layer's output": dtypes[0] if dtypes else None,
        "the movement of the weight": model.weight.detach() - before,
    }
    if not infinite:
        seen["the number of calls of scaler.update()"] = scaler.state_dict()["_growth_tracker"]
        seen["the norm"] = norm
    return seen


def _fp16_step(model, optimizer, scaler, parts, device_type, dtype, max_norm=math.inf, fault=None):
    """One step over a batch in parts, right or with a fault; returns the norm of the gradients."""
    if fault != "no zero_grad":
        optimizer.zero_grad()
    whole = sum(len(images) for images, _ in parts)
    for images, labels in parts:
        with torch.autocast(device_type, dtype, enabled=fault != "no autocast"):
            loss = binary_cross_entropy_with_logits(model(images), labels)
        share = {"not weighed": 1, "equal shares": 1 / len(parts)}.get(fault, len(images) / whole)
        scaler.scale(loss * share).backward()
        if fault == "a step for each part":
            scaler.step(optimizer)
            scaler.update()
    if fault == "a step for each part":
        return None
    if fault != "not unscaled":
        scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf if fault == "not clipped" else max_norm)
    if fault == "plain step":
        optimizer.step()
    elif fault != "no step":
        scaler.step(optimizer)
    if fault != "no update":
        scaler.update()
    return norm.item()


def _with(fault):
    """The step over a batch in parts with a fault, or without one."""

    def step(model, optimizer, scaler, parts, device_type, dtype):
        _fp16_step(model, optimizer, scaler, parts, device_type, dtype, fault=fault)
        return True

    return step


def _accumulated(answer, sizes, infinite):
    def step(model, optimizer, scaler, images, labels):
        parts = list(zip(images.split(sizes), labels.split(sizes)))
        answer(model, optimizer, scaler, parts, "cpu", torch.float16)

    return _seen(step, infinite)


_near = functools.partial(equal, rel=1e-3)

_FAULTS = {  # of either step, by the hint that names them
    "Call the model under autocast, in dtype.": "no autocast",
    "Call scaler.step(optimizer).": "no step",
    "Call scaler.update() in the end.": "no update",
    "Gradients of the step before are still in it. Call optimizer.zero_grad() first.": "no zero_grad",
    "Step by scaler.step(optimizer), which skips a step whose gradients are infinite.": "plain step",
}


@exercise(
    cases=[([2, 2, 2, 2], False), ([5, 3], False), ([4, 3, 1], True)],
    mistakes={
        **{hint: _with(fault) for hint, fault in _FAULTS.items()},
        "Step and update once, when all parts are done.": _with("a step for each part"),
        "Each loss is the mean of its part: multiply it by the part's share of the batch.": _with("not weighed"),
        "The parts differ in size: the larger the part, the more its loss counts.": _with("equal shares"),
    },
    observe=_accumulated,
    same=_near,
    show=lambda sizes, infinite: f"a batch in parts of {sizes}{', an infinity in one,' if infinite else ''}",
)
def accumulated_step(model, optimizer, scaler, parts, device_type, dtype):
    """`accumulated_step(model, optimizer, scaler, parts, device_type, dtype)` does one fp16 step over a batch."""
    return _with(None)(model, optimizer, scaler, parts, device_type, dtype)


def _clipped(answer, infinite):
    def step(model, optimizer, scaler, images, labels):
        return float(answer(model, optimizer, scaler, images, labels, "cpu", torch.float16, 0.1))

    return _seen(step, infinite)


def _clipping(fault):
    def step(model, optimizer, scaler, images, labels, device_type, dtype, max_norm):
        parts = [(images, labels)]
        norm = _fp16_step(model, optimizer, scaler, parts, device_type, dtype, max_norm, fault)
        return max_norm if fault == "the limit" else norm

    return step


@exercise(
    cases=[(False,), (True,)],
    mistakes={
        **{hint: _clipping(fault) for hint, fault in _FAULTS.items()},
        "That is the norm of the scaled gradients. Call scaler.unscale_(optimizer) before.": _clipping("not unscaled"),
        "The weight moved as without clipping. Clip between unscale_ and step.": _clipping("not clipped"),
        "Return the norm before clipping, which clip_grad_norm_ returns.": _clipping("the limit"),
    },
    observe=_clipped,
    same=_near,
    show=lambda infinite: "a batch with an infinity" if infinite else "",
)
def clipped_step(model, optimizer, scaler, images, labels, device_type, dtype, max_norm):
    """`clipped_step(model, optimizer, scaler, images, labels, device_type, dtype, max_norm)` returns the norm."""
    return _clipping(None)(model, optimizer, scaler, images, labels, device_type, dtype, max_norm)
