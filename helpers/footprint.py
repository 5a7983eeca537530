"""Memory and time of a training step, predicted: from fake tensors, which have a shape, a dtype and no memory.

Neither the GPU nor its memory is needed. What a real step adds, and no prediction here contains: the CUDA context, the
workspaces of cuDNN and cuBLAS, and the allocator's cache.
"""

import copy
import math
import weakref
from bisect import bisect_right
from collections import Counter, OrderedDict
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from helpers.autocast import Autocast, KernelsOfCuda, in_words, on_device, tensors_of

# Memory in GiB: a card sold with 24 GB has 24 GiB, and the driver keeps up to 2% of it. Bandwidth in GB/s, 1e9 bytes.
# Rates in TFLOP/s without sparsity (a datasheet that gives those with sparsity gives twice as much), those of 16-bit
# formats with sums in float32. Each row is one column of its source. The L2 cache in MiB: NVIDIA's whitepapers on the
# chips; the H200 has the H100's; the B200's as its driver tells (torchao's pull request 4002).
GPUS = pd.DataFrame(
    [
        ("V100", 16, 6, 900, 15.7, math.nan, 125, math.nan, "NVIDIA V100 datasheet, V100 SXM2"),
        ("T4", 16, 4, 320, 8.1, math.nan, 65, math.nan, "NVIDIA Turing whitepaper, Tesla T4"),
        ("RTX 3090", 24, 6, 936, 35.6, 35.6, 71, 71, "NVIDIA GA102 whitepaper, appendix A, RTX 3090"),
        ("A100", 80, 40, 2039, 19.5, 156, 312, 312, "NVIDIA A100 datasheet, A100 80GB SXM"),
        ("RTX 4090", 24, 72, 1008, 82.6, 82.6, 165.2, 165.2, "NVIDIA Ada whitepaper, appendix A, RTX 4090"),
        ("H100", 80, 50, 3350, 67, 494.5, 989.5, 989.5, "NVIDIA H100 datasheet, H100 SXM"),
        ("H200", 141, 50, 4800, 67, 494.5, 989.5, 989.5, "NVIDIA H200 datasheet, H200 SXM"),
        ("B200", 180, 126.5, 7700, 75, 1100, 2250, 2250, "NVIDIA Blackwell datasheet, HGX B200, one GPU"),
    ],
    columns=["gpu", "memory", "cache", "bandwidth", "fp32", "tf32", "fp16", "bf16", "source"],
).set_index("gpu")


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


@dataclass
class _Allocation:
    """A piece of memory: what it is for, the first op that has it, and the first that has it no more."""

    number: int
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
            number = len(self.allocations)
            self._alive[storage._cdata] = _Allocation(number, storage.nbytes(), dtype, born=len(self.rows))
            self.allocations.append(self._alive[storage._cdata])
            weakref.finalize(storage, self._freed, storage._cdata).atexit = False
        return self._alive[storage._cdata]

    def _freed(self, address):
        self._alive.pop(address).died = len(self.rows)

    def places(self, tensors):
        """The bytes of `tensors` by the number of the memory that they lie in."""
        found = Counter()
        for tensor in tensors:
            if allocation := self._alive.get(tensor.untyped_storage()._cdata):
                found[allocation.number] = min(found[allocation.number] + tensor.nbytes, allocation.bytes)
        return dict(found)

    def mark(self, tensors, kind):
        for tensor in tensors:
            self.allocation(tensor).kind = kind

    def mark_unmarked(self, kind):
        for allocation in self._alive.values():
            allocation.kind = kind if allocation.kind == "other" else allocation.kind

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = KNOWN_RESULTS.get(func, func)(*args, **kwargs)
        for tensor in _tensors(result):
            self.allocation(tensor)
        if func.is_view or func.namespace in ("prim", "profiler"):
            return result
        dtype = next((str(tensor.dtype).removeprefix("torch.") for tensor in _tensors((args, kwargs))), "")
        what = {"phase": self.phase, "op": func.name().split("::")[1], "depthwise": _is_depthwise(func, args)}
        what |= {"dtype": dtype, "flops": _flops(func, args, kwargs, result)}
        read, written = _traffic(func, args, kwargs, result)
        moved = sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in read + written)
        self.rows.append(what | {"bytes": moved, "reads": self.places(read), "writes": self.places(written)})
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


