"""What `audit` says of a model before it trains, what `watch` sees while it does, and what both leave alone."""

import ast
import copy
import math
import re
import subprocess
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from helpers import diagnose
from helpers.diagnose import NonFinite, audit, bisect, replay, watch
from helpers.launch import torchrun

ROOT = Path(__file__).resolve().parent.parent
FP16, BF16 = torch.float16, torch.bfloat16


def network(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), *more)


class Op(nn.Module):
    """A module that only computes."""

    def __init__(self, forward):
        super().__init__()
        self.forward = forward


def large(factor=1e4, *more):
    model = network(*more)
    with torch.no_grad():
        model[2].weight.mul_(factor)
    return model


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1} | options)


def scaler(**options):
    return torch.amp.GradScaler("cpu", **options)


def squares(output):
    return output.float().square().mean()


def train(model, optimizer, mine=None, factors=(1.0,), dtype=None, loss=squares):
    """A step for each of `factors`, by which the batch is multiplied."""
    mine = mine or scaler(enabled=False)
    torch.manual_seed(1)
    for factor in factors:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            made = loss(model(factor * torch.rand(4, 8)))
        mine.scale(made).backward()
        mine.step(optimizer)
        mine.update()


def found(report, words, severity=None):
    rows = report.findings[report.findings.what.str.contains(words, regex=False)]
    assert len(rows) == 1, f"{words!r} is not found once in:\n{report}"
    assert severity is None or rows.iloc[0].severity == severity, rows
    return rows.iloc[0]


def worst(report):
    return set(report.findings.severity) - {"note"}


# audit


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


def test_adapters_that_are_frozen():
    model = nn.ModuleDict({"base": nn.Linear(8, 8).bfloat16(), "lora_a": nn.Linear(8, 8)})
    model["base"].requires_grad_(False)
    assert says(model, "frozen 72 bfloat16; trained 72 float32", "note")["where"] == "base"
    assert "adapters" not in str(audit(model))
    model.requires_grad_(False)
    assert says(model, "adapters that are frozen", "likely")["where"] == "lora_a"


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
        self.register_buffer("position_ids", torch.arange(8.0))
        self.batch = nn.BatchNorm1d(8)


def test_modules_in_16_bits():
    report = audit(Positions().half())
    assert "norm.eps = 1e-08" in found(report, "an eps that is 0 in fp16", "likely")["where"]
    found(report, "frequencies of positions in float16", "note")
    found(audit(Positions().bfloat16()), "frequencies of positions in bfloat16", "likely")
    assert found(report, "positions in 16 bits", "likely")["where"] == "position_ids"
    found(report, "running statistics in 16 bits", "likely")


@pytest.mark.weekly
def test_old_and_new_switches_of_tf32():
    # In a process of its own: the mixture cannot be taken back.
    lines = "torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.cuda.matmul.fp32_precision = 'ieee'"
    command = f"import torch; from helpers.diagnose import audit; {lines}; print(audit(torch.nn.Linear(8, 8)))"
    said = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.startswith("Verdict, likely: old and new TF32 switches are mixed")
    says(network(), "TF32: products", "note")


def test_units_sizes_regions_and_compiled_modules(monkeypatch):
    monkeypatch.setattr(diagnose, "_native", lambda device: {FP16: True, BF16: False})
    assert "units" not in str(audit(network()))  # bf16 is not used
    says(network().bfloat16(), "no bfloat16 units", "note")
    assert "0.weight (10, 7)" in says(nn.Sequential(nn.Linear(7, 10)), "not multiples of 8", "note").what
    with torch.autocast("cpu"):
        assert says(network(), "autocast is on", "likely")["case"] == "Loss stays the same in every step"
    says(torch.compile(network(), backend="eager"), "compiled", "note")


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
    model[3].running_mean[1] = 1e5
    assert found(audit(model), "buffers above 65504", "note")["where"] == "3.running_mean: 100,000"
    model[3].running_mean[1] = 0
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
    says(model, "holds none of the model's weights", "certain", sgd(network()))
    assert says(model, "that the optimizer lacks", "likely", sgd(model[0]))["where"] == "2"
    says(model, "a learning rate of 0", "note", sgd(model, lr=0.0))
    assert "lacks" not in str(audit(model, [sgd(model[0]), sgd(model[2])]))


def test_merged_adapters_are_not_missing_from_the_optimizer():
    model = network()
    model.requires_grad_(False)
    model[0] = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 16))
    optimizer = torch.optim.AdamW(model[0].parameters())
    train(model, optimizer)
    trained, model[0] = model[0], nn.Linear(8, 16)
    assert "merged adapters" in says(model, "that the optimizer lacks", "note", optimizer).cost
    model[0], model[2] = trained, nn.Linear(16, 8)  # a new head
    says(model, "that the optimizer lacks", "likely", optimizer)


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
    (1e-5 * model(torch.rand(2, 8).half())).sum().backward()
    optimizer.step()
    says(model, "Adam's second moment is 0, as in fp16", "certain", optimizer)
    model = network().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 8).bfloat16()).sum().backward()
    optimizer.step()
    says(model, "AdamW's second moment in bf16", "likely", optimizer)
    assert "weight decay (lr * weight_decay = 1e-05)" in says(model, "FP32 masters", "likely", optimizer).cost


def test_each_case_is_a_heading_of_the_clinic():
    notebook = nbformat.read(ROOT / "notebooks" / "14_troubleshooting_clinic.ipynb", as_version=4)
    headings = {line.lstrip("# ") for cell in notebook.cells for line in cell.source.splitlines() if line[:3] == "###"}
    source = ast.parse((ROOT / "helpers" / "diagnose.py").read_text(encoding="utf-8"))
    texts = {str(node.value) for node in ast.walk(source) if isinstance(node, ast.Constant)}
    named = {text for text in texts if re.fullmatch(r"[A-Z]\w*(?: \w+){3,}", text)} - {"FP32 masters in the optimizer"}
    assert len(named) > 15 and named <= headings, named - headings


# watch: numbers that are not finite


def stopped(model, optimizer=None, *arguments, every=100, save=None, **options):
    """What is raised, and by whom."""
    optimizer = optimizer or sgd(model)
    with pytest.raises(NonFinite) as raised, watch(model, optimizer, *arguments[:1], every=every, save=save) as seen:
        train(model, optimizer, *arguments, **options)
    assert torch.autograd.backward.__module__ == "torch.autograd"
    assert torch.amp.GradScaler.scale.__closure__ is None
    return raised.value, seen


def test_a_healthy_run_is_left_as_it_is():
    plain, model = network(nn.Dropout()), network(nn.Dropout())
    train(plain, sgd(plain, momentum=0.9), scaler(), [1.0] * 6, FP16)
    optimizer, mine = sgd(model, momentum=0.9), scaler()
    with watch(model, optimizer, mine, every=2) as seen:
        train(model, optimizer, mine, [1.0] * 6, FP16)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    assert (seen.passes, seen.steps, seen.skipped) == (6, 6, 0)
    assert str(seen).splitlines() == [
        "Verdict: nothing wrong was found.",
        "Seen: 6 passes, 6 optimizer steps, 0 falls of the scale, now 65,536.",
    ]
    assert not worst(seen.report), seen
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert seen.history()["pass"].tolist() == [1, 3, 5]
    assert list(seen.table().index) == ["0", "1", "2", "3"] and set(seen.table().dtype) == {"float16"}


def test_an_overflow_of_forward_names_module_and_op(tmp_path):
    error, seen = stopped(large(), None, scaler(), [0.0, 1e3], FP16, save=tmp_path / "bad.pt")
    assert (
        error.origin[:2] == ("forward", "2")
        and "mm" in error.origin.op
        and error.case == "Model trained in bf16 gives NaN in fp16"
    )
    assert str(error).startswith("pass 2, after 0 optimizer steps: in the forward, in 2: ")  # pass 1 was skipped
    assert "made inf (float16)" in str(error) and "in float32 it is finite, up to " in str(error)
    assert replay(error.path, network()) == error.origin
    with pytest.raises(ValueError, match="other weights"):
        replay(error.path, nn.Linear(8, 8))
    assert seen.findings.severity[0] == "certain"


def test_bad_inputs_and_weights_are_not_blamed_on_a_module():
    assert stopped(network(), factors=[math.nan])[0].origin.phase == "input"
    model = network()
    model[2].bias.data[0] = math.inf
    error, _ = stopped(model)
    assert error.origin[:2] == ("weights", "2") and "before the first step" in str(error)
    model = network(nn.BatchNorm1d(8))  # its statistics are made by the bad pass, not before it
    error, _ = stopped(model, factors=[1.0, math.inf])
    assert error.origin.phase == "input" and "Not finite since: 3.running_mean" in str(error)


def test_an_optimizer_that_spoils_the_weights_is_named():
    model = network().half()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(NonFinite) as raised, watch(model, optimizer, save=None) as seen:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.rand(4, 8).half()).float().mean().backward()
            optimizer.step()
    assert raised.value.origin.phase == "weights"
    assert "the gradients before it were finite" in str(raised.value)
    found(seen, "Adam's eps = 1e-08 is 0", "certain")


def half_a_square(output):
    wide = 1e3 * output.half()
    return (wide * wide).mean()


def all_ignored(output):
    return F.cross_entropy(output, torch.full((4,), -100))


