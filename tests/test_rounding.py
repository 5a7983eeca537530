"""What `watch` sees of numbers that 16 bits are too coarse for; broken runs have a sound twin without alarm."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfbits import watch
from halfbits._tensors import _went_through
from tests.small_runs import BF16, FP16, Op, Run, after, found, network, scaler, sgd, squares, train, worst


def test_what_float32_makes_of_random_numbers_and_views_is_no_fault():
    def dropped(x):
        store = torch.zeros(4, 8, dtype=BF16)
        store[:, 2] = x[:, 0]
        return (store + F.dropout(x.bfloat16(), 0.5)) * torch.rand_like(store) + x

    for dtype in (FP16, BF16):
        model = network(nn.Dropout(), nn.BatchNorm1d(8), nn.LayerNorm(8), Op(dropped))
        assert not worst(after(model=model, dtype=dtype, mine=scaler(enabled=dtype == FP16)))


def test_times_in_float64_are_cast_too():
    class Clock(nn.Module):
        def forward(self, x):
            return x.bfloat16().float() / 1e9

    model = nn.Sequential(Clock(), nn.Linear(8, 8))
    with watch(model, sgd(model), save=None) as seen:
        for _ in range(2):
            model(1.7e9 + 1e5 * torch.rand(16, 8, dtype=torch.float64)).sum().backward()
    assert "column 0 of an input" in seen.report.verdict


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


def test_whole_numbers_that_are_regular_by_themselves_are_left_alone():
    ids = torch.arange(0, 4000, 7)
    assert _went_through(ids) is None
    assert _went_through(ids.bfloat16().long()) == BF16 and _went_through(ids.half().int()) == FP16
    for sound in (torch.arange(0, 1000, 20), 2 ** torch.arange(14), torch.arange(256), torch.full((64,), -100)):
        assert _went_through(sound) is None


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


def test_an_output_in_16_bits_near_its_target_is_no_stored_number():
    model = nn.Linear(8, 64)
    with watch(model, sgd(model), save=None) as seen:
        for _ in range(3):
            with torch.autocast("cpu", BF16):
                output = model(torch.rand(16, 8)).float()
            F.mse_loss(output, output.detach() + 1e-4 * torch.rand(16, 64)).backward()
    assert not worst(seen.report), seen


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
