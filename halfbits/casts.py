"""What autocast does, asked of the installed torch: the policy of every op, and the casts before every op that runs.

Neither needs the device that it asks about. Fake tensors have a device and a dtype, and no memory.
"""

import copy
import os
import threading
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from halfbits._fake import Autocast, fake_tensors, in_words, no_packed_sequences, on_device, tensors_of

_CAST = torch.ops.aten._to_copy.default
_ONE_AT_A_TIME = threading.Lock()  # probes share their notes, and the process has one standard error
# What a call must have to come as far as its casts, where a 1 will not do.
_OWN_ARGUMENTS = {("aten::_cudnn_rnn", "weight_stride0"): 2, ("aten::_cudnn_rnn", "proj_size"): 0}


@contextmanager
def _quiet():
    """Without the warnings of deprecated ops. Those of C++ pass Python by, and go to the process's standard error."""
    with warnings.catch_warnings(action="ignore"), Path(os.devnull).open("w") as nowhere:
        stderr = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


class _OpReached(Exception):
    """Autocast is done with its casts, and calls the op itself."""


class _Probe(torch.Tensor):
    """A 2 x 2 tensor without memory, on any device. It can be cast; any other op ends the call."""

    casts = None  # the set of dtypes that probes were cast to
    reached = None  # the first op behind autocast, with its arguments that are not tensors

    @staticmethod
    def __new__(cls, dtype, device):
        return torch.Tensor._make_wrapper_subclass(cls, (2, 2), dtype=dtype, device=device)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is _CAST:
            cls.casts.add(kwargs["dtype"])
            return cls(kwargs["dtype"], args[0].device)
        options = [leaf for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, torch.Tensor)]
        cls.reached = func, options
        raise _OpReached


def _probe_arguments(op, device_type, dtypes):
    """Small arguments that fit the op's schema; its tensors take turns in having each of `dtypes`."""
    turns = cycle(dtypes)

    def value(argument):
        kind = str(argument.type)
        if kind == "Tensor":
            return _Probe(next(turns), device_type)
        if kind == "List[Tensor]":
            return [_Probe(next(turns), device_type), _Probe(next(turns), device_type)]
        if kind == "List[Optional[Tensor]]":  # indices
            return [_Probe(torch.long, device_type)]
        if argument.has_default_value() or kind.startswith("Optional"):
            return argument.default_value
        if (op.name(), argument.name) in _OWN_ARGUMENTS:
            return _OWN_ARGUMENTS[op.name(), argument.name]
        return {"str": "ij,jk->ik", "bool": False, "List[int]": [1]}.get(kind, 1)

    return [value(argument) for argument in op._schema.arguments if not argument.kwarg_only]


def _probe(op, device_type, *dtypes):
    """Call `op` with tensors of `dtypes` in turn; returns the dtypes cast to, and what was reached or "refused"."""
    _Probe.casts, _Probe.reached = set(), None
    try:
        op(*_probe_arguments(op, device_type, dtypes))
    except Exception as error:  # _OpReached, or what the op itself finds wrong: that comes after the casts
        if "unsafe to autocast" in str(error):
            return set(), "refused"
    return _Probe.casts, _Probe.reached


def _policy(op, device_type):
    lower, wide = torch.float16, torch.float32
    casts, reached = _probe(op, device_type, wide)
    if reached == "refused":
        return "refused"
    # cuDNN's RNN wants float32 weights in a layout of its own; beside 16-bit weights its input is cast all the same.
    # A rule of the user's own may name bfloat16.
    if (casts | _probe(op, device_type, wide, lower, lower)[0]) & {torch.float16, torch.bfloat16}:
        return "lower"
    casts, reached = _probe(op, device_type, lower)
    if wide in casts:
        return "fp32"
    if wide in _probe(op, device_type, lower, wide)[0]:
        return "promote"
    with torch._C._DisableAutocast():
        alone = _probe(op, device_type, lower)[1]
    if None not in (reached, alone) and reached != alone:  # told to return float32: sum, softmax, norm
        return "fp32"
    return "unknown"


def _check_known(device_type):
    known = torch._C._autocast_supported_devices()
    if device_type not in known:
        raise ValueError(f"autocast knows no device type {device_type!r}, only {', '.join(known)}")


