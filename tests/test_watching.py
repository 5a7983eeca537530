"""What `watch` finds in runs that are broken, each beside a sound twin, and what it says of what it saw."""

import contextlib
import copy
import math

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from halfbits import NonFinite, watch
from halfbits._ops import Operations
from tests.small_runs import BF16, FP16, Op, after, found, large, network, scaler, sgd, squares, stopped, train, worst


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    """Where anything is, as by another test, operations are not looked at."""
    torch.compiler.reset()


def test_a_sound_run_is_told_as_one():
    model, mine = network(nn.Dropout()), scaler()
    optimizer = sgd(model, momentum=0.9)
    with watch(model, optimizer, mine, every=2) as seen:
        train(model, optimizer, mine, [1.0] * 6, FP16)
    assert (seen.passes, seen.steps, seen.skipped) == (6, 6, 0)
    assert str(seen).splitlines() == [
        "Verdict: nothing wrong was found in 6 passes, computed in float16 under autocast to float16.",
        "Seen: 6 passes, 6 optimizer steps, 0 skipped. Looked at closely, operation by operation: pass 2, 4, 6.",
    ]
    table = seen.table()
    assert list(table.index) == ["", "0", "1", "2", "3"] and set(table.dtype) == {"float16"}
    assert {"output headroom", "gradient headroom", "weight gradient headroom", "% updates lost"} <= set(table.columns)
    assert set(seen.history().columns) == {"pass", "module", "what", "value"}


# Where a number that is not finite came from.


def root(x):
    """Its derivative at 0 is infinite, and 0 times infinity NaN."""
    return (0 * x).sqrt()


def half_a_square(output):
    wide = 1e3 * output.half()
    return (wide * wide).mean()


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize(
    "options, phase, module, words",
    [
        ({"model": large(), "dtype": FP16, "factors": [1e-3, 1e3]}, "forward", "2", "addmm made inf (float16)"),
        ({"model": network(Op(lambda x: x.log())), "factors": [1.0]}, "forward", "3", "its operand is negative at"),
        ({"factors": [1.0, math.nan]}, "input", "", "in the input: args.0"),
        ({"model": network(Op(root))}, "backward", "3", "its result (float32) is 0 at 32 of 32 places"),
        ({"loss": lambda output: root(output).sum()}, "loss", "", "that of sqrt made"),
        ({"loss": half_a_square}, "loss", "", "made inf"),
        ({"loss": lambda output: output.sum() / (output > 1e9).sum()}, "loss", "", "div"),
        ({"loss": lambda output: (0 * output.half()).log().mean()}, "loss", "", "is 0 at 32 of 32 places"),
        ({"loss": lambda output: (-output.abs()).log().mean()}, "loss", "", "log"),
        ({"loss": lambda output: (1e5 * output.abs()).exp().mean()}, "loss", "", "exp"),
    ],
)
def test_the_first_number_that_is_not_finite_is_placed(options, phase, module, words, every):
    options = dict(options)
    model = copy.deepcopy(options.pop("model", network()))
    mine = scaler() if options.get("dtype") == FP16 else None
    factors = [1e-3] * 3 + options.pop("factors", [1.0])  # of every=100 the look is over by then
    error, seen = stopped(model, None, mine, every=every, factors=factors[-2 if every == 1 else 0 :], **options)
    assert error.origin[:2] == (phase, module) and words in str(error), error
    assert str(error).rstrip(".") in str(seen)


def test_an_overflow_in_the_loss_leads_to_its_case():
    error, _ = stopped(network(), loss=half_a_square)
    assert error.case == "Loss is inf but every output is finite", error


def test_weights_that_a_step_has_spoilt_are_told():
    model = network().half()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(NonFinite, match=r"in the weights already \(a step made them so"), watch(model, save=None):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.rand(4, 8).half()).float().mean().backward()
            optimizer.step()


def test_a_run_that_diverges_is_not_sent_to_a_case():
    model = network()
    error, _ = stopped(model, sgd(model, lr=50.0), scaler(enabled=False), factors=[1.0] * 60, dtype=BF16)
    assert "The loss had grown from" in str(error) and error.case == ""