def _batch_norm(x, weight, bias, running_mean, running_variance, training, *_):
    mean, deviation = (weight.new_empty(len(weight) * training) for _ in range(2))
    return torch.empty_like(x), mean, deviation, x.new_empty(0, dtype=torch.uint8)  # the last is the reserve


def _batch_norm_backward(x, gradient, weight, *_):
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


def _silu_backward(gradient, x):
    return torch.empty_like(x)


# What these return is known. FakeTensorMode would run dozens of small ops to find out: a third of a prediction of CNNs.
KNOWN_RESULTS = {
    torch.ops.aten.cudnn_batch_norm.default: _batch_norm,
    torch.ops.aten.cudnn_batch_norm_backward.default: _batch_norm_backward,
    torch.ops.aten.silu.default: torch.empty_like,
    torch.ops.aten.silu_backward.default: _silu_backward,
}


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
    if func.name().startswith("aten::_scaled_dot_product"):  # torch 2.11's wants all heads of keys
        *grad, query, key, value = (tensor.shape for tensor in args[: 3 + ("backward" in func.name())])
        count_flops = sdpa_backward_flop_count if grad else sdpa_flop_count
        return count_flops(*grad, query, query[:2] + key[2:], query[:2] + value[2:])
    formula = flop_registry.get(func.overloadpacket)
    return formula(*args, **kwargs, out_val=result) if formula else 0


def _traffic(func, args, kwargs, result):
    """The tensors read and written. A view moves nothing, nor does memory that is allocated and not filled."""
    if "empty" in func.name():
        return [], []
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args)} | kwargs
    changed = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    inputs = _tensors((args, kwargs))
    read_from = {tensor.untyped_storage()._cdata for tensor in inputs}
    written = _tensors([named.get(name) for name in changed])
    written += [tensor for tensor in _tensors(result) if tensor.untyped_storage()._cdata not in read_from]
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


def _made(make):
    """What `make()` returns, made on the meta device, without memory; for real where it asks for values."""
    with suppress(Exception), torch.device("meta"):
        return make()
    return make()


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


def _known(what, name, known):
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}; it is one of {', '.join(known)}")
    return name


@in_words("the model, its inputs or its optimizer")
def _record(build_model, inputs, precision, optimizer, device_type="cuda", loss=None):
    """Run one training step on fake tensors; the _Recorder that saw it."""
    autocast_to = PRECISIONS[_known("precision", precision, PRECISIONS)]
    make_optimizer = optimizer if callable(optimizer) else OPTIMIZERS[_known("optimizer", optimizer, OPTIMIZERS)]
    _known("device type", device_type, ["cuda", "cpu"])
    loss = loss or _loss_of_logits
    dtype = torch.bfloat16 if precision == "pure_bf16" else None
    seen, model = _Recorder(), _made(build_model)
    batch = _made(inputs if callable(inputs) else lambda: torch.empty(inputs))
    batch = batch if isinstance(batch, tuple | dict) else (batch,)
    with FakeTensorMode():
        model = _copied(model, device_type, dtype)
        batch = tree_map_only(torch.Tensor, lambda tensor: on_device(tensor, device_type, True, dtype), batch)
        optimizer = _after_a_step(make_optimizer(model.parameters()))

        seen.weights = sum(weight.numel() for weight in model.parameters())
        seen.mark(model.parameters(), "parameters")
        seen.mark(model.buffers(), "buffers")
        seen.mark([state for state in _tensors(list(optimizer.state.values())) if state.ndim], "optimizer state")
        seen.mark(_tensors(batch), "batch")
        given = {tensor.untyped_storage()._cdata for tensor in _tensors(batch)}

        def keep(tensor):
            if tensor.untyped_storage()._cdata in given:
                seen.mark([tensor], "activations")
            return tensor.detach()  # or an op that keeps its own output would keep itself alive

        autocast = Autocast(device_type, autocast_to, enabled=autocast_to is not None)
        kernels = KernelsOfCuda() if device_type == "cuda" else nullcontext()
        with seen, kernels:
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


