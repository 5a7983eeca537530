"""One training step, run on fake tensors: which ops it runs, what they allocate, and when that is freed.

`halfbits.memory` and `halfbits.speed` read what is recorded here. What a real step adds, and no prediction contains:
the CUDA context, the workspaces of cuDNN and cuBLAS, and the allocator's cache.
"""

import copy
import math
import weakref
from dataclasses import dataclass
from numbers import Integral
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from halfbits._fake import Autocast, fake_tensors, in_words, made_on_meta, no_packed_sequences, on_device, tensors_of


class _Adam8bit(torch.optim.Optimizer):
    """The states of torchao.optim.AdamW8bit. Its step is compiled; what that needs in passing is not counted."""

    def step(self):
        for weight in self.param_groups[0]["params"]:
            if weight.grad is not None and not self.state[weight]:
                self.state[weight] = {"first moment": _in_8_bits(weight), "second moment": _in_8_bits(weight)}


def _in_8_bits(weight):
    """A byte a number, a scale for each block of 256, and a table of what the bytes stand for."""
    if weight.numel() < 4096 or weight.numel() % 256:
        return [torch.empty_like(weight)]
    scales, table = (weight.new_empty(size, dtype=torch.float32) for size in (weight.numel() // 256, 256))
    return [torch.empty_like(weight, dtype=torch.uint8), scales, table]


# CUDA's default for Adam is foreach: it makes temporary copies as large as all weights in its step; fused makes none.
OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=1e-3),
    "sgd_momentum": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9),
    "adam": lambda weights: torch.optim.Adam(weights, lr=1e-3, fused=True),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-3, fused=True),
    "adamw_foreach": lambda weights: torch.optim.AdamW(weights, lr=1e-3, foreach=True),
    "adamw_8bit": lambda weights: _Adam8bit(weights, {}),
}
# The dtype of autocast, None without it.
PRECISIONS = {"fp32": None, "tf32": None, "fp16": torch.float16, "bf16": torch.bfloat16, "pure_bf16": None}
KINDS = ["parameters", "buffers", "optimizer state", "batch", "gradients", "activations", "other"]
_BLOCK = 512  # bytes; CUDACachingAllocator.cpp, kMinBlockSize
_NORMS = {torch.ops.aten.native_batch_norm, torch.ops.aten.native_group_norm, torch.ops.aten.native_layer_norm}


@dataclass
class _Allocation:
    """A piece of memory: what it is for, the first op that has it, and the first that has it no more."""

    bytes: int
    dtype: str
    born: int
    died: int = -1  # the end
    kind: str = "other"


class _Recorder(TorchDispatchMode):
    """Makes a row of every op but views, and follows the memory that ops allocate until it is freed."""

    def __init__(self):
        super().__init__()
        self.phase, self.rows, self.allocations, self._alive = "", [], [], {}

    def allocation(self, tensor):
        if tensor.layout is not torch.strided:
            raise ValueError("sparse tensors are not predicted; build nn.Embedding with sparse=False")
        storage = tensor.untyped_storage()
        if storage._cdata not in self._alive:
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._alive[storage._cdata] = _Allocation(storage.nbytes(), dtype, born=len(self.rows))
            self.allocations.append(self._alive[storage._cdata])
            weakref.finalize(storage, self._freed, storage._cdata).atexit = False
        return self._alive[storage._cdata]

    def _freed(self, address):
        self._alive.pop(address).died = len(self.rows)

    def mark(self, tensors, kind):
        for tensor in tensors:
            self.allocation(tensor).kind = kind

    def mark_unmarked(self, kind):
        for allocation in self._alive.values():
            allocation.kind = kind if allocation.kind == "other" else allocation.kind

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.overloadpacket in _NORMS:
            result = _with_real_statistics(args, result)
        for tensor in tensors_in(result):
            self.allocation(tensor)
        if func.is_view or func.namespace in ("prim", "profiler"):
            return result
        dtype = next((str(tensor.dtype).removeprefix("torch.") for tensor in tensors_in((args, kwargs))), "")
        what = {"phase": self.phase, "op": func.name().split("::")[1], "depthwise": _is_depthwise(func, args)}
        what |= {"dtype": dtype, "flops": _flops(func, args, kwargs, result)}
        read, written = _traffic(func, args, kwargs, result)
        moved = sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in read + written)
        self.rows.append(what | {"bytes": moved})
        return result

    def timeline(self):
        """The bytes alive while each op runs, by kind."""
        changes = np.zeros((len(self.rows) + 1, len(KINDS)), dtype=np.int64)
        for allocation in self.allocations:
            size = math.ceil(allocation.bytes / _BLOCK) * _BLOCK
            changes[allocation.born, KINDS.index(allocation.kind)] += size
            changes[allocation.died, KINDS.index(allocation.kind)] -= size
        alive = pd.DataFrame(changes[:-1].cumsum(axis=0), columns=KINDS)
        return pd.DataFrame(self.rows)[["phase", "op"]].join(alive)


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _with_real_statistics(args, result):
    """A norm's result with mean and deviation in float32 where its weights are. A CPU's fake ones are as the input."""
    if not any(tensor.dtype == torch.float32 for tensor in tensors_in(args)):
        return result
    return result[0], result[1].float(), result[2].float()


