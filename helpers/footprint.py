"""Memory and time of a training step, predicted: from fake tensors, which have a shape, a dtype and no memory.

Neither the GPU nor its memory is needed. What a real step adds, and no prediction here contains: the CUDA context, the
workspaces of cuDNN and cuBLAS, the allocator's cache, and the time to launch kernels.
"""

import copy
import heapq
import math
import weakref
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import binary_cross_entropy_with_logits, scaled_dot_product_attention
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry

from helpers.autocast import autocast_on, in_words, on_device, tensors_of

# Memory in GiB: a card sold with 24 GB has 24 GiB, and the driver keeps up to 2% of it. Bandwidth in GB/s, 1e9 bytes.
# Rates in TFLOP/s without sparsity (a datasheet that gives those with sparsity gives twice as much), those of 16-bit
# formats with sums in float32. Each row is one column of its source.
GPUS = pd.DataFrame(
    [
        ("V100", 16, 900, 15.7, math.nan, 125, math.nan, "NVIDIA V100 datasheet, V100 SXM2"),
        ("RTX 3090", 24, 936, 35.6, 35.6, 71, 71, "NVIDIA GA102 whitepaper, appendix A, RTX 3090"),
        ("A100", 80, 2039, 19.5, 156, 312, 312, "NVIDIA A100 datasheet, A100 80GB SXM"),
        ("RTX 4090", 24, 1008, 82.6, 82.6, 165.2, 165.2, "NVIDIA Ada whitepaper, appendix A, RTX 4090"),
        ("H100", 80, 3350, 67, 494.5, 989.5, 989.5, "NVIDIA H100 datasheet, H100 SXM"),
        ("H200", 141, 4800, 67, 494.5, 989.5, 989.5, "NVIDIA H200 datasheet, H200 SXM"),
        ("B200", 180, 7700, 75, 1100, 2250, 2250, "NVIDIA Blackwell datasheet, HGX B200, one GPU"),
    ],
    columns=["gpu", "memory", "bandwidth", "fp32", "tf32", "fp16", "bf16", "source"],
).set_index("gpu")

# Adam as with fused=True: the default on CUDA makes temporary copies as large as all weights in its step.
OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=1e-3),
    "sgd_momentum": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9),
    "adam": lambda weights: torch.optim.Adam(weights, lr=1e-3, fused=True),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-3, fused=True),
}

# The dtype of autocast, None without it.
PRECISIONS = {"fp32": None, "tf32": None, "fp16": torch.float16, "bf16": torch.bfloat16, "pure_bf16": None}

KINDS = ["parameters", "buffers", "optimizer state", "batch", "gradients", "activations", "other"]

_BLOCK = 512  # bytes; CUDACachingAllocator.cpp, kMinBlockSize


@dataclass
class _Allocation:
    """A piece of memory: what it is for, the first op that has it, and the first that has it no more."""

    bytes: int
    dtype: str
    born: int
    died: int | None = None
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
        for tensor in _tensors(result):
            self.allocation(tensor)
        if func.is_view or func.namespace in ("prim", "profiler"):
            return result
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in _tensors((args, kwargs))]
        self.rows.append(
            {
                "phase": self.phase,
                "op": func.name().split("::")[1],
                "depthwise": _is_depthwise(func, args),
                "dtype": dtypes[0] if dtypes else "",
                "flops": _flops(func, args, kwargs, result),
                "bytes": _traffic(func, args, kwargs, result),
            }
        )
        return result

    def timeline(self):
        """The bytes alive while each op runs, by kind."""
        changes = np.zeros((len(self.rows) + 1, len(KINDS)), dtype=np.int64)
        for allocation in self.allocations:
            size = math.ceil(allocation.bytes / _BLOCK) * _BLOCK
            changes[allocation.born, KINDS.index(allocation.kind)] += size
            if allocation.died is not None:
                changes[allocation.died, KINDS.index(allocation.kind)] -= size
        alive = pd.DataFrame(changes[:-1].cumsum(axis=0), columns=KINDS)
        return pd.DataFrame(self.rows)[["phase", "op"]].join(alive)


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_depthwise(func, args):
    """Whether a convolution filters each channel alone: its weight has one input channel, and there are groups."""
    weight, groups = {"aten::convolution": (1, 8), "aten::convolution_backward": (2, 9)}.get(func.name(), (0, 0))
    return bool(groups) and args[groups] > 1 and args[weight].shape[1] == 1


