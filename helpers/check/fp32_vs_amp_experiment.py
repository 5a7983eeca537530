"""Exercises of the notebook with the whole experiment."""

import functools

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from helpers.check.exercise import exercise


@exercise(
    cases=[(1.2, 1.5), (0.6, 0.7), (1.01, 1.02), (0.97, 0.99), (0.96, 1.04), (0.9, 2.4)],
    mistakes={
        "The interval lies below 1.": lambda low, high: "faster",
        "One end above 1 is not enough: the interval contains 1.": lambda low, high: "faster" if high > 1 else "slower",
        "Near 1 is not 1: the interval lies on one side of it.": lambda low, high: (
            "faster" if low > 1.1 else "slower" if high < 0.8 else "undecided"
        ),
    },
    show=lambda low, high: f"[{low}, {high}]",
)
def verdict(low, high):
    """`verdict(low, high)` puts an interval of a speed ratio into words: "faster", "slower" or "undecided"."""
    return "faster" if low > 1 else "slower" if high < 1 else "undecided"


def _two_steps(step):
    """What two calls of `step` do to one small layer, by words."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model, images = torch.nn.Linear(4, 1), torch.randn(8, 4)
    dtypes, labels = [], torch.tensor([[0.0], [1.0]] * 4)
    model.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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


def _step(model, optimizer, images, labels, fault=None):
    if fault != "no zero_grad":
        optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=fault != "float32"):
        output = model(images)
        loss = binary_cross_entropy_with_logits(output, labels)
    if fault == "outside":
        loss = (output - labels.bfloat16()).square().mean()
    if fault == "another loss":
        loss = (output.float() - labels).square().mean()
    loss.backward()
    if fault != "no step":
        optimizer.step()
    return {"graph": loss, "item": loss.item()}.get(fault, loss.detach() + (fault == "plus 1"))


def _with(fault):
    return functools.partial(_step, fault=fault)


@exercise(
    cases=[()],
    mistakes={
        "Call the model under bf16 autocast.": _with("float32"),
        "Return the tensor, detached: loss.item() would wait for the device at every step.": _with("item"),
        "Compute the loss inside the autocast block, which keeps it in float32.": _with("outside"),
        "The loss still holds its graph, and with it the activations. Return loss.detach().": _with("graph"),
        "The weight did not move. Call loss.backward(), then optimizer.step().": _with("no step"),
        "The second step added its gradients to those of the first. Call optimizer.zero_grad().": (
            _with("no zero_grad")
        ),
        "Take BCEWithLogitsLoss.": _with("another loss"),
        "Return the loss as it is.": _with("plus 1"),
    },
    observe=_two_steps,
)
def bf16_step(model, optimizer, images, labels):
    """`bf16_step(model, optimizer, images, labels)` does one training step in bf16 on the CPU, returns the loss."""
    return _step(model, optimizer, images, labels)