def _is_depthwise(func, args):
    """Whether a convolution filters each channel alone: its weight has one input channel, and there are groups."""
    weight, groups = {"aten::convolution": (1, 8), "aten::convolution_backward": (2, 9)}.get(func.name(), (0, 0))
    return bool(groups) and args[groups] > 1 and args[weight].shape[1] == 1


def _flops(func, args, kwargs, result):
    if func.name() == "aten::convolution_backward":  # torch's own formula forgets the groups
        grad, x, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
        return sum(wanted[:2]) * conv_flop_count(x.shape, weight.shape, grad.shape, transposed)
    if func.name().startswith("aten::_scaled_dot_product"):  # torch 2.11's wants all heads of keys
        *grad, query, key, value = (tensor.shape for tensor in args[: 3 + ("backward" in func.name())])
        count_flops = sdpa_backward_flop_count if grad else sdpa_flop_count
        return count_flops(*grad, query, query[:2] + key[2:], query[:2] + value[2:])
    if func.name() == "aten::_grouped_mm":  # the experts of a mixture share the rows of the first matrix
        return 2 * args[0].numel() * args[1].shape[-1]
    formula = flop_registry.get(func.overloadpacket)
    return formula(*args, **kwargs, out_val=result) if formula else 0


def _traffic(func, args, kwargs, result):
    """The tensors read and written. A view moves nothing, nor does memory that is allocated and not filled."""
    if "empty" in func.name():
        return [], []
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args)} | kwargs
    changed = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    inputs = tensors_in((args, kwargs))
    read_from = {tensor.untyped_storage()._cdata for tensor in inputs}
    written = tensors_in([named.get(name) for name in changed])
    written += [tensor for tensor in tensors_in(result) if tensor.untyped_storage()._cdata not in read_from]
    if not written:
        return [], []
    if func.name().startswith(("aten::copy_", "aten::fill_", "aten::zero_")):
        inputs = inputs[1:]
    return inputs, written


def _backward(losses):
    """What `losses.pop().backward()` does, one node of the graph after the other, in the engine's order.

    The engine itself asks the device for its streams, and there may be no device. A node is let go as soon as it has
    run, and with it what it had kept: the list must hold the only reference to the loss.
    """
    waiting, loss = {}, losses.pop()  # waiting: the nodes that have yet to run, each with its gradients
    _give(loss.grad_fn, loss.output_nr, torch.ones_like(loss), waiting)
    del loss
    while waiting:
        _run_newest(waiting)


def _give(node, place, gradient, waiting):
    """Add a gradient to those of a node, as its shape and dtype there are."""
    if type(node).__name__ == "CheckpointFunctionBackward":
        raise ValueError("reentrant checkpointing is not predicted; checkpoint with use_reentrant=False")
    takes = node._input_metadata
    if list(gradient.shape) != takes[place].shape:
        gradient = gradient.sum_to_size(takes[place].shape)
    gradient = gradient.to(takes[place].dtype)
    gradients = waiting.setdefault(node, [None] * len(takes))
    gradients[place] = gradient if gradients[place] is None else gradients[place] + gradient


def _run_newest(waiting):
    """Run the newest of the waiting nodes: it has all its gradients, for what makes them is newer than it is."""
    node = max(waiting, key=lambda node: node._sequence_nr())
    if hasattr(node, "variable"):
        weight, gradient = node.variable, *waiting.pop(node)
        if gradient.untyped_storage().nbytes() < gradient.nbytes:  # expanded from fewer numbers
            gradient = gradient.clone()
        weight.grad = gradient if weight.grad is None else weight.grad + gradient
        return
    results = _along_edges(node, waiting.pop(node))
    del node
    for (child, place), result in results:
        if child is not None and result is not None:
            _give(child, place, result, waiting)


def _along_edges(node, gradients):
    """The edges of a node, each with what the node makes of its gradients for it."""
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        results = node(*gradients)
        return zip(node.next_functions, results if isinstance(results, tuple) else (results,))
    takes = zip(gradients, node._input_metadata)
    results = node.apply(*(torch.zeros(t.shape, dtype=t.dtype, device=t.device) if g is None else g for g, t in takes))
    results = results if isinstance(results, tuple) else (results,)
    edges = [edge for edge in node.next_functions if edge[0] is not None]  # one for each argument with a gradient
    return zip(edges, [result for result, needed in zip(results, node.needs_input_grad) if needed])


