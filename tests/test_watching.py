"""How a model may be built and run while `watch` looks on, and what it leaves as it was."""

import math
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from halfbits import NonFinite, audit, watch
from halfbits._looks import RECORDS, _copies, _Looks
from halfbits._tensors import _together
from helpers.launch import torchrun
from tests.small_runs import (
    BF16,
    FP16,
    Op,
    after,
    found,
    large,
    network,
    saturated,
    scaler,
    sgd,
    squares,
    stopped,
    train,
    worst,
)

ROOT = Path(__file__).resolve().parent.parent


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
    assert [number for number, *_ in seen.looks.records] == [1, 3, 5]
    assert list(seen.table().index) == ["0", "1", "2", "3"] and set(seen.table().dtype) == {"float16"}


def test_numbers_from_several_devices_are_one_tensor_on_one():
    together = _together([torch.ones(()), torch.ones((), device="meta")], torch.device("meta"))
    assert together.device.type == "meta" and together.shape == (2,)


def test_warns_once_and_goes_on():
    model = network()
    with warnings.catch_warnings(record=True) as said, watch(model, save=None, warn=True) as seen:
        warnings.simplefilter("always")
        train(model, sgd(model), None, [1.0, math.nan, math.nan])
    assert seen.passes == 3 and len(said) == 1 and "pass 2" in str(said[0].message)


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
    saved = torch.load(error.path, weights_only=False)
    assert saved["state"].keys() == network().state_dict().keys()


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


@pytest.fixture
def one_process(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


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
    monkeypatch.setattr(_Looks, "output", lambda *_: 1 / 0)
    with pytest.warns(RuntimeWarning, match="watch stopped: ZeroDivisionError"), watch(model, optimizer) as seen:
        train(model, optimizer, factors=[1.0] * 3)
    found(seen, "watch stopped: ZeroDivisionError: division by zero", "note")


def test_fsdp2_in_fp16_without_a_scaler(one_process):
    for dtype, broken in ((FP16, True), (BF16, False)):
        model = fully_shard(network(), mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
        report = audit(model, sgd(model))
        assert report.findings.what.str.contains("FSDP2 computes in fp16, and nothing scales").any() == broken
        assert "FSDP2 computes in fp16" not in str(audit(model, sgd(model), scaler()))


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


def test_a_checkpoint_that_became_the_weights_is_no_copy_of_them():
    model = nn.Linear(24, 40)
    checkpoint = {name: weight.bfloat16() for name, weight in model.state_dict().items()}
    assert len(_copies(model)) == 1
    model.load_state_dict(checkpoint, assign=True)
    assert not _copies(model)


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
    assert len(records) <= RECORDS and records[-1][0] == 300
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


RANKS = """
import faulthandler, torch, torch.distributed as dist
from pathlib import Path
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from halfbits import NonFinite, audit, watch

dist.init_process_group("gloo")
faulthandler.dump_traceback_later(30, exit=True)
rank = dist.get_rank()

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 1))  # one row: rank 1 has none

def stopped(model, name):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with watch(model, optimizer, every=4, save=f"{Path(__file__).parent}/{name}.pt") as seen:
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
dist.destroy_process_group()
"""


@pytest.mark.weekly
def test_two_processes_stop_together(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "ranks.py").write_text(RANKS)
    run = torchrun(tmp_path / "ranks.py", timeout=60)
    assert run.status == 0, f"{run}{run.errors}{run.message}"
    for text in run.printed:
        assert re.search(r"^ddp passes 4 .*rank 1: pass 2, .*in the input: args.0", text, re.MULTILINE), text
        assert re.search(r"^fsdp passes 4 .*rank 1: pass 2, .*in the input", text, re.MULTILINE), text
        assert "FSDP2 reduces gradients in 16 bits: param_dtype bfloat16" in text
        assert "without FP32 masters" in text
        assert "fsdp 4 4 ['0', '1', '2', '3']" in text
        assert "an input is bfloat16, up to 1,000, where neighbours are 4 apart" in text
    saved = torch.load(tmp_path / "ddp_1.pt", weights_only=False)
    assert saved["origin"].phase == "input" and "3.weight" in saved["state"]


def test_an_evaluation_alone_is_no_forward_that_was_not_seen():
    model = network().eval()
    with torch.no_grad(), watch(model, save=None) as seen:
        model(torch.rand(4, 8))
    found(seen, "saw nothing of backward", "note")