def test_a_mask_may_hold_minus_infinity():
    def masked(x):
        mask = torch.zeros(8).masked_fill(torch.arange(8) > 5, -math.inf)
        return (x + mask).softmax(-1)

    seen = after(4, model=network(Op(masked)))
    assert not worst(seen.report)
    seen = after(
        4,
        model=network(Op(lambda x: x + torch.zeros(8).masked_fill(torch.arange(8) > 5, -math.inf))),
        loss=lambda y: y.softmax(-1)[:, 0].sum(),
    )
    assert not worst(seen.report)


def test_with_warn_it_goes_on_and_keeps_the_problem():
    model = network()
    with watch(model, save=None, warn=True) as seen:
        train(model, sgd(model), None, [1.0, math.nan, math.nan])
    assert isinstance(seen.problem, NonFinite) and "pass 2" in str(seen.problem)
    assert seen.report.verdict.startswith("Verdict, certain: pass 2")


def test_what_was_saved_can_be_done_again(tmp_path):
    error, _ = stopped(large(), None, scaler(), factors=[1e-3, 1e3], dtype=FP16, save=tmp_path / "bad.pt")
    saved = torch.load(error.path, weights_only=False)
    again = network()
    again.load_state_dict(saved["state"])
    (args, kwargs), setting = saved["batch"], saved["autocast"]
    with torch.autocast(**setting):
        assert not again(*args, **kwargs).isfinite().all()


def test_nan_in_an_evaluation():
    model = network(nn.BatchNorm1d(8)).eval()
    model[3].running_var.fill_(math.nan)
    with pytest.raises(NonFinite, match="in the weights already"), torch.no_grad(), watch(model, save=None):
        model(torch.rand(4, 8))


# A scaler.


class Run:
    def __init__(self, dtype=FP16):
        self.model, self.mine, self.dtype = network(), scaler(init_scale=1024.0), dtype
        self.optimizer = sgd(self.model, lr=1e-4)
        self.mine.scale(torch.ones(()))  # it is made ready
        self.steps, self.kept = 0, []

    def loss(self):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", self.dtype):
            return squares(self.model(torch.rand(4, 8)))

    def scaled(self):
        self.mine.scale(self.loss()).backward()

    def step(self):
        self.mine.step(self.optimizer)
        self.mine.update()


def not_scaled(run, broken):
    run.loss().backward() if broken else run.scaled()
    run.step()


def stepped_directly(run, broken):
    run.scaled()
    if not broken:
        run.mine.unscale_(run.optimizer)
    run.optimizer.step()
    run.mine._per_optimizer_states.clear()


def clipped_before(run, broken):
    run.scaled()
    if not broken:
        run.mine.unscale_(run.optimizer)
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
    run.step()


def divided_by_hand(run, broken):
    run.scaled()
    for weight in run.model.parameters() if broken else ():
        weight.grad /= run.mine.get_scale()
    run.step()


def cleared(run, broken):
    run.loss().backward()
    if broken:
        run.optimizer.zero_grad(set_to_none=False)
    run.optimizer.step()


def none_left(run, broken):
    run.loss().backward()
    if broken:
        run.optimizer.zero_grad()
    run.optimizer.step()


def turned(run, broken):
    run.scaled()
    run.mine.unscale_(run.optimizer)
    for weight in run.model.parameters() if broken else ():
        weight.grad.neg_()
    run.step()


# What rounding takes.


def counted(run, broken):
    """A count in 16 bits that stops."""
    not_scaled(run, False)
    total = getattr(run, "total", torch.full((), 250.0, dtype=BF16 if broken else torch.float32))
    run.total = total
    for _ in range(10):
        total += 1


def averaged(run, broken):
    """An average of the weights, in 16 bits, in place."""
    not_scaled(run, False)
    kept = getattr(
        run, "average", [weight.detach().to(BF16 if broken else torch.float32) for weight in run.model.parameters()]
    )
    run.average = kept
    with torch.no_grad():
        for average, weight in zip(kept, run.model.parameters()):
            average.mul_(0.999).add_(weight.to(average.dtype), alpha=0.001)


def averaged_together(run, broken):
    """The same with one call for all."""
    not_scaled(run, False)
    kept = getattr(
        run, "average", [weight.detach().to(BF16 if broken else torch.float32) for weight in run.model.parameters()]
    )
    run.average = kept
    torch._foreach_mul_(kept, 0.999)


def positions(run, broken):
    not_scaled(run, False)
    torch.arange(1000).to(BF16 if broken else torch.float32)


