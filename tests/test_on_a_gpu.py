"""What holds on a CUDA GPU, a real one (--gpu) or a pretended one (--pretend CARD)."""

import multiprocessing

import pytest
import torch

from halfbits import NonFinite, audit, watch
from helpers import hardware, records
from tools.record import measure

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device (--gpu or --pretend CARD)")

CUDA = torch.device("cuda")


def a_layer():
    return torch.nn.Linear(256, 64).to(CUDA), torch.randn(128, 256, device=CUDA)


def test_a_tensor_on_the_wrong_side_is_an_error():
    layer, rows = a_layer()
    with pytest.raises(RuntimeError, match=r"same device|addmm"):
        layer(rows.cpu())
    with pytest.raises(TypeError, match="numpy"):
        rows.numpy()
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(2, device=CUDA, generator=torch.Generator())


def test_gradients_and_the_optimizers_state_lie_on_the_gpu():
    layer, rows = a_layer()
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9), torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", torch.float16):
        loss = layer(rows).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    state = [tensor for each in optimizer.state.values() for tensor in each.values()]
    assert {tensor.device.type for tensor in (loss, layer.weight, layer.weight.grad, *state)} == {"cuda"}


def test_a_host_sync_is_found():
    _, rows = a_layer()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            rows.sum().item()
        rows.sum()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def use_the_gpu(answers):
    try:
        torch.zeros(1, device=CUDA)
    except RuntimeError as error:
        answers.put(str(error))


def test_a_forked_process_cannot_use_cuda():
    torch.zeros(1, device=CUDA)
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    process = fork.Process(target=use_the_gpu, args=(answers,))
    process.start()
    assert "forked subprocess" in answers.get()
    process.join()


def test_more_than_the_card_has_is_out_of_memory():
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * torch.cuda.get_device_properties(CUDA).total_memory, dtype=torch.uint8, device=CUDA)


def test_memory_of_a_step_is_that_of_its_tensors():
    layer, rows = a_layer()
    before = torch.cuda.memory_allocated()
    used = measure.memory(lambda: layer(rows).square().sum().backward(), CUDA)
    kept = 4 * 128 * 64
    assert used["allocated"] >= before + 2 * kept and used["reserved"] >= used["allocated"]
    assert used["device"] > used["allocated"]


def test_time_energy_and_a_batch_that_fits(capsys):
    layer, rows = a_layer()
    assert measure.time_block(lambda: layer(rows), 3, CUDA) > 0
    joules = measure.energy(lambda: layer(rows), 128, CUDA, seconds=0.5)
    assert joules > 0 if torch.cuda.get_device_capability() >= (7, 0) else joules is None
    too_much = 2 * torch.cuda.get_device_properties(CUDA).total_memory
    sizes = {8: too_much, 4: too_much, 2: 1}
    fits = measure.fitting_batch(lambda batch: torch.empty(sizes[batch], dtype=torch.uint8, device=CUDA), 8)
    assert fits == 2 and "Batch 4 runs out of memory; trying 2." in capsys.readouterr().out


def test_a_record_says_which_card_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HALF_THE_BITS_SAVE_TO", str(tmp_path))
    facts = hardware.manifest(hardware.pick_device())
    assert facts["device"]["name"] == torch.cuda.get_device_name() and facts["device"]["memory_total"] > 2**32
    path = records.save(records.new("a test", "one arm", {"batch": 1}, {"seconds": 1.0}, facts))
    assert path.parent == tmp_path


def test_formats_with_units_are_those_of_the_generation():
    formats, capability = hardware.native_formats(CUDA), torch.cuda.get_device_capability()
    assert formats == {
        "fp16": capability >= (7, 0),
        "bf16": capability >= (8, 0),
        "TF32": capability >= (8, 0),
        "FP8": capability >= (8, 9),
    }


def test_audit_and_watch_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def build():
        return torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 1)).to(CUDA)

    model, rows = build(), torch.randn(32, 256, device=CUDA)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
    no_units = "no bfloat16 units" in str(audit(build().bfloat16()))
    assert no_units == (torch.cuda.get_device_capability() < (8, 0))
    with torch.autocast("cuda", torch.float16):
        assert "autocast is on around this call" in str(audit(model))

    def steps(*factors):
        for factor in factors:
            with torch.autocast("cuda", torch.float16):
                scaler.scale(model(factor * rows).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    with watch(model, optimizer, scaler, every=1) as seen:
        steps(1, 1)
    assert "backward was called under autocast" in str(seen)
    with pytest.raises(NonFinite) as raised, watch(model, optimizer, scaler, every=1):
        steps(1, 1e5)
    origin = raised.value.origin
    assert (origin.phase, origin.module, origin.op) == ("forward", "0", "_to_copy")
    assert torch.load(raised.value.path, weights_only=False)["origin"] == origin