def _copied(model, device_type, dtype):
    """The model with fake tensors on the device; with a `dtype`, its float tensors have that one."""
    tensors = tensors_of(model)
    if any(map(is_lazy, tensors)):
        raise ValueError("lazy modules have no shapes yet; in build_model, call the model once before returning it")
    others = {weight.dtype for weight in model.parameters() if weight.requires_grad} - {torch.float32}
    if others and not dtype:
        raise ValueError(f"the model trains weights of {others.pop()}, not float32; pure_bf16 casts them by itself")
    if device_type == "cpu" and any(isinstance(module, torch.nn.LSTM) for module in model.modules()):
        raise ValueError("on a CPU an LSTM keeps a workspace of oneDNN's, which is not predicted; predict for cuda")
    return copy.deepcopy(model, {id(tensor): on_device(tensor, device_type, True, dtype) for tensor in tensors})


def _after_a_step(optimizer):
    """From the second step on, there is momentum."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS runs the model several times a step and is not predicted; take another optimizer")
    for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
        weight.grad = torch.empty_like(weight) if weight.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _loss_of_logits(output):
    if not isinstance(output, torch.Tensor):
        raise ValueError("the model must return one tensor, or `loss` make a scalar of what it returns")
    return binary_cross_entropy_with_logits(output, torch.zeros_like(output))


def known(what, name, known):
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}; it is one of {', '.join(known)}")
    return name


def built(build_model):
    """The model that `build_model()` returns, without memory."""
    if isinstance(build_model, torch.nn.Module) or not callable(build_model):
        kind = type(build_model).__name__
        raise TypeError(f"build_model must be a function that returns the model, as lambda: model, not {kind}")
    model = made_on_meta(build_model)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"build_model must return a module, not {type(model).__name__}")
    return model


def _called_with(inputs):
    """What the model is called with, without memory."""
    if callable(inputs):
        return made_on_meta(inputs)
    if not isinstance(inputs, tuple | list) or not all(isinstance(size, Integral) for size in inputs):
        words = "a shape, as (32, 3, 224, 224), or a function that returns what the model is called with, as lambda: x"
        raise TypeError(f"inputs must be {words}, not {type(inputs).__name__}")
    return torch.empty(inputs, device="meta")


def _made_by(optimizer):
    """The function that makes the optimizer."""
    if isinstance(optimizer, torch.optim.Optimizer):
        words = "a name, as 'adamw', or a function of the weights, as lambda weights: torch.optim.AdamW(weights)"
        raise TypeError(f"optimizer must be {words}, not one that is made already")
    return optimizer if callable(optimizer) else OPTIMIZERS[known("optimizer", optimizer, OPTIMIZERS)]


@in_words("the model or its optimizer", "if it looks at labels, leave them out of the inputs, and give loss=")
@_disable_current_modes()
def record_step(build_model, inputs, precision, optimizer, device_type="cuda", loss=None):
    """Run one training step on fake tensors; the _Recorder that saw it."""
    autocast_to = PRECISIONS[known("precision", precision, PRECISIONS)]
    make_optimizer = _made_by(optimizer)
    known("device type", device_type, ["cuda", "cpu"])
    loss = loss or _loss_of_logits
    dtype = torch.bfloat16 if precision == "pure_bf16" else None
    seen, model = _Recorder(), built(build_model)
    batch = _called_with(inputs)
    batch = batch if isinstance(batch, tuple | dict) else (batch,)
    with fake_tensors(device_type), no_packed_sequences():
        model = _copied(model, device_type, dtype)
        batch = tree_map_only(torch.Tensor, lambda tensor: on_device(tensor, device_type, True, dtype), batch)
        optimizer = _after_a_step(make_optimizer(model.parameters()))

        seen.weights = sum(weight.numel() for weight in model.parameters())
        seen.mark(model.parameters(), "parameters")
        seen.mark(model.buffers(), "buffers")
        seen.mark([state for state in tensors_in(list(optimizer.state.values())) if state.ndim], "optimizer state")
        seen.mark(tensors_in(batch), "batch")
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in(batch)}

        def keep(tensor):
            if tensor.untyped_storage()._cdata in given:
                seen.mark([tensor], "activations")
            return tensor.detach()  # or an op that keeps its own output would keep itself alive

        autocast = Autocast(device_type, autocast_to, enabled=autocast_to is not None)
        with seen:
            seen.phase = "forward"
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
                losses = [loss(model(**batch) if isinstance(batch, dict) else model(*batch))]
                if losses[0].ndim or not losses[0].requires_grad:
                    raise ValueError("the loss must be a scalar that depends on a weight that is trained")
            seen.mark_unmarked("activations")
            seen.phase = "backward"
            # Both are asked by torch.utils.checkpoint: for autocast, which torch refuses where the device is missing,
            # and for the engine's number, under which it keeps what it has computed again.
            with (
                patch.object(torch.amp, "autocast", Autocast),
                patch.object(torch._C, "_current_graph_task_id", lambda: 0),
                torch.no_grad(),
            ):
                _backward(losses)
            seen.mark([weight.grad for weight in model.parameters() if weight.grad is not None], "gradients")
            seen.phase = "optimizer"
            optimizer.step()
    return seen