@pytest.mark.parametrize(
    "loss, op, words",
    [
        (half_a_square, "mul", "in float32 it is finite"),
        (all_ignored, "nllloss", "all are ignored"),
        (lambda output: output.sum() / (output > 1e9).sum(), "div", "a count is 0"),
        (lambda output: (0 * output.half()).log().mean(), "log", "its operand is 0 at 32 of 32 places"),
        (lambda output: (-output.abs()).log().mean(), "log", "is negative at 32 of 32 places"),
        (lambda output: F.mse_loss(output, torch.full_like(output, math.nan)), "mseloss", "in the target of the loss"),
        (lambda output: (output * math.nan).sum(), "mul", "in the loss"),
        (
            lambda output: (0 * output.half() + 1).expand(70000, 4, 8).sum(0).log().sum(),
            "sum",
            "made inf (float16) of 70,000",
        ),
        (lambda output: (1e5 * output.abs()).exp().mean(), "exp", "exp made inf (float32)"),
    ],
)
def test_a_bad_loss_names_its_op(loss, op, words):
    error, _ = stopped(network(), loss=loss)
    assert error.origin.phase in ("loss", "input") and op in error.origin.op and words in str(error), error


def root(x):
    """Its derivative at 0 is infinite, and 0 times infinity NaN."""
    return (0 * x).sqrt()


def test_a_bad_backward_names_module_and_op_or_the_loss():
    error, _ = stopped(network(Op(root)))
    assert error.origin[:2] == ("backward", "3") and "made " in str(error)
    error, _ = stopped(network(), loss=lambda output: root(output).sum())
    assert error.origin[:3] == ("backward", "", "sqrt") and "its result is 0 at 32 of 32 places" in str(error)


def test_a_norm_that_overflows_in_fp16_is_no_bad_gradient():
    model = nn.Linear(8, 64).half()
    with pytest.raises(NonFinite) as caught, watch(model, sgd(model), save=None):
        output = model(torch.ones(64, 8).half())
        (3000 * output.float()).sum().backward()  # each weight sums 64 gradients of 3,000
    assert caught.value.origin.phase == "backward" and "bad already" not in str(caught.value)


@pytest.mark.parametrize("dtype", [None, BF16])
def test_divergence_is_told_from_an_overflow(dtype):
    model = network()
    error, seen = stopped(model, sgd(model, lr=50.0), None, [1.0] * 60, dtype)
    assert error.origin.phase == "divergence" and "; at the end of that, in the " in str(error)
    assert "likely" in seen.report.verdict and "the learning rate is 50" in seen.report.verdict


def test_an_overflow_at_the_end_of_a_rising_rate_is_not_certain():
    model, factor = network(nn.Tanh(), nn.Linear(8, 8)), [1.0]
    optimizer = sgd(model, lr=0.01)
    with pytest.raises(NonFinite) as raised, watch(model, optimizer, save=None) as seen:
        for _ in range(400):
            train(model, optimizer, None, factor, FP16)
            optimizer.param_groups[0]["lr"] *= 1.1
    assert "made inf (float16)" in str(raised.value) and "the learning rate rose" in str(raised.value)
    assert worst(seen.report) == {"likely"}


def test_a_scale_of_0_is_told_as_what_it_is():
    model, mine = network(), scaler(init_scale=0.0)
    with watch(model, sgd(model), mine, every=1, save=None):
        train(model, sgd(model), mine, [1.0], FP16)
    found(audit(model, None, mine), "the scale is 0", "certain")


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_infinity_of_either_sign_in_the_input_is_told(sign):
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, sign)
    with pytest.raises(NonFinite, match=r"in the input: args\.0"), watch(model, save=None):
        model(torch.tensor([[1.0, math.inf]])).sum().backward()


class Scores(nn.GRU):
    def forward(self, x, mask):
        hidden = super().forward(x)[0]
        return (hidden @ hidden.mT + mask).softmax(-1) @ hidden


def scores(steps=2, mine=None, broken=False, **options):
    """A watch of a run whose mask holds -inf, as it may, and, if it is broken, what it attends to as well."""
    x, mask = torch.rand(2, 4, 8), torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, -math.inf)
    x[0, 0] += -math.inf if broken else 0
    model, mine = Scores(8, 8, batch_first=True), mine or scaler(enabled=False)
    optimizer = sgd(model)
    with suppress(NonFinite), watch(model, optimizer, mine, **options) as seen:
        for _ in range(steps):
            optimizer.zero_grad()
            mine.scale(1e6 * squares(model(x, mask=mask))).backward()
            mine.step(optimizer)
            mine.update()
    return seen


def test_minus_infinity_in_the_input_is_blamed_before_the_module_it_spoils(tmp_path):
    assert scores(1, save=None).problem is None
    error = scores(save=tmp_path / "bad.pt", broken=True).problem
    assert error.origin.phase == "input" and "in the input: args.0" in str(error)
    assert replay(error.path, Scores(8, 8, batch_first=True)).phase == "input"
    seen = scores(6, scaler(init_scale=2.0**127), save=None)  # gradients overflow, by no fault of the mask
    assert seen.skips() == 6 and "in the input" not in str(seen)


def test_skipped_steps_are_routine_until_the_scale_is_below_1():
    model, mine = network(), scaler(init_scale=2.0**30)
    optimizer = sgd(model)
    with watch(model, optimizer, mine, save=None) as seen:
        train(model, optimizer, mine, [1.0] * 25, FP16)
    assert seen.skipped == 25 - seen.steps > 5
    assert found(seen, "gradients overflowed").severity == "note"
    error, seen = stopped(network(), None, scaler(), [1.0] * 40, FP16, lambda output: (0 * output.float()).sqrt().sum())
    assert 17 <= seen.passes <= 20 and error.origin.op == "sqrt" and error.case == "Loss scale falls in every step"
    huge = scaler(init_scale=2.0**120)  # the loss is judged before it is scaled
    with watch(model, optimizer, huge, save=None) as seen:
        train(model, optimizer, huge, [1e6] * 3, BF16)
    assert seen.problem is None


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
@pytest.mark.parametrize("broken", [True, False])
def test_a_schedule_that_goes_on_while_steps_are_skipped(broken):
    model, mine = network(), scaler(init_scale=2.0**40)
    optimizer = sgd(model, lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 / (number + 1))
    with watch(model, optimizer, mine, save=None, patience=40) as seen:
        for _ in range(40):
            before = mine.get_scale()
            train(model, optimizer, mine, dtype=FP16)
            if broken or mine.get_scale() >= before:
                schedule.step()
    assert seen.skipped > 15
    assert seen.findings.what.str.contains("the learning rate went on in").any() == broken
    assert worst(seen.report) == ({"likely"} if broken else set()), seen
    assert "lower init_scale" in found(seen, "gradients overflowed", "note").cost


def saturated(x):
    """Its product overflows fp16; what follows hides it."""
    return (x.half() * 6e4 * 20).float().sigmoid() * x


def test_overflow_that_later_ops_hide():
    model = network(Op(saturated))
    with watch(model, sgd(model), save=None) as seen:
        train(model, sgd(model), None, [1.0] * 3)
    row = found(seen, "made inf (float16)", "likely")
    assert "in 3" in row.what and "Later ops hide it" in row.cost


def test_a_nan_is_traced_to_the_overflow_that_usual_passes_have_too():
    def areas(x):
        squares = (x.half() * 1e3).square()
        return x + (squares - torch.where(x.max() > 2, squares, 0)).clamp(max=1)

    error, _ = stopped(network(Op(areas)), factors=[1.0, 1.0, 30.0])
    assert error.origin[:2] == ("forward", "3") and "made inf (float16)" in str(error), error
    assert "of that, sub made NaN" in str(error), error


def test_numbers_from_several_devices_are_one_tensor_on_one():
    together = diagnose._together([torch.ones(()), torch.ones((), device="meta")], torch.device("meta"))
    assert together.device.type == "meta" and together.shape == (2,)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_cause_of_skipped_steps_is_looked_for_in_the_forward(steps):
    model = network(Op(saturated))
    optimizer, mine = sgd(model), scaler()
    with watch(model, optimizer, mine, save=None) as seen:
        train(model, optimizer, mine, [1.0] * steps, None, lambda output: output.sum() + (0 * output).sqrt().sum())
    assert "A lower scale does not help" in found(seen, "steps are skipped", "certain").cost


def test_nan_in_evaluation_only():
    model = network(nn.BatchNorm1d(8))
    model[3].running_var[0] = math.nan
    with pytest.raises(NonFinite, match="in the weights already") as raised, watch(model, save=None):
        model(torch.rand(4, 8)).sum().backward()
        with torch.no_grad():
            model.eval()(torch.rand(4, 8))
    assert raised.value.origin.module == "3"


def test_warns_once_and_goes_on():
    model = network()
    with warnings.catch_warnings(record=True) as said, watch(model, save=None, warn=True) as seen:
        warnings.simplefilter("always")
        train(model, sgd(model), None, [1.0, math.nan, math.nan])
    assert seen.passes == 3 and len(said) == 1 and "pass 2" in str(said[0].message)


def masked(mask):
    """With the number that fp16 makes -inf."""
    return Op(lambda x: x.half() + (x.abs().sum() > 1e-9) * mask.half() * -1e9)


def test_masks_are_no_fault_but_rows_of_nothing_else_are():
    model = network(masked(torch.eye(8)[:4]), nn.Softmax(1))
    with watch(model, sgd(model), save=None) as seen:
        train(model, sgd(model), None, [1.0] * 3, loss=lambda output: output.sum())
    assert not worst(seen.report), seen
    for factors in ([1.0], [0.0, 1.0]):
        model = network(masked(torch.ones(4, 8)), nn.Softmax(1))
        error, _ = stopped(model, torch.optim.SGD(model.parameters(), lr=0.0), None, factors)
        assert error.origin[:3] == ("forward", "4", "_softmax") and error.case == "Attention is NaN for rows of padding"
        assert "The -inf: " in str(error)


# watch: how a model may be built and run


@pytest.mark.parametrize("how", ["torch.compile", "module.compile", "an inner module"])
def test_compiled_models_are_seen_from_outside_and_replayed_uncompiled(how, tmp_path):
    torch.compiler.reset()
    run = model = large()
    if how == "torch.compile":
        run = torch.compile(model, backend="eager")
    else:
        (model if how == "module.compile" else model[2]).compile(backend="eager")
    run(torch.rand(4, 8))  # compiled before it is watched
    error, seen = stopped(run, None, scaler(), [0.0, 1e3], FP16, save=tmp_path / "bad.pt")
    assert error.origin[:2] == ("forward", "2")
    assert "saw nothing inside of what is compiled" in str(seen)
    assert replay(error.path, network()).module == "2"