@dataclass(frozen=True)
class MemoryEstimate:
    """What one training step needs, in bytes. Weights, momentum and the batch are there before the step begins.

    `activations` is what forward keeps for backward, by dtype name, with the batch and autocast's copies of weights
    where these are kept. `peak` is the most that is alive at one moment, each tensor rounded up to blocks of 512 bytes,
    as torch does. `bytes_per_parameter`: weights, gradients and optimizer state over the number of weights. `timeline`
    has a row an op but views, in the order of running: phase, op, and the bytes alive meanwhile by kind (`KINDS`).
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    activations: dict
    peak: int
    bytes_per_parameter: float
    timeline: pd.DataFrame = field(repr=False)


def predict_memory(build_model, inputs, precision, optimizer="sgd_momentum", device_type="cuda", loss=None):
    """Predict the memory of a training step on a GPU that need not be there, as a MemoryEstimate.

    build_model: takes no argument and returns a module. It runs on the meta device unless it asks for values, so the
        model may be larger than this machine's memory; what it makes has no values to be used elsewhere. Frozen weights
        have no gradient and no state (LoRA), and any dtype. Activation checkpointing is predicted too.
    inputs: a shape of float images, (batch, channels, height, width), or a function without arguments that returns what
        the model is called with: a tensor (of tokens), a tuple of arguments, or a dict of named ones. They are copied
        to the device.
    precision: "fp32" or "tf32" (the same memory), "fp16" or "bf16" (autocast), "pure_bf16" (weights and images too).
    optimizer: a key of `OPTIMIZERS`, or a function that takes the weights and returns an optimizer.
    device_type: "cuda", or "cpu". A CPU keeps other things: its autocast has other rules for softmax and layer_norm,
        its dropout keeps a float mask, its attention with a mask that is learned keeps the softmax.
    loss: a function that makes a scalar of what the model returns, under autocast; it makes the targets too, on the
        output's device. By default binary cross-entropy with logits.

    On "cuda", attention is what Ampere and newer take: flash attention in 16 bits, memory-efficient attention in
    float32 and with a mask. The reserve that batch norm keeps in channels_last is left out. RNNs are predicted without
    cuDNN, which keeps other things. An optimizer of one's own goes through the weights one by one, unless told
    foreach=True, CUDA's default, which needs more in its step for some (RMSprop, Adam).

    Raises ValueError for an unknown precision, optimizer or device type, a loss that trains nothing, a model that asks
    for values, takes other inputs, runs backward itself, or uses sparse gradients, lazy modules or tensors of no
    module, weights that do not fit the precision, LBFGS, an LSTM on a CPU, reentrant checkpointing, and, on torch 2.11,
    an autograd.Function in Python. A model compiled with torch.compile is predicted eager.

    Examples
    --------
    >>> estimate = predict_memory(lambda: torch.nn.Linear(100, 1), (8, 100), "fp32")
    >>> estimate.parameters, estimate.gradients, estimate.optimizer_state, estimate.activations
    (404, 404, 404, {'float32': 3268})
    >>> tokens = lambda: torch.randint(50_000, (2, 1024))
    >>> predict_memory(lambda: torch.nn.Embedding(50_000, 64), tokens, "bf16", "adamw").bytes_per_parameter
    16.0
    """
    seen = _record(build_model, inputs, precision, optimizer, device_type, loss)
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
        bytes_per_parameter=sum(total[kind] for kind in ("parameters", "gradients", "optimizer state")) / seen.weights,
        timeline=timeline,
    )


def largest(limit, peak_of):
    """The largest whole number with `peak_of(number) <= limit`; 0 if there is none.

    peak_of: a function of a number of images, or of tokens in a sequence: it grows, and is asked for larger ones too.

    Examples
    --------
    >>> largest(1000, lambda number: 3 * number + 100)
    300
    """
    peak = cache(peak_of)
    before, number = 16, 32
    for _ in range(4):  # follow the straight line through the last two points; the peak is nearly straight
        each = (peak(number) - peak(before)) / (number - before)
        guess = number + math.floor((limit - peak(number)) / each) if each > 0 else 2 * number
        before, number = number, max(1, guess)
        if before == number:
            break
    step = 1
    while number and peak(number) > limit:
        number, step = max(0, number - step), 2 * step
    step = 1
    while peak(number + step) <= limit:
        number, step = number + step, 2 * step
    return bisect_right(range(number + step), limit, lo=number + 1, key=peak) - 1


def largest_batch(gpu_memory, build_model, image_shape, precision, optimizer="sgd_momentum"):
    """The largest batch whose predicted peak fits into `gpu_memory` bytes; 0 if a single image does not.

    image_shape: (channels, height, width). The other arguments are `predict_memory`'s. Take the CUDA context and the
    workspaces off `gpu_memory` before: they come on top of the prediction.

    Examples
    --------
    >>> largest_batch(10**6, lambda: torch.nn.Linear(100, 1), (100,), "fp32")
    2396
    """
    model = _made(build_model)

    def peak_of(batch):
        try:
            return predict_memory(lambda: model, (batch, *image_shape), precision, optimizer).peak
        except ValueError as error:
            if batch == 1 and "more than 1 value per channel" in str(error):  # batch norm cannot train on one image
                return math.inf
            raise

    return largest(gpu_memory, peak_of)


_PARTS = {
    "weights": ["parameters", "buffers"],
    "gradients": ["gradients"],
    "activations": ["batch", "activations", "other"],
}


def growth(build_model, inputs_of, precision, checkpointed=False, loss=None):
    """What a training step needs anyway and what each in the batch adds, as a DataFrame in GiB: columns `fixed` and
    `each`, a row for each part and each of four moments, one of which is the peak as a rule.

    As "forward ends" all activations are there, and autocast's copies of weights; as "backward begins" the first
    gradients have come, and with checkpointing the copies have gone; as "backward ends" all gradients are there; at the
    "optimizer's step" little else. Each at its fullest. What the optimizer itself has and makes is left out.

    inputs_of: takes the size of the batch, and returns `predict_memory`'s inputs. checkpointed: whether what
    `build_model` returns forgets its activations.
    """
    few, many = (predict_memory(build_model, inputs_of(n), precision, "sgd", loss=loss) for n in (2, 8))
    few, many = _at_moments(few), _at_moments(many)
    found = pd.DataFrame({"fixed": few - (many - few) / 3, "each": (many - few) / 6})
    layers = [layer for layer in _made(build_model).modules() if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d)]
    copied = 2 * sum(layer.weight.numel() for layer in layers) / 2**30 if PRECISIONS[precision] else 0
    for moment, there in {"forward ends": copied, "backward begins": copied * (not checkpointed)}.items():
        found.loc[("activations", moment), "fixed"] -= there
        found.loc[("autocast's copies", moment), ["fixed", "each"]] = there, 0
    return found


def _at_moments(estimate):
    """GiB at each of `growth`'s moments, at its fullest, by part and moment."""
    forward, backward, step = (ops for _, ops in estimate.timeline.groupby("phase", sort=False))
    first, last = backward.gradients[backward.gradients > 0].iloc[0], backward.gradients.max()
    moments = {"forward ends": forward, "backward begins": backward[backward.gradients < 1.05 * first]}
    moments |= {"backward ends": backward[backward.gradients > 0.99 * last], "optimizer's step": step}
    found = {}
    for moment, ops in moments.items():
        fullest = ops.loc[ops[KINDS].sum(axis=1).idxmax()]
        found |= {(part, moment): fullest[kinds].sum() / 2**30 for part, kinds in _PARTS.items()}
    return pd.Series(found, dtype=float).rename_axis(["part", "moment"])


