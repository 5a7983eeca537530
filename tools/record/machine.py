"""Stage a: how fast the card multiplies matrices, and what it costs to start an operation."""

import time
from functools import partial

import numpy as np
import torch

from helpers import hardware
from tools.record import measure
from tools.record.session import Unit, use_float32

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def units(session):
    """One unit per format that the card has units for, and one for overheads."""
    has = hardware.native_formats(session.device)
    formats = ["fp32"]
    formats += ["tf32"] if has["TF32"] else []
    formats += ["fp16"] if has["fp16"] is not False else []
    formats += ["bf16"] if has["bf16"] is not False else []
    formats += ["fp8"] if has["FP8"] else []
    found = [Unit("a", f"matmul rates, {name}", partial(rates, name=name), 4) for name in formats]
    return [*found, Unit("a", "overheads", overheads, 5)]


def multiplication(name, size, device):
    """A function that multiplies two square matrices in the format."""
    left = torch.randn(size, size, device=device)
    right = torch.randn(size, size, device=device)
    if name == "fp8":
        one = torch.ones((), device=device)
        left = left.to(torch.float8_e4m3fn)
        right = right.to(torch.float8_e4m3fn).t()  # the kernel wants columns
        return partial(torch._scaled_mm, left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    left = left.to(DTYPES[name])
    right = right.to(DTYPES[name])
    return partial(torch.matmul, left, right)


def rates(session, name):
    """TFLOP/s of one format for square matrices of several sizes."""
    use_float32("tf32" if name == "tf32" else "ieee")
    found = {}
    for size in (1024, 2048, 4096, 8192, 16384) if session.full else (64, 128):
        multiply = multiplication(name, size, session.device)
        once = measure.time_block(multiply, 1, session.device, drop=2)
        steps = max(1, min(100, round(0.05 / once)))
        seconds = np.median([measure.time_block(multiply, steps, session.device) for _ in range(5)])
        found[str(size)] = 2 * size**3 / seconds / 1e12
    config = {"matrices": "square, random numbers", "blocks": 5}
    float32 = "tf32" if name == "tf32" else "ieee"
    session.save("06 matmul rates", name, config, {"tflops": found}, float32)


def overheads(session, count=1000):
    """Microseconds that the CPU takes to start a small addition, and that the GPU takes for one in a CUDA graph."""
    x = torch.zeros(1, device=session.device)

    def many():
        for _ in range(count):
            x.add_(1)

    many()
    started = []
    whole = []
    for _ in range(5):
        measure.time_block(lambda: None, 1, session.device)  # waits until the device is idle
        began = time.perf_counter()
        many()
        started.append(time.perf_counter() - began)
        whole.append(measure.time_block(many, 1, session.device))
    results = {"dispatch_us": 1e6 * min(started) / count, "eager_us": 1e6 * min(whole) / count}
    if session.device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            many()
        replayed = [measure.time_block(graph.replay, 1, session.device) for _ in range(5)]
        results["in_a_graph_us"] = 1e6 * min(replayed) / count
    session.save("06 overheads", "additions of one number", {"operations": count}, results)
