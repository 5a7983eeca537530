import json
import os
import platform
import subprocess
from types import SimpleNamespace

import pynvml
import pytest
import torch

from helpers import hardware, records

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_device_can_be_chosen(monkeypatch):
    monkeypatch.setenv("HALF_THE_BITS_DEVICE", "cpu")
    assert hardware.pick_device() == CPU
    monkeypatch.setenv("HALF_THE_BITS_DEVICE", "cuda:1")
    with monkeypatch.context() as two_gpus:
        two_gpus.setattr(torch, "ones", lambda *shape, device: torch.zeros(1))
        assert hardware.pick_device() == torch.device("cuda:1")
    for name in ("nonsense", "meta", "cuda:99", "mps" if platform.system() != "Darwin" else "xpu"):
        monkeypatch.setenv("HALF_THE_BITS_DEVICE", name)
        with pytest.raises(ValueError, match=rf"^HALF_THE_BITS_DEVICE is '{name}': .+\. Set another, or unset it\.$"):
            hardware.pick_device()


def test_an_accelerator_that_torch_cannot_use_is_named_and_not_picked(monkeypatch, capsys):
    def ones(*shape, device):
        raise RuntimeError("CUDA error: no kernel image is available\nFor debugging, ...")

    monkeypatch.delenv("HALF_THE_BITS_DEVICE", raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: CUDA)
    monkeypatch.setattr(hardware, "_name", lambda device: "the GPU")
    with monkeypatch.context() as usable:
        usable.setattr(torch, "ones", lambda *shape, device: torch.zeros(1))
        assert hardware.pick_device() == CUDA and not capsys.readouterr().out
    monkeypatch.setattr(torch, "ones", ones)
    assert hardware.pick_device() == CPU
    assert capsys.readouterr().out == (
        "This PyTorch cannot use the GPU, so the CPU is used (CUDA error: no kernel image is available). "
        "See docs/hardware.md.\n"
    )


@pytest.mark.parametrize("driver", [True, False])
def test_nvidia_gpu_that_a_cpu_build_leaves_unused_is_named(monkeypatch, capsys, driver):
    def name(handle):
        if not driver:
            raise hardware.pynvml.NVMLError_LibraryNotFound()
        return "an RTX 4090"

    monkeypatch.delenv("HALF_THE_BITS_DEVICE", raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.setattr(hardware.pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(hardware.pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(hardware.pynvml, "nvmlDeviceGetName", name)
    assert hardware.pick_device() == CPU
    assert ("was built without CUDA, so the CPU is used, not an RTX 4090" in capsys.readouterr().out) == driver


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_other_accelerators_bear_their_own_name(monkeypatch, kind):
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "the mps")
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda device: f"the {device.type}")
    facts = hardware.manifest(torch.device(kind))["device"]
    cpu = hardware.manifest(CPU)["device"]
    assert (facts["type"], facts["name"], facts["cpu"]) == (kind, f"the {kind}", cpu["name"])
    records.validate(records.new("test", "fp16", {"batch": 2}, {"seconds": 1.0}, hardware.manifest(torch.device(kind))))


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


def test_a_commit_is_read_beside_files_whose_names_the_locale_cannot_write(monkeypatch, tmp_path):
    git = tmp_path / "git"  # prints a name in another encoding
    git.write_text("#!/bin/sh\n[ $1 = status ] && printf '?? \\377' || printf '../\\nabc'\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware.commit() == "abc+changes"


def test_the_size_is_small_if_asked_and_a_wrong_one_names_its_variable(monkeypatch):
    monkeypatch.setenv("HALF_THE_BITS_SIZE", "small")
    assert not hardware.full_size()
    monkeypatch.setenv("HALF_THE_BITS_SIZE", "Small")
    with pytest.raises(ValueError, match="HALF_THE_BITS_SIZE is 'Small'; set it to full or small"):
        hardware.full_size()


@pytest.mark.parametrize(
    "flags, fp16, bf16",
    [({}, False, False), ({"avx512_bf16": True}, False, True), ({"fp16_arith": True, "bf16": True}, True, True)],
)
def test_native_formats_of_cpus(monkeypatch, flags, fp16, bf16):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)
    assert hardware.native_formats(CPU) == {"fp16": fp16, "bf16": bf16, "TF32": None, "FP8": None}


@pytest.mark.parametrize(
    "capability, units, tensor_cores",
    [
        ((6, 0), "fp16", "none"),
        ((6, 1), "", "none"),
        ((7, 0), "fp16", "fp16"),
        ((7, 5), "fp16", "fp16"),
        ((8, 0), "fp16 bf16 TF32", "fp16 bf16 TF32"),
        ((8, 9), "fp16 bf16 TF32 FP8", "fp16 bf16 TF32 FP8"),
        ((9, 0), "fp16 bf16 TF32 FP8", "fp16 bf16 TF32 FP8"),
        ((12, 0), "fp16 bf16 TF32 FP8", "fp16 bf16 TF32 FP8 FP6 FP4"),
    ],
)
def test_native_formats_of_gpus_and_the_table_of_generations(monkeypatch, capability, units, tensor_cores):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert [f for f, native in hardware.native_formats(CUDA).items() if native] == units.split()
    table = hardware.GENERATIONS.set_index("compute capability")["Tensor Core formats"]
    names = {f"{capability[0]}.{capability[1]}", f"{capability[0]}.x"}
    assert [row for key, row in table.items() if names & set(key.split(", "))] == [tensor_cores]


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
    assert hardware.loader_workers() == min(8, cores)
    monkeypatch.setattr(hardware.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**26))
    assert hardware.loader_workers() == 0 and "shared memory" in capsys.readouterr().out


@pytest.mark.parametrize("version, slow", [(92300, False), (92301, True), (92400, True), (92500, False)])
def test_slow_cudnn_is_flagged(gpu, monkeypatch, version, slow):
    gpu.pop()
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    assert any("depthwise" in warning for warning in hardware.warnings(CUDA)) == slow


def test_cudnn_that_does_not_run_here_is_said_and_not_fatal(gpu, monkeypatch):
    def refuses():
        raise RuntimeError("cuDNN version 92600 is not compatible with devices with SM < 7.5.")

    monkeypatch.setattr(torch.backends.cudnn, "version", refuses)
    for device in (CUDA, CPU):
        assert "not compatible with devices" in hardware.manifest(device)["software"]["cudnn"]
    assert not any("depthwise" in warning for warning in hardware.warnings(CUDA))