def test_says_what_it_did_not_see():
    torch.compiler.reset()
    model = network()
    with watch(model) as seen:
        assert "saw nothing: neither" in str(seen)
        model(torch.rand(4, 8))
        assert "saw nothing of backward" in str(seen)
        network()(torch.rand(4, 8)).sum().backward()  # another model's
    with watch(model, save=None) as seen:
        torch.compile(model, backend="eager")(torch.rand(4, 8)).sum().backward()
    assert seen.passes == 1 and "saw nothing of forward" in str(seen)
    with watch(model, sgd(model)) as seen:
        model(torch.rand(4, 8)).sum().backward()
    assert "the optimizer took no step" in str(seen)


@dataclass
class Answer:
    logits: torch.Tensor
    others: dict


class Nested(nn.Module):
    """An LSTM, a checkpointed part, a sparse embedding, and nested outputs."""

    def __init__(self, reentrant=False):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(8, 8, sparse=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x):
        hidden, (last, _) = self.lstm(self.words((x.abs() * 7).long() % 8) + x[..., None])
        logits = checkpoint(self.middle, hidden, use_reentrant=self.reentrant)
        return Answer(logits, {"last": (last, [hidden])})


@pytest.mark.parametrize("reentrant", [False, True])
def test_nested_outputs_lstm_sparse_gradients_and_checkpointing(reentrant):
    model = Nested(reentrant)
    dense = [weight for name, weight in model.named_parameters() if name != "words.weight"]
    both = [torch.optim.SGD(dense, lr=0.1), torch.optim.SGD(model.words.parameters(), lr=0.1)]
    loss = lambda answer: answer.logits.square().mean() + answer.others["last"][1][0].mean()
    with watch(model, both, every=1, save=None) as seen:
        for _ in range(3):
            loss(model(torch.rand(4, 5))).backward()
            for one in both:
                one.step()
                one.zero_grad()
    assert (seen.passes, seen.steps) == (3, 3)
    assert {"words", "lstm", "middle.0", "middle.1"} <= set(seen.table().index)
    assert not worst(seen.report), seen
    with torch.no_grad():
        model.lstm.weight_hh_l0[0] = math.nan
    with pytest.raises(NonFinite) as raised, watch(model, both, save=None):
        loss(model(torch.rand(4, 5))).backward()
    assert raised.value.origin[:2] == ("weights", "lstm")


# watch: runs that stay finite


def after(steps=8, dtype=None, mine=None, model=None, loss=squares, every=1, **options):
    """What a watch says of a run."""
    model = model or network()
    optimizer = sgd(model, **options)
    with watch(model, optimizer, mine, every=every, save=None) as seen:
        train(model, optimizer, mine, [1.0] * steps, dtype, loss)
    return seen


class Cut(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            x = self.inner(x)
        return self.head(x)


def rounded(x):
    return x + 1e-9 * torch.arange(512, dtype=BF16).sum()


def angles(x):
    return x + torch.full((2,), 1000.0, dtype=BF16).sin().sum() * 1e-9


def counted(x):
    return x + 1e-9 * torch.zeros(8, dtype=BF16).index_add(0, torch.zeros(600).int(), torch.ones(600).bfloat16())


def waves(x):
    return x + 1e-9 * (torch.linspace(0, 1, 512).bfloat16().float() * 1000).sin().sum()


def distances(x):
    points = 30 + torch.rand(64, 8)
    return x + 1e-9 * (points.pow(2).sum(1).bfloat16() - 2 * (points @ points[0]).bfloat16() + 7500).sum()


def decays(x):
    return x + 1e-9 * torch.linspace(0.999, 0.9995, 8).bfloat16()


class Year(nn.Module):
    def __init__(self):
        super().__init__()
        self.year = nn.Linear(1, 8)

    def forward(self, x):
        return x + 1e-6 * self.year(torch.tensor([[2019.0], [2020.0], [2021.0], [2023.0]]))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5000, 8)

    def forward(self, x):
        return x + 1e-6 * self.table(torch.full((4,), 999.0).bfloat16().long())


class Stored(Named):
    """Ids that float32 was given by fp16."""

    def forward(self, x):
        ids = (torch.arange(64) * 61.0 + 2101).half()
        return x + 1e-6 * self.table(ids.float().long() - 2000)[:4]


class Dead(nn.Module):
    def __init__(self, then=None):
        super().__init__()
        self.first, self.then, self.last = nn.Linear(8, 8), then or nn.Identity(), nn.Linear(8, 8)

    def forward(self, x):
        return self.last((self.then(self.first(x)) - 1e3).relu())


def growing():
    return scaler(init_scale=2.0**30, growth_interval=1, growth_factor=16.0)


def zeros():
    model = network()
    for weight in model.parameters():
        nn.init.zeros_(weight)
    return model


@pytest.mark.parametrize(
    "options, words, severity",
    [
        ({"dtype": BF16, "mine": scaler()}, "bf16 autocast with a GradScaler", "likely"),
        ({"dtype": FP16}, "fp16 autocast without a GradScaler", "likely"),
        ({"mine": scaler()}, "autocast is not on", "likely"),
        ({"lr": 0.0}, "steps that move none of the weights", "certain"),
        (
            {"dtype": FP16, "model": large(0.01), "loss": lambda output: 6e-8 * output.float().sum()},
            "gradients that underflow to 0: in the backward, in 2: ",
            "certain",
        ),
        (
            {"model": zeros(), "loss": torch.sum},
            "weights that are 0, and whose gradient is 0 in float32 too",
            "certain",
        ),
        ({"model": Cut()}, "weights that no gradient reaches", "certain"),
        ({"model": network(Op(rounded))}, "512 whole numbers in a row become", "likely"),
        ({"model": network(Op(angles))}, "sin of bfloat16 up to 1,000, where neighbours are 4 apart", "likely"),
        ({"model": Dead()}, "between last and the module before it, ReLU gets no number above 0", "certain"),
        ({"mine": growing(), "dtype": FP16, "steps": 60}, "the scale grows back as fast as it falls", "certain"),
        ({"model": network(Year()), "dtype": BF16}, "column 0 of an input, 2,019 to 2,023: its 4 values", "likely"),
        ({"lr": 20.0, "steps": 12}, "training diverges: the loss grew", "likely"),
        ({"model": network(Op(counted))}, "index_add gives numbers that are 57% off float32's", "likely"),
        ({"model": network(Op(waves))}, "sin gives numbers that are", "likely"),
        ({"model": network(Op(distances))}, "add gives numbers that are", "likely"),
        ({"model": network(Op(decays))}, "all 8 numbers, 0.999 to 0.9995, become 1 in bfloat16", "likely"),
        ({"model": Dead(Op(counted))}, "ReLU gets no number above 0, anywhere: its units are dead", "note"),
        ({"model": network(Stored())}, "whole numbers that went through float16", "likely"),
        ({"model": network(Named())}, "whole numbers up to 1,000 come out of bfloat16", "likely"),
    ],
)
def test_what_a_watch_finds(options, words, severity):
    found(after(**options), words, severity)


def test_what_float32_makes_of_random_numbers_and_views_is_no_fault():
    def dropped(x):
        store = torch.zeros(4, 8, dtype=BF16)
        store[:, 2] = x[:, 0]
        return (store + F.dropout(x.bfloat16(), 0.5)) * torch.rand_like(store) + x

    for dtype in (FP16, BF16):
        model = network(nn.Dropout(), nn.BatchNorm1d(8), nn.LayerNorm(8), Op(dropped))
        assert not worst(after(model=model, dtype=dtype, mine=scaler(enabled=dtype == FP16)))


def test_a_step_of_an_optimizer_that_has_other_numbers():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer, every=1, save=None) as seen:
        train(model, optimizer, factors=[1.0] * 6)
        for state in optimizer.state.values():
            state["exp_avg_sq"].zero_()
        train(model, optimizer, factors=[1.0] * 3)
    found(seen.report, "a single step, in pass 7, changed weights by", "likely")


def test_a_loss_that_comes_back_to_where_it_was_is_a_note():
    model = network()
    heights = [*torch.linspace(1, 0.1, 20), *torch.linspace(0.1, 1, 20)]
    with watch(model, sgd(model), save=None) as seen:
        for height in heights:
            (height * squares(model(torch.ones(4, 8)))).backward()
    found(seen.report, "the loss does not fall", "note")


def test_two_scalers_of_different_scale_are_no_falls():
    both = [network(), network()]
    model = nn.ModuleList(both)
    runs = [(each, sgd(each), scaler(init_scale=2.0**power)) for each, power in zip(both, (16, 4))]
    with watch(model, [optimizer for _, optimizer, _ in runs], save=None) as seen:
        for _ in range(10):
            for run in runs:
                train(*run, dtype=FP16)
    assert seen.skipped == 0 and not worst(seen.report), seen


def test_a_penalty_that_overflows_by_its_scale_is_a_skipped_step():
    model = network()
    optimizer, mine = sgd(model, lr=1e-3), scaler(init_scale=2.0**30)
    with watch(model, optimizer, mine, save=None) as seen:
        for _ in range(12):
            optimizer.zero_grad()
            with torch.autocast("cpu", FP16):
                loss = squares(model(torch.rand(4, 8)))
            gradients = torch.autograd.grad(mine.scale(loss), [*model.parameters()], create_graph=True)
            penalty = sum((gradient / mine.get_scale()).square().sum() for gradient in gradients)
            mine.scale(loss + penalty).backward()
            mine.step(optimizer)
            mine.update()
    assert seen.problem is None and seen.skipped > 2, seen