# How many of optimizer state, gradients and weights are divided, in this order: S. Rajbhandari, J. Rasley, O. Ruwase,
# Y. He: ZeRO, SC20, arXiv:1910.02054, sections 3 and 5. FSDP2 divides what stage 3 does.
_STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp2": 3}


def shards(estimate, strategy, ranks):
    """The bytes that each of `ranks` GPUs holds, as a dict: optimizer_state, gradients, parameters, activations.

    estimate: a MemoryEstimate of one rank's batch. Its activations, with autocast's copies of weights, stay whole.
    strategy: "ddp", "zero1", "zero2", "zero3" or "fsdp2".

    Left out: the weights of the block that runs, which stage 3 and FSDP2 gather; and the buckets of DDP, as large as
    the gradients where gradient_as_bucket_view=True is not set.

    Examples
    --------
    >>> shards(predict_memory(lambda: torch.nn.Linear(100, 1, False), (8, 100), "fp32"), "zero2", 4)
    {'optimizer_state': 100, 'gradients': 100, 'parameters': 400, 'activations': 3268}
    """
    divided = _STAGES[_known("strategy", strategy, _STAGES)]
    held = {kind: getattr(estimate, kind) for kind in ("optimizer_state", "gradients", "parameters")}
    held |= {kind: math.ceil(held[kind] / ranks) for kind in list(held)[:divided]}
    return held | {"activations": sum(estimate.activations.values())}


