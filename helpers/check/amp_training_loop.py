"""Exercises of the notebook on the training loop."""

import math

import torch
from torch.nn import functional as F

from helpers.check.exercise import exercise


def small_training():
    """A layer, its optimizer, a batch of images and labels, and a list that takes the dtypes of the layer's outputs."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model, images = torch.nn.Linear(4, 1), torch.randn(8, 4)
    labels, dtypes = torch.tensor([[0.0], [1.0]] * 4), []
    model.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), images, labels, dtypes


def _fp16_step(step, infinite):
    """What one call of `step(model, optimizer, scaler, images, labels)` does, by words."""
    model, optimizer, images, labels, dtypes = small_training()
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    images[0] *= math.inf if infinite else 1
    scaler = torch.amp.GradScaler("cpu", 1024.0)
    before = model.weight.detach().clone()
    norm = step(model, optimizer, scaler, images, labels)
    return {
        "the dtype of the layer's output": dtypes[0] if dtypes else None,
        "the movement of the weight": model.weight.detach() - before,
        "the number of calls of scaler.update()": scaler.state_dict()["_growth_tracker"],
        "the norm": norm,
    }


def _accumulated(answer, sizes, infinite):
    def step(model, optimizer, scaler, images, labels):
        answer(model, optimizer, scaler, list(zip(images.split(sizes), labels.split(sizes))), "cpu", torch.float16)

    return _fp16_step(step, infinite)


_EITHER = {  # mistakes of either step
    "Call the model under autocast.": ("autocast(device_type, dtype)", "autocast(device_type, enabled=False)"),
    "Call scaler.step(optimizer) and scaler.update().": ("scaler.step(optimizer)\n    scaler.update()", "pass"),
    "Call scaler.update() in the end.": ("scaler.update()", "pass"),
    "Gradients of the step before are still in it: optimizer.zero_grad().": ("optimizer.zero_grad()", "pass"),
}


@exercise(
    cases=[([2, 2, 2, 2], False), ([5, 3], False), ([4, 3, 1], True)],
    mistakes={
        **_EITHER,
        "Only scaler.step(optimizer) skips a step.": (
            "scaler.step(optimizer)",
            "scaler.unscale_(optimizer), optimizer.step()",
        ),
        "Step and update once, when all parts are done.": (
            "    scaler.step(optimizer)\n    scaler.update()",
            "        scaler.step(optimizer)\n        scaler.update()",
        ),
        "Each loss is a mean: multiply it by the part's share of the batch.": (" * len(images) / whole", ""),
        "The larger the part, the more its loss counts.": ("len(images) / whole", "1 / len(parts)"),
    },
    observe=_accumulated,
    rel=1e-3,
    show=lambda sizes, infinite: f"a batch in parts of {sizes}{', an infinity in one,' if infinite else ''}",
)
def accumulated_step(model, optimizer, scaler, parts, device_type, dtype):
    """`accumulated_step(model, optimizer, scaler, parts, device_type, dtype)` does one fp16 step over a batch."""
    optimizer.zero_grad()
    whole = sum(len(images) for images, _ in parts)
    for images, labels in parts:
        with torch.autocast(device_type, dtype):
            loss = F.binary_cross_entropy_with_logits(model(images), labels)
        scaler.scale(loss * len(images) / whole).backward()
    scaler.step(optimizer)
    scaler.update()
    return True


def _clipped(answer, infinite):
    def step(model, optimizer, scaler, images, labels):
        return float(answer(model, optimizer, scaler, images, labels, "cpu", torch.float16, 0.1))

    return _fp16_step(step, infinite)


@exercise(
    cases=[(False,), (True,)],
    mistakes={
        **_EITHER,
        "The weight does not move. Call scaler.step(optimizer).": ("scaler.step(optimizer)", "pass"),
        "Only scaler.step(optimizer) skips a step.": ("scaler.step(optimizer)", "optimizer.step()"),
        "The norm is that of the scaled gradients: scaler.unscale_(optimizer).": ("scaler.unscale_(optimizer)", "pass"),
        "The weight moved as without clipping. Clip between unscale_ and step.": (", max_norm)\n", ", math.inf)\n"),
        "Return the norm before clipping, which clip_grad_norm_ returns.": ("return norm", "return max_norm"),
    },
    observe=_clipped,
    rel=1e-3,
    show=lambda infinite: "a batch with an infinity" if infinite else "",
)
def clipped_step(model, optimizer, scaler, images, labels, device_type, dtype, max_norm):
    """`clipped_step(model, optimizer, scaler, images, labels, device_type, dtype, max_norm)` returns the norm."""
    optimizer.zero_grad()
    with torch.autocast(device_type, dtype):
        loss = F.binary_cross_entropy_with_logits(model(images), labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return norm
