"""Exercises of the notebook with the whole experiment."""

import torch
from torch.nn import functional as F

from helpers.check.amp_training_loop import small_training
from helpers.check.exercise import exercise


@exercise(
    cases=[(1.2, 1.5), (0.6, 0.7), (1.01, 1.02), (0.97, 0.99), (0.96, 1.04), (0.9, 2.4)],
    mistakes={
        "The interval lies below 1.": lambda low, high: "faster",
        "One end above 1 is not enough: the interval contains 1.": ("low > 1", "high > 1"),
        "Near 1 is not 1: the interval lies on one side of it.": ("low > 1", "low > 1.1"),
    },
    show=lambda low, high: f"[{low}, {high}]",
)
def verdict(low, high):
    """`verdict(low, high)` puts an interval of a speed ratio into words: "faster", "slower" or "undecided"."""
    return "faster" if low > 1 else "slower" if high < 1 else "undecided"


def _two_steps(step):
    """What two calls of `step` do to one small layer, by words."""
    model, optimizer, images, labels, dtypes = small_training()
    for _ in range(2):
        loss = step(model, optimizer, images, labels)
    return {
        "the dtype of the layer's output": dtypes[0] if dtypes else None,
        "the kind of what you return": type(loss).__name__,
        "the dtype of the loss": getattr(loss, "dtype", None),
        "requires_grad of the loss": getattr(loss, "requires_grad", None),
        "the weight after two steps": model.weight.detach(),
        "the second loss": loss.detach() if isinstance(loss, torch.Tensor) else loss,
    }


@exercise(
    cases=[()],
    mistakes={
        "Call the model under bf16 autocast.": ("torch.bfloat16", "enabled=False"),
        "Return the tensor, detached: loss.item() waits for the device.": ("loss.detach()", "loss.item()"),
        "Compute the loss inside the autocast block, which keeps it in float32.": (
            "        loss = F.binary_cross_entropy_with_logits(output, labels)",
            "    loss = F.binary_cross_entropy_with_logits(output, labels.bfloat16())",
        ),
        "The loss still holds its graph, and with it the activations. Return loss.detach().": ("loss.detach()", "loss"),
        "The weight did not move. Call loss.backward(), then optimizer.step().": ("optimizer.step()", "pass"),
        "Gradients of the first step are in the second: optimizer.zero_grad().": ("optimizer.zero_grad()", "pass"),
        "Take BCEWithLogitsLoss.": ("binary_cross_entropy_with_logits", "mse_loss"),
    },
    observe=_two_steps,
)
def bf16_step(model, optimizer, images, labels):
    """`bf16_step(model, optimizer, images, labels)` does one training step in bf16 on the CPU, returns the loss."""
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(images)
        loss = F.binary_cross_entropy_with_logits(output, labels)
    loss.backward()
    optimizer.step()
    return loss.detach()
