"""The memory of a training step, predicted, on a GPU that need not be there."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from numbers import Real

import pandas as pd

from halfbits._step import KINDS, built, record_step


@dataclass(frozen=True)
class MemoryEstimate:
    """What one training step needs, in bytes. Weights, momentum and the batch are there before the step begins.

    `activations` is what forward keeps for backward, by dtype name, with the batch, the loss, and autocast's copies of
    weights where these are kept. `peak` is the most that is alive at one moment, each tensor rounded up to blocks of
    512 bytes, as torch does. `bytes_per_parameter`: weights, gradients and optimizer state over the number of weights.
    `timeline` has a row an op but views, in the order of running: phase, op, and the bytes alive meanwhile by kind
    (`KINDS`).
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    activations: dict
    peak: int
    bytes_per_parameter: float
    timeline: pd.DataFrame = field(repr=False)


def predict_memory(
    build_model: Callable,
    inputs: tuple | Callable,
    precision: str,
    optimizer: str | Callable = "sgd_momentum",
    device_type: str = "cuda",
    loss: Callable | None = None,
) -> MemoryEstimate:
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
    cuDNN, which keeps other things. A model that checks whether its numbers are finite is told that they are. An
    optimizer of one's own goes through the weights one by one, unless told foreach=True, CUDA's default, which needs
    more in its step for some (RMSprop, Adam).

    Raises TypeError for a model, a tensor or an optimizer where a function that makes it is wanted. Raises ValueError
    for an unknown precision, optimizer or device type, a loss that trains nothing, a model that asks for values (the
    error names the line), takes other inputs, runs backward itself, or uses sparse gradients, lazy modules or tensors
    of no module, weights that do not fit the precision, LBFGS, an LSTM on a CPU, reentrant checkpointing, and, on torch
    2.11, an autograd.Function in Python. A model compiled with torch.compile is predicted eager.

    Examples
    --------
    >>> import torch
    >>> estimate = predict_memory(lambda: torch.nn.Linear(100, 1), (8, 100), "fp32")
    >>> estimate.parameters, estimate.gradients, estimate.optimizer_state, estimate.activations
    (404, 404, 404, {'float32': 3268})
    >>> tokens = lambda: torch.randint(50_000, (2, 1024))
    >>> predict_memory(lambda: torch.nn.Embedding(50_000, 64), tokens, "bf16", "adamw").bytes_per_parameter
    16.0
    """
    seen = record_step(build_model, inputs, precision, optimizer, device_type, loss)
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


def largest_batch(
    gpu_memory: float,
    build_model: Callable,
    inputs_of: tuple | Callable,
    precision: str,
    optimizer: str | Callable = "sgd_momentum",
    loss: Callable | None = None,
) -> int:
    """The largest batch whose predicted peak fits into `gpu_memory` bytes; 0 if a single image does not.

    inputs_of: the shape of one image, (channels, height, width), or a function of the size of the batch that returns
        `predict_memory`'s inputs. The other arguments are `predict_memory`'s. Take the CUDA context and the workspaces
        off `gpu_memory` before: they come on top of the prediction.

    Examples
    --------
    >>> import torch
    >>> largest_batch(10**6, lambda: torch.nn.Linear(100, 1), (100,), "fp32")
    2396
    """
    if not isinstance(gpu_memory, Real):
        raise TypeError(f"gpu_memory must be a number of bytes, as 24 * 2**30, not {gpu_memory!r}")
    model = built(build_model)

    def peak_of(batch):
        inputs = inputs_of(batch) if callable(inputs_of) else (batch, *inputs_of)
        try:
            return predict_memory(lambda: model, inputs, precision, optimizer, loss=loss).peak
        except ValueError as error:
            # Batch norm cannot train on one image.
            if batch == 1 and "more than 1 value per channel" in str(error):
                return math.inf
            raise

    return _largest(gpu_memory, peak_of)


def _largest(limit, peak_of):
    """The largest whole number with `peak_of(number) <= limit`; 0 if there is none. `peak_of` never falls."""
    peak = cache(peak_of)
    before = 16
    number = 32
    for _ in range(4):  # follow the straight line through the last two points; the peak is nearly straight
        each = (peak(number) - peak(before)) / (number - before)
        guess = number + math.floor((limit - peak(number)) / each) if each > 0 else 2 * number
        before = number
        number = max(1, guess)
        if before == number:
            break
    step = 1
    while number and peak(number) > limit:
        number = max(0, number - step)
        step *= 2
    step = 1
    while peak(number + step) <= limit:
        number += step
        step *= 2
    return bisect_right(range(number + step), limit, lo=number + 1, key=peak) - 1