def test_passes_without_a_backward_and_buffers_of_an_evaluation():
    model = nn.Sequential(network(), nn.BatchNorm1d(8))
    with watch(model, sgd(model), save=None) as seen:
        for _ in range(6):
            model(torch.rand(4, 8))
        model[1].running_var[0] = math.inf
        model.eval()(torch.rand(4, 8))
    found(seen.report, "saw nothing of backward", "note")
    found(seen.report, "buffers that are not finite", "certain")


def test_steps_as_large_as_the_weights():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    with watch(model, optimizer, every=1, save=None) as seen:
        for _ in range(3):
            optimizer.zero_grad()
            (1e6 * squares(model(torch.rand(4, 8)))).backward()
            optimizer.step()
    found(seen, "a step changes weights by", "likely")


def test_settings_of_an_optimizer_in_16_bits():
    model = network()
    says(model, "SGD's settings as tensors of 16 bits", "likely", sgd(model, lr=torch.tensor(0.1, dtype=BF16)))


def test_outputs_in_evaluation_whose_squares_overflow():
    model = large(1e3)
    with watch(model, save=None) as seen, torch.no_grad(), torch.autocast("cpu", FP16):
        model(torch.rand(4, 8))
    found(seen, "outputs without gradients, as in evaluation, are float16 up to", "likely")


def test_two_networks_in_a_dictionary_and_the_slope_of_one():
    both = nn.ModuleDict({"maker": network(), "critic": network()})
    nn.init.zeros_(both["critic"][2].weight)
    with pytest.raises(NonFinite, match=r"that of sqrt .* makes inf"), watch(both, sgd(both), save=None) as seen:
        made = both["maker"](torch.rand(4, 8))
        squares(both["critic"](made)).backward()
        point = made.detach().requires_grad_()
        (slope,) = torch.autograd.grad(both["critic"](point).sum(), point, create_graph=True)
        (slope.square().sum().sqrt() - 1).square().backward()
    assert {"maker.0", "critic.2"} <= set(seen.table().index)


def test_an_error_carries_what_it_means():
    model = network()
    with pytest.raises(RuntimeError) as caught, watch(model, save=None):
        model(torch.rand(4, 8, dtype=BF16))
    assert "watch: certain: the run stopped with RuntimeError" in caught.value.__notes__[0]
    assert "(0). Two dtypes meet" in caught.value.__notes__[0]


def test_misplaced_lines_are_seen():
    model = network()
    optimizer, x = sgd(model), torch.rand(4, 8)
    with watch(model, optimizer, every=1, save=None) as seen, torch.autocast("cpu"):
        for _ in range(8):
            model(x).float().square().mean().backward()
            optimizer.step()
    found(seen, "backward was called under autocast", "note")
    found(seen, "the step was taken under autocast", "certain")
    found(seen, "gradients are not set to zero", "likely")


@pytest.mark.parametrize("none", [True, False])
@pytest.mark.parametrize("clears", [True, False])
def test_gradients_that_another_network_leaves_are_cleared_before_the_step(clears, none):
    maker, critic = network(), network()
    makes, judges, x = sgd(maker, lr=1e-3), sgd(critic, lr=1e-3), torch.rand(4, 8)
    with watch(critic, judges, every=1, save=None) as seen:
        for _ in range(6):
            if clears:
                judges.zero_grad(set_to_none=none)
            (critic(x) - critic(maker(x).detach())).square().mean().backward()
            judges.step()
            makes.zero_grad()
            critic(maker(x)).square().mean().backward()
            makes.step()
    words = "gradients are not set to zero"
    assert clears is (words not in str(seen))


def in_float32(x):
    """A product that is taken out of autocast."""
    with torch.autocast("cpu", enabled=False):
        return x.float() @ torch.linspace(-1, 1, 64).reshape(8, 8)


@pytest.mark.parametrize("part, severity", [(Op(in_float32), "likely"), (nn.LayerNorm(8), "note")])
def test_a_backward_under_autocast_is_a_fault_if_it_changes_gradients(part, severity):
    model = network(part)
    optimizer = sgd(model, lr=1e-3)
    with watch(model, optimizer, save=None) as seen:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", BF16):
                squares(model(torch.rand(4, 8)) - torch.rand(4, 8)).backward()
            optimizer.step()
    found(seen, "backward was called under autocast", severity)
    assert worst(seen.report) == {severity} - {"note"}, seen


def new_scaler(run):
    run.mine = scaler()
    run.scaled()
    run.mine.step(run.optimizer)


def scaled_twice(run):
    run.mine.scale(run.mine.scale(run.loss()) / 2).backward()
    run.mine.step(run.optimizer)


def not_scaled(run):
    run.loss().backward()
    run.mine.step(run.optimizer)


def stepped_directly(run):
    run.scaled()
    run.optimizer.step()


def stepped_directly_after_unscaling(run):
    run.scaled()
    run.mine.unscale_(run.optimizer)
    run.optimizer.step()


def stepped_again(run):
    run.scaled()
    run.mine.step(run.optimizer)
    run.optimizer.step()


def clipped_first(run):
    run.scaled()
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
    run.mine.step(run.optimizer)


def unscaled_twice(run):
    for _ in range(2):
        run.scaled(clear=False)
        run.mine.unscale_(run.optimizer)
        run.mine.update()
    run.mine.unscale_(run.optimizer)
    run.mine.step(run.optimizer)
    run.optimizer.zero_grad()


def another_optimizer(run):
    run.scaled()
    run.mine.step(run.optimizer)
    run.other.step()


def partly_scaled(run):
    run.loss().backward()
    run.scaled(clear=False)
    run.mine.step(run.optimizer)


def penalised(run, divisor=1.0):
    loss = run.loss()
    scaled = run.mine.scale(loss)
    gradients = torch.autograd.grad(scaled, run.model.parameters(), create_graph=True)
    penalty = sum((gradient / divisor).square().sum() for gradient in gradients)
    run.mine.scale(loss + penalty).backward()
    run.mine.step(run.optimizer)


def cleared(run):
    run.loss().backward()
    for one in (run.optimizer, run.other):
        one.zero_grad(set_to_none=False)
    run.optimizer.step()


class Run:
    def __init__(self):
        self.model, self.mine = network(), scaler(init_scale=16.0)
        self.optimizer = sgd(self.model[0], lr=1e-4)
        self.other = sgd(self.model[2], lr=1e-4)

    def loss(self, clear=True):
        if clear:
            self.optimizer.zero_grad()
            self.other.zero_grad()
        with torch.autocast("cpu", FP16):
            return squares(self.model(torch.rand(4, 8)))

    def scaled(self, clear=True):
        """A backward as it should be."""
        self.mine.scale(self.loss(clear)).backward()


@pytest.mark.parametrize(
    "step, words, updates",
    [
        (new_scaler, "each step uses a new GradScaler", True),
        (scaled_twice, "scaler.scale is called twice on the same loss", True),
        (not_scaled, "on a loss that scaler.scale has not seen", True),
        (partly_scaled, "of 2 losses for one step, 1 were not scaled", True),
        (stepped_directly, "without scaler.step or unscale_", False),
        (stepped_directly_after_unscaling, "was called after unscale_, and scaler.step was not", True),
        (stepped_again, "is called again after scaler.step", True),
        (clipped_first, "between backward and unscale_", True),
        (clipped_first, "scaler.update is never called", False),
        (unscaled_twice, "unscale_ is called on gradients that it unscaled already", True),
        (another_optimizer, "without scaler.step or unscale_", True),
        (penalised, "torch.autograd.grad was given a scaled loss, and its gradients were used", True),
        (cleared, "gradients are 0 at the step, and were not after the backward", False),
    ],
)
def test_a_scaler_that_is_used_wrongly(step, words, updates):
    run = Run()
    with watch(run.model, run.optimizer, run.mine, every=1, save=None) as seen:
        for _ in range(5):
            step(run)
            if updates:
                run.mine.update()
            else:
                run.mine._per_optimizer_states.clear()
    found(seen, words, "certain")


def test_a_penalty_of_gradients_that_are_divided_by_the_scale_is_right():
    run = Run()
    with watch(run.model, run.optimizer, run.mine, every=1, save=None) as seen:
        penalised(run, divisor=run.mine.get_scale())
        run.mine.update()
    assert not seen.findings.what.str.contains("torch.autograd.grad").any()


def test_an_error_of_the_run_is_placed_and_explained():
    model = network()
    model[2].half()
    with pytest.raises(RuntimeError, match="dtype"), watch(model, sgd(model), save=None) as seen:
        model(torch.rand(4, 8))
    row = found(seen, "the run stopped with RuntimeError", "certain")
    assert row["where"] == "2" and "Two dtypes meet" in row.cost and "the run stopped" in seen.report.verdict