def running_positions(run, broken):
    not_scaled(run, False)
    torch.ones(2, 600, dtype=BF16 if broken else torch.float32).cumsum(1)


def angles(run, broken):
    not_scaled(run, False)
    torch.linspace(900, 1000, 9).to(BF16 if broken else torch.float32).sin()


def chosen(run, broken):
    not_scaled(run, False)
    (1 + torch.rand(64, 100) / 50).to(BF16 if broken else torch.float32).argmax(1)


def hidden(run, broken):
    def steep(x):
        return (x * (6e4 if broken else 1) * (20 if broken else 1)).sigmoid()

    run.model[1] = Op(steep)
    not_scaled(run, False)


def offset(run, broken):
    run.model[2].bias.data = torch.full((8,), 300.0 if broken else 0.1)
    run.model[2].weight.data.mul_(0.01 if broken else 1)
    not_scaled(run, False)


def in_eight_bits(run, broken):
    not_scaled(run, False)
    values = torch.rand(64, 8) * (1e-4 if broken else 1.0)
    values.to(torch.float8_e4m3fn)


def left_over(run, broken):
    """Gradients are cleared only after a step that was taken."""
    with torch.autocast("cpu", run.dtype):
        loss = squares(run.model(torch.rand(4, 8)))
    run.mine.scale(loss * (1e30 if run.steps == 1 else 1)).backward()
    run.steps += 1
    before = run.mine.get_scale()
    run.step()
    if not (broken and run.mine.get_scale() < before):
        run.optimizer.zero_grad()


def several_scalers(run, broken):
    if broken:
        run.mine = scaler(init_scale=1024.0)
        run.kept.append(run.mine)
    run.scaled()
    run.step()


def replaced(run, broken):
    not_scaled(run, False)
    if broken:
        run.model[0].weight = nn.Parameter(run.model[0].weight.detach().clone())


def probabilities(run, broken):
    not_scaled(run, False)
    logits = torch.randn(16, 50).to(BF16 if broken else torch.float32)
    logits.log_softmax(-1).gather(1, torch.zeros(16, 1, dtype=torch.long))


@pytest.mark.parametrize(
    "step, words, severity",
    [
        (not_scaled, "steps the loss was not multiplied by the scale", "certain"),
        (stepped_directly, "optimizer.step was called on gradients that are still scaled", "certain"),
        (clipped_before, "gradients are clipped to 0.05 while they are still scaled", "certain"),
        (divided_by_hand, "gradients are divided by the scale, 1,024, twice", "certain"),
        (cleared, "gradients are 0 at the step, and were not after the backward", "certain"),
        (none_left, "at the step no weight has a gradient, and none moves", "certain"),
        (turned, "gradients change their sign between backward and step", "certain"),
        (counted, "a sum in bfloat16 that has come to 256 takes up 0 for 1", "certain"),
        (averaged, "a decay by 0.999 leaves numbers in bfloat16 as they were", "certain"),
        (averaged_together, "a decay by 0.999 leaves numbers in bfloat16 as they were", "certain"),
        (positions, "whole numbers up to 999 were cast to bfloat16", "likely"),
        (running_positions, "cumsum in bfloat16 stands still", "certain"),
        (angles, "sin of bfloat16 up to 1,000, where neighbours are 4 apart", "certain"),
        (chosen, "argmax of rounded numbers (bfloat16) chooses among equal numbers", "likely"),
        (hidden, "mul made inf (float16)", "likely"),
        (offset, "the model's output is float16 up to 30", "likely"),
        (in_eight_bits, "of the numbers become 0, 0% are cut off", "likely"),
        (left_over, "the gradients of a skipped step are still there", "certain"),
        (several_scalers, "GradScalers were used one after the other", "certain"),
        (replaced, "the optimizer holds tensors that are no weights any more", "certain"),
        (probabilities, "log-probabilities are bfloat16", "likely"),
    ],
)
def test_a_broken_run_and_its_sound_twin(step, words, severity):
    for broken in (True, False):
        torch.manual_seed(0)
        run = Run()
        with watch(run.model, run.optimizer, run.mine, every=2, save=None) as seen:
            for _ in range(5):
                step(run, broken)
        if broken:
            found(seen, words, severity)
        else:
            assert not seen.findings.what.str.contains(words, regex=False).any(), seen
            sound = {cleared, none_left}  # for which there is no scaler, and it says so
            assert step in sound or not worst(seen.report), seen


