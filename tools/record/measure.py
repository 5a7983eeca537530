"""Times, memory and energy of training steps, for the records."""

import gc
import math
import os
import re
from collections.abc import Callable

import numpy as np
import pandas as pd
import pynvml
import torch

from helpers.hardware import ask_nvml, gpu_processes
from helpers.measure import progress, time_block


def _at_most(number):
    """A number of rounds or steps, or fewer where HALF_THE_BITS_ROUNDS says so, as tests do."""
    number = min(number, int(os.environ.get("HALF_THE_BITS_ROUNDS") or number))
    if number < 1:
        asked = "take 1 or more, and HALF_THE_BITS_ROUNDS likewise"
        raise ValueError(f"{number} rounds or steps measure nothing; {asked}")
    return number


def warm_up(step: Callable, device: torch.device, steps: int = 5, at_most: int = 18) -> bool:
    """Run blocks of `steps` until their times settle, and `at_most` so many.

    So compilation, autotuning and the allocator's growth are not measured afterwards. Returns
    whether the medians of the last three blocks and of the three before agree within 1%.
    """
    step()
    steps = _at_most(steps)
    blocks = []
    for _ in range(_at_most(at_most)):
        blocks.append(time_block(step, steps, device))
        if len(blocks) >= 6:
            change = np.median(blocks[-3:]) / np.median(blocks[-6:-3]) - 1
            if abs(change) <= 0.01:
                return True
    return False


def compare(
    arms: dict[str, Callable],
    device: torch.device,
    images: int,
    rounds: int = 20,
    steps: int = 10,
    drop: int = 2,
) -> pd.DataFrame:
    """Time every arm in every round, in ABBA order.

    `arms` maps a name to a function of no argument that does one training step on `images` images.
    Returns a DataFrame with one row per block: round, arm, seconds (of one step). The order of a
    round is random or that of the round before reversed, so that a slow drift of the machine
    burdens all arms alike.

    An interrupt (Jupyter's stop button) or an error ends the measurement and is told. Complete
    rounds are kept, `attrs["complete"]` is False, and `attrs["why"]` says what happened. If there
    are none, the error goes on.
    """
    random = np.random.default_rng(0)
    rounds = _at_most(rounds)
    steps = _at_most(steps)
    rows = []
    order = []
    why = ""
    try:
        with progress(total=rounds * len(arms), desc="Timing", unit="block") as bar:
            for number in range(rounds):
                order = order[::-1] if number % 2 else random.permutation(list(arms)).tolist()
                blocks = []
                for name in order:
                    seconds = time_block(arms[name], steps, device, drop)
                    blocks.append({"round": number, "arm": name, "seconds": seconds})
                    bar.set_postfix_str(f"{name}: {images / seconds:,.0f} images/s")
                    bar.update()
                rows += blocks
    except (KeyboardInterrupt, Exception) as stop:
        interrupted = isinstance(stop, KeyboardInterrupt)
        why = "Interrupted" if interrupted else f"Stopped by {type(stop).__name__}: {stop}"
        print(f"{why}: {len(rows) // len(arms)} of {rounds} rounds are complete and kept.")
        if not rows:
            raise
    times = pd.DataFrame(rows, columns=["round", "arm", "seconds"])
    times.attrs.update(complete=not why, why=why)
    return times


def speedup(times: pd.DataFrame, arm: str, baseline: str) -> tuple[float, float, float]:
    """How many times faster `arm` is than `baseline` in what `compare` returned, and its 95% interval.

    The ratio is that of median block times. The interval is SciPy's bootstrap percentile interval
    over rounds: both arms of a round are drawn together. With fewer than 2 rounds there is none,
    and all three numbers are NaN.

    Examples
    --------
    >>> rows = {"round": [0, 0, 1, 1], "arm": ["a", "b"] * 2, "seconds": [2.0, 1.0, 2.0, 1.0]}
    >>> speedup(pd.DataFrame(rows), "b", "a")
    (2.0, 2.0, 2.0)
    """
    from scipy.stats import bootstrap  # a machine that only records may lack it

    by_round = times.pivot(index="round", columns="arm", values="seconds")
    samples = by_round[baseline].to_numpy(), by_round[arm].to_numpy()
    if len(by_round) < 2:
        return math.nan, math.nan, math.nan
    drawn = bootstrap(samples, _ratio_of_medians, paired=True, method="percentile", rng=0)
    low, high = map(float, drawn.confidence_interval)
    return float(_ratio_of_medians(*samples, axis=0)), low, high