class Cast(torch.autograd.Function):
    """Its backward meets a float32 weight outside of autocast."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x.half() @ weight.half()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.saved_tensors[0].T, None


class Casts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x):
        return Cast.apply(x, self.weight)


def test_an_error_in_a_backward_of_one_s_own_is_told_of_autocast():
    model = network(Casts())
    with pytest.raises(RuntimeError, match="dtype"), watch(model, sgd(model), save=None) as seen:
        model(torch.rand(4, 8)).float().sum().backward()
    assert "torch.amp.custom_bwd" in found(seen, "the run stopped with RuntimeError", "certain").cost


def test_a_loss_that_is_divided_by_an_inf_is_flat():
    model = network()
    with watch(model, sgd(model), save=None) as seen:
        count = torch.ones(70_000, dtype=FP16).sum()
        train(model, sgd(model), factors=[1] * 2, loss=lambda output: output.half().sum() / count)
    assert "div was given inf (float16)" in found(seen, "output is 0 everywhere", "certain").what


def test_a_cast_is_not_blamed_for_the_inf_that_it_was_given():
    def gram(output):
        wide = 1e3 * output
        return (wide @ wide.T).float().square().mean()

    model = network()
    with pytest.raises(NonFinite, match="in the loss: mm made inf"), watch(model, sgd(model), save=None):
        train(model, sgd(model), dtype=FP16, factors=[10], loss=gram)


@pytest.mark.weekly
def test_a_softmax_is_not_blamed_for_what_a_compiled_model_gave_it():
    model = nn.Linear(4, 4)

    @torch.compile(backend="aot_eager")
    def overflows(x):
        return model(x) * 1e38 * 1e38 * 0

    with (
        pytest.raises(NonFinite, match=r"compiledfunction made NaN \(float32\); logsoftmax got it"),
        watch(model, save=None),
    ):
        F.cross_entropy(overflows(torch.rand(2, 4)), torch.tensor([0, 1])).backward()


def test_a_cast_of_the_output_is_blamed_for_the_inf_that_it_makes():
    model = network()
    with pytest.raises(NonFinite, match=r"tocopy made inf \(float16\)"), watch(model, sgd(model), save=None):
        train(model, sgd(model), factors=[1e7], loss=lambda output: output.half().square().mean())


def test_rates_and_scales_that_stand_still():
    model, slow = network(), scaler(init_scale=2.0**20, backoff_factor=0.97)
    optimizer = sgd(model, lr=1e-6)
    with watch(model, optimizer, slow, save=None) as seen:
        train(model, optimizer, slow, factors=[1] * 3)
    found(seen, "an overflow takes 3% off the scale", "likely")
    assert "rate is at most 1e-06" in found(seen, "a step changes weights by", "likely").cost


def test_times_in_float64_are_cast_too():
    class Clock(nn.Module):
        def forward(self, x):
            return x.bfloat16().float() / 1e9

    model = nn.Sequential(Clock(), nn.Linear(8, 8))
    with watch(model, sgd(model), save=None) as seen:
        for _ in range(2):
            model(1.7e9 + 1e5 * torch.rand(16, 8, dtype=torch.float64)).sum().backward()
    assert "column 0 of an input" in seen.report.verdict


@pytest.fixture
def one_process(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


# broken runs, each with a sound twin that draws no alarm


def ratios(run, broken):
    """Log-probabilities of a rollout, kept in bf16."""
    x, action = torch.rand(32, 8), torch.arange(32)[:, None] % 8
    with torch.no_grad():
        old = run.model(x).log_softmax(1).gather(1, action)
    old = old.bfloat16().float() if broken else old
    run.optimizer.zero_grad()
    new = run.model(x).log_softmax(1).gather(1, action)
    ((new - old).exp() * torch.randn(32, 1)).mean().backward()
    run.optimizer.step()


def unscaled_early(run, broken):
    run.optimizer.zero_grad()
    for number in range(3):
        run.scaled(clear=False)
        if broken and number == 0:
            run.mine.unscale_(run.optimizer)
    run.mine.step(run.optimizer)
    run.mine.update()


class Square(torch.autograd.Function):
    """Its backward may ignore, or only look at, the gradient that it is given."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]


class Ignores(Square):
    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] / 32


class Signs(Square):
    @staticmethod
    def backward(ctx, gradient):
        return gradient.sign() * ctx.saved_tensors[0]


def own_loss(run, broken):
    run.optimizer.zero_grad()
    with torch.autocast("cpu", FP16):
        output = run.model(torch.rand(4, 8))
    run.mine.scale((Ignores if broken else Square).apply(output.float()).mean()).backward()
    run.mine.step(run.optimizer)
    run.mine.update()


def own_module(run, broken):
    run.model[1].forward = (Signs if broken else Square).apply
    run.scaled()
    run.mine.step(run.optimizer)
    run.mine.update()


def evaluated(run, broken):
    """A metric in 16 bits: a counter that stops."""
    run.loss().backward()
    run.optimizer.step()
    right = torch.zeros((), dtype=BF16 if broken else torch.float32)
    with torch.no_grad():
        for _ in range(40):
            for hit in run.model(torch.rand(8, 8)).argmax(1) >= 0:
                right += hit


def by_class(run, broken):
    """Counts by class, added up by index."""
    run.loss().backward()
    run.optimizer.step()
    counts = torch.zeros(8, dtype=FP16 if broken else torch.float32)
    with torch.no_grad():
        for _ in range(60):
            right = (0 * run.model(torch.rand(50, 8)).argmax(1)).long()
            counts.index_add_(0, right, torch.ones(50, dtype=counts.dtype))


def averaged(run, broken):
    """An average of the weights, a new tensor at each step."""
    run.loss().backward()
    run.optimizer.step()
    dtype = BF16 if broken else torch.float32
    for name, weight in run.model.state_dict().items():
        run.average[name] = run.average.get(name, weight).to(dtype) * 0.999 + weight.to(dtype) * 0.001


def confused(run, broken):
    """A table of counts, added up by pairs of indices: most of what comes falls on one."""
    run.loss().backward()
    run.optimizer.step()
    table = torch.zeros(3, 3, dtype=FP16 if broken else torch.float32)
    with torch.no_grad():
        for _ in range(3):
            right = (0 * run.model(torch.rand(4000, 8)).argmax(1)).long()
            right[:3] = torch.arange(3)
            table.index_put_((right, right), torch.ones(4000, dtype=table.dtype), accumulate=True)


def counted(run, broken):
    """A count by class, `table[label] += 1`."""
    run.loss().backward()
    run.optimizer.step()
    table = torch.zeros(3, dtype=BF16 if broken else torch.float32)
    with torch.no_grad():
        for _ in range(3):
            right = (0 * run.model(torch.rand(100, 8)).argmax(1)).long()
            for label in right:
                table[label[None]] += 1


def followed(run, broken):
    """An average of the weights by lerp."""
    run.loss().backward()
    run.optimizer.step()
    for name, weight in run.model.state_dict().items():
        average = run.average.get(name, weight).to(BF16 if broken else torch.float32)
        run.average[name] = torch.lerp(average, weight.to(average.dtype), 1e-3)


def rolled_out(run, broken):
    """A ratio of outputs to those of a pass without gradients, in bf16 if it is broken."""
    batch = torch.rand(4, 8)
    with torch.no_grad(), torch.autocast("cpu", BF16, enabled=broken):
        before = run.model(batch).float()
    run.optimizer.zero_grad()
    squares(run.model(batch) - before + 1).backward()
    run.optimizer.step()


def divided_by_hand(run, broken):
    run.mine.scale(run.loss()).backward()
    for weight in run.model.parameters() if broken else ():
        weight.grad /= run.mine.get_scale()
    run.mine.step(run.optimizer)
    run.mine.update()


def words(run, broken):
    """Ids that were cast with the batch, outside of the model."""
    ids = torch.randint(5000, (64,))
    ids = ids.bfloat16().long() if broken else ids
    run.optimizer.zero_grad()
    F.cross_entropy(run.model(torch.rand(64, 8)).repeat(1, 700), ids).backward()
    run.optimizer.step()


IN_FP16 = [evaluated, by_class, averaged, confused, counted, followed]  # without a scaler, which is told too
NOT_SCALED = [ratios, words, rolled_out, *IN_FP16]


@pytest.mark.parametrize(
    "step, said, severity",
    [
        (ratios, "sub of float32 and of numbers that went through bfloat16", "likely"),
        (unscaled_early, "a backward adds scaled gradients to those that unscale_ has divided", "certain"),
        (own_loss, "the backward of Ignores never reads the gradient that it is given", "certain"),
        (own_module, "gradients that stay the same when the loss is doubled", "certain"),
        (evaluated, "a sum in bfloat16 that has come to 256 takes up 0 for ", "certain"),
        (by_class, "a sum in float16 that has come to 2048 takes up 0 for 50", "certain"),
        (confused, "a sum in float16 that has come to 2048 takes up 0 for 4e+03", "certain"),
        pytest.param(
            counted, "a sum in bfloat16 that has come to 256 takes up 0 for 1", "certain", marks=pytest.mark.weekly
        ),
        (averaged, "a factor of 0.999 in bfloat16", "likely"),
        (followed, "a factor of 0.001 in bfloat16", "likely"),
        (rolled_out, "sub of outputs in float32 and of the model's in bfloat16", "likely"),
        (divided_by_hand, "between backward and unscale_", "certain"),
        (words, "whole numbers that went through bfloat16: above 256 neighbours fell together", "likely"),
    ],
)
def test_a_broken_run_and_its_sound_twin(step, said, severity):
    for broken in (True, False):
        run = Run()
        run.optimizer, run.other, run.average = sgd(run.model, lr=1e-3), sgd(run.model[2]), {}
        run.mine = scaler(init_scale=4096.0)
        with watch(run.model, run.optimizer, None if step in NOT_SCALED else run.mine, save=None) as seen:
            for _ in range(6):
                step(run, broken)
        assert not broken or found(seen, said, severity) is not None
        assert broken or not seen.findings.what.str.contains(said, regex=False).any()
        assert broken or step in IN_FP16 or not worst(seen.report), seen


class Adam8(torch.optim.Optimizer):
    """Adam whose second moment is rounded to whole parts of its largest, as one that is kept in so many bits."""

    def __init__(self, parameters, bits):
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.999)})
        self.levels = 2**bits - 1

    @torch.no_grad()
    def step(self):
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            first = state.get("first", 0) * 0.9 + 0.1 * weight.grad
            second = state.get("second", 0) * 0.999 + 0.001 * weight.grad**2
            size = second.max() / self.levels
            state["first"], state["second"] = first, (second / size).round() * size
            taken = state["taken"] = state.get("taken", 0) + 1
            root = (state["second"] / (1 - 0.999**taken)).sqrt() + 1e-8
            weight -= 1e-3 * first / (1 - 0.9**taken) / root


def test_steps_that_adam_cannot_take():
    for bits in (8, 40):
        model = network()
        optimizer = Adam8(model.parameters(), bits)
        with suppress(NonFinite), watch(model, optimizer, every=2, save=None) as seen:
            train(model, optimizer, factors=[1.0] * 10)
        assert seen.report.verdict.startswith("Verdict, certain: a step moves a number") == (bits == 8), seen