@dataclass(frozen=True)
class TimeEstimate:
    """The time of a training step on a GPU by the roofline: its arithmetic and its memory traffic, nothing else.

    `flops`: a multiply-add of a convolution, a matrix product or attention counts 2, all else 0. `bytes`: what the ops
    read and write, each tensor once an op. `seconds`: the larger of arithmetic and traffic, summed over the ops;
    `bound`: "memory" or "compute", whichever makes up most of it. `ops`: a row an op, with its phase, depthwise
    (whether it is such a convolution), dtype, flops, bytes, intensity (FLOPs a byte), seconds and bound; `reads` and
    `writes` are dicts of bytes by the number of a piece of memory.
    """

    flops: int
    bytes: int
    seconds: float
    images_per_second: float
    bound: str
    ops: pd.DataFrame = field(repr=False)


def roofline(build_model, inputs, precision, gpu, optimizer="sgd_momentum", loss=None):
    """The time of a training step on one of `GPUS` by the roofline, as a TimeEstimate.

    An op takes its FLOPs over the GPU's rate for its dtype, or its bytes over the bandwidth, whichever is longer
    (S. Williams, A. Waterman, D. Patterson: Roofline, CACM 52(4), 2009, doi:10.1145/1498765.1498785). A depthwise
    convolution has no sum over channels, so nothing for Tensor Cores: its rate is that of float32. The ops are those
    of eager mode; torch.compile fuses many of them and saves traffic. "fp32" is IEEE float32 and "tf32" TF32 in every
    op; PyTorch's default on Ampere and newer is in between, TF32 in convolutions only. The other arguments are
    `predict_memory`'s; the first size of the first input is the number of images, or of texts.

    No strict bound: Winograd's algorithm multiplies less than is counted. `on_gpu` adds a cache and launches, `fused`
    is what a compiler could make of the ops.

    Raises ValueError for an unknown GPU, precision or optimizer, and for a precision that the GPU has no units for.

    Examples
    --------
    >>> roofline(lambda: torch.nn.Linear(4096, 4096), (64, 4096), "fp16", "V100").bound
    'memory'
    """
    ops = pd.DataFrame(_record(build_model, inputs, precision, optimizer, loss=loss).rows)
    ops = on_gpu(ops[ops.bytes > 0].reset_index(drop=True), gpu, precision)
    seconds = float(ops.seconds.sum())
    return TimeEstimate(
        flops=int(ops.flops.sum()),
        bytes=int(ops.bytes.sum()),
        seconds=seconds,
        images_per_second=(len(_tensors(_made(inputs))[0]) if callable(inputs) else inputs[0]) / seconds,
        bound=ops.groupby("bound").seconds.sum().idxmax(),
        ops=ops,
    )


