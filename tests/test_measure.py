import gc
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pynvml
import pytest
import torch
from scipy.stats import bootstrap

from helpers.measure import kept_for_backward
from tools.record import measure

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def table(**arms):
    """Block times as `compare` returns them, from one list of seconds an arm."""
    rows = [
        {"round": i, "arm": arm, "seconds": seconds} for arm, times in arms.items() for i, seconds in enumerate(times)
    ]
    return pd.DataFrame(rows)


@pytest.fixture
def clock(monkeypatch):
    """A clock that only sleep moves, and that no load of the machine disturbs."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))


def test_time_block_leaves_out_the_dropped_steps(clock):
    durations = iter([9, 9, 1, 2, 3])
    assert measure.time_block(lambda: time.sleep(next(durations)), steps=3, device=CPU, drop=2) == 2


def test_compare_finds_the_ratio_of_known_sleeps_under_drift(clock):
    slowness = [1.0]

    def sleeper(seconds):
        def step():
            slowness[0] *= 1.0005  # a machine that gets slower all the time
            time.sleep(seconds * slowness[0])

        return step

    arms = {"slow": sleeper(6), "fast": sleeper(3), "slow, again": sleeper(6)}
    times = measure.compare(arms, CPU, images=1, rounds=20, steps=3, drop=1)
    assert len(times) == 60 and times.groupby("arm").size().eq(20).all()
    value, low, high = measure.speedup(times, "fast", "slow")
    assert low <= 2 <= high and value == pytest.approx(2, rel=0.01)
    _, low, high = measure.speedup(times, "slow, again", "slow")
    assert low <= 1 <= high


def test_interval_is_scipys_own():
    rng = np.random.default_rng(0)
    slow, fast = rng.lognormal(0, 0.1, 25), rng.lognormal(-0.5, 0.1, 25)
    value, low, high = measure.speedup(table(slow=slow, fast=fast), "fast", "slow")
    expected = bootstrap(
        (slow, fast),
        lambda a, b, axis: np.median(a, axis) / np.median(b, axis),
        paired=True,
        vectorized=True,
        method="percentile",
        rng=0,
    ).confidence_interval
    assert (low, high) == pytest.approx((expected.low, expected.high))
    assert value == np.median(slow) / np.median(fast) and 1 < low <= value <= high


def test_summary_table():
    summary = measure.summary(table(base=[0.1, 0.2, 0.3], twice=[0.05, 0.1, 0.15]), images=32, baseline="base")
    assert summary.index.tolist() == ["base", "twice"]
    assert summary.loc["base", ["step (ms)", "IQR (ms)", "images/s", "speedup"]].tolist() == pytest.approx(
        [200, 100, 160, 1]
    )
    assert summary.loc["twice", ["speedup", "low", "high"]].tolist() == pytest.approx([2, 2, 2])


def test_one_round_has_no_interval():
    assert np.isnan(measure.speedup(table(a=[1.0], b=[1.0]), "a", "b")).all()
    assert measure.summary(table(a=[1.0], b=[2.0]), 1, "a").speedup.isna().all()
    value, low, high = measure.speedup(table(a=[2.0, 3.0], b=[1.0, 1.0]), "a", "b")  # two are the fewest that have one
    assert low < value < high


@pytest.mark.parametrize(
    "stop, said",
    [
        (KeyboardInterrupt(), "Interrupted"),
        (RuntimeError("DataLoader worker is killed"), "Stopped by RuntimeError: DataLoader worker is killed"),
    ],
)
def test_what_stops_the_measurement_is_told_and_the_complete_rounds_are_kept(stop, said, capsys):
    calls = []

    def step():
        calls.append(1)
        if len(calls) == 8:  # in the fourth round: two calls a round
            raise stop

    times = measure.compare({"a": step, "b": step}, CPU, images=1, rounds=10, steps=1, drop=0)
    assert times["round"].tolist() == [0, 0, 1, 1, 2, 2] and not times.attrs["complete"]
    assert times.attrs["why"] == said
    assert f"{said}: 3 of 10 rounds are complete and kept." in capsys.readouterr().out
    assert measure.compare({"a": step}, CPU, images=1, rounds=1, steps=1, drop=0).attrs["complete"]
    calls[:] = range(7)
    with pytest.raises(type(stop)):  # nothing to go on with
        measure.compare({"a": step}, CPU, images=1, rounds=1, steps=1, drop=0)


@pytest.mark.parametrize("rounds, variable", [(0, ""), (20, "-1")])
def test_no_rounds_at_all_are_refused(rounds, variable, monkeypatch):
    monkeypatch.setenv("HALF_THE_BITS_ROUNDS", variable)
    with pytest.raises(ValueError, match=r"rounds or steps measure nothing; take 1 or more, and HALF_THE_BITS_ROUNDS"):
        measure.compare({"a": lambda: None}, CPU, images=1, rounds=rounds)


def test_warm_up_ends_as_soon_as_the_blocks_agree_and_leaves_out_the_first_step(clock):
    durations = iter([100, 1, 1])
    assert measure.warm_up(lambda: time.sleep(next(durations, 1)), CPU, steps=2)
    assert time.perf_counter() == 100 + 6 * 2, "the first step, and two times three blocks"


@pytest.mark.parametrize("growth, settled", [(1.0, True), (1.001, True), (1.01, False)])
def test_warm_up_sees_a_drift_of_more_than_its_tolerance(clock, growth, settled):
    durations = iter(growth**i for i in range(100))
    assert measure.warm_up(lambda: time.sleep(next(durations)), CPU, steps=1, at_most=9) == settled


def test_tests_may_shorten_what_is_timed(clock, monkeypatch):
    monkeypatch.setenv("HALF_THE_BITS_ROUNDS", "3")
    arms = {name: lambda: time.sleep(1) for name in ("a", "b")}
    assert len(measure.compare(arms, CPU, 1, rounds=5, steps=1)) == 3 * 2
    assert len(measure.compare(arms, CPU, 1, rounds=2, steps=1)) == 2 * 2


@pytest.mark.parametrize("hidden", [True, False])
def test_progress_bar_can_be_hidden(monkeypatch, hidden):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    if hidden:
        monkeypatch.setenv("TQDM_DISABLE", "1")
    bar = measure.progress(range(3))
    assert bar.disable == hidden and not bar.leave
    bar.close()


def a_span(name, start, end, above=None, device="CPU", note=False):
    kind = getattr(torch.autograd.DeviceType, device)
    span = {"name": name, "time_range": SimpleNamespace(start=1000 * start, end=1000 * end)}
    return SimpleNamespace(**span, cpu_parent=above, device_type=kind, is_user_annotation=note)


def test_kept_for_backward_counts_bytes_by_hand():
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Sigmoid())
    x = torch.randn(16, 8)
    # The linear layer keeps its input (its weight is a parameter), the sigmoid its output.
    assert kept_for_backward(model, lambda: model(x)) == {"float32": (16 * 8 + 16 * 4) * 4}
    with torch.autocast("cpu", torch.bfloat16):
        # The input is kept as bfloat16; its gradient is not asked for, so no 16-bit weight is kept.
        assert kept_for_backward(model, lambda: model(x)) == {"bfloat16": (16 * 8 + 16 * 4) * 2}


def test_kept_for_backward_leaves_nothing_alive():
    """A sigmoid keeps its own output: with it the whole graph stayed in memory, and counted in the next measurement."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Sigmoid())
    outputs = []

    def forward():
        outputs.append(weakref.ref(model(torch.randn(16, 8))))

    kept_for_backward(model, forward)
    gc.collect()
    assert outputs[0]() is None


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"),
    ],
)
def test_out_of_memory_halves_the_batch_and_says_so(error, capsys):
    tried = []

    def run(batch):
        tried.append(batch)
        if batch > 10:
            raise error

    assert measure.fitting_batch(run, 32) == 8 and tried == [32, 16, 8]
    assert capsys.readouterr().out.splitlines()[0] == "Batch 32 runs out of memory; trying 16."


