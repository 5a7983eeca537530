"""What a watch hangs on model, optimizers, scaler and autograd, and takes away again."""

import functools
import math
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from halfbits._looks import _dtype_within, _harmless
from halfbits._loss import _Loss, _own_scale
from halfbits._search import _own_backwards
from halfbits._tensors import (
    AUTOCAST,
    FP16,
    FP32,
    SIXTEEN,
    _child,
    _gpus,
    _gradients,
    _held,
    _is_compiled,
    _is_fsdp,
    _is_on,
    _largest,
    _last_whole,
    _local,
    _norms,
    _policy,
    _short,
    _spacing,
    _stops,
    _tensors,
    _together,
)
from halfbits.auditing import _moments, _resumed
from halfbits.report import certain, likely


class _Hooks:
    """What a watch hangs on model, optimizers, scaler and autograd. They note numbers of a pass, as tensors: nothing
    waits for a GPU, but at a close look, or with `at_once`. Passes are pending until `read_pending`."""

    def __init__(self, seen):
        self.seen, self.undo, self.watched = seen, [], []
        self.labels, self.values, self.pending = [], [], []  # (kind, name) and number; whole passes
        self.inside = self.muted = self.forward_seen = self.stepped = self.step_in_autocast = False
        self.not_judged = -1  # the pass after which another backward, as of the same forward, was not looked at
        self.evaluation = self.evaluated = torch.zeros((), device=seen.device)

    def attach(self):
        seen = self.seen
        self.ids = set(map(id, seen.weights.values()))
        self.order = 2 if seen.at_once else math.inf  # of norms: squares overflow, and are faster on a CPU
        self.every_output = not seen.at_once or _is_fsdp(seen.model)
        if self.every_output:
            self._see_outputs()
        hooks = register_optimizer_step_pre_hook(self._before_step), register_optimizer_step_post_hook(self._after_step)
        self.undo += [self._see_no_outputs, *(hook.remove for hook in hooks)]
        for name, part in _entries(seen.model):
            self.undo.append(_attach(part, functools.partial(self._begin, name), self._end))
        self._wrap(torch.autograd, "backward", self._backward)
        self._wrap(torch.autograd, "grad", seen.calls.grad)
        for name in ("scale", "unscale_", "step", "update"):
            self._wrap(torch.amp.GradScaler, name, getattr(seen.calls, name))

    def detach(self):
        self.seen.between.off()
        while self.undo:
            self.undo.pop()()

    def _wrap(self, owner, name, around):
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(lambda *a, **k: around(original, *a, **k)))
        self.undo.append(lambda: setattr(owner, name, original))

    def _see_outputs(self):
        if not self.watched:
            parts = [(module, functools.partial(self._output, name)) for name, module in _parts(self.seen.model)]
            self.watched = [_attach(module, None, after) for module, after in parts]

    def _see_no_outputs(self):
        while self.watched:
            self.watched.pop()()

    @contextmanager
    def quiet(self):
        """What is computed within is not the run's."""
        self.muted = True
        try:
            yield
        finally:
            self.muted = False

    def is_off(self):
        return self.muted or torch.compiler.is_compiling()

    def _note(self, kind, name, values):
        self.labels += [(kind, name)] * len(values)
        self.values += values

    def read_pending(self):
        """Wait for the device: (pass, step, labels, values) of all passes that were not read."""
        pending, self.pending = self.pending, []
        values = torch.cat([stack for *_, stack in pending]).tolist() if pending else []
        for number, step, labels, _ in pending:
            yield number, step, labels, values[: len(labels)]
            values = values[len(labels) :]

    @_harmless
    def _begin(self, name, module, args, kwargs):
        """Before the model's forward."""
        if self.is_off():
            return
        seen, kind = self.seen, self.seen.device.type
        seen.between.off()
        seen.looks.read_updates()
        self.inside, self.began = True, len(self.values)
        is_on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        cast = {"device_type": kind, "enabled": is_on, "dtype": dtype}
        seen.earlier = [*seen.earlier, seen.saved][-3:] if self.values and "batch" in (seen.saved or {}) else []
        random = [torch.get_rng_state(), *(torch.get_device_module(d).get_rng_state(d) for d in _gpus(seen.device))]
        seen.saved = {"module": name, "batch": (args, kwargs), "random": random, "autocast": cast, "gradients": {}}
        seen.saved |= {"backward in autocast": False, "training": seen.model.training, "usual": []}
        if not torch.is_grad_enabled():
            if seen.between.evaluations < 6 and not any(map(_is_compiled, seen.plain.modules())):
                seen.between.on(training=False, within=True)
            return
        if cast["enabled"]:
            seen.cast = AUTOCAST[seen.plain] = cast["dtype"]
            if self.step_in_autocast and any(_is_stale(each, cast["dtype"]) for each in [*seen.trained.values()][:8]):
                what = "the step was taken under autocast, and the next forward used the weights as cast before it"
                cost = "One region around many steps keeps its first cast copies of the weights."
                seen.tell(certain(what, "", cost, "Loss stays the same in every step"))
        if seen.passes % seen.every == 0 and not self.labels:
            seen.looks.begin(seen.passes + 1)
            self._see_outputs()
            seen.tell(*_cast_by_fsdp(module, args, kwargs))

    @_harmless
    def _output(self, name, module, args, output):
        """After the forward of a part of the model."""
        if self.is_off() or not (self.inside or torch.is_grad_enabled()):
            return
        for each in _tensors(output):
            self._note("output", name, [_local(each).sum(dtype=FP32)])
            if self.seen.looks.on and each.numel():
                self.seen.looks.output(name, module, each)

    @_harmless
    def _end(self, module, args, output):
        """After the model's forward."""
        if self.is_off():
            return
        self.seen.between.off()
        self.inside, outputs = False, _tensors(output)
        sums = [_local(each).sum(dtype=FP32) for each in outputs]
        if self.seen.at_once and any(map(_stops, _together(sums, self.seen.device).tolist())):
            self.seen.explain("forward", self.labels[self.began :], self.values[self.began :])
        if not torch.is_grad_enabled():  # evaluation: its numbers are not kept
            del self.labels[self.began :], self.values[self.began :]
            self.evaluation = self.evaluation + sum(sums) * 0
            for each in [_local(each).abs().amax().float() for each in outputs if each.dtype == FP16 and each.numel()]:
                self.evaluated = torch.maximum(self.evaluated, each)
            then = _dtype_within(self.seen.saved["autocast"], self.seen.plain)
            self.seen.between.given.update(dict.fromkeys(outputs, then))
            self.seen.between.on(training=False)
            return
        self.forward_seen = True
        self._note("root", "", sums)
        for place, each in enumerate(outputs):
            if each.requires_grad:
                each.grad_fn.metadata["output"] = True
                each.register_hook(functools.partial(self._incoming, self.seen.saved, place))
        if len(self.values) > 100_000:  # forward passes without a backward pass
            self.labels, self.values = [], []
        self.seen.between.on(training=True)

    @_harmless
    def _incoming(self, saved, place, gradient):
        """The gradient of the model's output."""
        self._note("incoming", "", _norms([gradient], self.order))
        if gradient.nbytes <= 2**26:
            saved["gradients"][place] = gradient.detach()

    def _backward(self, original, tensors, *args, **kwargs):
        """Stands in for torch.autograd.backward."""
        if self.is_off() or (self.forward_seen and not self.labels):
            self.not_judged = self.seen.passes
            return original(tensors, *args, **kwargs)
        self._before_backward(tensors)
        # What is recomputed for checkpointing does not count.
        with self.seen.looks.around_backward(self.stepped), self.quiet():
            original(tensors, *args, **kwargs)
        self._after_backward()

    @_harmless
    def _before_backward(self, tensors):
        seen = self.seen
        seen.between.off()
        seen.saved = seen.saved or {"gradients": {}}
        seen.saved["backward in autocast"] = torch.is_autocast_enabled(seen.device.type)
        loss = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors))
        if loss.numel() == 1:
            seen.loss = _Loss(loss, seen.at_once)
            seen.own_scale = seen.own_scale or _own_scale(loss)
            raw = [node.metadata["loss"] for node in seen.loss.region if "loss" in node.metadata]  # not scaled
            seen.calls.not_scaled += _is_on(seen.scaler) and not raw
            seen.tell(*(_own_backwards(seen, seen.loss.region) if seen.looks.on else ()))
            value = (raw[0] if raw else loss.detach()).float().reshape(())
            # Of scaled gradients, as a penalty is made: an overflow is the scaler's routine.
            routine = any("scaled gradient" in node.metadata for node in seen.loss.region)
            self._note("penalty" if routine else "loss", "", [value])
            if seen.at_once and not routine and not math.isfinite(value.item()):
                seen.explain("loss", self.labels, self.values)
            elif seen.at_once and value.item() == 0 and (origin := seen.loss.origin()):
                seen.flat = origin.words
        seen.calls.before_backward(seen.loss.region if seen.loss else [])

    @_harmless
    def _after_backward(self):
        seen, found = self.seen, _gradients(self.seen.weights)
        seen.calls.after_backward(seen.loss.region if seen.loss else [])
        self.stepped = False
        norms = _norms(found.values(), self.order)
        self.labels += [("gradient", name) for name in found]
        self.values += norms
        seen.looks.gradients(found, norms)
        if _is_on(seen.scaler):
            self._note("scale", id(seen.scaler), [seen.scaler.scale(torch.ones((), device=seen.device))])
        seen.passes += 1
        if self.values:
            self.pending.append((seen.passes, seen.calls.tries, self.labels, _together(self.values, seen.device)))
        self.labels, self.values = [], []
        if not self.every_output:
            self._see_no_outputs()
        seen.end_of_pass()

    def _holds(self, optimizer):
        """Whether it is one of this model; one that is met for the first time is added."""
        if not any(optimizer is one for one in self.seen.optimizers):
            if self.ids.isdisjoint(map(id, _held([optimizer]))):
                return False
            self.seen.optimizers.append(optimizer)
            self.seen.tell(*_moments(None, [optimizer], None), *_resumed(None, [optimizer], self.seen.scaler))
        return True

    @_harmless
    def _before_step(self, optimizer, *_):
        self.seen.between.off()
        if self._holds(optimizer):
            self.step_in_autocast |= torch.is_autocast_enabled(self.seen.device.type)
            self.seen.calls.before_step(optimizer)
            self.seen.looks.before_step(optimizer)

    @_harmless
    def _after_step(self, optimizer, *_):
        if self._holds(optimizer):
            self.seen.steps += optimizer is self.seen.optimizers[0]
            self.stepped = True
            self.seen.between.on(training=True)