def cast_policies(device_type: str) -> pd.DataFrame:
    """What autocast does with each op that is registered under its key for `device_type` in the installed torch.

    Returns a DataFrame with the columns `op` ("aten::matmul"), `overload` ("" for the default one) and `policy`:

    - "lower": inputs are cast to the autocast dtype;
    - "fp32": inputs are cast to float32, or the op is told to return float32;
    - "promote": inputs of different dtypes are cast to the widest of them;
    - "refused": the call is an error under autocast;
    - "unknown": no probe could tell.

    Nothing is copied from a list: each op is called on small tensors without memory, and the casts that
    reach them are watched. The device may be missing. No rows: torch itself has no rules for the device type; those of
    "xla" come with another package. Raises ValueError for a device type that autocast does not know.

    Examples
    --------
    >>> cast_policies("cuda").query("op == 'aten::addmm' and overload == ''").policy.item()
    'lower'
    """
    _check_known(device_type)
    key = f"Autocast{torch._C._dispatch_key_for_device(device_type)}"
    rows = []
    with _ONE_AT_A_TIME, _quiet(), torch.inference_mode(False), Autocast(device_type, torch.float16):
        for name in sorted(torch._C._dispatch_get_registrations_for_dispatch_key(key)):
            op, _, overload = name.partition(".")
            packet = getattr(getattr(torch.ops, op.split("::")[0]), op.split("::")[1])
            rows.append((op, overload, _policy(getattr(packet, overload or "default"), device_type)))
    table = pd.DataFrame(rows, columns=["op", "overload", "policy"])
    # Torch 2.11 has overloads for named dimensions, and such a tensor never reaches Python.
    named = table.overload.str.contains("dimname|names_", case=False)
    table.loc[named, "policy"] = table.op[named].map(table[~named].groupby("op").policy.first())
    return table


_SHORTCUTS = {torch.Tensor.to, torch.Tensor.type, torch.Tensor.type_as, torch.Tensor.half, torch.Tensor.bfloat16}
_SHORTCUTS |= {torch.Tensor.float, torch.Tensor.double}


class _CurrentCall(TorchFunctionMode):
    """Knows whether the call of torch's Python interface that is running asks for a dtype by itself."""

    asks_for_dtype = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        named = any(isinstance(leaf, torch.dtype) for leaf in tree_leaves((args, kwargs)))
        self.asks_for_dtype = named or func in _SHORTCUTS
        return func(*args, **(kwargs or {}))


class _OpRows(TorchDispatchMode):
    """Makes a row of each op that reaches the dispatcher; autocast's casts go to the op behind them, not to a view."""

    def __init__(self, call, tracker, dtype):
        super().__init__()
        self.call, self.tracker, self.dtypes = call, tracker, {dtype, torch.float32}
        self.casts, self.moved_bytes, self.rows = [], 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is _CAST and not self.call.asks_for_dtype and result.dtype in self.dtypes - {args[0].dtype}:
            owner = args[0]._base if args[0]._is_view() else args[0]
            role = "weight" if isinstance(owner, torch.nn.Parameter) else "activation"
            self.casts.append(f"{role} {_dtypes(args[0])} -> {_dtypes(result)}")
            self.moved_bytes += args[0].nbytes + result.nbytes
        elif func.namespace != "prim":
            module = max(self.tracker.parents - {"Global"}, key=len, default="Global")
            row = [func.name(), _dtypes((args, kwargs)), _dtypes(result), "", 0, module]
            if not func.is_view:
                row[3:5] = "; ".join(self.casts), self.moved_bytes
                self.casts, self.moved_bytes = [], 0
            self.rows.append(row)
        return result


def _dtypes(tree):
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return ", ".join(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)


@contextmanager
def _no_grad_and_no_cache(enabled):
    cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(cache and not enabled)
    try:
        with torch.set_grad_enabled(not enabled):
            yield
    finally:
        torch.set_autocast_cache_enabled(cache)


@contextmanager
def _ops_in_parts():
    """Makes inference mode, around or within, no_grad without autocast's cache.

    The casts are the same. But in inference mode ops such as linear would come whole, with their casts inside.
    """
    enabled = torch.is_inference_mode_enabled()
    left = torch.inference_mode(False) if enabled else nullcontext()
    instead = _no_grad_and_no_cache(True) if enabled else nullcontext()
    with left, instead, patch.object(torch._C, "_InferenceMode", _no_grad_and_no_cache):
        yield


def _rows(fn, args, device_type, dtype):
    call, tracker = _CurrentCall(), ModuleTracker()
    # Nothing runs backward: on a real GPU the activations kept for it would fill the memory.
    keep_nothing = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)
    with keep_nothing, Autocast(device_type, dtype), tracker, call, _OpRows(call, tracker, dtype) as ops:
        fn(*args)
    return ops.rows


_DTYPES = {"fp16": torch.float16, "float16": torch.float16, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}