def test_a_head_that_starts_near_0_takes_no_wild_step():
    model = network()
    with torch.no_grad():
        model[2].weight.mul_(1e-6)
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-3)
    with watch(model[2:], optimizer, every=2, save=None) as seen:
        for _ in range(10):
            optimizer.zero_grad()
            squares(model(torch.rand(4, 8)) - 1).backward()
            optimizer.step()
    assert not worst(seen.report), seen


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


def test_a_loop_that_scales_its_loss_itself():
    model = network()
    optimizer = sgd(model, lr=1e-4 / 1024)
    with watch(model, optimizer, save=None) as seen:
        train(model, optimizer, factors=[1.0] * 3, dtype=FP16, loss=lambda output: squares(output) * 1024)
    found(seen, "the loop multiplies its loss by 1,024 itself", "note")
    assert "without a GradScaler" not in " ".join(seen.findings.what)


def test_gradients_that_autograd_grad_took_of_a_loss_that_was_not_scaled():
    for scaled in (False, True):
        model, mine = network(), scaler(init_scale=16.0)
        optimizer = sgd(model)
        with watch(model, optimizer, mine, save=None) as seen:
            for _ in range(3):
                loss = squares(model(torch.rand(4, 8)))
                made = torch.autograd.grad(mine.scale(loss) if scaled else loss, [*model.parameters()])
                for weight, gradient in zip(model.parameters(), made):
                    weight.grad = gradient
                mine.scale(torch.ones(()))
                mine.step(optimizer)
                mine.update()
        assert ("scaler.scale has not seen" in str(seen)) != scaled, seen


def through_16_bits(model, dtype):
    """What a loop does that stores its weights in 16 bits, and forgets to cast a copy."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype).float()


def test_weights_that_go_through_16_bits_while_they_train():
    for dtype in (BF16, FP16, None):
        model = network()
        through_16_bits(model, BF16)  # as of a checkpoint: they start so, which is no fault
        optimizer = sgd(model)
        with watch(model, optimizer, every=2, save=None) as seen:
            for _ in range(8):
                train(model, optimizer)
                through_16_bits(model, dtype) if dtype else None
        said = "float32 weights whose numbers are all "
        assert (said + str(dtype).removeprefix("torch.") in str(seen)) == (dtype is not None), seen
        assert dtype or not worst(seen.report), seen


def test_an_inf_between_the_passes():
    """Areas of boxes, in the dtype of the outputs, as a detector assigns its targets."""
    for dtype in (FP16, torch.float32):
        model = network()
        optimizer, boxes = sgd(model), torch.full((4, 2), 400.0)
        with watch(model, optimizer, save=None) as seen:
            for _ in range(3):
                output = model(torch.rand(4, 8))
                sides = boxes.to(dtype)
                targets = (sides[:, 0] * sides[:, 1] < 200_000).float()
                optimizer.zero_grad()
                squares(output - targets[:, None]).backward()
                optimizer.step()
        assert ("between the model's passes: mul made inf (float16)" in str(seen)) == (dtype == FP16), seen


def test_a_gradient_of_0_is_blamed_on_the_inf_that_the_loss_divides_by():
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer, save=None) as seen:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", FP16):
                made = 100 * model(torch.rand(600, 8)).sigmoid()
                loss = 1 - made[0].float().sum() / made.sum(dtype=FP16)
            loss.backward()
            optimizer.step()
    assert re.match("Verdict, likely: between the model's passes: .* made inf", seen.report.verdict), seen


def test_decays_that_16_bits_make_equal():
    model = network()
    model.decay = nn.Parameter(torch.linspace(0.99, 0.9995, 16))
    assert not worst(audit(model))
    report = audit(model.bfloat16(), sgd(model))
    assert found(report, "16 numbers, 0.98828 to 1, are 4 different ones in bfloat16", "likely")["where"] == "decay"


def test_a_schedule_in_16_bits():
    for dtype, broken in ((BF16, True), (torch.float32, False)):
        model = network()
        noise = torch.linspace(1e-4, 0.02, 1000).to(dtype)
        model.register_buffer("kept", (1 - noise).cumprod(0))
        model.register_buffer("mixed", torch.randn(1000).to(dtype))
        report = audit(model, sgd(model))
        assert [*report.findings["where"][report.findings.severity == "likely"]] == ["kept"] * broken, report


class Linear(nn.Module):
    """Attention whose state is a running sum in evaluation, and whose gradient is one in training."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype, self.keys = dtype, nn.Linear(8, 8)

    def forward(self, x):
        keys = self.keys(x).exp()
        state = torch.zeros(4, 8, dtype=self.dtype)
        with torch.no_grad():
            for _ in range(800):
                state = state + keys.to(self.dtype)
        return keys / (1 + 1e-6 * state)


@pytest.mark.parametrize("evaluates", [True, False])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_long_sums_within_a_model(dtype, evaluates):
    model = Linear(dtype)
    with watch(model, save=None) as seen, torch.set_grad_enabled(not evaluates):
        for _ in range(2):
            made = squares(model(torch.rand(4, 8)))
            made.requires_grad and made.backward()
    where = "in the forward of an evaluation" if evaluates else "in the forward, in the model"
    rows = seen.findings[seen.findings.what.str.startswith("a sum in bfloat16 that has come to")]
    assert [*rows["where"]] == [where] * (dtype == BF16), seen
    assert worst(seen.report) == ({"likely"} if dtype == BF16 else set()), seen


def test_higher_order_operators_run_while_it_looks():
    model = network(Op(lambda x: torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))))
    x = torch.rand(4, 8)
    with torch.no_grad():
        right = model(x)
        with watch(model, save=None):
            assert torch.equal(model(x), right)


def test_the_look_at_ops_waits_for_a_pass_that_reaches_the_model():
    model, critic = network(Op(saturated)), network()
    with watch(model, sgd(model), save=None) as seen:
        for number in range(4):
            made = model(torch.rand(4, 8))
            squares(critic(made.detach()) if number < 3 else made).backward()
    found(seen, "made inf (float16)", "likely")


def test_an_offset_that_takes_the_digits():
    for offset in (-1036.0, 0.0):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        nn.init.constant_(model[2].bias, offset)
        optimizer = sgd(model, lr=1e-5)
        with watch(model, optimizer, save=None) as seen:
            for _ in range(3):
                optimizer.zero_grad()
                with torch.autocast("cpu", BF16):
                    output = model(torch.rand(64, 8))
                squares(output.float() - offset).backward()
                optimizer.step()
        assert ("addmm gives numbers near 1,036 that differ by" in str(seen)) == (offset != 0), seen


def test_all_forwards_of_a_pass_are_looked_at():
    class Waves(nn.Linear):
        def forward(self, times):
            return super().forward(times).sin()

    model = Waves(1, 8)
    optimizer = sgd(model, lr=1e-6)
    nn.init.constant_(model.weight, 3.0)
    with watch(model, optimizer, save=None) as seen:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", BF16):
                made = model(60 * torch.rand(16, 1)).float().mean() + model(torch.zeros(1, 1)).float().mean()
            made.backward()
            optimizer.step()
    assert "sin of bfloat16 up to 1" in str(seen), seen


def test_masters_that_take_the_gradients_away():
    model = network().bfloat16()
    masters = [weight.detach().float() for weight in model.parameters()]
    optimizer = torch.optim.Adam(masters, lr=1e-3)
    with watch(model, optimizer, save=None) as seen:
        for _ in range(3):
            squares(model(torch.rand(4, 8, dtype=BF16))).backward()
            for master, weight in zip(masters, model.parameters()):
                master.grad, weight.grad = weight.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                for master, weight in zip(masters, model.parameters()):
                    weight.copy_(master)
    assert not worst(seen.report), seen


class Taken(torch.optim.SGD):
    """It keeps the gradients itself, as in FP32 beside 16-bit weights."""

    def take(self):
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["main"], weight.grad = weight.grad.float(), None

    @torch.no_grad()
    def step(self):
        for weight in self.param_groups[0]["params"]:
            weight -= 0.1 * self.state[weight]["main"]


def test_gradients_that_the_optimizer_takes_away_are_not_missing():
    model = network()
    optimizer = Taken(model.parameters(), lr=0.1)
    with watch(model, optimizer, save=None) as seen:
        for _ in range(3):
            squares(model(torch.rand(4, 8))).backward()
            optimizer.take()
            optimizer.step()
    assert not worst(seen.report), seen


def test_the_compiled_model_is_found_from_the_plain_one():
    model = network()
    compiled = torch.compile(model, backend="eager")
    optimizer = sgd(model)
    with watch(model, optimizer, save=None) as seen:
        train(compiled, optimizer, factors=[1.0] * 3)
    assert "saw nothing of forward" not in str(seen) and seen.table().dtype[""] == "float32", seen


def test_an_error_of_the_watch_ends_the_watch_and_not_the_run(monkeypatch):
    model = network()
    optimizer = sgd(model)
    monkeypatch.setattr(diagnose._Looks, "output", lambda *_: 1 / 0)
    with pytest.warns(RuntimeWarning, match="watch stopped: ZeroDivisionError"), watch(model, optimizer) as seen:
        train(model, optimizer, factors=[1.0] * 3)
    found(seen, "watch stopped: ZeroDivisionError: division by zero", "note")


