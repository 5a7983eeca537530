"""A run under `watch` is the run without it: the same losses to the bit, exceptions, pickles and copies."""

import copy
import gc
import io
import pickle
import re
import threading
import warnings
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call, grad, jvp, stack_module_state, vmap
from torch.nn import functional as F
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from halfbits import audit, watch

FP16, BF16 = torch.float16, torch.bfloat16
KINDS = {}


def kind(function):
    """A run: it takes what is put around its loop, and returns tensors, numbers, bytes and words to compare."""
    KINDS[function.__name__] = function
    return function


def network(*more):
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), *more, nn.Linear(16, 8))


def batches(steps=5, rows=6):
    return [torch.randn(rows, 8, generator=torch.Generator().manual_seed(step)) for step in range(steps)]


def train(around, model, optimizer=None, scaler=None, dtype=BF16, call=None, loss=None, inputs=None):
    """An ordinary loop: the losses, the weights, and the state of optimizer and scaler."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-2)
    mine = scaler or torch.amp.GradScaler("cpu", enabled=False)
    call, loss = call or model, loss or (lambda output, x: F.mse_loss(output.float(), x))
    losses = []
    with around(model, optimizer, scaler):
        for x in inputs or batches():
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                made = loss(call(x), x)
            mine.scale(made).backward()
            mine.step(optimizer)
            mine.update()
            losses.append(made.detach())
    return [*losses, *model.state_dict().values(), repr(optimizer.state_dict()), repr(mine.state_dict())]


@kind
def float32(around):
    return train(around, network(nn.Dropout()), dtype=None)


@kind
def fp16_that_overflows_under_a_scaler(around):
    model = network(nn.BatchNorm1d(16), nn.Dropout())
    return train(around, model, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**30), dtype=FP16, inputs=batches(20))


@kind
def fused_steps_under_a_scaler(around):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    return train(around, model, optimizer, torch.amp.GradScaler("cpu", init_scale=2.0**30), FP16, inputs=batches(20))


@kind
def weights_in_bf16(around):
    model = network().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return train(around, model, optimizer, dtype=None, call=lambda x: model(x.bfloat16()))


@kind
def convolutions_channels_last(around):
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(64, 8))
    model = model.to(memory_format=torch.channels_last)
    return train(around, model, call=lambda x: model(x[:, None, :, None].expand(-1, -1, -1, 1)))


@kind
def an_lstm(around):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.lstm, self.out = nn.Embedding(8, 8, sparse=True), nn.LSTM(8, 16, 2), nn.Linear(16, 8)

        def forward(self, x):
            hidden, _ = self.lstm(self.words((x.abs() * 7).long() % 8))
            return self.out(hidden).mean(1)

    model = Words()
    return train(around, model, torch.optim.SGD(model.parameters(), 0.1))


@kind
def attention_in_training_and_on_its_fast_path(around):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)
    found = train(around, model, call=lambda x: model(x[None])[0])
    model.eval()
    mask = torch.tensor([[False] * 6, [False] * 3 + [True] * 3])
    x = torch.stack(batches(2))
    with around(model, None, None), torch.no_grad():
        found.append(model(x, src_key_padding_mask=mask))
        with torch.autocast("cpu", BF16):
            found.append(model(x))
            try:
                model(x, src_key_padding_mask=mask)
            except RuntimeError as error:
                found.append(repr(error))
    return found


@kind
def an_ensemble_under_vmap(around):
    members = [network() for _ in range(3)]
    weights, buffers = stack_module_state(members)
    model, optimizer, losses = copy.deepcopy(members[0]), torch.optim.AdamW(weights.values(), 1e-2), []
    ensemble = vmap(lambda w, b, x: functional_call(model, (w, b), (x,)), in_dims=(0, 0, None))
    with around(model, optimizer, None):
        for x in batches():
            optimizer.zero_grad()
            with torch.autocast("cpu", BF16):
                loss = F.mse_loss(ensemble(weights, buffers, x).float(), x.expand(3, 6, 8))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return [*losses, *weights.values()]


@kind
def per_sample_gradients_and_a_forward_derivative(around):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights, x):
        return functional_call(model, weights, (x[None],)).float().square().mean()

    with around(model, optimizer, None):
        for x in batches():
            with torch.autocast("cpu", BF16):
                found = vmap(grad(loss), in_dims=(None, 0))(weights, x)
            for name, weight in model.named_parameters():
                weight.grad = found[name].mean(0)
            optimizer.step()
        _, slope = jvp(model, (x,), (torch.ones_like(x),))
    return [*model.state_dict().values(), slope]


@kind
def an_inner_loop_with_gradients_of_gradients(around):
    model = network()
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    with around(model, optimizer, None):
        for x in batches():
            optimizer.zero_grad()
            weights = dict(model.named_parameters())
            inner = functional_call(model, weights, (x,)).square().mean()
            slopes = torch.autograd.grad(inner, [*weights.values()], create_graph=True)
            fast = {name: weight - 0.1 * slope for (name, weight), slope in zip(weights.items(), slopes)}
            loss = functional_call(model, fast, (x,)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return [*losses, *model.state_dict().values()]


@kind
def complex_numbers(around):
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(5, 5, dtype=torch.complex64), nn.Linear(5, 8)

        def forward(self, x):
            return self.second(self.first(torch.fft.rfft(x)).abs())

    return train(around, Complex(), dtype=None)


@kind
def scripted_and_traced(around):
    first = train(around, torch.jit.script(network()))
    return first + train(around, torch.jit.trace(network(), torch.ones(2, 8)))


@kind
def traced_and_exported_meanwhile(around):
    model, x = network(), torch.ones(2, 8)
    with around(model, None, None):
        model(x).sum().backward()
        traced = torch.jit.trace(model, x)
        exported = torch.export.export(model, (x,))
    return [traced(x), exported.module()(x), re.sub("mangle_[0-9]+", "", str(traced.graph)), str(exported.graph)]


@kind
def lazy_layers(around):
    model = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(8))
    return train(around, model, torch.optim.AdamW(model.parameters(), 1e-2), torch.amp.GradScaler("cpu"), FP16)


@kind
def weights_on_meta(around):
    model = network()
    model[2].to("meta")
    return train(around, model, torch.optim.SGD(model.parameters(), 0.1))


@kind
def nested_and_jagged_tensors(around):
    found = []
    for layout in (torch.strided, torch.jagged):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with around(model, optimizer, None):
            for x in batches():
                optimizer.zero_grad()
                output = model(torch.nested.nested_tensor([x[:2], x[2:]], layout=layout, requires_grad=True))
                output.to_padded_tensor(0.0).square().mean().backward()
                optimizer.step()
        found += model.state_dict().values()
    return found


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x):
        output = self.net(x)
        return output, F.mse_loss(output.float(), x)


@kind
def compiled_with_an_output_that_is_not_used(around):
    torch.compiler.reset()
    model = torch.compile(TwoOutputs(), backend="aot_eager")
    return train(around, model, loss=lambda output, x: output[1])


@kind
def a_loss_and_a_layer_that_are_compiled(around):
    torch.compiler.reset()
    loss = torch.compile(lambda output, x: (output.float() - x).square().mean(), backend="aot_eager")
    first = train(around, network(), loss=loss)
    model = network()
    model[2].compile(backend="aot_eager")
    return first + train(around, model)


@kind
def compiled_while_it_is_watched(around):
    torch.compiler.reset()
    model, compiled = network(), []

    def call(x):
        compiled.append(compiled[0] if compiled else torch.compile(model, backend="aot_eager"))
        return compiled[0](x)

    return train(around, model, call=call)


@kind
def fsdp2(around):
    model = network()
    fully_shard(model[0], mp_policy=MixedPrecisionPolicy(BF16, torch.float32))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, torch.float32))
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
    with around(model, optimizer, None):
        for x in batches():
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return [*losses, *(weight.to_local() for weight in model.parameters())]


@kind
def ddp(around):
    return train(around, nn.parallel.DistributedDataParallel(network()))


@kind
def data_parallel(around):
    return train(around, nn.DataParallel(network()))


@kind
def tied_weights_and_parametrizations(around):
    model = network(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)))
    nn.utils.parametrizations.weight_norm(model[0])
    model[0].bias = model[3].bias
    return train(around, model)


@kind
def checkpointed(around):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = network(nn.Dropout()), network(nn.Dropout())

        def forward(self, x):
            x = checkpoint(self.first, x, use_reentrant=False)
            return checkpoint(self.second, x, use_reentrant=True)

    return train(around, Twice())


@kind
def closures(around):
    found = []
    for make in (lambda w: torch.optim.LBFGS(w, 0.1), lambda w: torch.optim.SGD(w, 0.1, momentum=0.9)):
        model = network()
        optimizer = make(model.parameters())
        with around(model, optimizer, None):
            for x in batches():

                def closure(x=x, model=model, optimizer=optimizer):
                    optimizer.zero_grad()
                    loss = model(x).square().mean()
                    loss.backward()
                    return loss

                found.append(optimizer.step(closure).detach())
        found += model.state_dict().values()
    return found


@kind
def steps_within_the_backward(around):
    model = network()
    each = {weight: torch.optim.SGD([weight], 0.1) for weight in model.parameters()}

    def step(weight):
        each[weight].step()
        each[weight].zero_grad()

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(step)
    losses = []
    with around(model, None, None):
        for x in batches():
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
    return [*losses, *model.state_dict().values()]


@kind
def a_gan_with_a_penalty_under_two_watches(around):
    maker, critic = network(), network()
    first, second = torch.optim.Adam(maker.parameters()), torch.optim.Adam(critic.parameters())
    losses = []
    with around(maker, first, None), around(critic, second, None):
        for x in batches():
            made = maker(torch.randn(6, 8))
            point = made.detach().requires_grad_()
            (slope,) = torch.autograd.grad(critic(point).sum(), point, create_graph=True)
            loss = critic(made.detach()).mean() - critic(x).mean() + (slope.norm(dim=1) - 1).square().mean()
            second.zero_grad()
            loss.backward()
            second.step()
            first.zero_grad()
            (-critic(made).mean()).backward()
            first.step()
            losses.append(loss.detach())
    return [*losses, *maker.state_dict().values(), *critic.state_dict().values()]


@kind
def evaluation_and_inference(around):
    model = network(nn.BatchNorm1d(16)).eval()
    with around(model, None, None):
        with torch.no_grad():
            found = [model(x) for x in batches()]
        with torch.inference_mode(), torch.autocast("cpu", BF16):
            found += [model(x) for x in batches()]
        found += [model(x).detach() for x in batches()]  # with a graph that nobody uses
    return found


@kind
def modes_of_the_run_s_own(around):
    ran = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(str(func))
            return func(*args, **kwargs or {})

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with around(model, optimizer, None):
        for number, x in enumerate(batches()):
            with FlopCounterMode(display=False) if number % 2 else Mode():
                output = model(x)
            mode = Mode()
            mode.__enter__()
            output.square().mean().backward()
            optimizer.step()
            model(x)
            mode.__exit__(None, None, None)
            optimizer.zero_grad()
    return [*model.state_dict().values(), [name for name in ran if "aminmax" in name]]


@kind
def anomalies_and_saved_tensors_are_looked_for(around):
    model = network()
    packed = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
    with torch.autograd.detect_anomaly(check_nan=True), packed:
        return train(around, model)


@kind
def a_function_of_its_own(around):
    class Half(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=BF16)
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, gradient):
            return gradient * 2

    model = network()
    return train(around, model, call=lambda x: Half.apply(model(x)))


@kind
def other_defaults(around):
    torch.set_default_dtype(torch.float64)
    try:
        return train(around, network(), dtype=None, inputs=[x.double() for x in batches()])
    finally:
        torch.set_default_dtype(torch.float32)


@kind
def errors_of_the_run(around):
    found = []

    def raises(_):
        raise ValueError("mine")

    class Fails(nn.Module):
        def __init__(self, where):
            super().__init__()
            self.net, self.where = network(), where

        def forward(self, x):
            output = self.net(x)
            if self.where == "forward":
                raises(x)
            if self.where == "backward":
                output.register_hook(raises)
            return output

    for where in ("forward", "backward", "step"):
        model = Fails(where)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if where == "step":
            optimizer.register_step_pre_hook(lambda *_: raises(None))
        try:
            train(around, model, optimizer)
        except ValueError as error:
            found.append((repr(error), getattr(error, "__notes__", None)))
    return found


@kind
def copied_and_pickled_meanwhile(around):
    model = network(nn.BatchNorm1d(16))
    optimizer, scaler, found = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu"), []

    def loss(output, x):
        file = io.BytesIO()
        torch.save(model, file)
        copied = copy.deepcopy(model)
        with torch.no_grad():
            copied[0].weight.fill_(float("nan"))
        copied(x)
        found.extend(
            [file.getvalue(), pickle.dumps(scaler.state_dict()), sorted(vars(copied[0])), len(pickle.dumps(model))]
        )
        found.append([len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()])
        copy.deepcopy(optimizer)
        copy.deepcopy(scaler)
        return F.mse_loss(output.float(), x)

    return train(around, model, optimizer, scaler, FP16, loss=loss) + found


@kind
def averages(around):
    model = network()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))

    def loss(output, x):
        average.update_parameters(model)
        with torch.no_grad():
            average(x)
        return F.mse_loss(output.float(), x)

    return [*train(around, model, loss=loss), *average.state_dict().values()]


@kind
def threads(around):
    model, found = network(), []
    with around(model, None, None):
        workers = [threading.Thread(target=lambda x=x: found.append(float(model(x).sum()))) for x in batches()]
        for worker in workers:
            worker.start()
            worker.join()
        model(batches()[0]).sum().backward()
    return found + [weight.grad for weight in model.parameters()]


@kind
def accelerate(around):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
    losses = []
    with around(model, optimizer, None):
        for x in batches():
            loss = F.mse_loss(model(x), x)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return [*losses, *model.state_dict().values()]


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, number):
        return {"x": torch.randn(8, generator=torch.Generator().manual_seed(number))}


@kind
def transformers_trainer(around):
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network(nn.Dropout())

        def forward(self, x):
            output = self.net(x)
            return {"loss": F.mse_loss(output.float(), x), "logits": output}

    model = Model()
    options = {"bf16": True, "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "seed": 0}
    arguments = TrainingArguments("unused", max_steps=5, per_device_train_batch_size=4, logging_steps=1, **options)
    trainer = Trainer(model, arguments, train_dataset=Rows())
    with around(model, None, None):
        trainer.train()
    return [row.get("loss") for row in trainer.state.log_history] + [*model.state_dict().values()]


@kind
def lightning(around):
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = network(nn.Dropout()), []

        def training_step(self, batch, number):
            loss = F.mse_loss(self.net(batch["x"]).float(), batch["x"])
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    model = Model()
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
    }
    trainer = lightning.Trainer(accelerator="cpu", precision="bf16-mixed", max_steps=5, **quiet)
    with around(model, None, None):
        trainer.fit(model, torch.utils.data.DataLoader(Rows(), batch_size=4))
    return [*model.losses, *model.state_dict().values()]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def outcome(run, around):
    """What a run gives, or how it ends, and where it leaves the random numbers."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = run(around)
        except Exception as error:
            found = [type(error).__name__, str(error)]
    said = sorted({f"{each.category.__name__}: {each.message}" for each in said})
    return [*found, torch.get_rng_state(), said]


