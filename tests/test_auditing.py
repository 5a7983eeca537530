"""What `audit` says of a model before it trains, and what it leaves alone."""

import ast
import copy
import math
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from torch import nn

from halfbits import audit
from tests.small_runs import FP16, found, network, scaler, sgd, squares, train, worst

NAMING_CASES = "_verdicts", "auditing"
ROOT = Path(__file__).resolve().parent.parent


def says(model, words, severity=None, optimizer=None, scaler=None):
    return found(audit(model, optimizer, scaler), words, severity)


def test_a_sound_run_is_blamed_for_nothing():
    model = network()
    report = audit(model, sgd(model), scaler())
    assert not worst(report), report
    assert str(report).startswith("Verdict: nothing wrong was found.") and len(str(report).splitlines()) <= 3
    assert found(report, "weights: 280 float32").severity == "note"


def with_masters(model):
    return torch.optim.SGD([weight.detach().float() for weight in model.parameters()], lr=0.1)


def with_kept(model):
    optimizer = sgd(model)
    for weight in model.parameters():
        optimizer.state[weight]["master_param"] = weight.detach().float()
    return optimizer


def with_luck(model):
    optimizer = sgd(model)
    optimizer.bf16_stochastic_round = True
    return optimizer


@pytest.mark.parametrize(
    "make, words, severity",
    [
        (sgd, "without FP32 masters", "likely"),
        (with_masters, "FP32 masters in the optimizer", "note"),
        (with_kept, "keeps FP32 copies", "note"),
        (with_luck, "rounded stochastically", "note"),
    ],
)
def test_trained_16_bits_and_their_masters(make, words, severity):
    model = network().bfloat16()
    report = audit(model, make(model))
    assert found(report, words, severity) is not None
    assert worst(report) == ({"likely"} if severity == "likely" else set())


def test_states_of_0_are_no_copies_of_weights_that_begin_at_0():
    model = network().bfloat16()
    optimizer = sgd(model)
    for weight in model.parameters():
        nn.init.zeros_(weight)
        optimizer.state[weight]["momentum_buffer"] = torch.zeros(weight.shape)
    says(model, "without FP32 masters", "likely", optimizer)


def test_a_scaler_over_fp16_weights_is_an_error_and_really_raises():
    model = network().half()
    row = says(model, "GradScaler over trained fp16 weights", "certain", sgd(model), scaler())
    assert row["case"] == "Attempting to unscale FP16 gradients"
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        train(model, sgd(model), scaler(), dtype=FP16)
    says(model, "GradScaler over trained fp16 weights", "likely", sgd(model, fused=True), scaler())


def test_what_is_frozen_is_told_and_not_judged():
    model = nn.ModuleDict({"base": nn.Linear(8, 8).bfloat16(), "lora_a": nn.Linear(8, 8)})
    model["base"].requires_grad_(False)
    assert says(model, "frozen 72 bfloat16; trained 72 float32", "note")["where"] == "base"
    assert not worst(audit(model))


class Dynamic:
    """A loss scaler as DeepSpeed's."""

    cur_scale = min_scale = 1


@pytest.mark.parametrize(
    "mine, words, severity",
    [
        (scaler(enabled=False), "the GradScaler is disabled", "note"),
        (scaler(init_scale=0.5), "below 1: 0.5", "likely"),
        (scaler(init_scale=0.0), "the scale is 0", "certain"),
        (scaler(), "GradScaler over bf16", "likely"),
        (Dynamic(), "at its minimum: 1", "likely"),
        (scaler(init_scale=math.inf), "the scale is inf", "certain"),
    ],
)
def test_scales(mine, words, severity):
    says(network().bfloat16(), words, severity, scaler=mine)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.words = nn.LayerNorm(8, eps=1e-8), nn.Embedding(8, 8)
        self.register_buffer("inv_freq", torch.rand(4))
        self.register_buffer("position_ids", torch.arange(3000.0))
        self.register_buffer("position_table", torch.rand(8, 4))  # of sines, say
        self.batch = nn.BatchNorm1d(8)


def test_modules_in_16_bits():
    report = audit(Positions().half())
    assert "norm.eps = 1e-08" in found(report, "an eps that is 0 in fp16", "likely")["where"]
    assert found(report, "rotary frequencies in 16 bits", "note")["where"] == "inv_freq"
    assert found(report, "positions in 16 bits", "likely")["where"] == "position_ids"
    found(report, "running statistics in 16 bits", "likely")