def test_other_errors_are_not_taken_for_out_of_memory():
    def wrong(batch):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        measure.fitting_batch(wrong, 32)

    def hopeless(batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        measure.fitting_batch(hopeless, 2)


def test_no_gpu_no_memory_figures_and_no_energy():
    assert measure.memory(lambda: None, CPU) == {}
    assert measure.energy(lambda: None, 1, CPU) is None


# What follows drives the CUDA branches against stand-ins of torch.cuda and NVML: it proves the arithmetic and the
# order of calls. That the real ones behave so is for a machine with a GPU to show (`uv run pytest --gpu`).


@pytest.fixture
def cuda(monkeypatch):
    """A CUDA device that sleeps, counts its synchronisations and draws 100 W."""
    state = SimpleNamespace(log=[], synchronisations=0)

    class Event:
        def __init__(self, device, enable_timing):
            assert enable_timing

        def record(self, stream):
            self.at = time.perf_counter()
            state.log.append("record")

        def synchronize(self):
            state.synchronisations += 1

        def elapsed_time(self, end):
            return (end.at - self.at) * 1000

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: state.log.append("empty"))
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda device: state.log.append("reset"))
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda device: 2000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetTotalEnergyConsumption", lambda gpu: int(time.perf_counter() * 100 * 1000)
    )
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda gpu: SimpleNamespace(used=4000))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda gpu: state.processes)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetGraphicsRunningProcesses", lambda gpu: [])
    state.processes = [SimpleNamespace(pid=measure.os.getpid(), usedGpuMemory=3000)]
    return state