def hung_up():
    """All that hangs in PyTorch."""
    hooks = [modules._global_forward_hooks, modules._global_forward_pre_hooks]
    hooks += [modules._global_forward_hooks_always_called, modules._global_forward_hooks_with_kwargs]
    hooks += [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
    functions = [torch.autograd.backward, torch.compile, torch.amp.GradScaler.step]
    return [*map(len, hooks), *functions, len(_get_current_dispatch_mode_stack())]


def compare(run, **options):
    """The watches of a run, after it was found to be the same as without one."""
    watches = []

    @contextmanager
    def around(*arguments):
        seen = watch(*arguments, save=None, **options)
        watches.append(seen)
        with seen:
            yield

    for _ in range(2):  # some warnings come only once
        torch.compiler.reset()
        bare = outcome(run, lambda *_: nullcontext())
    torch.compiler.reset()
    before = hung_up()
    watched = outcome(run, around)
    assert hung_up() == before
    assert len(bare) == len(watched)
    for one, other in zip(bare, watched):
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype and torch.equal(one, other)
        else:
            assert one == other
    return watches


@pytest.mark.parametrize("name", KINDS)
def test_a_run_under_watch_is_the_run_without_it(name, one_process):
    for seen in compare(KINDS[name], every=2):
        assert not seen.boundary.closed, seen
        assert name == "weights_in_bf16" or "certain" not in set(seen.findings.severity), seen
        str(seen), seen.table(), seen.history()


def test_audit_changes_nothing():
    model = network(nn.BatchNorm1d(16))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    states = [model.state_dict(), optimizer.state_dict()]
    before = copy.deepcopy(states)
    audit(model, optimizer)
    assert str(before) == str(states)


@pytest.mark.parametrize(
    "broken", ["enter", "leave", "before_backward", "after_backward", "before_step", "_begin_look"]
)
def test_an_error_of_its_own_ends_the_looking_and_not_the_run(broken, monkeypatch):
    monkeypatch.setattr(watch, broken, lambda *_, **__: 1 / 0)
    [seen] = compare(float32)
    assert "watch has stopped looking at" in str(seen) and "ZeroDivisionError: division by zero" in str(seen)
    assert seen.report.verdict.startswith("Verdict: none.") and "nothing wrong" not in str(seen)


def test_an_error_in_an_operation_s_look_leaves_the_operation_alone(monkeypatch):
    monkeypatch.setattr("halfbits._ops.Operations._look", lambda *_: 1 / 0)
    [seen] = compare(float32)
    assert "watch has stopped looking at operations" in str(seen)


def test_nothing_is_alive_after_it():
    model = network()
    with watch(model, save=None) as seen:
        for x in batches():
            model(x).square().mean().backward()
    gone, there = weakref.ref(model), weakref.ref(x)
    del seen, model, x
    gc.collect()
    assert gone() is None and there() is None


def test_nothing_is_kept_from_step_to_step():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    counts = []
    with watch(model, optimizer, every=10, save=None):
        for step in range(3000):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            if step in (1999, 2999):
                gc.collect()
                counts.append(len(gc.get_objects()))
    assert counts[1] < counts[0] + 1000, counts