def stepped(steps=20):
    """A model and an optimizer that has taken steps."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, factors=[1.0] * steps, loss=lambda output: 1e-2 * squares(output))
    return model, optimizer


def loaded(model, states, mine=None):
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(states)
    with watch(model, optimizer, mine, save=None) as seen:
        train(model, optimizer, mine, [1.0] * 3, dtype=FP16 if mine else None)
    return audit(model, optimizer), seen.report


def test_moments_that_a_checkpoint_compressed():
    model, optimizer = stepped()
    states = copy.deepcopy(optimizer.state_dict())
    assert not any(map(worst, loaded(model, states)))
    for state in states["state"].values():
        state |= {key: state[key].half() for key in ("exp_avg", "exp_avg_sq")}
    report = loaded(model, states)[1]
    found(report, "AdamW's second moment is 0, as in fp16, where the first is not", "certain")
    found(report, "all numbers of the float32 state exp_avg are float16's", "likely")


def test_a_resumed_run_whose_scaler_starts_over():
    model, optimizer = stepped()
    kept = scaler(init_scale=2.0**12)
    train(model, optimizer, kept, [1.0] * 3, FP16)
    states, mine = optimizer.state_dict(), scaler()
    found(audit(model, optimizer, mine), "the optimizer has taken steps before, the scaler counts none", "likely")
    found(loaded(model, states, mine)[1], "the optimizer has taken steps before, the scaler counts none", "likely")
    mine = scaler()
    mine.load_state_dict(kept.state_dict())
    assert not worst(loaded(model, states, mine)[1])
    run = Run()
    with watch(run.model, save=None) as seen:  # it meets the second optimizer when the first has stepped
        run.scaled()
        for one in (sgd(run.model[0], momentum=0.9), sgd(run.model[2], momentum=0.9)):
            run.mine.step(one)
        run.mine.update()
    assert not worst(seen.report), seen


def test_a_rate_that_is_too_high_is_not_blamed_on_precision():
    for rate, broken in ((20.0, True), (0.05, False)):
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8), nn.LayerNorm(8))
        optimizer = sgd(model, lr=rate)
        with watch(model, optimizer, save=None) as seen:
            train(model, optimizer, None, [1.0] * 50, BF16, lambda output: F.cross_entropy(output, torch.arange(4)))
        assert ("in any precision" in seen.report.verdict) == broken, seen


def test_fsdp2_in_fp16_without_a_scaler(one_process):
    for dtype, broken in ((FP16, True), (BF16, False)):
        model = fully_shard(network(), mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
        report = audit(model, sgd(model))
        assert report.findings.what.str.contains("FSDP2 computes in fp16, and nothing scales").any() == broken
        assert "FSDP2 computes in fp16" not in str(audit(model, sgd(model), scaler()))


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(32, 32).bfloat16().requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(4, 32) / 32), nn.Parameter(torch.zeros(32, 4))

    def forward(self, x):
        return self.base(x.bfloat16()).float() + x @ self.down.T @ self.up.T

    @torch.no_grad()
    def merge(self):
        self.base.weight += (self.up @ self.down).bfloat16()
        self.up.zero_()


def test_adapters_that_a_base_of_16_bits_rounds_away():
    for size, broken in ((1e-4, True), (1.0, False)):
        model = Adapted()
        nn.init.normal_(model.up, 0, size)
        assert ("adapters would lose" in str(audit(model))) == broken
        with watch(model, sgd(model, lr=1e-4), save=None) as seen:
            model.merge()
        assert ("adapters were merged into weights of 16 bits" in str(seen)) == broken, seen


def test_optimizers_that_step_at_their_own_time_lack_no_gradient():
    both = nn.ModuleDict({"maker": network(), "critic": network()})
    maker, critic = sgd(both["maker"], lr=1e-3), sgd(both["critic"], lr=1e-3)
    with watch(both, [maker, critic], save=None) as seen:
        for _ in range(4):
            for one, point in ((critic, lambda made: made.detach()), (maker, lambda made: made)):
                one.zero_grad()
                squares(both["critic"](point(both["maker"](torch.rand(4, 8))))).backward()
                one.step()
    assert not worst(seen.report), seen


def test_whole_numbers_that_are_regular_by_themselves_are_left_alone():
    ids = torch.arange(0, 4000, 7)
    assert diagnose._went_through(ids) is None
    assert diagnose._went_through(ids.bfloat16().long()) == BF16 and diagnose._went_through(ids.half().int()) == FP16
    for sound in (torch.arange(0, 1000, 20), 2 ** torch.arange(14), torch.arange(256), torch.full((64,), -100)):
        assert diagnose._went_through(sound) is None


def test_what_cannot_be_seen_is_said():
    model = network()
    optimizer = sgd(model, lr=1.0)
    with watch(model, optimizer, save=None) as seen:
        for _ in range(40):
            optimizer.zero_grad()
            (1 + 1e-3 * squares(model(torch.rand(4, 8)))).backward()
            optimizer.step()
    assert (
        not worst(seen.report) and "Not seen from here" in found(seen, "the loss does not fall (1 to 1)", "note").cost
    )


@pytest.mark.parametrize(
    "loss, op, severity",
    [
        (lambda output: (torch.atanh(output.sign()) - 1).square().mean(), "atanh", "certain"),
        (lambda output: (output * 1e30 * 1e30 - 1).square().mean(), "sub", "likely"),
    ],
)
def test_an_op_is_not_blamed_for_what_another_made(loss, op, severity):
    error, seen = stopped(network(), loss=loss)
    assert error.origin.op == op and seen.findings.severity[0] == severity, error
    assert severity == "certain" or "if it was not mul before it" in str(error)


def test_a_loss_that_is_compiled_and_modes_of_others_are_left_alone():
    torch.compiler.reset()
    compiled, ran = torch.compile(squares, backend="eager"), []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(func)
            return func(*args, **kwargs or {})

    model = network()
    with watch(model, sgd(model), every=1, save=None):
        output = model(torch.rand(4, 8))
        with Mode():
            compiled(output).backward()
        mode = Mode()
        with mode:
            output = model(torch.rand(4, 8))
        compiled(output).backward()
    assert ran and not torch.utils._python_dispatch.is_in_torch_dispatch_mode()


def test_fsdp2_is_not_disturbed_and_its_underflow_is_seen(one_process):
    policy = MixedPrecisionPolicy(param_dtype=FP16, output_dtype=torch.float32)
    model = fully_shard(network(), mp_policy=policy)
    with watch(model, sgd(model), every=2, save=None) as seen:
        for _ in range(6):
            (1e-8 * model(torch.rand(4, 8))).mean().backward()
            assert all(weight.grad is not None for weight in model.parameters())
            model.zero_grad()
    assert "is 0 in fp16" in found(seen, "the gradient that reaches the model's output", "certain").what


def test_a_communication_hook_of_ddp_is_blamed_for_what_it_makes(one_process):
    model = nn.parallel.DistributedDataParallel(network())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    words = "in the communication hook fp16_compress_hook"
    with pytest.raises(NonFinite, match=words), watch(model, sgd(model), save=None):
        (1e6 * model(torch.rand(4, 8))).sum().backward()


def test_accumulation_and_several_forwards_are_one_step():
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer, save=None) as seen:
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(3):
                (model(torch.rand(4, 8)) - model(torch.rand(4, 8))).square().mean().backward()
            optimizer.step()
    assert (seen.passes, seen.steps) == (6, 2) and not worst(seen.report), seen


def test_sums_in_16_bits_and_copies_that_stand_still():
    model = nn.Linear(8, 8).bfloat16()
    with watch(model, every=100, save=None) as seen:
        for _ in range(1001):
            model(torch.ones(1, 8).bfloat16()).sum().backward()
    assert seen.table()["% sums lost"].max() > 10
    found(seen, "gradients in 16 bits, summed over passes", "likely")
    model, average = network(), {name: weight.bfloat16() for name, weight in network().state_dict().items()}
    optimizer, targets = sgd(model), [1.5 * kept for kept in average.values()]
    targets[1][0] = 5
    with watch(model, optimizer, every=10, save=None) as seen:
        for _ in range(40):
            train(model, optimizer)
            for kept, target in zip(average.values(), targets):
                kept.mul_(0.998).add_(target, alpha=0.002)
    found(seen, "a copy of the weights in 16 bits", "certain")


def test_a_checkpoint_that_became_the_weights_is_no_copy_of_them():
    model = nn.Linear(24, 40)
    checkpoint = {name: weight.bfloat16() for name, weight in model.state_dict().items()}
    assert len(diagnose._copies(model)) == 1
    model.load_state_dict(checkpoint, assign=True)
    assert not diagnose._copies(model)


def test_an_output_in_16_bits_near_its_target_is_no_stored_number():
    model = nn.Linear(8, 64)
    with watch(model, sgd(model), save=None) as seen:
        for _ in range(3):
            with torch.autocast("cpu", BF16):
                output = model(torch.rand(16, 8)).float()
            F.mse_loss(output, output.detach() + 1e-4 * torch.rand(16, 64)).backward()
    assert not worst(seen.report), seen


def test_table_counts_what_is_lost():
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    nn.init.constant_(model[0].weight, 2.0)
    optimizer = sgd(model, lr=1e-3)
    weights = torch.tensor([1.0, 2.0**-26, 0.0, 2.0**-140])
    with watch(model, optimizer, save=None) as seen:
        (model(torch.ones(1, 4)) * weights).sum().backward()
        optimizer.step()
    row = seen.table().loc["0"]
    assert row["output headroom"] == pytest.approx(math.log2(65504 / 8))
    assert row["gradient headroom"] == pytest.approx(math.log2(65504))
    assert row[["% zero", "% 0 in fp16"]].tolist() == [25, 50]
    assert row["% updates lost"] == pytest.approx(200 / 3)
    assert row["update/weight"] == pytest.approx(1e-3 * 2 / 8, rel=1e-3)


def test_bad_passes_of_an_asynchronous_device_are_named_late():
    """As on a GPU: read once in `every` passes, when the step is done."""
    model = large(1e15)
    optimizer = sgd(model, lr=0.0)
    seen = watch(model, optimizer, None, every=5)
    seen.at_once = False
    with pytest.raises(NonFinite) as raised, seen:
        train(model, optimizer, factors=[0.0, 0.0, 1e30, 1.0, 1.0, 1.0, 1.0])
    assert seen.passes == 5 and raised.value.origin[:2] == ("forward", "2") and raised.value.path is None
    assert "pass 3, " in str(raised.value) and "every=1" in str(raised.value)


@pytest.mark.weekly
def test_memory_stays_and_records_are_thinned():
    seen = after(steps=300)
    records = seen.looks.records
    assert len(records) <= diagnose.RECORDS and records[-1][0] == 300
    hooks = seen.hooks
    assert not (hooks.labels or hooks.values or hooks.pending or seen.looks.before or seen.loss.region)
    assert len(seen.trend) <= 256 and len({id(labels) for _, labels, *_ in records}) <= 2


def test_most_passes_cost_a_number_a_gradient():
    """Counted, as times vary: the ops that a watched pass adds to a plain one."""

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.ops = getattr(self, "ops", 0) + (func.overloadpacket.__name__ != "detach")
            return func(*args, **kwargs or {})

    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(20)])
    optimizer = sgd(model)
    with Count() as plain:
        train(model, optimizer)
    with watch(model, optimizer, save=None):
        train(model, optimizer, factors=[1.0] * 2)
        with Count() as watched:
            train(model, optimizer)
    assert watched.ops - plain.ops <= len(list(model.parameters())) + 20


def test_fp16_buffers_are_looked_at_under_autocast_to_bf16():
    model = network(Op(lambda x: x / (1 - model.noise)))
    model.register_buffer("noise", torch.tensor([1.0], dtype=torch.float16))
    told = pytest.warns(RuntimeWarning, match="div made inf.* divides by 0")
    with told, watch(model, save=None, warn=True), torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(2, 8)).sum().backward()


def test_fused_momentum_is_told_before_a_first_step_that_may_be_skipped():
    model, scaler = network(), torch.amp.GradScaler("cpu")
    fused, plain = (torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=fused) for fused in (True, False))
    words = "the momentum of a fused SGD"
    assert words in str(audit(model, fused, scaler))
    assert words not in str(audit(model, fused)) and words not in str(audit(model, plain, scaler))
    model(torch.ones(2, 8)).sum().backward()
    fused.step()
    assert words not in str(audit(model, fused, scaler))


def test_plot_names_the_least_headroom():
    seen = after(steps=6, every=2)
    least = seen.table().filter(like="headroom").min(axis=None)
    figure = seen.plot()
    plt.close(figure)  # an open one would be seen by other tests
    assert f"{least:.1f} doublings" in figure.get_suptitle()
    with pytest.raises(ValueError, match="saw nothing"):
        watch(network()).plot()


def wide(x):
    """Overflows fp16 between two modules that do not."""
    return (x * 1e4 * 1e3) / 1e7


def test_bisect_keeps_the_fewest_modules():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(Op(wide), nn.Linear(8, 8)), nn.BatchNorm1d(8), nn.Dropout())
    before, batch = copy.deepcopy(model.state_dict()), torch.rand(16, 8)
    assert bisect(model, batch, squares, tolerance=0.05) == ["1.0"]
    assert all(torch.equal(model.state_dict()[name], each) for name, each in before.items())
    assert bisect(model, (batch,), squares, BF16, tolerance=0.05) == []
    assert bisect(model.bfloat16(), {"input": batch}, squares, tolerance=0.05) == ["1.0"]
    with pytest.raises(ValueError, match="in FP32 too"):
        bisect(model, batch, lambda output: output.sum() * math.nan)


RANKS = """
import faulthandler, sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from helpers.diagnose import NonFinite, audit, bisect, replay, watch

