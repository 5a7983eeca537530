"""What this machine is, and which number formats its arithmetic units know."""

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import pynvml
import torch

# Formats: "Tensor Core data types" in NVIDIA's CUDA Programming Guide; FP6 and FP4: `mma` in the
# PTX ISA. fp16 without Tensor Cores: the throughput of arithmetic instructions, in CUDA 12's guide.
FP8 = "fp16 bf16 TF32 FP8"
COLUMNS = ["generation", "since", "compute capability", "for example", "Tensor Core formats"]
ROWS = [
    ("Pascal", "2016", "6.0, 6.1", "P100, GTX 1080", "none"),
    ("Volta", "2017", "7.0", "V100", "fp16"),
    ("Turing", "2018", "7.5", "T4, RTX 2080", "fp16"),
    ("Ampere", "2020", "8.0, 8.6, 8.7", "A100, RTX 3090", "fp16 bf16 TF32"),
    ("Ada", "2022", "8.9", "L4, RTX 4090", FP8),
    ("Hopper", "2022", "9.0", "H100, H200", FP8),
    ("Blackwell", "2024", "10.0, 10.3, 11.0, 12.x", "B200, RTX 5090", f"{FP8} FP6 FP4"),
]
NOTES = {
    "Pascal": "P100: fp16 at twice fp32's rate; GTX 10xx: 1/64",
    "Volta": "the first Tensor Cores",
    "Turing": "GTX 16xx, T1000: no Tensor Cores, fp16 at twice fp32",
    "Ampere": "bf16 needs no loss scaling",
    "Blackwell": "block scales: MXFP8, NVFP4",
}
GENERATIONS = pd.DataFrame(ROWS, columns=COLUMNS).set_index("generation")
GENERATIONS["note"] = [NOTES.get(name, "") for name in GENERATIONS.index]
UNKNOWN = "unknown: "  # begins an answer that could not be had; why follows


def pick_device() -> torch.device:
    """The accelerator that torch sees (CUDA, Apple's MPS, ...), or else the CPU.

    The environment variable HALF_THE_BITS_DEVICE ("cpu", "cuda:1") overrules it; ValueError if it
    cannot be used. An accelerator that this PyTorch has no code for is named and not picked.
    """
    chosen = os.environ.get("HALF_THE_BITS_DEVICE")
    device = chosen or torch.accelerator.current_accelerator(check_available=True) or "cpu"
    try:
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # the second: torch was built without CUDA
        why = str(error).partition("\n")[0]
        if chosen:
            fix = "Set another, or unset it."
            raise ValueError(f"HALF_THE_BITS_DEVICE is {chosen!r}: {why}. {fix}") from None
        name = _name(device)
        print(f"This PyTorch cannot use {name}, so the CPU is used ({why}). See docs/hardware.md.")
        return torch.device("cpu")
    if device == "cpu" and not chosen and not torch.backends.cuda.is_built():
        gpu = _ask_nvml(lambda: pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
        if not gpu.startswith(UNKNOWN):
            built = f"This PyTorch ({torch.__version__}) was built without CUDA"
            print(f"{built}, so the CPU is used, not {gpu}. See docs/hardware.md.")
    return torch.device(device)


def full_size() -> bool:
    """Whether a GPU gets the numbers of a real experiment: not where HALF_THE_BITS_SIZE is
    "small", as in tests."""
    chosen = os.environ.get("HALF_THE_BITS_SIZE") or "full"
    if chosen not in ("full", "small"):
        fix = "set it to full or small, or unset it"
        raise ValueError(f"HALF_THE_BITS_SIZE is {chosen!r}; {fix}")
    return chosen == "full"


def loader_workers() -> int:
    """How many processes may decode images: one for each CPU core of this process, at most 8.

    None where shared memory, through which they hand over their batches, is small, as it often is
    in containers.
    """
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free < 2 * 1024**3:
        little = "Less than 2 GiB of shared memory is free"
        print(f"{little}: images are decoded without extra processes.")
        return 0
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return min(8, cores)


def native_formats(device: torch.device) -> dict[str, bool | None]:
    """Which of fp16, bf16, TF32 and FP8 `device` has fast units for, Tensor Cores or others.

    P100 and GTX 16xx have no Tensor Cores, but fp16 at twice the rate of fp32. The answer is None
    where this function knows nothing: for GPUs of other makers, and for TF32 and FP8 on CPUs.

    Examples
    --------
    >>> native_formats(torch.device("mps"))["fp16"] is None
    True
    """
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        return {
            "fp16": capability >= (7, 0) or capability == (6, 0),
            "bf16": capability >= (8, 0),
            "TF32": capability >= (8, 0),
            "FP8": capability >= (8, 9),
        }
    if device.type == "cpu":
        flags = torch.cpu.get_capabilities()
        fp16 = any(flags.get(flag) for flag in ("avx512_fp16", "amx_fp16", "fp16_arith"))
        bf16 = any(flags.get(flag) for flag in ("avx512_bf16", "amx_bf16", "bf16"))
        return {"fp16": fp16, "bf16": bf16, "TF32": None, "FP8": None}
    return dict.fromkeys(["fp16", "bf16", "TF32", "FP8"])


def manifest(device: torch.device) -> dict[str, Any]:
    """Everything about this machine that a measurement depends on, as a dict fit for JSON.

    `device`: type, name, driver and, for an NVIDIA GPU, uuid, compute capability, memory in bytes,
    clocks in MHz, power limit in W and how many other processes use it. `software`: versions.
    `precision`: torch's switches. `commit`: of this checkout. What NVML cannot tell says why in its
    place.
    """
    cuda = torch.backends.cuda.matmul
    return {
        "device": _gpu(device) if device.type == "cuda" else _cpu_or_other(device),
        "software": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": _cudnn(),
            "timm": version("timm"),
            "opencv": _opencv(),
        },
        "precision": {
            "convolutions": torch.backends.cudnn.conv.fp32_precision,
            "rnn": torch.backends.cudnn.rnn.fp32_precision,
            "matmuls": cuda.fp32_precision,
            "fp16_reduced_precision_reduction": cuda.allow_fp16_reduced_precision_reduction,
            "bf16_reduced_precision_reduction": cuda.allow_bf16_reduced_precision_reduction,
            "cpu_convolutions": torch.backends.mkldnn.conv.fp32_precision,
            "cpu_matmuls": torch.backends.mkldnn.matmul.fp32_precision,
            "cudnn_enabled": torch.backends.cudnn.enabled,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        },
        "commit": commit(),
    }


