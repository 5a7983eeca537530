"""Time, memory and energy of training steps, measured so that two ways of training can be compared."""

import os
import re
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pynvml
import torch
from scipy.stats import bootstrap
from tqdm.auto import tqdm

from helpers.hardware import ask_nvml


def progress(iterable=None, **options):
    """A tqdm bar that goes when it is done. TQDM_DISABLE=1 hides it; tqdm itself ignores that in a notebook."""
    return tqdm(iterable, leave=False, disable="TQDM_DISABLE" in os.environ, **options)


def synchronize(device):
    """Wait until `device` has done all that was asked of it; nothing to wait for on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def time_block(step, steps, device, drop=0):
    """Mean seconds of one of `steps` calls of `step()`, after `drop` calls that are not timed.

    The device is synchronised once, at the end: CUDA events mark both ends of the block on the GPU itself; elsewhere
    `time.perf_counter` does, after the queue has run dry.
    """
    for _ in range(drop):
        step()
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(steps):
            step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / steps
    synchronize(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return (time.perf_counter() - began) / steps


@dataclass(frozen=True)
class WarmUp:
    """How a step warmed up: seconds in all, the time of the first step, and whether the block times settled."""

    seconds: float
    first_step: float
    settled: bool


def warm_up(step, device, steps=5, tolerance=0.01, at_most=12):
    """Run blocks of `steps` until two medians of three blocks in a row agree within `tolerance`, or `at_most` blocks.

    Compilation, autotuning and the allocator's growth end up in here, not in what is measured afterwards.
    """
    began = time.perf_counter()
    first = time_block(step, 1, device)
    blocks, settled = [], False
    while len(blocks) < at_most and not settled:
        blocks.append(time_block(step, steps, device))
        if len(blocks) >= 4:
            settled = bool(abs(np.median(blocks[-3:]) / np.median(blocks[-4:-1]) - 1) <= tolerance)
    return WarmUp(time.perf_counter() - began, first, settled)


def abba(names, rounds, seed=0):
    """The order in which to measure: `rounds` lists of all `names`, each odd list a random order, each even list the
    one before it reversed, so that a slow drift of the machine burdens all names alike."""
    shuffle, order = np.random.default_rng(seed), []
    for number in range(rounds):
        order.append(order[-1][::-1] if number % 2 else shuffle.permutation(names).tolist())
    return order


def compare(arms, device, images, rounds=20, steps=10, drop=2, seed=0):
    """Time every arm in every round, in ABBA order.

    `arms` maps a name to a function of no argument that does one training step on `images` images. Returns a
    DataFrame with one row a block: round, arm, seconds (of one step). An interrupt, or Jupyter's stop button, ends
    the measurement and keeps the rounds that were complete.
    """
    rows = []
    with progress(total=rounds * len(arms), desc="Timing", unit="block") as bar:
        try:
            for number, order in enumerate(abba(list(arms), rounds, seed)):
                block = []
                for name in order:
                    seconds = time_block(arms[name], steps, device, drop)
                    block.append({"round": number, "arm": name, "seconds": seconds})
                    bar.set_postfix_str(f"{name}: {images / seconds:,.0f} images/s")
                    bar.update()
                rows += block
        except KeyboardInterrupt:
            print(f"Interrupted: {number} of {rounds} rounds are complete and kept.")
    return pd.DataFrame(rows, columns=["round", "arm", "seconds"])


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians with its bootstrap interval."""

    value: float
    low: float
    high: float

    def __contains__(self, value):
        return self.low <= value <= self.high

    def __str__(self):
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def _ratio_of_medians(numerator, denominator, axis):
    return np.median(numerator, axis=axis) / np.median(denominator, axis=axis)


def speedup(times, arm, baseline, confidence=0.95, seed=0):
    """How many times faster `arm` is than `baseline`: the ratio of median block times, with SciPy's bootstrap
    percentile interval over rounds (both arms of a round are drawn together). `times` is what `compare` returned.

    Raises ValueError with fewer than 2 rounds.
    """
    by_round = times.pivot(index="round", columns="arm", values="seconds")
    if len(by_round) < 2:
        raise ValueError(f"An interval needs at least 2 complete rounds; there are {len(by_round)}. Measure again.")
    samples = by_round[baseline].to_numpy(), by_round[arm].to_numpy()
    interval = bootstrap(
        samples, _ratio_of_medians, paired=True, confidence_level=confidence, method="percentile", rng=seed
    ).confidence_interval
    return Ratio(float(_ratio_of_medians(*samples, axis=0)), float(interval.low), float(interval.high))


def summary(times, images, baseline):
    """One row an arm, the baseline first: median and interquartile range of a step in ms, images/s, and the speedup
    over `baseline` with its 95% interval, `low` to `high`."""
    rows = {}
    for arm in dict.fromkeys([baseline, *times.arm]):
        seconds = times.seconds[times.arm == arm]
        low, median, high = seconds.quantile([0.25, 0.5, 0.75])
        ratio = speedup(times, arm, baseline)
        rows[arm] = {
            "step (ms)": median * 1000,
            "IQR (ms)": (high - low) * 1000,
            "images/s": images / median,
            "speedup": ratio.value,
            "low": ratio.low,
            "high": ratio.high,
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def kept_for_backward(model, forward):
    """Bytes that `forward()` keeps for the backward pass, as a dict by dtype name; `model`'s own weights not counted.

    Counted with saved-tensor hooks, each storage once: exact on any device, and the same in every run.
    """
    weights = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    kept = {}  # holds the tensors, lest a freed address be given to another one and be counted as the same

    def note(tensor):
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward()
    total = Counter()
    for address, tensor in kept.items():
        if address not in weights:
            total[str(tensor.dtype).removeprefix("torch.")] += tensor.untyped_storage().nbytes()
    return dict(total)


def memory(step, device, steps=3):
    """Peak memory of `step()` on a CUDA device, in bytes, as a dict; an empty dict elsewhere.

    `allocated`: tensors. `reserved`: what torch's allocator holds from the driver. `process` and `device`: what NVML
    sees of this process (CUDA context and libraries included) and of the whole GPU. Call it after the warm-up.
    """
    if device.type != "cuda":
        return {}
    torch.cuda.reset_peak_memory_stats(device)
    time_block(step, steps, device)
    return {
        "allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
        "process": ask_nvml(_our_memory, device),
        "device": ask_nvml(lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).used, device),
    }


def _our_memory(gpu):
    ours = [p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu) if p.pid == os.getpid()]
    return ours[0] if ours else "unknown: NVML does not list this process"


def energy(step, images, device, seconds=10):
    """Joules an image over at least `seconds` of calls of `step()` on `images` images, by NVML's energy counter.

    The counter is the whole GPU's, other processes included. None where there is no counter (CPU, old GPUs).
    """
    if device.type != "cuda":
        return None
    count = pynvml.nvmlDeviceGetTotalEnergyConsumption
    synchronize(device)
    before = ask_nvml(count, device)
    if isinstance(before, str):
        return None
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        time_block(step, 10, device)
        done += 10
    return (ask_nvml(count, device) - before) / 1000 / (done * images)


def fitting_batch(run, batch):
    """The largest of `batch`, `batch // 2`, ... for which `run(batch)` does not run out of memory.

    Says so each time it halves. Raises the error if a single image does not fit.
    """
    while True:
        try:
            run(batch)
            return batch
        except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU's allocator raises a plain one
            if batch == 1 or not re.search("out of memory|not enough memory|can't allocate memory", str(error)):
                raise
            print(f"Batch {batch} runs out of memory; trying {batch // 2}.")
            batch //= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