def _flops(func, args, kwargs, result):
    if func.name() == "aten::convolution_backward":  # torch's own formula forgets the groups
        grad, x, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
        return sum(wanted[:2]) * conv_flop_count(x.shape, weight.shape, grad.shape, transposed)
    formula = flop_registry.get(func.overloadpacket)
    return formula(*args, **kwargs, out_val=result) if formula else 0


def _traffic(func, args, kwargs, result):
    """Bytes read and written. A view moves nothing, nor does memory that is allocated and not filled."""
    if "empty" in func.name():
        return 0
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args)} | kwargs
    changed = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    inputs = _tensors((args, kwargs))
    read_from = {tensor.untyped_storage()._cdata for tensor in inputs}
    written = _tensors([named.get(name) for name in changed])
    written += [tensor for tensor in _tensors(result) if tensor.untyped_storage()._cdata not in read_from]
    if not written:
        return 0
    if func.name().startswith(("aten::copy_", "aten::fill_", "aten::zero_")):
        inputs = inputs[1:]
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in inputs + written)


_RNNS = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}


class _KernelsOfCuda(TorchFunctionMode):
    """Attention by the kernel that CUDA would take. Without a GPU, torch finds none that supports a fused kernel.

    RNNs run without cuDNN, which asks for the device, and whose memory fake tensors do not know.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and (args[0] if args else kwargs["query"]).dim() == 4:
            return _attention(*args, **kwargs)
        with torch.backends.cudnn.flags(enabled=False) if func in _RNNS else nullcontext():
            return func(*args, **kwargs)


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if enable_gqa:
        repeats = query.size(-3) // key.size(-3)
        key, value = (tensor.repeat_interleave(repeats, -3) for tensor in (key, value))
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    if attn_mask is None and query.dtype != torch.float32:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        return kernel(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:-1], key.size(-2))
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale)[0]


def _expected_by(node):
    """What gradients a node of the graph takes: their shapes, dtypes and devices."""
    if type(node).__name__ == "CheckpointFunctionBackward":
        raise ValueError("reentrant checkpointing is not predicted; checkpoint with use_reentrant=False")
    try:
        return node._input_metadata
    except RuntimeError:  # 2.11 does not tell, 2.15 does
        raise ValueError(
            f"torch {torch.__version__} is too old for a model with an autograd.Function in Python"
        ) from None


def _backward(losses, on_gradient):
    """What `losses.pop().backward()` does, one node of the graph after the other, in the engine's order.

    The engine itself asks the device for its streams, and there may be no device. A node is let go as soon as it has
    run, and with it what it had kept: the list must hold the only reference to the loss. `on_gradient` is called with
    each gradient that arrives at a weight.
    """
    loss = losses.pop()
    waiting, nodes = Counter(), [loss.grad_fn]  # `waiting`: how many gradients a node has yet to be given
    for node in nodes:
        for child, _ in node.next_functions:
            if child is not None:
                if child not in waiting:
                    nodes.append(child)
                waiting[child] += 1
    given = {loss.grad_fn: [torch.ones_like(loss)]}
    order = count()
    ready = [(-loss.grad_fn._sequence_nr(), next(order), loss.grad_fn)]
    del loss, node, nodes, child
    while ready:
        *_, node = heapq.heappop(ready)
        gradients, edges = given.pop(node), node.next_functions
        if hasattr(node, "variable"):
            weight, gradient = node.variable, gradients[0]
            if gradient.untyped_storage().nbytes() < gradient.nbytes:  # expanded from fewer numbers
                gradient = gradient.clone()
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
            on_gradient(weight.grad)
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):  # written in Python, with a place an argument
            for place, expected in enumerate(_expected_by(node)):
                if gradients[place] is None:
                    gradients[place] = torch.zeros(expected.shape, dtype=expected.dtype, device=expected.device)
            results = node.apply(*gradients)
            results = results if isinstance(results, tuple) else (results,)
            results = [result for result, needed in zip(results, node.needs_input_grad) if needed]
            edges = [edge for edge in edges if edge[0] is not None]
        else:
            results = node(*gradients)
            results = results if isinstance(results, tuple) else (results,)
        del node, gradients
        for (child, place), result in zip(edges, results):
            if child is None:
                continue
            takes = _expected_by(child)
            places = given.setdefault(child, [None] * len(takes))
            if result is not None:
                expected = takes[place]
                result = result.sum_to_size(expected.shape).to(expected.dtype)
                places[place] = result if places[place] is None else places[place] + result
            waiting[child] -= 1
            if not waiting[child]:
                del waiting[child]
                heapq.heappush(ready, (-child._sequence_nr(), next(order), child))
        del results, result, takes, places, child, edges


def _autocast(device_type, dtype=None, enabled=True, cache_enabled=True):
    return autocast_on(device_type, dtype, cache_enabled) if enabled else nullcontext()


@in_words("the model or its optimizer")
def _record(model, input_shape, precision, optimizer, device_type):
    """Run one training step on fake tensors; the _Recorder that saw it."""
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; it is one of {', '.join(PRECISIONS)}")
    if not callable(optimizer) and optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {optimizer!r}; it is a function or one of {', '.join(OPTIMIZERS)}")
    if device_type not in ("cuda", "cpu"):
        raise ValueError(f"unknown device type {device_type!r}; only cuda and cpu can be predicted")
    make_optimizer = optimizer if callable(optimizer) else OPTIMIZERS[optimizer]
    dtype = torch.bfloat16 if precision == "pure_bf16" else None
    seen = _Recorder()
    with FakeTensorMode():
        tensors = tensors_of(model)
        if any(map(is_lazy, tensors)):
            raise ValueError("lazy modules have no shapes yet; in build_model, call the model once before returning it")
        others = {weight.dtype for weight in model.parameters() if weight.is_floating_point()} - {torch.float32}
        if others and precision != "pure_bf16":
            raise ValueError(f"the model has weights of {others.pop()}, not float32; pure_bf16 casts weights by itself")
        if device_type == "cpu" and any(isinstance(module, torch.nn.LSTM) for module in model.modules()):
            raise ValueError("on a CPU an LSTM keeps a workspace of oneDNN's, which is not predicted; predict for cuda")
        model = copy.deepcopy(model, {id(tensor): on_device(tensor, device_type, True, dtype) for tensor in tensors})
        optimizer = make_optimizer(model.parameters())
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS runs the model several times a step and is not predicted; take another optimizer")
        for weight in model.parameters():
            weight.grad = torch.empty_like(weight) if weight.requires_grad else None
        optimizer.step()  # from the second step on, there is momentum
        optimizer.zero_grad()
        batch = torch.empty(input_shape, dtype=dtype, device=device_type)

        seen.mark(model.parameters(), "parameters")
        seen.mark(model.buffers(), "buffers")
        seen.mark([state for state in _tensors(list(optimizer.state.values())) if state.ndim], "optimizer state")
        seen.mark([batch], "batch")

        def keep(tensor):
            if tensor.untyped_storage()._cdata == batch.untyped_storage()._cdata:
                seen.mark([tensor], "activations")
            return tensor.detach()  # or an op that keeps its own output would keep itself alive

        autocast = _autocast(device_type, PRECISIONS[precision], PRECISIONS[precision] is not None)
        kernels = _KernelsOfCuda() if device_type == "cuda" else nullcontext()
        with seen, kernels:
            seen.phase = "forward"
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
                output = model(batch)
                if not isinstance(output, torch.Tensor) or not output.requires_grad:
                    raise ValueError("the model must return one tensor that depends on a weight that is trained")
                losses = [binary_cross_entropy_with_logits(output, torch.zeros_like(output))]
            del output
            seen.mark_unmarked("activations")
            seen.phase = "backward"
            # Both are asked by torch.utils.checkpoint: for autocast, which torch refuses where the device is missing,
            # and for the engine's number, under which it keeps what it has computed again.
            with (
                patch.object(torch.amp, "autocast", _autocast),
                patch.object(torch._C, "_current_graph_task_id", lambda: 0),
                torch.no_grad(),
            ):
                _backward(losses, on_gradient=lambda gradient: seen.mark([gradient], "gradients"))
            seen.phase = "optimizer"
            optimizer.step()
    return seen


@dataclass(frozen=True)
class MemoryEstimate:
    """What one training step needs, in bytes. Weights, momentum and the batch are there before the step begins.

    `activations` is what forward keeps for backward, the batch included where it is kept, by dtype name. `peak` is the
    most that is alive at one moment, every tensor rounded up to torch's blocks of 512 bytes. `timeline` has a row an
    op, views left out, in the order of running: phase, op, and the bytes alive while it runs, a column for each of
    `KINDS`.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    activations: dict
    peak: int
    timeline: pd.DataFrame = field(repr=False)