def _opencv():
    try:
        import cv2  # a machine that only records may lack it
    except ImportError:
        return "not installed"
    return cv2.__version__


def _cudnn():
    try:
        return torch.backends.cudnn.version()
    except RuntimeError as error:  # this cuDNN does not run on one of the GPUs here
        return f"{UNKNOWN}{error}"


def _cpu_or_other(device):
    cpu = torch.cpu.get_capabilities().get("cpu_name") or platform.processor()
    cpu = cpu or platform.machine()
    facts = {
        "type": device.type,
        "name": cpu,
        "driver": None,
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
    if device.type != "cpu":
        facts |= {"name": _name(device), "cpu": cpu}
    return facts


def _name(device):
    """The name of an accelerator."""
    if device.type == "mps":
        return torch.backends.mps.get_name()
    return torch.get_device_module(device).get_device_name(device)


def _gpu(device):
    torch.cuda.mem_get_info(device)  # makes a context: NVML lists no process without one
    properties = torch.cuda.get_device_properties(device)
    ask = partial(ask_nvml, device=device)
    sm, memory = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM
    return {
        "type": device.type,
        "name": properties.name,
        "driver": _ask_nvml(pynvml.nvmlSystemGetDriverVersion),
        "uuid": str(properties.uuid),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_total": properties.total_memory,
        "sm_clock_mhz": ask(lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, sm)),
        "sm_clock_max_mhz": ask(lambda gpu: pynvml.nvmlDeviceGetMaxClockInfo(gpu, sm)),
        "memory_clock_mhz": ask(lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, memory)),
        "power_limit_w": ask(lambda gpu: pynvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1000),
        "other_processes": ask(_other_processes),
    }


def ask_nvml(question: Callable, device: torch.device) -> Any:
    """`question(handle)` for NVML's handle of a CUDA device; "unknown: ..." without an answer.

    The handle is found by UUID, as torch and NVML may count GPUs differently; a slice of a GPU
    (MIG) has its own.
    """

    def ask():
        uuid = torch.cuda.get_device_properties(device).uuid
        try:
            gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except pynvml.NVMLError_NotFound:
            gpu = pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
        return question(gpu)

    return _ask_nvml(ask)


def _ask_nvml(question):
    try:
        pynvml.nvmlInit()
        return question()
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError) as error:
        return f"{UNKNOWN}{error}"


def gpu_processes(gpu: Any) -> dict[int, int]:
    """The bytes of each process on the GPU behind an NVML handle, by process number.

    In a container NVML sees the host's numbers, or none: then our own is not among them.
    """
    running = pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
    running = running + pynvml.nvmlDeviceGetGraphicsRunningProcesses(gpu)
    return {process.pid: process.usedGpuMemory for process in running}


def _other_processes(gpu):
    found = gpu_processes(gpu)
    if found and os.getpid() not in found and torch.cuda.is_initialized():
        one = "of which one may be this one under another number"
        return f"{UNKNOWN}{len(found)} process(es), {one}"
    return len(found.keys() - {os.getpid()})


def warnings(device: torch.device) -> list[str]:
    """Sentences on what makes measurements on this machine doubtful; [] if nothing was seen."""
    if device.type != "cuda":
        return []
    found = []
    others = _gpu(device)["other_processes"]
    if isinstance(others, str):
        found.append(f"Whether others use this GPU too is not known. NVML says {others}.")
    elif others:
        shared = "times and device memory are shared"
        found.append(f"{others} other process(es) use this GPU: {shared}.")
    cudnn = _cudnn()
    if isinstance(cudnn, int) and 92301 <= cudnn <= 92400:
        slow = "cuDNN 9.23.1 to 9.24.0 is slow on depthwise convolutions like this model's"
        found.append(f"{slow}: use another version.")
    return found


def commit() -> str:
    """The commit of this checkout, "+changes" if its code or notebooks differ from it; without Git,
    helpers' digest."""
    helpers = Path(__file__).resolve().parent
    ask = partial(subprocess.check_output, cwd=helpers, stderr=subprocess.DEVNULL)
    with suppress(OSError, subprocess.CalledProcessError):
        root, head = ask(["git", "rev-parse", "--show-cdup", "HEAD"], text=True).splitlines()
        if root == "../":
            changed = ask(["git", "status", "--porcelain", ".", "../halfbits", "../notebooks"])
            return head + ("+changes" if changed else "")
    code = b"".join(path.read_bytes() for path in sorted(helpers.rglob("*.py")))
    return f"no Git checkout; helpers' SHA-256 is {hashlib.sha256(code).hexdigest()}"
