"""Where a number that is not finite came from: a pass again, op by op."""

import functools
import math
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halfbits._rounding import FACTORIES, _coarse, _in_float32, _Sums, _Wide
from halfbits._tensors import (
    FP16,
    SIXTEEN,
    _device,
    _gpus,
    _in,
    _kinds,
    _largest,
    _mapped,
    _plain,
    _short,
    _tensors,
    _trained,
)
from halfbits.report import _some


class Origin(NamedTuple):
    """Where a number that is not finite came from. `phase`: "input", "weights", "forward", "loss", "backward", or
    "divergence". `why`: "format", the same op on the same numbers is finite in float32; "range", it is not; "reason",
    the operands tell it, as a divisor of 0; "guess", it may have been an op before; "" if that is not known. `given`:
    what of its operands was not finite."""

    phase: str
    module: str
    op: str
    words: str
    kind: str = ""
    why: str = ""
    given: tuple = ()

    def __str__(self):
        return self.words


class NonFinite(RuntimeError):
    """The first number that is not finite: `origin`, an `Origin`; `path`, what was saved, or None; `case`."""

    def __init__(self, words, origin=None, path=None, case=""):
        super().__init__(words)
        self.origin, self.path, self.case = origin, path, case


def _reason(op, first=None, second=None, *_):
    """Why an op has no finite result, in words, if its operands tell it; "" else."""
    if "softmax" in op and first is not None and (masked := (first == -math.inf).all(-1)).any():
        return f"{int(masked.sum())} of its rows hold nothing but -inf: all of it is masked"
    if op == "div" and second is not None and (zero := second == 0).any():
        whole = not second.is_floating_point() or (second.max() >= 1 and bool((second == second.round()).all()))
        hint = ", where float32 may hold a number" if second.dtype == FP16 else ""
        hint = ": a count is 0, as of an empty mask" if whole else hint
        return f"it divides by 0 at {int(zero.sum()):,} of {zero.numel():,} places{hint}"
    if op in ("acos", "asin", "atanh") and (ends := first.abs() >= 1).any():
        return f"its operand is 1 or more in size at {int(ends.sum()):,} of {ends.numel():,} places"
    if first is None or op not in ("log", "log2", "log10", "rsqrt", "reciprocal", "sqrt"):
        return ""
    zero, negative = int((first == 0).sum()), int((first < 0).sum())
    if zero and op != "sqrt":
        hint = ", where float32 may hold a number: compute it in float32" if first.dtype in SIXTEEN else ""
        return f"its operand is 0 at {zero:,} of {first.numel():,} places{hint}"
    if negative and op != "reciprocal":
        return f"its operand is negative at {negative:,} of {first.numel():,} places"
    return ""


def _made(phase, module, op, call, args, kwargs, output):
    """An Origin if an op made a number that is not finite of such that are; it is done again in float32."""
    inputs, outputs, others = _tensors((args, kwargs)), _tensors(output), [*args, *kwargs.values()]
    after = _kinds(outputs)
    before = _kinds(inputs) if after else set()
    numbers = [each for each in others if isinstance(each, float)]
    if before or any(map(math.isinf, numbers)):
        after &= {"nan"} - before  # an inf that was there already, or was asked for
    if not after:
        return None
    kind = next(each for each in ("nan", "inf", "-inf") if each in after)
    negative = op == "pow" and isinstance(args[1], float) and args[1] < 0
    tensors = [each for each in others if isinstance(each, torch.Tensor)]
    hint, why = _reason("reciprocal" if negative else op, *tensors), "reason"
    if not hint:
        again = _in_float32(call, args, kwargs, outputs[0].device)
        why = "format" if again and not _kinds(again) else "" if before else "range"
        hints = {"range": "not finite in float32 either", "": "an operand was not finite already"}
        hint = hints.get(why) or f"in float32 it is finite, up to {_largest(again):,.3g}"
    given = dict.fromkeys(f"{_short(each.dtype)} up to {_largest([each]):,.3g}" for each in inputs)
    given = " and ".join([*given, *(f"{each:g}" for each in numbers)])
    verb = "the cast" if op == "_to_copy" else op
    words = f"{verb} made {kind.replace('nan', 'NaN')} ({_short(outputs[0].dtype)}) of {given} ({hint})"
    where = "in the loss" if phase == "loss" else _in(phase, module)
    return Origin(phase, module, op, f"{where}: {words}", kind, why, tuple(before))


UNITS = {"threshold_backward": "ReLU", "hardtanh_backward": "clamp", "sigmoid_backward": "sigmoid"}
UNITS |= {"tanh_backward": "tanh", "gelu_backward": "GELU", "silu_backward": "SiLU", "leaky_relu_backward": "LeakyReLU"}