@pytest.mark.parametrize("broken", [True, False])
def test_skipped_steps_are_routine_unless_no_scale_ends_them(broken):
    loss = (lambda output: root(output.float()).sum()) if broken else squares
    mine = scaler(init_scale=2.0**24)
    seen = after(8, FP16, mine, loss=loss)
    if broken:
        row = found(seen, "that of sqrt made", "certain")
        assert "8 of 8 steps were skipped" in row.what and row.case == "Loss scale falls in every step"
    else:
        found(seen, "gradients overflowed, as they do until the scale fits", "note")
    with pytest.raises(NonFinite, match="6 optimizer steps in a row were skipped"):
        model = network()
        with watch(model, save=None, patience=5):
            train(model, sgd(model), scaler(), [1.0] * 9, FP16, lambda output: root(output.float()).sum())


def test_a_region_of_autocast_around_all_steps():
    for around, broken in ((True, True), (False, False)):
        model = network()
        optimizer = sgd(model)
        with watch(model, optimizer, save=None) as seen, torch.autocast("cpu", BF16, enabled=around):
            for _ in range(3):
                with torch.autocast("cpu", BF16, enabled=not around) if not around else torch.enable_grad():
                    loss = squares(model(torch.rand(4, 8)))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert seen.findings.what.str.contains("one region of autocast spans steps").any() == broken, seen


def test_autocast_that_ends_before_the_model_is_called():
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer, save=None) as seen:
        for _ in range(3):
            with torch.autocast("cpu", BF16):
                x = torch.rand(4, 8)
            squares(model(x)).backward()
            optimizer.step()
    found(seen, "autocast is entered, and no module runs in it", "likely")


def test_autocast_for_another_network_and_within_a_wrapped_forward():
    """As beside a network that stays in float32; and as Accelerate does it, where the output is float32 again."""
    model, other = network(), network()
    with watch(model, save=None) as seen:
        for _ in range(2):
            with torch.autocast("cpu", BF16):
                other(torch.rand(4, 8))
            squares(model(torch.rand(4, 8))).backward()
    assert "autocast is entered" not in str(seen) and not worst(seen.report)
    assert "computed in float32 without autocast" in str(seen)
    plain_forward = model.forward
    model.forward = lambda x: torch.autocast("cpu", BF16)(plain_forward)(x).float()
    with watch(model, save=None) as seen:
        for _ in range(2):
            squares(model(torch.rand(4, 8))).backward()
    assert not worst(seen.report)
    assert "computed in bfloat16 and float32 under autocast to bfloat16." in str(seen)


def test_autocast_around_an_island_is_used():
    model = network()
    with watch(model, save=None) as seen:
        for _ in range(2):
            with torch.autocast("cpu", BF16), torch.autocast("cpu", enabled=False):
                loss = squares(model(torch.rand(4, 8)))
            loss.backward()
    assert not worst(seen.report), seen


def test_minus_infinity_that_a_part_before_has_made():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    model[0].weight.data.fill_(-1e5)
    told = pytest.raises(NonFinite, match=r"in the forward, in 1, whose input holds -inf \(args.0\)")
    with told, watch(model, save=None), torch.autocast("cpu", FP16):
        model[1](model[0](torch.rand(4, 8)))


def test_a_loss_of_another_network_is_none_of_this_one():
    model, other = network(), large(1e30)
    with watch(model, save=None) as seen:
        squares(model(torch.rand(4, 8))).backward()
        squares(other(torch.rand(4, 8))).backward()
    assert seen.problem is None and not worst(seen.report)
    with pytest.raises(NonFinite, match="in the loss"), watch(model, save=None):
        (squares(model(torch.rand(4, 8))) + squares(other(torch.rand(4, 8)))).backward()


def test_an_overflow_in_a_gradient_that_is_asked_for_is_none_of_the_loss():
    model = network()
    with watch(model, save=None, every=1) as seen:
        for _ in range(3):
            with torch.autocast("cpu", FP16):
                loss = squares(model(torch.rand(4, 8)))
            torch.autograd.grad(loss * 1e9, [*model.parameters()])
    assert not worst(seen.report), seen