def test_cuda_block_is_timed_by_events_with_one_synchronisation(clock, cuda):
    def step():
        cuda.log.append("step")
        time.sleep(5)

    assert measure.time_block(step, steps=3, device=CUDA, drop=2) == pytest.approx(5)
    assert cuda.log == ["step", "step", "record", "step", "step", "step", "record"] and cuda.synchronisations == 1


def test_other_accelerators_are_measured_alike_but_for_nvml(clock, cuda):
    device = torch.device("xpu")
    assert measure.time_block(lambda: time.sleep(2), steps=3, device=device) == pytest.approx(2)
    assert measure.memory(lambda: None, device) == {"allocated": 1000, "reserved": 2000}


@pytest.mark.parametrize(
    "name, error",
    [
        ("reset_peak_memory_stats", AttributeError),
        ("max_memory_allocated", NotImplementedError),
    ],
)
def test_an_accelerator_that_does_not_count_is_not_recorded(cuda, name, error, monkeypatch, capsys):
    def refuse(device):
        raise error("its allocator does not count")

    monkeypatch.setattr(torch.accelerator, name, refuse)
    assert measure.memory(lambda: None, torch.device("xpu")) == {}
    assert capsys.readouterr().out == "No memory is measured on xpu: its allocator does not count\n"


def test_no_bytes_after_a_step_are_no_reading(cuda, monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 0)
    assert measure.memory(lambda: None, torch.device("xpu")) == {}
    assert "says 0 bytes" in capsys.readouterr().out


def test_errors_of_the_step_are_the_caller_s(cuda):
    def step():
        if "reset" in cuda.log:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        measure.memory(step, CUDA)


def test_cuda_memory_is_reset_before_it_is_read(cuda):
    sizes = measure.memory(lambda: cuda.log.append("step"), CUDA, steps=2)
    assert sizes == {"allocated": 1000, "reserved": 2000, "process": 3000, "device": 4000}
    assert [call for call in cuda.log if call != "record"] == ["step", "step", "empty", "reset", "step", "step"]
    cuda.processes.clear()
    assert "does not list" in measure.memory(lambda: None, CUDA)["process"]


def test_joules_per_image_of_a_known_power(clock, cuda):
    joules = measure.energy(lambda: time.sleep(0.5), images=4, device=CUDA, seconds=12)
    assert joules == pytest.approx(100 * 0.5 / 4)
    assert time.perf_counter() == 5 + 15, "a block of ten, to see how long it takes, then three"


def test_missing_nvml_is_said_and_not_fatal(cuda, monkeypatch):
    def missing():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert measure.energy(lambda: None, 1, CUDA, seconds=0.01) is None
    sizes = measure.memory(lambda: None, CUDA)
    assert sizes["allocated"] == 1000 and sizes["device"].startswith("unknown: ")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device (`uv run pytest --gpu`)")
def test_a_kernel_twice_as_long_takes_twice_the_time_on_a_real_gpu():
    device = torch.device("cuda")
    short = measure.time_block(lambda: torch.cuda._sleep(10**7), 5, device, drop=1)
    long = measure.time_block(lambda: torch.cuda._sleep(2 * 10**7), 5, device, drop=1)
    assert long / short == pytest.approx(2, rel=0.05)