def predict_memory(build_model, input_shape, precision, optimizer="sgd_momentum", device_type="cuda"):
    """Predict the memory of a training step on a GPU that need not be there, as a MemoryEstimate.

    build_model: takes no argument and returns a module. Activation checkpointing that it turns on
        (`model.set_grad_checkpointing()` in timm) is predicted too.
    input_shape: (batch, channels, height, width) of float images. The loss is binary cross-entropy with logits.
    precision: "fp32" or "tf32" (the same memory), "fp16" or "bf16" (autocast), "pure_bf16" (weights and images too).
    optimizer: a key of `OPTIMIZERS`, or a function that takes the weights and returns an optimizer.
    device_type: "cuda", or "cpu". A CPU keeps other things: its autocast has other rules for softmax and layer_norm,
        its dropout keeps a float mask, its attention with a mask that is learned keeps the softmax.

    On "cuda", attention is what Ampere and newer take: flash attention in 16 bits, memory-efficient attention in
    float32 and with a mask. The reserve that batch norm keeps in channels_last is left out. RNNs are predicted without
    cuDNN, which keeps other things. The optimizer goes through the weights one by one; CUDA's default, foreach, needs
    more in its step for some (RMSprop, Adam without fused).

    Raises ValueError for an unknown precision, optimizer or device type, for a model that returns no tensor to train
    on, asks for values, takes whole numbers, runs backward itself, or uses sparse gradients, lazy modules or tensors of
    no module, for weights that do not fit the precision, LBFGS, an LSTM on a CPU, reentrant checkpointing, and, on old
    versions of torch, an autograd.Function written in Python. A model compiled with torch.compile is predicted eager.

    Examples
    --------
    >>> estimate = predict_memory(lambda: torch.nn.Linear(100, 1), (8, 100), "fp32")
    >>> estimate.parameters, estimate.gradients, estimate.optimizer_state, estimate.activations
    (404, 404, 404, {'float32': 3268})
    """
    seen = _record(build_model(), input_shape, precision, optimizer, device_type)
    total, activations = Counter(), Counter()
    for allocation in seen.allocations:
        total[allocation.kind] += allocation.bytes
        if allocation.kind == "activations":
            activations[allocation.dtype] += allocation.bytes
    timeline = seen.timeline()
    return MemoryEstimate(
        parameters=total["parameters"],
        buffers=total["buffers"],
        gradients=total["gradients"],
        optimizer_state=total["optimizer state"],
        activations=dict(+activations),
        peak=int(timeline[KINDS].sum(axis=1).max()),
        timeline=timeline,
    )


