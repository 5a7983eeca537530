"""Numbers that are not finite, gradients that are 0, errors: what `watch` names as their origin."""

import math
import re
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfbits import NonFinite, watch
from tests.small_runs import (
    BF16,
    FP16,
    Op,
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


def test_an_overflow_of_forward_names_module_and_op(tmp_path):
    error, seen = stopped(large(), None, scaler(), [0.0, 1e3], FP16, save=tmp_path / "bad.pt")
    assert (
        error.origin[:2] == ("forward", "2")
        and "mm" in error.origin.op
        and error.case == "Model trained in bf16 gives NaN in fp16"
    )
    assert str(error).startswith("pass 2, after 0 optimizer steps: in the forward, in 2: ")  # pass 1 was skipped
    assert "made inf (float16)" in str(error) and "in float32 it is finite, up to " in str(error)
    saved = torch.load(error.path, weights_only=False)
    assert saved["origin"] == error.origin and saved["batch"][0][0].shape == (4, 8)
    assert torch.equal(saved["state"]["2.weight"], large()[2].weight)
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


def test_minus_infinity_in_the_input_is_blamed_before_the_module_it_spoils():
    assert scores(1, save=None).problem is None
    error = scores(save=None, broken=True).problem
    assert error.origin.phase == "input" and "in the input: args.0" in str(error)
    seen = scores(6, scaler(init_scale=2.0**127), save=None)  # gradients overflow, by no fault of the mask
    assert seen.skips() == 6 and "in the input" not in str(seen)


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


def test_an_error_carries_what_it_means():
    model = network()
    with pytest.raises(RuntimeError) as caught, watch(model, save=None):
        model(torch.rand(4, 8, dtype=BF16))
    assert "watch: certain: the run stopped with RuntimeError" in caught.value.__notes__[0]
    assert "(0). Two dtypes meet" in caught.value.__notes__[0]


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


def test_fp16_buffers_are_looked_at_under_autocast_to_bf16():
    model = network(Op(lambda x: x / (1 - model.noise)))
    model.register_buffer("noise", torch.tensor([1.0], dtype=torch.float16))
    told = pytest.warns(RuntimeWarning, match="div made inf.* divides by 0")
    with told, watch(model, save=None, warn=True), torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(2, 8)).sum().backward()


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