def trace_casts(
    fn: Callable,
    *args: Any,
    device_type: str = "cuda",
    dtype: torch.dtype | str = torch.float16,
    fake: bool | None = None,
) -> pd.DataFrame:
    """Run `fn(*args)`, a forward pass, once under autocast, and tell op by op what was cast.

    It runs in the caller's no_grad or inference_mode. TorchDispatchModes around it do not see it.

    fn: a module, or a function that finds the modules and tensors that it works on among its arguments.
    args: modules, tensors, containers of tensors. Copies of them are made on the device, so they stay as they are.
    device_type: if there is no such device, or if `fake` asks for it, the copies are fake tensors: the dtypes are
        right, nothing is computed. Kernels are then those of Ampere and newer, such as flash attention, and a model
        that checks whether its numbers are finite is told that they are. RNNs run without cuDNN; with it they copy
        their weights into one buffer, which is not seen as casts.
    dtype: torch.float16 or torch.bfloat16, or a name for it: "fp16", "float16", "bf16", "bfloat16".

    Returns a DataFrame, a row an op in the order of running: `op` ("aten::convolution"), `inputs` and `output` (their
    dtypes), `casts` (what autocast put in front of it, "weight float32 -> float16; ..."), `cast_bytes` (read and
    written by these casts) and `module` (the innermost that was running, "Global" for none).

    Raises ValueError where the device is missing and is not "cuda", the only one that fake tensors stand in for here,
    for a dtype that autocast does not cast to, and where `fn` uses tensors that are neither copies nor on the device,
    is given inputs of a wrong shape, runs backward, or asks for values that fake tensors do not have: device_type="cpu"
    has them.

    Examples
    --------
    >>> trace_casts(torch.nn.Linear(2, 2), torch.ones(1, 2))[["op", "inputs", "output", "cast_bytes"]]
                op                     inputs   output  cast_bytes
    0      aten::t                    float16  float16           0
    1  aten::addmm  float16, float16, float16  float16          48
    """
    if not callable(fn):
        raise TypeError(f"fn must be a module or a function, not {type(fn).__name__}")
    _check_known(device_type)
    dtype = _DTYPES.get(dtype, dtype)
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"autocast casts to torch.float16 or torch.bfloat16, not to {dtype}")
    if fake is None:
        fake = device_type != "cpu" and not torch.get_device_module(device_type).is_available()
    if fake and device_type != "cuda":
        raise ValueError(f"there is no {device_type} device here; without one, only cuda and cpu can be traced")
    what = type(fn).__name__ if isinstance(fn, torch.nn.Module) else "fn"
    words = in_words(what, 'device_type="cpu" traces it on real tensors')
    device = fake_tensors(device_type) if fake else nullcontext()
    with words, _disable_current_modes(), _ops_in_parts(), device, no_packed_sequences():
        copies = {}
        for leaf in tree_leaves((fn, args)):
            leaf = getattr(leaf, "__self__", leaf)  # a method's object
            tensors = tensors_of(leaf) if isinstance(leaf, torch.nn.Module) else [leaf]
            copies |= {id(t): on_device(t, device_type, fake) for t in tensors if isinstance(t, torch.Tensor)}
        fn, args = copy.deepcopy((fn, args), copies)
        rows = _rows(fn, args, device_type, dtype)
    return pd.DataFrame(rows, columns=["op", "inputs", "output", "casts", "cast_bytes", "module"])


# Ops as they are called below autocast, and as its rules name them.
_RULE_DTYPES = {
    "convolution": "conv2d",
    "native_layer_norm": "layer_norm",
    "native_group_norm": "group_norm",
    "native_batch_norm": "batch_norm",
    "cudnn_batch_norm": "batch_norm",
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "nll_loss_forward": "nll_loss",
}


def rules_of(fn: Callable, *args: Any, device_type: str) -> pd.DataFrame:
    """Which rules autocast has on a device for the ops that `fn(*args)` runs. The device may be missing.

    A weaker answer than `trace_casts`, for devices that fake tensors do not stand in for, such as "mps" and "xpu".

    Returns a DataFrame with the columns `op` ("addmm"), `times` and `rule`: a policy of `cast_policies`, or "none" for
    an op that takes its inputs as they come. The arguments and errors are those of `trace_casts`.

    Examples
    --------
    >>> rules_of(torch.nn.Linear(2, 2), torch.ones(1, 2), device_type="mps").values.tolist()
    [['t', 1, 'none'], ['addmm', 1, 'lower']]
    """
    policies = cast_policies(device_type).query("overload == ''").set_index("op").policy
    with torch.no_grad():
        ops = trace_casts(fn, *args, fake=True).op.str.removeprefix("aten::")
    ops = ops.where(~ops.str.startswith("_scaled_dot_product"), "scaled_dot_product_attention")
    times = ops.replace(_RULE_DTYPES).value_counts(sort=False).rename_axis("op").reset_index(name="times")
    return times.assign(rule=[policies.get(f"aten::{op}", "none") for op in times.op])
