"""Where two precisions, or two models, part: `compare`. Which modules of a model need FP32: `bisect`."""

import copy
import math
from collections.abc import Callable
from contextlib import ExitStack, contextmanager

import pandas as pd
import torch

from halfbits._tensors import FP16, SIXTEEN, device_of, plain, readable, short, tensors_in


def compare(
    model: torch.nn.Module,
    other: torch.nn.Module | torch.dtype,
    batch: torch.Tensor | tuple | dict,
) -> pd.DataFrame:
    """How far the output of each module is from that in another precision, or from that of another model.

    Parameters
    ----------
    other : a dtype for autocast, as torch.bfloat16, under which the same model runs again; or a model whose modules
        have the same names, as one from another checkpoint, or after a change
    batch : the model's arguments: a tuple, a dict, or one tensor

    Returns one row for each module that ran in both, in the order of running: "difference" is the norm of the
    difference, divided by the norm of the first; NaN where one is not finite. The first large one is where they part.
    Random numbers are the same for both, and statistics are put back. Raises ValueError if no module ran in both.

    Examples
    --------
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(1))
    >>> table = compare(model, torch.bfloat16, torch.ones(2, 4))
    >>> table.index.tolist(), bool(table.difference.max() < 0.02)
    (['0', '1', ''], True)
    """
    is_dtype = isinstance(other, torch.dtype)
    first = _outputs(model, batch, None)
    second = _outputs(model if is_dtype else other, batch, other if is_dtype else None)
    rows = {}
    for name in first:
        if name in second and first[name].shape == second[name].shape:
            one, two = first[name], second[name]
            difference = (one.double() - two.double()).norm() / one.double().norm().clamp(min=1e-30)
            rows[name] = {"dtype": short(one.dtype), "other dtype": short(two.dtype), "difference": float(difference)}
    if not rows:
        raise ValueError("no module ran in both with an output of the same shape: are the names the same?")
    return pd.DataFrame.from_dict(rows, orient="index")


def _outputs(model, batch, dtype):
    """The first output of each module, by name, in the order of running."""
    model, found, hooks = plain(model), {}, []
    args, kwargs = _arguments(batch)
    kind = device_of(model).type

    def keep(name):
        def hook(module, args, output):
            for each in readable(tensors_in(output))[:1]:
                found[name] = each.clone()

        return hook

    with ExitStack() as around:
        for name, module in model.named_modules():
            hooks.append(module.register_forward_hook(keep(name)))
            around.callback(hooks[-1].remove)
        around.enter_context(_put_back(model))
        around.enter_context(torch.compiler.set_stance("force_eager"))
        around.enter_context(torch.no_grad())
        around.enter_context(torch.autocast(kind, dtype, enabled=dtype is not None))
        model(*args, **kwargs)
    return found


def _arguments(batch):
    """What a model is called with: args and kwargs."""
    if isinstance(batch, dict):
        return (), batch
    return (batch if isinstance(batch, tuple) else (batch,)), {}


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
    model, kind = copy.deepcopy(plain(model)).float(), device_of(model).type
    modules = dict(model.named_modules())
    args, kwargs = _arguments(batch)

    def loss_of(kept):
        with _put_back(model), torch.no_grad(), torch.compiler.set_stance("force_eager"), ExitStack() as around:
            for name in kept:
                around.enter_context(_in_fp32(modules[name], kind))
            with torch.autocast(kind, dtype, cache_enabled=False):
                return float(loss(model(*in_float32(args), **in_float32(kwargs))))

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
    forward, own = module.forward, vars(module).get("forward")

    def without(*args, **kwargs):
        with torch.autocast(kind, enabled=False):
            return forward(*in_float32(args), **in_float32(kwargs))

    module.forward = without
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def in_float32(value):
    """Nested arguments with float32 for tensors in 16 bits."""
    if isinstance(value, dict):
        return {key: in_float32(each) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(in_float32(each) for each in value)
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in SIXTEEN else value


@contextmanager
def _put_back(model):
    """Random numbers and statistics are afterwards what they were."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    device = device_of(model)
    try:
        with torch.random.fork_rng([device] if device.type in ("cuda", "xpu") else [], device_type=device.type):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