def test_a_penalty_on_gradients_that_overflow_is_the_scaler_s_routine():
    """And what the generator's backward leaves in the critic is cleared before the critic's next step."""
    generator, critic = network(), network()
    model, mine = nn.ModuleDict({"generator": generator, "critic": critic}), scaler(init_scale=2.0**24)
    optimizers = [sgd(generator, lr=1e-5), sgd(critic, lr=1e-5)]
    with watch(model, optimizers, mine, save=None) as seen:
        for _ in range(25):
            optimizers[1].zero_grad()
            real = torch.rand(4, 8, requires_grad=True)
            with torch.autocast("cpu", FP16):
                judged = critic(real)
            (slope,) = torch.autograd.grad(mine.scale(judged.float().sum()), real, create_graph=True)
            penalty = (slope / mine.get_scale()).square().mean()
            mine.scale(judged.float().mean() + penalty).backward()
            mine.step(optimizers[1])
            optimizers[0].zero_grad()
            with torch.autocast("cpu", FP16):
                judged = critic(generator(torch.rand(4, 8)))
            mine.scale(judged.float().mean()).backward()
            mine.step(optimizers[0])
            mine.update()
    assert 5 < seen.skipped < 40 and not worst(seen.report), seen


def test_a_second_backward_is_the_run_s_own_error():
    model = network()
    with watch(model, save=None) as seen:
        loss = 2.0 * (model(torch.rand(4, 8)).sum() * torch.tensor(2.0))
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        squares(model(torch.rand(4, 8))).backward()
    assert seen.passes == 2 and not seen.boundary.closed


def test_a_forward_of_fake_tensors_on_a_gpu_that_is_not_there():
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.Linear(8, 8, device="cuda")
        with watch(model, save=None) as seen:
            model(torch.rand(4, 8, device="cuda"))
    assert not seen.boundary.closed


def test_gradients_of_skipped_steps_that_nothing_is_added_to():
    """Two networks under one scaler, with schedules of their own; and windows of two backwards, which overflow."""
    model, mine = nn.ModuleDict({"one": network(), "two": network()}), scaler(init_scale=2.0**20)
    optimizers = [sgd(model["one"], lr=1e-3), sgd(model["two"], lr=1e-4)]
    with watch(model, optimizers, mine, save=None) as seen:
        for _ in range(6):
            for name, optimizer in zip(model, optimizers):
                optimizer.zero_grad()
                for _ in range(2):
                    with torch.autocast("cpu", FP16):
                        loss = squares(model[name](torch.rand(4, 8)))
                    mine.scale(loss).backward()
                mine.step(optimizer)
            mine.update()
    assert 1 < seen.skipped < 12 and not worst(seen.report), seen


def test_masters_that_the_loop_keeps_are_no_steps_that_move_nothing():
    for copied in (True, False):
        model = network().bfloat16()
        masters = [weight.detach().float() for weight in model.parameters()]
        optimizer = torch.optim.SGD(masters, 1.0)
        with watch(model, optimizer, save=None) as seen:
            for _ in range(5):
                squares(model(torch.rand(4, 8).bfloat16())).backward()
                for master, weight in zip(masters, model.parameters()):
                    master.grad = weight.grad.float()
                optimizer.step()
                for master, weight in zip(masters, model.parameters()):
                    weight.data.copy_(master if copied else weight)
                    weight.grad = None
        assert seen.findings.what.str.contains("steps that move none of the weights").any() != copied, seen
        assert not (copied and worst(seen.report)), seen


def test_gradients_that_are_applied_unchecked():
    model, mine = network(), scaler(init_scale=2.0**40)
    with pytest.raises(NonFinite, match="were applied all the same, unchecked"), watch(model, save=None):
        for _ in range(2):
            with torch.autocast("cpu", FP16):
                loss = squares(model(torch.rand(4, 8)))
            mine.scale(loss).backward()
            with torch.no_grad():
                for weight in model.parameters():
                    weight -= 0.1 * weight.grad


def test_a_loop_that_scales_its_loss_itself_is_not_accused():
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer, save=None) as seen:
        for _ in range(3):
            with torch.autocast("cpu", FP16):
                loss = squares(model(torch.rand(4, 8)))
            (loss * 1024.0).backward()
            for weight in model.parameters():
                weight.grad /= 1024
            optimizer.step()
            optimizer.zero_grad()
    found(seen, "the loop multiplies its loss by 1,024 itself", "note")
    assert not worst(seen.report)


