"""What the clinic's cases share: digits, a small network, one right step, and how far off a result is.

Notebook 14 and its drawers, 14a to 14e, differ from `amp_step` in one place each.
"""

from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

_digits = load_digits()
x = torch.tensor(_digits.data[:256] / 16, dtype=torch.float32)  # (256, 64), from 0 to 1
y = torch.tensor(_digits.target[:256])  # (256,), int64


def network(seed: int = 0) -> nn.Sequential:
    """A new network for the digits; the same weights for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def sgd(model: nn.Module, lr: float = 0.1, **options) -> torch.optim.SGD:
    """SGD on all of the model's parameters."""
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def autocast(enabled: bool = True) -> torch.autocast:
    """Autocast to fp16 on the CPU."""
    return torch.autocast("cpu", torch.float16, enabled=enabled)


def amp_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    x: torch.Tensor = x,
    y: torch.Tensor = y,
) -> float:
    """The right step in mixed precision: every case differs from it. Returns the loss."""
    optimizer.zero_grad()
    with autocast():
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def after(step: Callable, steps: int = 1, **options) -> nn.Sequential:
    """A new network, trained: `step` is called with model, optimizer and scaler."""
    model = network()
    optimizer = sgd(model, **options)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(steps):
        step(model, optimizer, scaler)
    return model


def weights(model: nn.Module) -> torch.Tensor:
    """All parameters in one vector."""
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def fp32(steps: int = 1, clip: float = float("inf"), lr: float = 0.1) -> torch.Tensor:
    """The network's weights after FP32 steps on the digits."""
    model = network()
    optimizer = sgd(model, lr)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return weights(model)


def off_course(model: nn.Module, reference: torch.Tensor) -> float:
    """The distance from the weights `reference`, divided by how far those moved in training.

    Examples
    --------
    >>> off_course(after(amp_step, 5), fp32(5)) < 0.01
    True
    """
    start = weights(network())
    return ((weights(model) - reference).norm() / (reference - start).norm()).item()


def error_of(function: Callable) -> str:
    """The first line of the error that `function()` raises.

    Examples
    --------
    >>> error_of(lambda: 1 / 0)
    'ZeroDivisionError: division by zero'
    """
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "no error"