def largest_batch(gpu_memory, build_model, image_shape, precision, optimizer="sgd_momentum"):
    """The largest batch whose predicted peak fits into `gpu_memory` bytes; 0 if a single image does not.

    image_shape: (channels, height, width). The other arguments are `predict_memory`'s. Take the CUDA context and the
    workspaces off `gpu_memory` before: they come on top of the prediction.

    Examples
    --------
    >>> largest_batch(10**6, lambda: torch.nn.Linear(100, 1), (100,), "fp32")
    2396
    """
    model = build_model()

    @cache
    def peak(batch):
        try:
            return predict_memory(lambda: model, (batch, *image_shape), precision, optimizer).peak
        except ValueError as error:
            if batch == 1 and "more than 1 value per channel" in str(error):  # batch norm cannot train on one image
                return math.inf
            raise

    before, batch = 16, 32
    for _ in range(4):  # follow the straight line through the last two points; the peak is nearly straight
        each = (peak(batch) - peak(before)) / (batch - before)
        guess = batch + math.floor((gpu_memory - peak(batch)) / each) if each > 0 else 2 * batch
        before, batch = batch, max(1, guess)
        if before == batch:
            break
    fits, too_large, reach = 0, None, 1
    while too_large is None or too_large - fits > 1:
        if peak(batch) <= gpu_memory:
            fits = batch
        else:
            too_large = batch
        if too_large is None:
            batch, reach = fits + reach, 2 * reach
        elif fits == 0:
            batch, reach = max(1, too_large - reach), 2 * reach
        else:
            batch = (fits + too_large) // 2
    return fits