dist.init_process_group("gloo")
faulthandler.dump_traceback_later(30, exit=True)
rank = dist.get_rank()

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 1))  # one row: rank 1 has none

def stopped(model, name):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with watch(model, optimizer, every=4, save=f"{sys.argv[1]}/{name}.pt") as seen:
            for number in range(9):
                optimizer.zero_grad()
                x = torch.rand(4, 8)
                x = x * float("nan") if rank == 1 and number == 1 else x
                model(x).float().square().mean().backward()
                optimizer.step()
        print(name, "finished")
    except NonFinite as error:
        print(name, "passes", seen.passes, "|", error)

stopped(nn.parallel.DistributedDataParallel(network()), "ddp")
mesh = init_device_mesh("cpu", (2,))
model = network().bfloat16()
fully_shard(model[0], mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
fully_shard(model, mesh=mesh)
print(audit(model, torch.optim.SGD(model.parameters(), lr=0.1)))
model = fully_shard(network(), mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with watch(model, optimizer, every=2, save=None) as seen:
    for _ in range(4):
        model(torch.rand(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print("fsdp", seen.passes, seen.steps, sorted(seen.table().index), seen)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
cast = fully_shard(network(), mesh=mesh, mp_policy=policy)
with watch(cast, save=None) as seen:
    cast(torch.full((4, 8), 999.0)).float().square().mean().backward()
print(seen)
stopped(model, "fsdp")
if rank == 1:
    print(replay(f"{sys.argv[1]}/ddp_1.pt", network()))
dist.destroy_process_group()
"""


@pytest.mark.weekly
def test_two_processes_stop_together(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "ranks.py").write_text(RANKS)
    run = torchrun(tmp_path / "ranks.py", tmp_path, timeout=60)
    assert run.status == 0, f"{run}{run.errors}{run.message}"
    for text in run.printed:
        assert re.search(r"^ddp passes 4 .*rank 1: pass 2, .*in the input: args.0", text, re.MULTILINE), text
        assert re.search(r"^fsdp passes 4 .*rank 1: pass 2, .*in the input", text, re.MULTILINE), text
        assert "FSDP2 reduces gradients in 16 bits: param_dtype bfloat16" in text
        assert "without FP32 masters" in text
        assert "fsdp 4 4 ['0', '1', '2', '3']" in text
        assert "an input is bfloat16, up to 1,000, where neighbours are 4 apart" in text
    assert run.printed[1].endswith("in the input: args.0\n")


class WithAverage(nn.Module):
    """A network and an average of its weights, in one model."""

    def __init__(self, dtype):
        super().__init__()
        self.net = network()
        self.average = copy.deepcopy(self.net).to(dtype).requires_grad_(False)

    def forward(self, x):
        return self.net(x)

    @torch.no_grad()
    def follow(self):
        for kept, weight in zip(self.average.parameters(), self.net.parameters()):
            kept.lerp_(weight.to(kept.dtype), 0.001)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_an_average_may_be_a_part_of_the_model(dtype):
    model = WithAverage(dtype)
    optimizer = torch.optim.Adam(model.net.parameters(), lr=0.03)
    with watch(model, optimizer, every=10, save=None) as seen:
        for _ in range(60):
            train(model, optimizer, loss=lambda output: (output - 3).square().mean())
            model.follow()
    assert ("a copy of the weights in 16 bits" in str(seen)) == (dtype == BF16)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.value, self.out = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        q, v = self.query(x)[:, None], self.value(x)[:, None]
        return self.out(F.scaled_dot_product_attention(q, q, v))


@pytest.mark.parametrize("tokens", [5, 24])
def test_a_gradient_that_is_0_and_that_rounding_alone_would_make_is_no_underflow(tokens):
    """All tokens are alike, so attention's weights change nothing."""
    model = Attends()
    x = torch.rand(4, 1, 32).expand(4, tokens, 32)
    with watch(model, sgd(model), scaler(init_scale=2.0), save=None) as seen:
        for _ in range(3):
            with torch.autocast("cpu", torch.float16):
                loss = (model(x).square() * torch.rand(tokens, 1)).mean()
            seen.scaler.scale(loss).backward()
    assert "underflow" not in str(seen)


def test_of_two_optimizers_the_one_stepped_first_takes_no_norm_away():
    one, two, mine = network(), network(), scaler()
    both = nn.ModuleList([one, two])
    optimizers = [sgd(one, lr=1e-3), sgd(two, lr=1e-3)]
    with watch(both, optimizers, mine, every=1, save=None) as seen:
        for _ in range(3):
            both.zero_grad()
            x = torch.rand(4, 8)
            mine.scale((one(x) + two(x) / 100).square().mean()).backward()
            for optimizer in optimizers:
                mine.step(optimizer)
            mine.update()
    assert "between backward and unscale_" not in str(seen)


def test_an_unscale_that_is_refused_has_divided_nothing():
    model, mine = network(), scaler()
    optimizer = sgd(model)
    with pytest.raises(RuntimeError, match="already been called"), watch(model, optimizer, mine, save=None) as seen:
        for _ in range(2):
            mine.scale(squares(model(torch.rand(4, 8)))).backward()
            mine.unscale_(optimizer)
    found(seen, "a backward adds scaled gradients", "certain")
    assert "unscaled already" not in str(seen)


def test_an_error_of_dtypes_names_weights_that_were_cast_meanwhile():
    model = network()
    with pytest.raises(RuntimeError) as caught, watch(model, sgd(model), save=None):
        model(torch.rand(4, 8)).sum().backward()
        model.bfloat16()  # as for a file
        model(torch.rand(4, 8))
    assert "Weights were cast since the watch began: 0.weight is bfloat16" in caught.value.__notes__[0]


def test_no_inf_checks_names_the_weights_without_a_gradient():
    maker, critic, mine = network(), network(), scaler()
    both = nn.ModuleDict({"maker": maker, "critic": critic})
    with pytest.raises(AssertionError) as caught, watch(both, [sgd(maker), sgd(critic)], mine, save=None) as seen:
        mine.scale(squares(critic(maker(torch.rand(4, 8)).detach()))).backward()
        mine.step(seen.optimizers[0])
    assert "Without a gradient: maker.0, maker.2; a detach?" in caught.value.__notes__[0]


def test_an_evaluation_alone_is_no_forward_that_was_not_seen():
    model = network().eval()
    with torch.no_grad(), watch(model, save=None) as seen:
        model(torch.rand(4, 8))
    found(seen, "saw nothing of backward", "note")
