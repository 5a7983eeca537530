import json
import os
import subprocess
from types import SimpleNamespace

import pynvml
import pytest
import torch

from helpers import hardware

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_device_can_be_chosen(monkeypatch):
    monkeypatch.setenv("HALF_THE_BITS_DEVICE", "meta")
    assert hardware.pick_device() == torch.device("meta")
    monkeypatch.delenv("HALF_THE_BITS_DEVICE")
    assert hardware.pick_device().type == (torch.accelerator.current_accelerator(check_available=True) or CPU).type


def test_manifest_of_a_cpu_is_complete_and_fit_for_json():
    facts = hardware.manifest(CPU)
    assert facts == json.loads(json.dumps(facts))
    assert facts["device"]["name"] and facts["device"]["threads"] == torch.get_num_threads()
    assert facts["software"]["torch"] == torch.__version__
    assert facts["precision"]["convolutions"] in ("tf32", "ieee", "none")
    assert hardware.warnings(CPU) == []


def test_commit_is_that_of_git_and_tells_of_changes(monkeypatch):
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert hardware.commit() in (head, head + "+changes") or not head
    monkeypatch.setenv("PATH", "")
    assert "SHA-256" in hardware.commit() and len(hardware.commit()) > 64


@pytest.mark.parametrize(
    "flags, fp16, bf16",
    [({}, False, False), ({"avx512_bf16": True}, False, True), ({"fp16_arith": True, "bf16": True}, True, True)],
)
def test_native_formats_of_cpus(monkeypatch, flags, fp16, bf16):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)
    assert hardware.native_formats(CPU) == {"fp16": fp16, "bf16": bf16, "TF32": False, "FP8": False}


@pytest.mark.parametrize(
    "name, capability, formats",
    [
        ("Tesla P100", (6, 0), ""),
        ("Tesla V100", (7, 0), "fp16"),
        ("NVIDIA GeForce GTX 1660", (7, 5), ""),
        ("NVIDIA T1000 8GB", (7, 5), ""),
        ("Tesla T4", (7, 5), "fp16"),
        ("NVIDIA GeForce RTX 2080", (7, 5), "fp16"),
        ("NVIDIA A100", (8, 0), "fp16 bf16 TF32"),
        ("NVIDIA L4", (8, 9), "fp16 bf16 TF32 FP8"),
        ("NVIDIA H200", (9, 0), "fp16 bf16 TF32 FP8"),
    ],
)
def test_native_formats_of_gpus_agree_with_the_table(monkeypatch, name, capability, formats):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert [f for f, native in hardware.native_formats(CUDA).items() if native] == formats.split()
    table = hardware.GENERATIONS.set_index("compute capability")["Tensor Core formats"]
    rows = [row for key, row in table.items() if f"{capability[0]}.{capability[1]}" in key]
    if formats or capability != (7, 5):
        assert rows == [formats or "none"]


def test_other_accelerators_are_unknown_rather_than_guessed():
    assert set(hardware.native_formats(torch.device("mps")).values()) == {None}


@pytest.fixture
def gpu(monkeypatch):
    """Stand-ins for one Hopper GPU and its NVML, shared with one process of somebody else."""
    properties = SimpleNamespace(name="NVIDIA H200", uuid="abc", major=9, minor=0, total_memory=10**11)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92600)
    others = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=5), SimpleNamespace(pid=1, usedGpuMemory=7)]
    answers = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: {"GPU-abc": "handle"}[uuid],
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetClockInfo": lambda gpu, which: 1500,
        "nvmlDeviceGetMaxClockInfo": lambda gpu, which: 1980,
        "nvmlDeviceGetGraphicsRunningProcesses": lambda gpu: others[1:],
        "nvmlDeviceGetPowerManagementLimit": lambda gpu: 700_000,
        "nvmlDeviceGetComputeRunningProcesses": lambda gpu: others,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    return others


def test_manifest_of_a_gpu(gpu):
    device = hardware.manifest(CUDA)["device"]
    assert device["uuid"] == "abc" and device["driver"] == "580.1" and device["power_limit_w"] == 700
    assert device["compute_capability"] == "9.0" and device["other_processes"] == 1


def test_shared_gpu_is_said_aloud(gpu):
    assert "1 other process(es) use this GPU" in hardware.warnings(CUDA)[0]
    gpu.pop()
    assert hardware.warnings(CUDA) == []


def test_missing_nvml_is_said_and_not_fatal(gpu, monkeypatch):
    def missing():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert hardware.manifest(CUDA)["device"]["driver"].startswith("unknown: ")
    assert "is not known" in hardware.warnings(CUDA)[0] and "Not Found" in hardware.warnings(CUDA)[0]


def test_own_process_under_another_number_is_not_taken_for_somebody_else(gpu, monkeypatch):
    del gpu[0]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert "may be this one" in hardware.manifest(CUDA)["device"]["other_processes"]


def test_slice_of_a_gpu_is_found_by_its_own_name(gpu, monkeypatch):
    def handle(uuid):
        if not uuid.startswith("MIG-"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", handle)
    assert hardware.ask_nvml(lambda gpu: gpu, CUDA) == "MIG-abc"


def test_workers_are_as_many_as_cores_and_none_where_shared_memory_is_small(monkeypatch, capsys):
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(hardware.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**40))
    assert hardware.loader_workers() == min(8, cores) and hardware.loader_workers(1) == 1
    monkeypatch.setattr(hardware.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**26))
    assert hardware.loader_workers() == 0 and "shared memory" in capsys.readouterr().out


@pytest.mark.parametrize("version, slow", [(92300, False), (92301, True), (92400, True), (92500, False)])
def test_slow_cudnn_is_flagged(gpu, monkeypatch, version, slow):
    gpu.pop()
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    assert any("depthwise" in warning for warning in hardware.warnings(CUDA)) == slow
