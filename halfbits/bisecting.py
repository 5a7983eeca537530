"""Which modules of a model need FP32: `bisect`."""

import copy
import math
from collections.abc import Callable
from contextlib import ExitStack, contextmanager

import torch

from halfbits._tensors import FP16, _device, _floats, _plain
from halfbits.origin import _kept


def bisect(
    model: torch.nn.Module,
    batch: torch.Tensor | tuple | dict,
    loss: Callable,
    dtype: torch.dtype = FP16,
    tolerance: float = 0.02,
) -> list[str]:
    """The fewest modules to keep in FP32 so that the loss under autocast is finite and near FP32's.

    From the whole model down: a module is dropped if the rest is enough, and replaced by its children if they are.
    None of those that remain can be left out. It looks at the forward pass only, of an FP32 copy of the model.

    Parameters
    ----------
    batch : the model's arguments: a tuple, a dict, or one tensor
    loss : callable, `loss(output)` is a scalar
    dtype : autocast's
    tolerance : float, of FP32's loss

    Returns a list of names of modules; [] if none is needed, [""] for the whole model. Raises ValueError if the loss is
    not finite in FP32 either.

    Examples
    --------
    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.ReLU())
    >>> _ = torch.nn.init.constant_(model[0].weight, 1e6)
    >>> bisect(model, torch.ones(1, 1), torch.sum)
    ['0']
    """
    model, kind = copy.deepcopy(_plain(model)).float(), _device(model).type
    modules = dict(model.named_modules())
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch if isinstance(batch, tuple) else (batch,), {})

    def loss_of(kept):
        with _kept(model), torch.no_grad(), torch.compiler.set_stance("force_eager"), ExitStack() as around:
            for name in kept:
                around.enter_context(_in_fp32(modules[name], kind))
            with torch.autocast(kind, dtype, cache_enabled=False):
                return float(loss(model(*_floats(args), **_floats(kwargs))))

    right = loss_of([""])
    if not math.isfinite(right):
        raise ValueError(f"the loss is {right} in FP32 too: precision is not the cause")
    good = lambda kept: abs(loss_of(kept) - right) <= tolerance * abs(right)  # false for nan
    kept, settled = [""], []
    while kept := _fewest(kept, lambda names: good(settled + names)):
        name = kept.pop()
        children = [f"{name}.{child}".lstrip(".") for child, _ in modules[name].named_children()]
        if children and good(settled + kept + children):
            kept += children
        else:
            settled.append(name)
    return sorted(settled, key=[*modules].index)


def _fewest(names, good):
    """Names without which `good(names)` fails, each of them."""
    for name in list(names):
        rest = [each for each in names if each != name]
        names = rest if good(rest) else names
    return list(names)


@contextmanager
def _in_fp32(module, kind):
    """Runs a module's forward without autocast, on float32 arguments."""
    forward = module.forward

    def without(*args, **kwargs):
        with torch.autocast(kind, enabled=False):
            return forward(*_floats(args), **_floats(kwargs))

    module.forward = without
    try:
        yield
    finally:
        del module.forward
