"""What `watch` sees of loss scales, and of the calls of a GradScaler and of optimizers."""

import pytest
import torch
from torch import nn

from halfbits import audit, watch
from tests.small_runs import BF16, FP16, Run, found, network, scaler, sgd, squares, stopped, train, worst


def test_a_scale_of_0_is_told_as_what_it_is():
    model, mine = network(), scaler(init_scale=0.0)
    with watch(model, sgd(model), mine, every=1, save=None):
        train(model, sgd(model), mine, [1.0], FP16)
    found(audit(model, None, mine), "the scale is 0", "certain")


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


def test_rates_and_scales_that_stand_still():
    model, slow = network(), scaler(init_scale=2.0**20, backoff_factor=0.97)
    optimizer = sgd(model, lr=1e-6)
    with watch(model, optimizer, slow, save=None) as seen:
        train(model, optimizer, slow, factors=[1] * 3)
    found(seen, "an overflow takes 3% off the scale", "likely")
    assert "rate is at most 1e-06" in found(seen, "a step changes weights by", "likely").cost


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
