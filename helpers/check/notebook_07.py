"""Checks of notebook 07, the experiment."""

import functools

import torch

from helpers.check.replies import says


@says
def verdict(answer):
    """`answer(low, high)` puts an interval of a speed ratio into words: "faster", "slower" or "undecided"."""
    cases = [(1.2, 1.5, "faster"), (0.6, 0.7, "slower"), (1.01, 1.02, "faster"), (0.97, 0.99, "slower")]
    cases += [(0.96, 1.04, "undecided"), (0.9, 2.4, "undecided")]
    for low, high, right in cases:
        given = answer(low, high)
        if given != right:
            where = {"faster": "above 1", "slower": "below 1", "undecided": "on both sides of 1"}[right]
            return f"for [{low}, {high}] you say {given!r}, but the interval lies {where}: {right!r}"
    return None


def _weights_after_two(step):
    """Train one small layer by two calls of `step`; returns its weight, its output dtypes and the last loss."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model, images = torch.nn.Linear(4, 1), torch.randn(8, 4)
    dtypes, labels = [], torch.tensor([[0.0], [1.0]] * 4)
    model.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = step(model, optimizer, images, labels)
    return model.weight.detach(), dtypes, loss


def _reference_step(model, optimizer, images, labels, zero_grad=True):
    if zero_grad:
        optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss


@says
def bf16_step(answer):
    """`answer(model, optimizer, images, labels)` does one training step in bf16 on the CPU and returns the loss."""
    weight, dtypes, loss = _weights_after_two(answer)
    if set(dtypes) != {torch.bfloat16}:
        return f"the layer's output is {dtypes[0] if dtypes else 'missing'}. Call the model under bf16 autocast."
    if not isinstance(loss, torch.Tensor):
        return f"you return {loss!r}. Return the tensor, detached: loss.item() would wait for the device at every step."
    if loss.dtype != torch.float32:
        return f"the loss is {loss.dtype}. Compute it inside the autocast block, which keeps it in float32."
    if loss.requires_grad:
        return "the loss still holds its graph, and with it the activations. Return loss.detach()."
    if torch.equal(weight, _weights_after_two(lambda *_: None)[0]):
        return "the weights did not move. Call loss.backward(), then optimizer.step()."
    if torch.equal(weight, _weights_after_two(functools.partial(_reference_step, zero_grad=False))[0]):
        return "the second step added its gradients to those of the first. Call optimizer.zero_grad()."
    right_weight, _, right_loss = _weights_after_two(_reference_step)
    if not (torch.equal(weight, right_weight) and torch.equal(loss, right_loss)):
        return "the weights or the loss are not those of a bf16 step with BCEWithLogitsLoss on this batch."
    return None