def _parts(model, name="", known=None):
    """The modules whose outputs can be seen: those without children, with weights of their own, or compiled."""
    known = set() if known is None else known
    if id(model) in known:
        return
    known.add(id(model))
    if isinstance(model, nn.parallel.DistributedDataParallel):
        yield from _parts(model.module, name, known)
        return
    children = list(model.named_children())
    passes_on = isinstance(model, nn.Identity | nn.Flatten | nn.Unflatten)
    if _is_compiled(model) or [*model.parameters(recurse=False)] or not (children or passes_on):
        yield name, model
    for child, module in () if _is_compiled(model) else children:
        yield from _parts(module, _child(name, child), known)


def _entries(model, name=""):
    """What is called from outside: the model, or, if it has no forward, as a ModuleDict, its parts."""
    if getattr(model.forward, "__func__", None) is not nn.Module.forward:
        return [(name, model)]
    return [entry for child, part in model.named_children() for entry in _entries(part, _child(name, child))]


def _attach(module, before, after):
    """Call `before` and `after` around a module's forward, outside of its compiled code; returns what undoes it."""
    call = module._compiled_call_impl
    if call is None:
        hooks = [module.register_forward_pre_hook(before, with_kwargs=True)] if before else []
        hooks.append(module.register_forward_hook(after, always_call=bool(before)))
        return lambda: [hook.remove() for hook in hooks]

    def outside(*args, **kwargs):
        if before:
            before(module, args, kwargs)
        output = call(*args, **kwargs)
        after(module, args, output)
        return output

    module._compiled_call_impl = outside
    return lambda: setattr(module, "_compiled_call_impl", call)


def _is_stale(weight, dtype):
    """Whether autocast holds a cast copy of a weight that is not the weight's."""
    if weight.dim() < 2 or hasattr(weight, "to_local"):
        return False
    one = torch.ones(weight.shape[-1], 1, device=weight.device)
    return not torch.equal(torch.matmul(weight, one), torch.matmul(weight.to(dtype), one.to(dtype)))


def _cast_by_fsdp(module, args, kwargs):
    """Inputs that FSDP2 has cast, and whose last digits are gone."""
    policy = _policy(module)
    if policy is None or not policy.cast_forward_inputs or policy.param_dtype not in SIXTEEN:
        return
    for each in _tensors((args, kwargs)):
        if each.dtype in SIXTEEN and _last_whole(each.dtype) < (size := _largest([each])) < math.inf:
            what = f"an input is {_short(each.dtype)}, up to {size:,.0f}, where neighbours are "
            cost = "FSDP2 casts inputs, times and positions too: cast_forward_inputs=False, or scale them."
            yield likely(f"{what}{_spacing(size, each.dtype):g} apart", "", cost)