def on_gpu(ops, gpu, precision, launch=0.0, cache=False):
    """The ops of a TimeEstimate on another of `GPUS`: with new `seconds`, `bound` and `idle`.

    launch: seconds that the CPU needs to ask for an op. It asks for one after the other, and the GPU takes them in that
        order: where it has nothing to do yet, it is `idle` before an op (seconds; 0 without launches).
    cache: whether a tensor that an op reads may still lie in the GPU's L2 cache, which keeps whole tensors, those that
        were touched last. What is written goes to memory all the same.

    Raises ValueError for an unknown GPU, and for a precision that it has no units for.

    Examples
    --------
    >>> ops = roofline(lambda: torch.nn.Linear(4096, 4096), (64, 4096), "fp16", "V100").ops
    >>> seconds = [on_gpu(ops, gpu, "fp16").seconds.sum() for gpu in ("V100", "H100")]
    >>> f"{seconds[0] / seconds[1]:.1f} times the time, as {GPUS.bandwidth.H100 / GPUS.bandwidth.V100:.1f} times slower"
    '3.7 times the time, as 3.7 times slower'
    """
    peaks = GPUS.loc[_known("GPU", gpu, GPUS.index)]
    if math.isnan(peaks[_known("precision", precision, PRECISIONS).removeprefix("pure_")]):
        raise ValueError(f"the {gpu} has no arithmetic units for {precision}")
    wide = peaks.tf32 if precision == "tf32" else peaks.fp32
    rates = {"float32": wide, "float16": peaks.fp16, "bfloat16": peaks.bf16}
    rate = ops.dtype.map(rates).fillna(wide).mask(ops.depthwise, peaks.fp32)
    moved = _not_cached(ops, peaks.cache * 2**20) if cache else ops.bytes
    arithmetic, traffic = ops.flops / rate / 1e12, moved / peaks.bandwidth / 1e9
    ops = ops.assign(intensity=ops.flops / ops.bytes, seconds=np.maximum(arithmetic, traffic))
    ops["bound"] = np.where(arithmetic > traffic, "compute", "memory")
    done, asked, idle = 0.0, 0.0, []
    for seconds in ops.seconds:
        asked += launch
        idle.append(max(0.0, asked - done))
        done = max(done, asked) + seconds
    return ops.assign(idle=idle)


def _not_cached(ops, room):
    """The bytes that each op moves to and from memory, with a cache of so many bytes that keeps what was touched."""
    kept, used, moved = OrderedDict(), 0, []
    for reads, writes in zip(ops.reads, ops.writes):
        missed = sum(size for number, size in reads.items() if number not in kept)
        moved.append(missed + sum(writes.values()))
        for number, size in (reads | writes).items():
            used += size - kept.pop(number, 0)
            kept[number] = size
        while used > room:
            used -= kept.popitem(last=False)[1]
    return np.array(moved)


def fused(ops):
    """The ops of a TimeEstimate as the best of compilers could run them: of those between two that have FLOPs it makes
    one, which reads each tensor once, and writes what a later one needs. So it does with the optimizer's.

    A real compiler is not as good: a batch norm must read its input twice, and different shapes do not merge.

    Examples
    --------
    >>> layers = [torch.nn.Linear(64, 64, bias=False), torch.nn.ReLU(), torch.nn.Tanh()]
    >>> ops = roofline(lambda: torch.nn.Sequential(*layers), (64, 64), "fp32", "A100").ops
    >>> fused(ops.query("phase == 'forward'")).op.tolist()
    ['mm', 'relu']
    """
    product = ops.flops > 0
    group = (product | product.shift(fill_value=True) | (ops.phase != ops.phase.shift())).cumsum()
    last = {number: at for at, reads, writes in zip(group, ops.reads, ops.writes) for number in (*reads, *writes)}
    kernels, there = {}, set()
    for at, op in zip(group, ops.loc[:, "phase":"writes"].to_dict("records")):
        kernel = kernels.setdefault(at, op | {"reads": {}, "writes": {}})  # named after its first op
        for number, size in op["reads"].items():
            if number not in kernel["writes"]:
                kernel["reads"][number] = max(size, kernel["reads"].get(number, 0))
        kernel["writes"] |= op["writes"]
    for at, kernel in kernels.items():
        there |= kernel["reads"].keys()
        writes = {number: size for number, size in kernel["writes"].items() if number in there or last[number] > at}
        there |= writes.keys()
        kernel.update(writes=writes, bytes=sum(kernel["reads"].values()) + sum(writes.values()))
    fewer = pd.DataFrame(kernels.values())
    return fewer[fewer.bytes > 0].reset_index(drop=True)
