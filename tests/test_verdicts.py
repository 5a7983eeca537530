"""What `watch` finds in runs that stay finite or diverge, and what it leaves alone."""

import math
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfbits import NonFinite, watch
from tests.small_runs import BF16, FP16, Op, after, found, large, network, scaler, sgd, squares, stopped, train, worst


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


def test_outputs_in_evaluation_whose_squares_overflow():
    model = large(1e3)
    with watch(model, save=None) as seen, torch.no_grad(), torch.autocast("cpu", FP16):
        model(torch.rand(4, 8))
    found(seen, "outputs without gradients, as in evaluation, are float16 up to", "likely")


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


def test_a_rate_that_is_too_high_is_not_blamed_on_precision():
    for rate, broken in ((20.0, True), (0.05, False)):
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8), nn.LayerNorm(8))
        optimizer = sgd(model, lr=rate)
        with watch(model, optimizer, save=None) as seen:
            train(model, optimizer, None, [1.0] * 50, BF16, lambda output: F.cross_entropy(output, torch.arange(4)))
        assert ("in any precision" in seen.report.verdict) == broken, seen


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