@dataclass(frozen=True)
class TimeEstimate:
    """The time of a training step on a GPU by the roofline: its arithmetic and its memory traffic, nothing else.

    `flops`: a multiply-add of a convolution, a matrix product or attention counts 2, all else 0. `bytes`: what the ops
    read and write, each tensor once an op. `seconds`: the larger of arithmetic and traffic, summed over the ops;
    `bound`: "memory" or "compute", whichever makes up most of it. `ops`: a row an op, with its phase, depthwise
    (whether it is such a convolution), dtype, flops, bytes, intensity (FLOPs a byte), seconds and bound.
    """

    flops: int
    bytes: int
    seconds: float
    images_per_second: float
    bound: str
    ops: pd.DataFrame = field(repr=False)


def roofline(build_model, input_shape, precision, gpu, optimizer="sgd_momentum"):
    """The time of a training step on one of `GPUS` by the roofline, as a TimeEstimate.

    An op takes its FLOPs over the GPU's rate for its dtype, or its bytes over the bandwidth, whichever is longer
    (S. Williams, A. Waterman, D. Patterson: Roofline, CACM 52(4), 2009, doi:10.1145/1498765.1498785). A depthwise
    convolution has no sum over channels, so nothing for Tensor Cores: its rate is that of float32. The ops are those
    of eager mode; torch.compile fuses many of them and saves traffic. "fp32" is IEEE float32 and "tf32" TF32 in every
    op; PyTorch's default on Ampere and newer is in between, TF32 in convolutions only. The other arguments are
    `predict_memory`'s.

    No strict bound: Winograd's algorithm needs fewer multiplications than are counted, a tensor that stays in the L2
    cache is not read from memory. And a real step launches a kernel for each op, a few microseconds each on the CPU.

    Raises ValueError for an unknown GPU, precision or optimizer, and for a precision that the GPU has no units for.

    Examples
    --------
    >>> roofline(lambda: torch.nn.Linear(4096, 4096), (64, 4096), "fp16", "V100").bound
    'memory'
    """
    if gpu not in GPUS.index:
        raise ValueError(f"unknown GPU {gpu!r}; footprint.GPUS has {', '.join(GPUS.index)}")
    peaks = GPUS.loc[gpu]
    if math.isnan(peaks.get(precision.removeprefix("pure_"), 0)):
        raise ValueError(f"the {gpu} has no arithmetic units for {precision}")
    seen = _record(build_model(), input_shape, precision, optimizer, "cuda")
    wide = peaks.tf32 if precision == "tf32" else peaks.fp32
    rates = {"float32": wide, "float16": peaks.fp16, "bfloat16": peaks.bf16}
    ops = pd.DataFrame(seen.rows)
    ops = ops[ops.bytes > 0].reset_index(drop=True)
    rate = ops.dtype.map(rates).fillna(wide).mask(ops.depthwise, peaks.fp32)
    arithmetic = ops.flops / rate / 1e12
    traffic = ops.bytes / peaks.bandwidth / 1e9
    ops["intensity"] = ops.flops / ops.bytes
    ops["seconds"] = np.maximum(arithmetic, traffic)
    ops["bound"] = np.where(arithmetic > traffic, "compute", "memory")
    seconds = float(ops.seconds.sum())
    return TimeEstimate(
        flops=int(ops.flops.sum()),
        bytes=int(ops.bytes.sum()),
        seconds=seconds,
        images_per_second=input_shape[0] / seconds,
        bound=ops.groupby("bound").seconds.sum().idxmax(),
        ops=ops,
    )
