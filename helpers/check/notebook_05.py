"""Checks of notebook 05, the training loop."""

import math

import torch

from helpers.check.replies import says


def _fp16_training(infinite=False):
    """A small layer with old gradients, its optimizer and scaler, the dtypes of its outputs (a list), and a batch."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model, images, dtypes = torch.nn.Linear(4, 1), torch.randn(8, 4), []
    model.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    images[0] *= math.inf if infinite else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", 1024.0)
    return model, optimizer, scaler, dtypes, images, torch.tensor([[0.0], [1.0]] * 4)


def _reference_fp16_step(parts, divide=True, zero_grad=True, max_norm=math.inf):
    """The weight after one step on the batch in so many parts, and the gradients' norm."""
    model, optimizer, scaler, _, images, labels = _fp16_training()
    if zero_grad:
        optimizer.zero_grad()
    for x, y in zip(images.chunk(parts), labels.chunk(parts)):
        with torch.autocast("cpu", torch.float16):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(x), y) / (parts if divide else 1)
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    return model.weight.detach(), norm


def _fault_of_fp16_step(step, parts, max_norm=math.inf):
    """What is wrong with the weights after `step(model, optimizer, scaler, images, labels)`, or None."""
    model, optimizer, scaler, dtypes, images, labels = _fp16_training()
    before = model.weight.detach().clone()
    step(model, optimizer, scaler, images, labels)
    if set(dtypes) != {torch.float16}:
        return f"the layer's output is {dtypes[0] if dtypes else 'missing'}. Call the model under autocast, in dtype."
    if scaler._get_growth_tracker() != 1:
        return f"scaler.update() was called {scaler._get_growth_tracker()} times; once at the end is right"
    if torch.equal(model.weight, before):
        return "the weights did not move. Call scaler.step(optimizer)."
    if not torch.allclose(model.weight, _reference_fp16_step(parts, max_norm=max_norm)[0]):
        for fault, words in [
            (
                {"divide": False},
                f"the gradient is {parts} times that of the whole batch. Divide each loss by len(parts).",
            ),
            ({"zero_grad": False}, "gradients of the step before are still in it. Call optimizer.zero_grad() first."),
            ({"max_norm": math.inf}, "the weights moved as without clipping. Clip between unscale_ and step."),
        ]:
            if torch.allclose(model.weight, _reference_fp16_step(parts, **({"max_norm": max_norm} | fault))[0]):
                return words
        return "the weights are not those of one step. Is the loss a mean, and the scale taken off by scaler.step?"
    model, optimizer, scaler, _, images, labels = _fp16_training(infinite=True)
    step(model, optimizer, scaler, images, labels)
    if not torch.equal(model.weight, before):
        return "with an infinite gradient the weights moved. Step by scaler.step(optimizer), which skips such a step."
    return None


@says
def accumulated_step(answer):
    """`answer(model, optimizer, scaler, parts, device_type, dtype)` does one fp16 step over a batch in parts."""
    for parts in (4, 2):

        def step(model, optimizer, scaler, images, labels, parts=parts):
            pairs = list(zip(images.chunk(parts), labels.chunk(parts)))
            answer(model, optimizer, scaler, pairs, "cpu", torch.float16)

        if fault := _fault_of_fp16_step(step, parts):
            return fault
    return None


@says
def clipped_step(answer):
    """`answer(model, optimizer, scaler, images, labels, device_type, dtype, max_norm)` returns the norm."""
    norms = []

    def step(model, optimizer, scaler, images, labels):
        norms.append(float(answer(model, optimizer, scaler, images, labels, "cpu", torch.float16, 0.1)))

    fault, right = _fault_of_fp16_step(step, 1, max_norm=0.1), _reference_fp16_step(1)[1]
    if norms[0] > 100 * right:
        return f"you return the norm {norms[0]:.4g} of the scaled gradients. Call scaler.unscale_(optimizer) before."
    if not fault and not math.isclose(norms[0], right, rel_tol=1e-3):
        return f"you return {norms[0]:.4g}; the norm before clipping is {right:.4g}"
    return fault