def _ratio_of_medians(old, new, axis):
    return np.median(old, axis=axis) / np.median(new, axis=axis)


def summary(times: pd.DataFrame, images: int, baseline: str) -> pd.DataFrame:
    """One row per arm, the baseline first: a step's median and interquartile range in ms, images
    per second, and the speedup over `baseline` with its 95% interval, `low` to `high`."""
    rows = {}
    for arm in dict.fromkeys([baseline, *times.arm]):
        low, median, high = times.seconds[times.arm == arm].quantile([0.25, 0.5, 0.75])
        ratio = speedup(times, arm, baseline)
        rows[arm] = [median * 1000, (high - low) * 1000, images / median, *ratio]
    columns = ["step (ms)", "IQR (ms)", "images/s", "speedup", "low", "high"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def memory(step: Callable, device: torch.device, steps: int = 3) -> dict[str, int | str]:
    """Memory of `step()` on an accelerator, in bytes; {} on a CPU, and where torch does not count.

    `allocated`: tensors and the workspaces of libraries, at the peak, with the rests that the
    allocator leaves with them. `reserved`: what torch's allocator holds from the driver, at the
    peak. On CUDA also `process` and `device`: what NVML sees afterwards of this process (CUDA
    context and libraries included) and of the whole GPU. The first steps are not counted, and what
    earlier work left in the allocator's cache is given back before.
    """
    if device.type == "cpu":
        return {}
    time_block(step, steps, device)
    try:
        if not torch.accelerator.max_memory_allocated(device):
            raise RuntimeError("after a step its allocator says 0 bytes")
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)
    except (RuntimeError, AttributeError) as error:
        print(f"No memory is measured on {device.type}: {error}")
        return {}
    time_block(step, steps, device)
    peak = {
        "allocated": torch.accelerator.max_memory_allocated(device),
        "reserved": torch.accelerator.max_memory_reserved(device),
    }
    if device.type == "cuda":
        own = ask_nvml(lambda gpu: gpu_processes(gpu).get(os.getpid()), device)
        peak["process"] = own or "unknown: NVML does not list this process"
        peak["device"] = ask_nvml(lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).used, device)
    return peak


def energy(step: Callable, images: int, device: torch.device, seconds: float = 10) -> float | None:
    """Joules per image over about `seconds` of calls of `step()` on `images` images.

    NVML's energy counter is the whole GPU's, other processes included. None where there is no
    counter: on a CPU, and on old GPUs.
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
    return (after - before) / 1000 / (10 * blocks * images)


def fitting_batch(run: Callable[[int], object], batch: int) -> int:
    """The largest of `batch`, `batch // 2`, ... for which `run(batch)` does not run out of memory.

    Says so each time it halves. Raises the error if a single image does not fit.

    Examples
    --------
    >>> def run(batch):
    ...     if batch > 16:
    ...         raise MemoryError
    >>> fitting_batch(run, 32)
    Batch 32 runs out of memory; trying 16.
    16
    """
    # Besides torch's, the CPU's and cuBLAS's words, and cuDNN's when no workspace fits.
    words = "out of memory|not enough memory|can't allocate memory|ALLOC_FAILED"
    words += "|unable to find an engine"
    while True:
        try:
            run(batch)
            return batch
        except (RuntimeError, MemoryError) as error:
            full = isinstance(error, MemoryError) or re.search(words, str(error))
            if batch == 1 or not full:
                raise
            print(f"Batch {batch} runs out of memory; trying {batch // 2}.")
            batch //= 2
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
