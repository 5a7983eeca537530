"""Time, memory and energy of training steps, measured so that two ways of training can be compared."""

import gc
import math
import os
import re
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pynvml
import torch
from tqdm.auto import tqdm

from helpers.hardware import ask_nvml, gpu_processes


def progress(iterable=None, **options):
    """A tqdm bar that goes when it is done. TQDM_DISABLE=1 hides it; tqdm itself ignores that in a notebook."""
    return tqdm(iterable, leave=False, disable="TQDM_DISABLE" in os.environ, **options)


def time_block(step, steps, device, drop=0):
    """Mean seconds of one of `steps` calls of `step()`, after `drop` calls that are not timed.

    On an accelerator, events mark both ends of the block on the device itself, and the host waits once, for the second.
    On a CPU `time.perf_counter` is read before and after.
    """
    for _ in range(drop):
        step()
    if device.type == "cpu":
        began = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - began) / steps
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    stream = torch.accelerator.current_stream(device)  # the device need not be the current one
    start.record(stream)
    for _ in range(steps):
        step()
    end.record(stream)
    end.synchronize()
    return start.elapsed_time(end) / 1000 / steps


def _at_most(number):
    """A number of rounds or steps, or fewer where HALF_THE_BITS_ROUNDS says so: tests time everything, and need no
    narrow intervals.
    """
    number = min(number, int(os.environ.get("HALF_THE_BITS_ROUNDS") or number))
    if number < 1:
        raise ValueError(f"{number} rounds or steps measure nothing; take 1 or more, and HALF_THE_BITS_ROUNDS likewise")
    return number


def warm_up(step, device, steps=5, tolerance=0.01, at_most=18):
    """Run blocks of `steps` until the medians of the last three blocks and of the three before agree within
    `tolerance`, or until `at_most` blocks have run. Returns whether they agree.

    Compilation, autotuning and the allocator's growth end up in here, not in what is measured afterwards.
    """
    step()
    steps = _at_most(steps)
    blocks = []
    for _ in range(_at_most(at_most)):
        blocks.append(time_block(step, steps, device))
        if len(blocks) >= 6 and abs(np.median(blocks[-3:]) / np.median(blocks[-6:-3]) - 1) <= tolerance:
            return True
    return False


def _abba(names, rounds, seed=0):
    """The order in which to measure: `rounds` lists of all `names`, each odd list a random order, each even list the
    one before it reversed, so that a slow drift of the machine burdens all names alike.

    Examples
    --------
    >>> _abba(["a", "b", "c"], rounds=2)
    [['c', 'a', 'b'], ['b', 'a', 'c']]
    """
    shuffle, order = np.random.default_rng(seed), []
    for number in range(rounds):
        order.append(order[-1][::-1] if number % 2 else shuffle.permutation(names).tolist())
    return order


