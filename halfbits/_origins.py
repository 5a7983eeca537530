"""Where a number that is not finite came from, in the pass that `watch` has just seen; what is saved of it."""

import functools
from contextlib import ExitStack
from pathlib import Path

import torch

from halfbits._listening import BUSY, HUB
from halfbits._ops import Operations, Origin, Slopes, first_made, loss_origin
from halfbits._tensors import bad_kind, module_of, plain, short, tensors_in
from halfbits.report import some


def of_forward(seen, name, args, kwargs):
    """The Origin of what the forward of the part `name` put out."""
    found = _already_there(seen, args, kwargs)
    if found is None and seen.look and seen.look.opened:
        found = first_made(seen.look.operations.made)
    if found is None:
        found = first_made(_again(seen)[0])
    if found is None and (masked := _bad_inputs(args, kwargs, ("-inf",))):  # which a mask may hold, and others not
        words = f"in the forward, in {name or 'the model'}, whose input holds -inf ({some(masked)})"
        found = Origin("forward", name, "", words)
    words = f"in the forward, in {name or 'the model'}; done again, it was finite or failed: the operation is not known"
    return found or Origin("forward", name, "", words)


def _already_there(seen, args, kwargs):
    """Weights, buffers or inputs that were not finite before this pass."""
    bad = [name for name, weight in seen.weights.items() if bad_kind([weight])]
    written = {name for name, module in seen.plain.named_modules() if module.training}
    for name, buffer in seen.plain.named_buffers():  # in training, batch norm only writes its statistics
        used = "running_" not in name or module_of(name) not in written
        bad += [name] if used and bad_kind([buffer]) in ("nan", "inf") else []
    if bad:
        when = "a step made them so" if seen.steps else "before the first pass"
        if seen.bad_gradients and seen.bad_gradients == seen.passes:
            when = "the gradients of the pass before were not finite, and were applied all the same, unchecked"
        elif seen.passes and not seen.steps:
            when = "the loop made them so, outside of an optimizer's step"
        return Origin("weights", module_of(bad[0]), "", f"in the weights already ({when}): {some(bad)}")
    bad = _bad_inputs(args, kwargs, ("nan", "inf"))
    return Origin("input", "", "", f"in the input: {some(bad)}") if bad else None


def _bad_inputs(args, kwargs, kinds):
    named = [*((f"args.{number}", each) for number, each in enumerate(args)), *kwargs.items()]
    return [name for name, each in named if bad_kind(tensors_in(each)) in kinds]


def of_loss(seen, root):
    """The Origin of a loss, where all that the model put out is finite."""
    if seen.look and seen.look.opened and (origin := first_made(seen.look.operations.made)):
        return origin
    words, op, why = loss_origin(root.grad_fn, seen.is_output)
    finite = ", and all that the model put out is finite" if seen.sees_forward else ""
    words = f"in the loss: {words}; the loss is {short(root.dtype)}{finite}"
    return Origin("loss", "", op, words, bad_kind([root]), why)


def of_backward(seen, bad, incoming, intact):
    """The Origin of gradients, of the weights `bad`; `incoming`, whether the model's output gets a bad one already."""
    if intact and seen.culprit_here:
        return seen.culprit_here
    if intact and incoming:
        return Origin("backward", "", "", "in the backward of the loss: the model's output gets a bad gradient")
    if intact and seen.batch and seen.arrived:
        made, culprit = _again(seen, seen.arrived)
        if culprit or first_made(made):
            return culprit or first_made(made)
    order = [*seen.names.values()]
    module = max(map(module_of, bad), key=lambda name: order.index(name) if name in order else -1)
    return Origin("backward", module, "", f"in the backward, of {module or 'the model'} or of what follows it")


def _again(seen, gradients=()):
    """The pass once more, operation by operation: the Origins of its forward, and the culprit of its backward.

    The run is about to end. Random state and buffers are put back all the same.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return [], None  # other processes would not follow
    name, args, kwargs, random, setting = seen.batch
    buffers = [(buffer, buffer.detach().clone()) for buffer in seen.plain.buffers()]
    operations, culprit = Operations(seen.boundary, seen.where), None
    phase, busy = seen.phase, BUSY.depth
    seen.phase, seen.inside, BUSY.depth = "forward", [], 0
    try:
        with ExitStack() as around:
            around.enter_context(HUB.replay())
            around.enter_context(torch.random.fork_rng(seen.gpus, device_type=seen.device.type))
            around.enter_context(torch.set_grad_enabled(bool(gradients)))
            torch.set_rng_state(random[0])
            for device, state in zip(seen.gpus, random[1:]):
                torch.get_device_module(device).set_rng_state(state, device)
            with operations, torch.autocast(**setting, cache_enabled=False):
                outputs = tensors_in(plain(seen.plain).get_submodule(name)(*args, **kwargs))
            if gradients:
                culprit = _backward_again(seen, outputs, gradients)
    except Exception as error:
        seen.unseen[f"the pass done again, which failed ({type(error).__name__}: {error})"] = True
    finally:
        seen.phase, seen.inside, BUSY.depth = phase, [], busy
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.data.copy_(before)
    return operations.made, culprit


def _backward_again(seen, outputs, gradients):
    starts = [each for each in outputs if each.requires_grad][: len(gradients)]
    if not starts or [each.shape for each in starts] != [each.shape for each in gradients]:
        return None
    loss = sum((start * gradient).sum() for start, gradient in zip(starts, gradients))
    module_at = functools.partial(seen.marked, key="module")
    slopes = Slopes(seen.boundary, loss.grad_fn, module_at, lambda node: False, 20_000)
    try:
        torch.autograd.grad(loss, [*seen.trained.values()], allow_unused=True)
    finally:
        slopes.remove()
    return slopes.culprit


def save(seen, number, origin):
    """Batch, weights and origin of a bad pass, in the file `seen.save`; its path."""
    name, args, kwargs, random, setting = seen.batch or (None, (), {}, None, None)
    state = seen.plain.state_dict()
    state = {key: value.detach() for key, value in state.items() if isinstance(value, torch.Tensor)}
    saved = {"pass": number, "origin": tuple(origin), "module": name, "batch": (args, kwargs), "random": random}
    path = Path(seen.save)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        path = path.with_stem(f"{path.stem}_rank{torch.distributed.get_rank()}")
    torch.save(saved | {"autocast": setting, "state": state}, path)
    return path