class _Ops(TorchDispatchMode):
    """Looks at the ops of a pass. `made`: Origins; `coarse`: Findings of numbers that 16 bits cannot tell apart;
    `zeros`: where gradients first became 0 by the "format", and by a "unit" that is dead, in words."""

    def __init__(self, model):
        super().__init__()
        self.model, self.device, self.phase, self.inside, self.hooks = model, _device(model), "forward", [], []
        self.made, self.coarse, self.zeros, self.wide, self.sums = [], [], {}, _Wide(self.device), _Sums()

    def __enter__(self):
        for name, module in self.model.named_modules():
            leave = functools.partial(self._leave_module, name)
            self.hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self.inside.append(name)))
            self.hooks.append(module.register_forward_hook(leave, always_call=True))
        return super().__enter__()

    def __exit__(self, *error):
        while self.hooks:
            self.hooks.pop().remove()
        return super().__exit__(*error)

    def _leave_module(self, name, module, args, output):
        self.inside = self.inside[:-1]
        for each in _tensors(output):
            if each.requires_grad and each.grad_fn.metadata.setdefault("module", name) == name:  # the innermost
                each.register_hook(functools.partial(self._arrive, name))

    def _arrive(self, name, gradient):
        self.inside = [name]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, op = kwargs or {}, func.overloadpacket.__name__
        given = _mapped(torch.clone, args) if func._schema.is_mutable else args
        right = self.wide.do(op, func, args, kwargs) if self.phase == "forward" else []
        module = self.inside[-1] if self.inside else ""
        output, found = self.sums.do(_in(self.phase, module), op, func, args, kwargs)
        self.coarse += found
        self.wide.compare(module, op, args, output, right)
        again = functools.partial(_in_float32, func, given, kwargs, self.device)
        if self.phase == "forward" and isinstance(output, torch.Tensor):
            self.coarse += _coarse(module, op, args, output)
        if op.startswith(FACTORIES) or not _tensors(output):
            return output
        if _tensors((args, kwargs)) and (origin := _made(self.phase, module, op, func, given, kwargs, output)):
            self.made.append(origin)
        if self.phase == "backward":
            self._look_at_zeros(module, op, args, output, again)
        return output

    def _look_at_zeros(self, module, op, args, output, again):
        """A gradient that is 0 everywhere, made of one that is not."""
        given, outputs = ([each for each in _tensors(some) if each.numel() > 1] for some in (args, output))
        if not given or all(_largest([each]) for each in outputs) or not (size := _largest(given[:1])):
            return
        if op in UNITS:
            own = not [*self.model.get_submodule(module).parameters()]
            where = f"in {module}" if own else f"between {module or 'the output'} and the module before it"
            dead = "gets no number above 0" if "ReLU" in UNITS[op] else "is saturated"
            self.zeros.setdefault("unit", f"{where}, {UNITS[op]} {dead}, anywhere: its units are dead")
        elif op == "_to_copy" or _largest(again()):
            by, dtype = "the cast" if op == "_to_copy" else op, _short(outputs[0].dtype)
            words = f"{_in('backward', module)}: {by} made 0 ({dtype}) of gradients up to {size:.2g}"
            self.zeros.setdefault("format", words)


def _first(made, usual, batch=None):
    """The first of some Origins that a good pass has not; not a mask's -inf, but what fails by it; the input's inf."""
    key = lambda each: (each.phase, each.module, each.op, each.kind)
    new = [each for each in made if key(each) not in set(map(key, usual))] or made
    if not new:
        return None
    fails = next((place for place, each in enumerate(new) if "masked" in each.words and each.why == "reason"), None)
    if fails is not None and all(each.kind == "-inf" for each in new[:fails]):
        maker = next((f". The -inf: {each.words}" for each in made if each.kind == "-inf"), "")
        return new[fails]._replace(words=new[fails].words + maker)
    first = new[0]
    earlier = [each for each in made[: made.index(first)] if each.kind in first.given]
    if first.why or not earlier:
        return (not first.why and first.given and _bad_input(*batch, first)) or first
    source = next((each for each in reversed(earlier) if each.module == first.module), earlier[-1])
    return source._replace(words=f"{source.words}; of that, {first.op} made NaN")


@contextmanager
def _kept(model):
    """Puts the random state, buffers, and what modules keep as attributes back."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    device = _device(model)
    with torch.random.fork_rng(_gpus(device), device_type=device.type):
        try:
            yield
        finally:
            for module, before in attributes:
                vars(module).update(before)
            for buffer, before in buffers:
                buffer.data.copy_(before)


def _again(model, saved, ops, times=1):
    """A saved pass again, uncompiled, while `ops` looks on: gradients by name, so many times. It changes nothing."""
    model, (args, kwargs), cast = _plain(model), saved["batch"], saved["autocast"]
    weights = _trained(model)
    with _kept(model), ExitStack() as around:
        around.enter_context(torch.compiler.set_stance("force_eager"))
        around.enter_context(torch.set_grad_enabled(bool(saved["gradients"])))
        torch.set_rng_state(saved["random"][0].cpu())
        for device, state in zip(_gpus(_device(model)), saved["random"][1:]):
            torch.get_device_module(device).set_rng_state(state.cpu(), device)
        around.enter_context(ops)
        with torch.autocast(**cast, cache_enabled=False):
            outputs = _tensors(model.get_submodule(saved["module"])(*args, **kwargs))
        if not saved["gradients"]:
            return {}
        ops.phase = "backward"
        # Views, as hooks see only what starts there.
        starts = [outputs[place].view_as(outputs[place]) for place in saved["gradients"]]
        gradients = [times * each.to(start.dtype) for start, each in zip(starts, saved["gradients"].values())]
        with torch.autocast(**cast | {"enabled": cast["enabled"] and saved["backward in autocast"]}):
            found = torch.autograd.grad(starts, [*weights.values()], gradients, allow_unused=True)
    return {name: gradient for name, gradient in zip(weights, found) if gradient is not None}


def _ops_made(model, saved):
    """The Origins of a saved pass; if it fails, those until then, and why."""
    ops = _Ops(_plain(model))
    try:
        _again(model, saved, ops)
    except Exception as error:  # a diagnosis must not hide what it diagnoses
        return ops.made, f"the replay failed: {type(error).__name__}: {error}"
    return ops.made, ""


def _bad_input(args, kwargs, first=None):
    """An input that is not finite. One that holds -inf, as a mask may, is blamed only for a `first` Origin."""
    named = [*((f"args.{place}", each) for place, each in enumerate(args)), *kwargs.items()]
    bad = [name for name, each in named if _kinds(_tensors(each)) - (set() if first else {"-inf"})]
    made = f", which holds -inf; then {first}" if first else ""
    return Origin("input", "", "", f"in the input: {_some(bad)}{made}") if bad else None