def compare(arms, device, images, rounds=20, steps=10, drop=2):
    """Time every arm in every round, in ABBA order.

    `arms` maps a name to a function of no argument that does one training step on `images` images. Returns a
    DataFrame with one row a block: round, arm, seconds (of one step). An interrupt (Jupyter's stop button) or an
    error ends the measurement, is told, and leaves the rounds that were complete (`attrs["complete"]` is then False,
    and `attrs["why"]` says what stopped it, "Interrupted" or the error); without one, it goes on.
    """
    rows, rounds = [], _at_most(rounds)
    steps = _at_most(steps)
    why = ""
    with progress(total=rounds * len(arms), desc="Timing", unit="block") as bar:
        try:
            for number, order in enumerate(_abba(list(arms), rounds)):
                block = []
                for name in order:
                    seconds = time_block(arms[name], steps, device, drop)
                    block.append({"round": number, "arm": name, "seconds": seconds})
                    bar.set_postfix_str(f"{name}: {images / seconds:,.0f} images/s")
                    bar.update()
                rows += block
        except (KeyboardInterrupt, Exception) as stop:
            why = "Interrupted" if isinstance(stop, KeyboardInterrupt) else f"Stopped by {type(stop).__name__}: {stop}"
            print(f"{why}: {len(rows) // len(arms)} of {rounds} rounds are complete and kept.")
            if not rows:
                raise
    times = pd.DataFrame(rows, columns=["round", "arm", "seconds"])
    times.attrs["complete"] = len(times) == rounds * len(arms)
    times.attrs["why"] = why
    return times


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians with its bootstrap interval.

    Examples
    --------
    >>> print(Ratio(1.2, 1.1, 1.3), 1 in Ratio(1.2, 1.1, 1.3))
    1.20 [1.10, 1.30] False
    """

    value: float
    low: float
    high: float

    def __contains__(self, value):
        return self.low <= value <= self.high

    def __str__(self):
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def product(*speedups):
    """The product of speed-ups, each given as `(times, arm, baseline)`: ratios of median block times, with SciPy's
    95% bootstrap percentile interval over rounds (all arms of a round are drawn together, in all comparisons alike).
    With fewer than 2 rounds there is no interval, and all three numbers are NaN.
    """
    from scipy.stats import bootstrap  # a machine that only records may lack it

    samples = []
    for times, arm, baseline in speedups:
        by_round = times.pivot(index="round", columns="arm", values="seconds")
        samples += [by_round[baseline].to_numpy(), by_round[arm].to_numpy()]
    rounds = min(map(len, samples))  # an interrupted comparison has fewer
    if rounds < 2:
        return Ratio(math.nan, math.nan, math.nan)
    samples = [sample[:rounds] for sample in samples]
    interval = bootstrap(samples, _ratio_of_medians, paired=True, method="percentile", rng=0).confidence_interval
    return Ratio(float(_ratio_of_medians(*samples, axis=0)), float(interval.low), float(interval.high))


def _ratio_of_medians(*samples, axis):
    medians = [np.median(sample, axis=axis) for sample in samples]
    return np.prod(medians[::2], axis=0) / np.prod(medians[1::2], axis=0)


def speedup(times, arm, baseline):
    """How many times faster `arm` is than `baseline` in what `compare` returned, as a Ratio with its 95% interval.

    Examples
    --------
    >>> times = pd.DataFrame({"round": [0, 0, 1, 1], "arm": ["a", "b"] * 2, "seconds": [2.0, 1.0, 2.0, 1.0]})
    >>> print(speedup(times, "b", "a"))
    2.00 [2.00, 2.00]
    """
    return product((times, arm, baseline))


def summary(times, images, baseline):
    """One row an arm, the baseline first: median and interquartile range of a step in ms, images/s, and the speedup
    over `baseline` with its 95% interval, `low` to `high`."""
    rows = {}
    for arm in dict.fromkeys([baseline, *times.arm]):
        low, median, high = times.seconds[times.arm == arm].quantile([0.25, 0.5, 0.75])
        ratio = speedup(times, arm, baseline)
        rows[arm] = {"step (ms)": median * 1000, "IQR (ms)": (high - low) * 1000, "images/s": images / median}
        rows[arm] |= {"speedup": ratio.value, "low": ratio.low, "high": ratio.high}
    return pd.DataFrame.from_dict(rows, orient="index")


def spans(events, phases):
    """What a profiler saw, as rows for `explore.timeline`: a loop's parts, that `record_function` named as in `phases`,
    the ops in them (outermost only) and a GPU's kernels; each with the phase and the step in which it began."""
    rows = []
    for event in events:
        part = "loop" if event.name in phases else "ops" if event.name.startswith("aten::") else None
        if event.device_type != torch.autograd.DeviceType.CPU:
            part = None if event.is_user_annotation else "kernels"
        elif part == "ops" and event.cpu_parent and event.cpu_parent.name.startswith("aten::"):
            part = None
        rows.append((part, event.name, event.time_range.start / 1000, event.time_range.end / 1000))
    rows = pd.DataFrame(rows, columns=["part", "name", "start", "end"]).dropna().sort_values("start")
    loop = rows[rows.part == "loop"].assign(phase=rows.name, step=lambda each: each.groupby("name").cumcount())
    return pd.merge_asof(rows, loop[["start", "phase", "step"]], on="start").dropna().astype({"step": int})