def test_a_schedule_that_goes_on_while_steps_are_skipped():
    model, mine = network(), scaler(init_scale=2.0**40)
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with watch(model, save=None) as seen:
        for _ in range(6):
            train(model, optimizer, mine, [1.0], FP16)
            schedule.step()
    found(seen, "the learning rate went on in", "likely")


@pytest.mark.parametrize(
    "options, words, severity",
    [
        ({"dtype": BF16, "mine": scaler()}, "bf16 autocast with a GradScaler", "likely"),
        ({"dtype": FP16}, "fp16 autocast without a GradScaler", "likely"),
        ({"model": network().bfloat16(), "loss": squares}, "updates that rounding takes away", "certain"),
    ],
)
def test_what_does_not_go_together(options, words, severity):
    model = options.get("model")
    if model is not None:
        model[0].register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
        options = options | {"lr": 1e-4}
    found(after(**options), words, severity)


def test_weights_that_no_optimizer_holds():
    model = network()
    for held, broken in ((model[0], True), (model, False)):
        optimizer = sgd(held)
        with watch(model, optimizer, save=None) as seen:
            train(model, optimizer, None, [1.0] * 4)
        assert seen.findings.what.str.contains("weights that no optimizer holds").any() == broken, seen


class Compensated(torch.optim.Optimizer):
    """SGD that adds what rounding took to the next step, if it is asked to."""

    def __init__(self, weights, compensates):
        super().__init__(weights, {"lr": 1e-3})
        self.compensates = compensates

    @torch.no_grad()
    def step(self):
        for weight in self.param_groups[0]["params"]:
            kept = self.state[weight].setdefault("kept", torch.zeros_like(weight, dtype=torch.float32))
            wanted = weight.float() + kept * self.compensates - 1e-3 * weight.grad.float()
            weight.copy_(wanted)
            kept.copy_(wanted - weight.float())


def test_an_optimizer_that_makes_up_for_rounding_is_not_accused():
    for compensates in (False, True):
        model = network().bfloat16()
        optimizer = Compensated(model.parameters(), compensates)
        with watch(model, optimizer, save=None) as seen:
            for _ in range(110):
                optimizer.zero_grad()
                squares(model(torch.rand(4, 8).bfloat16()) - 1).backward()
                optimizer.step()
        found(seen, "updates that rounding takes away", "note" if compensates else "certain")


class Cut(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.inner, self.head, self.spare, self.how = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), how

    def forward(self, x):
        if self.how == "no_grad":
            with torch.no_grad():
                return self.head(self.inner(x))
        inner = self.inner(x)
        return self.head(inner.detach() if self.how == "detach" else inner)


def test_weights_that_no_gradient_reaches():
    class Inner(Cut):
        def forward(self, x):
            with torch.no_grad():
                inner = self.inner(x)
            return self.head(inner)

    assert found(after(model=Inner("")), "weights that no gradient reaches", "certain")["where"] == "inner"
    assert "inner" in found(after(model=Cut("detach")), "weights that no gradient reaches", "likely")["where"]
    assert found(after(model=Cut("")), "weights that are not used", "note")["where"] == "spare"


def test_autocast_that_has_no_effect_is_told_by_the_dtypes():
    seen = after(3)
    assert "nothing wrong was found in 3 passes, computed in float32 without autocast." in str(seen)


def test_says_what_it_did_not_see():
    model = network()
    assert "It has not started" in str(watch(model))
    with watch(model) as seen:
        assert "Not seen: anything, as neither forward nor backward reached this model" in str(seen)
        model(torch.rand(4, 8))
    assert "Not seen: a backward" in str(seen)
    with watch(model) as seen:
        model(torch.rand(4, 8)).sum().backward()
    assert "Not seen: updates, as the optimizer took no step" in str(seen)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    with watch(compiled, save=None) as seen:
        train(compiled, sgd(model), None, [1.0] * 3)
    assert "Not seen: the inside of what is compiled (the model), operations, as torch.compile is used" in str(seen)
    assert seen.passes == 3 and seen.table()["update/weight"].notna().any()
    with pytest.raises(NonFinite, match="in 0: addmm made"), watch(compiled, save=None):  # uncompiled, it is repeated
        with torch.no_grad():
            model[0].weight.fill_(3e38)
        train(compiled, sgd(model), None, [1e3])
    torch.compiler.reset()