@pytest.mark.weekly
def test_old_and_new_switches_of_tf32():
    # In a process of its own, as the mixture cannot be taken back; a device of CUDA is wanted, and no driver is asked.
    lines = """
import torch
from halfbits import audit, auditing
auditing.device_of = lambda model: torch.device("cuda")
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cuda.matmul.fp32_precision = "ieee"
print(audit(torch.nn.Linear(7, 10)))
"""
    said = subprocess.run([sys.executable, "-c", lines], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.startswith("Verdict, likely: old and new TF32 switches are mixed")
    assert "not multiples of 8, which Tensor Cores want: weight (10, 7)" in said


def test_a_region_around_the_call():
    assert "TF32" not in str(audit(network()))  # a CPU has none
    with torch.autocast("cpu"):
        assert says(network(), "autocast is on", "likely")["case"] == "Loss stays the same in every step"


def test_numbers():
    model = network(nn.BatchNorm1d(8))
    with torch.no_grad():
        model[0].weight[0], model[2].weight[0] = 7e4, 5e4
        model[3].running_var[0], model[3].bias[0] = math.inf, math.nan
    model.register_buffer("mask", torch.full((2,), -math.inf))
    report = audit(model, None, scaler())
    assert found(report, "weights that are not finite", "certain")["where"] == "3.bias"
    assert "0.weight" in found(report, "weights above 65504", "likely")["where"]
    assert found(report, "buffers that are not finite", "certain")["where"] == "3.running_var"
    assert "65504" not in str(audit(model))  # nothing says that fp16 is used
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    model[0].bias.grad.fill_(math.inf)
    assert "gradients" not in str(audit(model, scaler=scaler()).findings.query("severity != 'note'"))
    optimizer = sgd(model, momentum=0.9)
    optimizer.step()
    report = audit(model, optimizer)
    found(report, "gradients that are not finite", "certain")
    found(report, "states of the optimizer that are not finite", "certain")


def test_what_the_optimizer_holds():
    model = network()
    says(model, "holds none of the model's weights", "likely", sgd(network()))
    stacked = torch.optim.SGD([torch.nn.Parameter(torch.stack([weight] * 3)) for weight in model.parameters()], 0.1)
    says(model, "holds none of this model's weights, but others", "note", stacked)
    assert says(model, "that the optimizer lacks", "note", sgd(model[0]))["where"] == "2"
    says(model, "a learning rate of 0", "note", sgd(model, lr=0.0))
    assert "lacks" not in str(audit(model, [sgd(model[0]), sgd(model[2])]))


def test_a_step_counter_in_16_bits():
    model, optimizer = stepped(2)
    states = copy.deepcopy(optimizer.state_dict())
    for count, severity in ((300.0, "certain"), (7.0, "likely")):
        for state in states["state"].values():
            state["step"] = torch.tensor(count).bfloat16()
        optimizer.load_state_dict(states)
        says(model, f"step counter, {count:g}, is bfloat16, which stops at 256", severity, optimizer)
    assert "counter" not in str(audit(*stepped(2)))


def test_a_model_that_was_halved_after_its_training_is_not_accused_of_adam_s_eps():
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    assert "eps" not in str(audit(model.half(), optimizer))


def test_adam_in_16_bits_and_decay_that_is_lost():
    model = network().half()
    row = says(model, "Adam's eps = 1e-08 is 0", "certain", torch.optim.Adam(model.parameters()))
    assert row["case"] == "Weights are NaN after one step of Adam"
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-4)
    assert "eps" not in str(audit(model, optimizer))
    model = network().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 8).bfloat16()).sum().backward()
    optimizer.step()
    says(model, "AdamW's second moment in bf16", "likely", optimizer)
    assert "weight decay (lr * weight_decay = 1e-05)" in says(model, "FP32 masters", "likely", optimizer).cost


def test_each_case_is_a_heading_of_the_clinic():
    drawers = [nbformat.read(path, as_version=4) for path in (ROOT / "notebooks").glob("14[a-e]_*.ipynb")]
    lines = {line for drawer in drawers for cell in drawer.cells for line in cell.source.splitlines()}
    headings = {line.lstrip("# ") for line in lines if line.startswith("##")}
    paths = [ROOT / "halfbits" / f"{name}.py" for name in NAMING_CASES]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    texts = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    named = {text for text in texts if re.fullmatch(r"[A-Z]\w*(?: \w+){3,}", text)} - {"FP32 masters in the optimizer"}
    assert len(named) > 12 and named <= headings, named - headings


def test_masters_that_a_checkpoint_cast():
    model = network().bfloat16()
    states = with_kept(model).state_dict()
    optimizer = sgd(model)
    optimizer.load_state_dict(states)
    assert says(model, "SGD's masters are in 16 bits", "certain", optimizer)["where"] == "master_param"


def test_a_copy_that_is_only_evaluated_is_no_fault():
    model = network().bfloat16()
    says(model, "without FP32 masters", "likely")
    says(model.eval(), "without FP32 masters", "note")


def stepped(steps=20):
    """A model and an optimizer that has taken steps."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, factors=[1.0] * steps, loss=lambda output: 1e-2 * squares(output))
    return model, optimizer


def test_a_resumed_run_whose_scaler_starts_over():
    model, optimizer = stepped()
    kept, mine = scaler(init_scale=2.0**12), scaler()
    train(model, optimizer, kept, [1.0] * 3, FP16)
    found(audit(model, optimizer, mine), "the optimizer has taken steps before, the scaler counts none", "likely")
    mine.load_state_dict(kept.state_dict())
    assert not worst(audit(model, optimizer, mine))


def test_weights_without_numbers():
    model = network()
    model[2].to("meta")
    assert says(model, "weights on the meta device", "certain", sgd(model))["where"] == "2"
    lazy = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    says(lazy, "lazy weights", "note", sgd(lazy))
    assert not worst(audit(lazy, sgd(lazy)))


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((lambda x: x,), "the first argument is a torch.nn.Module, and not a function"),
        ((network(), network().parameters()), "an optimizer is wanted, or a list of them"),
        ((network(), None, "fp16"), "the scaler is a torch.amp.GradScaler or None, and not 'fp16'"),
    ],
)
def test_what_cannot_be_audited_is_refused_in_a_sentence(arguments, words):
    with pytest.raises(TypeError, match=words):
        audit(*arguments)


def test_a_scheduler_is_no_optimizer():
    model = network()
    with pytest.raises(TypeError, match="a scheduler was given as the optimizer"):
        audit(model, torch.optim.lr_scheduler.StepLR(sgd(model), 1))