def kept_for_backward(model, forward):
    """Bytes that `forward()` keeps for the backward pass, as a dict by dtype name; `model`'s own weights not counted.

    Counted with saved-tensor hooks, each storage once: all that autograd saves, and the same in every run. What an
    operation keeps by itself (a library's workspace) is not seen.

    Examples
    --------
    >>> layer = torch.nn.Linear(4, 4)
    >>> kept_for_backward(layer, lambda: layer(torch.ones(2, 4)))
    {'float32': 32}
    """
    weights = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    kept = {}  # holds the tensors, lest a freed address be given to another one and be counted as the same

    def note(tensor):
        # Detached: an output that its own graph keeps would hold the graph, and both would never be freed.
        tensor = tensor.detach()
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward()
    total = Counter()
    for address, tensor in kept.items():
        if address not in weights:
            total[str(tensor.dtype).removeprefix("torch.")] += tensor.untyped_storage().nbytes()
    return dict(+total)  # without empty tensors, as cuDNN's batch norm keeps


def memory(step, device, steps=3):
    """Memory of `step()` on an accelerator, in bytes, as a dict; empty on a CPU, and where torch does not count.

    `allocated`: tensors and the workspaces of libraries, at the peak, with the rests that the allocator leaves with
    them. `reserved`: what torch's allocator holds from the driver, at the peak. On CUDA also `process` and `device`:
    what NVML sees afterwards of this process (CUDA context and libraries included) and of the whole GPU. The first
    steps are not counted, and what earlier work left in the allocator's cache is given back before.
    """
    if device.type == "cpu":
        return {}
    time_block(step, steps, device)
    try:
        if not _peak(device)["allocated"]:
            raise RuntimeError("after a step its allocator says 0 bytes")
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)
    except (RuntimeError, AttributeError) as error:
        print(f"No memory is measured on {device.type}: {error}")
        return {}
    time_block(step, steps, device)
    peak = _peak(device)
    if device.type == "cuda":
        peak["process"] = ask_nvml(_our_memory, device)
        peak["device"] = ask_nvml(lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).used, device)
    return peak


def _peak(device):
    allocated = torch.accelerator.max_memory_allocated(device)
    return {"allocated": allocated, "reserved": torch.accelerator.max_memory_reserved(device)}


def _our_memory(gpu):
    return gpu_processes(gpu).get(os.getpid()) or "unknown: NVML does not list this process"


def energy(step, images, device, seconds=10):
    """Joules an image over about `seconds` of calls of `step()` on `images` images, by NVML's energy counter.

    The counter is the whole GPU's, other processes included. None where there is no counter (CPU, old GPUs).
    """
    if device.type != "cuda":
        return None
    blocks = math.ceil(seconds / (10 * time_block(step, 10, device)))
    before = ask_nvml(pynvml.nvmlDeviceGetTotalEnergyConsumption, device)  # in mJ
    if isinstance(before, str):
        return None
    for _ in progress(range(blocks), desc="Energy"):
        time_block(step, 10, device)
    after = ask_nvml(pynvml.nvmlDeviceGetTotalEnergyConsumption, device)
    return None if isinstance(after, str) else (after - before) / 1000 / (10 * blocks * images)


def fitting_batch(run, batch):
    """The largest of `batch`, `batch // 2`, ... for which `run(batch)` does not run out of memory.

    Says so each time it halves. Raises the error if a single image does not fit.

    Examples
    --------
    >>> def run(batch):
    ...     if batch > 10:
    ...         raise MemoryError
    >>> fitting_batch(run, 32)
    Batch 32 runs out of memory; trying 16.
    Batch 16 runs out of memory; trying 8.
    8
    """
    while True:
        try:
            run(batch)
            return batch
        except (RuntimeError, MemoryError) as error:  # not only torch.OutOfMemoryError: the CPU's, cuBLAS's, cuDNN's
            said = "out of memory|not enough memory|can't allocate memory|ALLOC_FAILED|unable to find an engine"
            told = re.search(said, str(error))  # the last: cuDNN, when no algorithm's workspace fits
            if batch == 1 or not (told or isinstance(error, MemoryError)):
                raise
            print(f"Batch {batch} runs out of memory; trying {batch // 2}.")
            batch //= 2
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