def test_steps_of_a_closure_are_measured_like_others():
    tables = []
    for closure in (False, True):
        model = network()
        optimizer = sgd(model)

        def backward(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = squares(model(torch.ones(4, 8)))
            loss.backward()
            return loss

        with watch(model, optimizer, save=None) as seen:
            for _ in range(4):
                if closure:
                    optimizer.step(backward)
                else:
                    backward()
                    optimizer.step()
        tables.append(seen.table())
    assert tables[0].equals(tables[1]) and tables[0]["update/weight"].max() > 0


def test_of_two_networks_each_has_its_own_table():
    maker, critic = network(), network()
    first, second = sgd(maker), sgd(critic)
    with watch(maker, first) as one, watch(critic, second) as two:
        for _ in range(3):
            made = maker(torch.rand(4, 8))
            second.zero_grad()
            squares(critic(made.detach())).backward()
            second.step()
            first.zero_grad()
            squares(critic(made)).backward()
            first.step()
    assert (one.passes, two.passes) == (3, 6)
    for seen in (one, two):
        assert {"0", "2"} <= set(seen.table().dropna().index) and not worst(seen.report)


def test_two_watches_do_not_look_at_each_other(monkeypatch):
    seen_by, look = [], Operations._look
    monkeypatch.setattr(Operations, "_look", lambda *args: seen_by.append(args[1].name()) or look(*args))
    model = network()
    optimizer = sgd(model)
    counts = []
    for watches in (1, 2):
        seen_by.clear()
        with contextlib.ExitStack() as stack:
            for _ in range(watches):
                stack.enter_context(watch(model, optimizer, save=None, every=1))
            train(model, optimizer, None, [1.0] * 3)
        counts.append(len(seen_by))
    assert counts[1] == counts[0] > 0  # one of them looks at operations


def test_numbers_of_a_device_that_is_read_late_are_judged_pass_by_pass():
    model = network()
    optimizer, seen = sgd(model), watch(model, every=4, save=None)
    seen.at_once = False  # as on a GPU
    with pytest.raises(NonFinite, match="pass 2") as raised, seen:
        train(model, optimizer, None, [1.0, math.nan, 1.0, 1.0, 1.0])
    assert "with every=1 it stops at once" in str(raised.value)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: watch(lambda x: x), "the first argument is a torch.nn.Module, and not a function"),
        (lambda: watch(network(), network().parameters()), "an optimizer is wanted"),
        (lambda: watch(network(), None, "fp16"), "the scaler is a torch.amp.GradScaler or None, and not 'fp16'"),
        (lambda: watch(network(), every=0), "every is the number of passes between two close looks"),
    ],
)
def test_what_cannot_be_watched_is_refused_in_a_sentence(call, words):
    with pytest.raises((TypeError, ValueError), match=words.replace(".", "[.]")):
        call()


def test_callbacks_watch_what_others_train(tmp_path, capsys):
    import lightning
    from transformers import Trainer, TrainingArguments

    from halfbits.callbacks import LightningWatch, TrainerWatch
    from tests.test_harmless import Rows

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x):
            output = self.net(x)
            return {"loss": F.mse_loss(output.float(), x), "logits": output}

        def training_step(self, batch, number):
            return self(batch["x"])["loss"]

        def configure_optimizers(self):
            return sgd(self)

    options = {"bf16": True, "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(str(tmp_path), max_steps=3, per_device_train_batch_size=4, **options)
    watching = TrainerWatch(save=None)
    Trainer(Model(), arguments, train_dataset=Rows(), callbacks=[watching]).train()
    assert (watching.seen.passes, watching.seen.steps) == (3, 3)

    watching = LightningWatch(save=None)
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
    }
    trainer = lightning.Trainer(accelerator="cpu", precision="bf16-mixed", max_steps=3, callbacks=[watching], **quiet)
    trainer.fit(Model(), torch.utils.data.DataLoader(Rows(), batch_size=4))
    assert (watching.seen.passes, watching.seen.steps) == (3, 3)
    assert capsys.readouterr().out.count("Verdict: nothing wrong was found in 3 passes") == 2
