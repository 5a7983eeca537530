"""The time of a training step by the roofline: what 16 bits can gain on a GPU that need not be there."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from halfbits._fake import made_on_meta
from halfbits._step import PRECISIONS, known, record_step, tensors_in

# Memory in GiB: a card sold with 24 GB has 24 GiB, and the driver keeps up to 2% of it. Bandwidth in GB/s, 1e9 bytes.
# Rates in TFLOP/s without sparsity (a datasheet that gives those with sparsity gives twice as much), those of 16-bit
# formats with sums in float32. Each row is one column of its source.
GPUS = pd.DataFrame(
    [
        ("V100", 16, 900, 15.7, math.nan, 125, math.nan, "NVIDIA V100 datasheet, V100 SXM2"),
        ("T4", 16, 320, 8.1, math.nan, 65, math.nan, "NVIDIA Turing whitepaper, Tesla T4"),
        ("RTX 3090", 24, 936, 35.6, 35.6, 71, 71, "NVIDIA GA102 whitepaper, appendix A, RTX 3090"),
        ("A100", 80, 2039, 19.5, 156, 312, 312, "NVIDIA A100 datasheet, A100 80GB SXM"),
        ("RTX 4090", 24, 1008, 82.6, 82.6, 165.2, 165.2, "NVIDIA Ada whitepaper, appendix A, RTX 4090"),
        ("H100", 80, 3350, 67, 494.5, 989.5, 989.5, "NVIDIA H100 datasheet, H100 SXM"),
        ("H200", 141, 4800, 67, 494.5, 989.5, 989.5, "NVIDIA H200 datasheet, H200 SXM"),
        ("B200", 180, 7700, 75, 1100, 2250, 2250, "NVIDIA Blackwell datasheet, HGX B200, one GPU"),
    ],
    columns=["gpu", "memory", "bandwidth", "fp32", "tf32", "fp16", "bf16", "source"],
).set_index("gpu")


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


def roofline(
    build_model: Callable,
    inputs: tuple | Callable,
    precision: str,
    gpu: str,
    optimizer: str | Callable = "sgd_momentum",
    loss: Callable | None = None,
) -> TimeEstimate:
    """The time of a training step on one of `GPUS` by the roofline, as a TimeEstimate.

    An op takes its FLOPs over the GPU's rate for its dtype, or its bytes over the bandwidth, whichever is longer
    (S. Williams, A. Waterman, D. Patterson: Roofline, CACM 52(4), 2009, doi:10.1145/1498765.1498785). A depthwise
    convolution has no sum over channels, so nothing for Tensor Cores: its rate is that of float32. The ops are those
    of eager mode; torch.compile fuses many of them and saves traffic. "fp32" is IEEE float32 and "tf32" TF32 in every
    op; PyTorch's default on Ampere and newer is in between, TF32 in convolutions only. The other arguments are
    `predict_memory`'s; the first size of the first input is the number of images, or of texts.

    No strict bound: Winograd's algorithm multiplies less than is counted. Notebook 19 compares the gains that this
    predicts with all that were published.

    Raises ValueError for an unknown GPU, precision or optimizer, and for a precision that the GPU has no units for.

    Examples
    --------
    >>> import torch
    >>> roofline(lambda: torch.nn.Linear(4096, 4096), (64, 4096), "fp16", "V100").bound
    'memory'
    """
    ops = pd.DataFrame(record_step(build_model, inputs, precision, optimizer, loss=loss).rows)
    ops = on_gpu(ops[ops.bytes > 0].reset_index(drop=True), gpu, precision)
    seconds = float(ops.seconds.sum())
    return TimeEstimate(
        flops=int(ops.flops.sum()),
        bytes=int(ops.bytes.sum()),
        seconds=seconds,
        images_per_second=(len(tensors_in(made_on_meta(inputs))[0]) if callable(inputs) else inputs[0]) / seconds,
        bound=ops.groupby("bound").seconds.sum().idxmax(),
        ops=ops,
    )


def on_gpu(ops: pd.DataFrame, gpu: str, precision: str) -> pd.DataFrame:
    """The ops of a TimeEstimate on another of `GPUS`: with new `seconds` and `bound`.

    Raises ValueError for an unknown GPU, and for a precision that it has no units for.

    Examples
    --------
    >>> import torch
    >>> ops = roofline(lambda: torch.nn.Linear(4096, 4096), (64, 4096), "fp16", "V100").ops
    >>> seconds = [on_gpu(ops, gpu, "fp16").seconds.sum() for gpu in ("V100", "H100")]
    >>> f"{seconds[0] / seconds[1]:.1f} times the time, as {GPUS.bandwidth.H100 / GPUS.bandwidth.V100:.1f} times slower"
    '3.7 times the time, as 3.7 times slower'
    """
    peaks = GPUS.loc[known("GPU", gpu, GPUS.index)]
    if math.isnan(peaks[known("precision", precision, PRECISIONS).removeprefix("pure_")]):
        raise ValueError(f"the {gpu} has no arithmetic units for {precision}")
    wide = peaks.tf32 if precision == "tf32" else peaks.fp32
    rates = {"float32": wide, "float16": peaks.fp16, "bfloat16": peaks.bf16}
    rate = ops.dtype.map(rates).fillna(wide).mask(ops.depthwise, peaks.fp32)
    arithmetic = ops.flops / rate / 1e12
    traffic = ops.bytes / peaks.bandwidth / 1e9
    bound = np.where(arithmetic > traffic, "compute", "memory")
    return ops.assign(intensity=ops.flops / ops.bytes, seconds=np.maximum(arithmetic, traffic), bound=bound)
