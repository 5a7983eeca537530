"""The loss, by what autograd keeps of it, and the calls of a GradScaler and of the optimizers' steps."""

import functools
import math
import re
import weakref
from collections import Counter

import torch
from torch.nn import functional as F

from halfbits._tensors import FP16, _held, _is_on, _kinds, _list, _local, _op, _sample, _short, _tensors, _whole
from halfbits.origin import Origin, _made, _reason
from halfbits.report import certain, likely

OPERANDS = "self", "other"
SOFTMAX = "softmax", "logsoftmax"  # they make NaN only of what is not finite
PASS_ON = re.compile("tocopy|view|unsafeview|reshapealias|t|transpose|permute|expand|slice|select|clone")
ALONE = re.compile("log|log2|log10|log1p|atanh|acosh|asin|acos|erfinv|lgamma|digamma|sinh|cosh")  # they keep `self`
CALLS = {"mul": torch.mul, "div": torch.div, "pow": torch.pow, "mseloss": F.mse_loss}
RISKY = {"sqrt", "rsqrt", "pow", "log", "div", "reciprocal", "norm", "linalgvectornorm", "acos", "asin", "cdist", "std"}


def _saved(node):
    """What a node of autograd keeps: "self", "other", "result", "target", "exponent"..."""
    return {name[7:]: getattr(node, name) for name in dir(node) if name.startswith("_saved_")}


def _passes_on(node):
    """Whether an inf of its result was in its operand: views, casts, and a division by a number."""
    return bool(PASS_ON.fullmatch(_op(node))) or (_op(node) == "div" and (None, 0) in node.next_functions)


def _region(loss):
    """The nodes of autograd between a loss and the model's outputs, inputs first."""
    order, known, stack = [], set(), [(loss.grad_fn, False)]
    while stack and len(known) < 1000:
        node, finished = stack.pop()
        if finished:
            order.append(node)
        elif node is not None and node not in known and "output" not in node.metadata:
            known.add(node)
            stack += [(node, True), *((each, False) for each, _ in node.next_functions)]
    return order


class _Loss:
    """The ops between the model's outputs and a loss. `culprit`: the Origin, if the backward of a risky one made a
    number that is not finite of gradients that are."""

    def __init__(self, loss, look):
        self.region, self.culprit = _region(loss), None
        for place, node in enumerate(self.region if look else ()):
            if _op(node) in RISKY:
                node.register_hook(functools.partial(self._look, place))

    def _look(self, place, made, given):
        if self.culprit is None and (kinds := _kinds(_tensors(made))) and not _kinds(_tensors(given)):
            op, kept = _op(self.region[place]), _saved(self.region[place])
            kind, dtype = "NaN" if "nan" in kinds else "inf", _short(_tensors(made)[0].dtype)
            words = f"in the backward of the loss: that of {op} ({dtype}) makes {kind} of finite gradients"
            for key, each in kept.items():
                if isinstance(each, torch.Tensor) and (zero := int((each == 0).sum())):
                    words += f"; its {key} is 0 at {zero:,} of {each.numel():,} places"
            self.culprit = Origin("backward", "", op, words, kind.lower(), "reason")

    @torch.no_grad()
    def origin(self):
        """Which op made a loss bad; None if what autograd keeps does not tell."""
        for node in self.region:
            op, kept = _op(node), _saved(node)
            bad = {key: each for key, each in kept.items() if _kinds(_tensors(each))}
            operands = [kept[key] for key in (*OPERANDS, "exponent", "target") if kept.get(key) is not None]
            call = getattr(torch, op) if ALONE.fullmatch(op) else CALLS.get(op)
            known = call and not bad and len(operands) == (2 if op in CALLS else 1)
            if known and (origin := _made("loss", "", op, call, operands, {}, call(*operands))):
                return origin
            why = _reason(op, *(each if isinstance(each, torch.Tensor) else None for each in map(kept.get, OPERANDS)))
            if kept.get("reduction") == 1 and "total_weight" in kept and kept["total_weight"] == 0:
                why = "it averages over 0 targets: all are ignored"
            if why:
                return Origin("loss", "", op, f"in the loss: {op}: {why}", "", "reason")
            if "target" in bad:
                return Origin("input", "", op, f"in the target of the loss ({op})")
            if bad:
                return self._maker(node, *next(iter(bad.items())))
        return None

    def _maker(self, node, key, tensor):
        """The Origin of a bad operand or result that a node keeps, while all before it was finite."""
        kind = f"{'NaN' if 'nan' in _kinds([tensor]) else 'inf'} ({_short(tensor.dtype)})"
        op, sources = _op(node), [each for each, _ in node.next_functions]
        if key.startswith("result") and op not in SOFTMAX:
            end = "; fp16's exp ends at 11.09" if op == "exp" and tensor.dtype == FP16 else ""
            return self._blamed(node, f"{op} made {kind}{end}")
        maker = sources[OPERANDS.index(key)] if key in OPERANDS[: len(sources)] else next(filter(None, sources), None)
        while maker is not None and "output" not in maker.metadata and _passes_on(maker):
            source = maker.next_functions[0][0]
            if source is None or "output" in source.metadata or hasattr(source, "variable"):
                break  # what it was given is finite
            maker, kind = source, kind.partition(" ")[0]  # of a dtype that is not known
        if maker is None or "output" in maker.metadata:
            words = "it needs no gradient, as data, a mask, a weight of the loss, or what is computed of a buffer"
            words = f"{op} was given {kind} that is not of the model's output: {words}"
            return Origin("loss", "", op, f"in the loss: {words}")
        sizes = _saved(maker).get("self_sym_sizes") if _op(maker) in ("sum", "mean") else ()
        terms = f" of {math.prod(sizes) // tensor.numel():,} numbers each" if sizes else ""
        return self._blamed(maker, f"{_op(maker)} made {kind}{terms}; {op} got it")

    def _blamed(self, maker, words):
        """The Origin at a node: a guess where what it was given may have been bad already, as not all ops keep that."""
        unknown, passed = [], [maker]
        for node in passed:
            kept = any(isinstance(each, torch.Tensor) for each in _saved(node).values())
            sources = [source for source, _ in node.next_functions]
            for source in filter(None, sources):
                ends = hasattr(source, "variable") or "output" in source.metadata
                if not ends and "result" not in _saved(source):
                    (passed if _passes_on(source) else unknown).append(source)
            unknown += ["a number that needs no gradient"] * (None in sources and not kept)
        names = dict.fromkeys(each if isinstance(each, str) else f"{_op(each)} before it" for each in unknown)
        words = f"in the loss: {words}" + (f", if it was not {' or '.join(names)}" if unknown else "")
        return Origin("loss", "", _op(maker), words, why="guess" if unknown else "")


class _Calls:
    """Tells of calls that are missing, double or misplaced."""

    def __init__(self, seen):
        self.seen, self.scalers, self.met = seen, weakref.WeakSet(), 0
        self.tries = self.updates = self.scaled = 0  # steps tried, updates, losses scaled since the last update
        self.not_scaled = self.taken = 0  # backward passes of other losses since then; gradients by torch.autograd.grad
        self.unscaled, self.kept, self.in_step = Counter(), [], False
        self.stepped = weakref.WeakSet()  # by the scaler, since a loss was scaled
        self.rates, self.went_on = weakref.WeakKeyDictionary(), 0  # at skipped steps; how often the next was another

    def tell(self, what, cost, where="", say=certain):
        self.seen.tell(say(what, where, cost))

    def scale(self, original, scaler, outputs):
        scaled = original(scaler, outputs)
        self.scaled += scaler.is_enabled() and not isinstance(outputs, torch.Tensor)
        if isinstance(outputs, torch.Tensor) and outputs.grad_fn is not None and scaler.is_enabled():
            if any("loss" in node.metadata for node in _region(outputs)):
                what = "scaler.scale is called twice on the same loss"
                self.tell(what, "Gradients are unscaled once: they stay multiplied by the scale.")
            scaled.grad_fn.metadata["loss"] = outputs.detach()
            self.seen.scaler, self.scaled, self.met = scaler, self.scaled + 1, self.met + (scaler not in self.scalers)
            self.scalers.add(scaler)
            self.stepped.clear()
            if self.met > 2 and self.met > self.tries:
                cost = "Each starts at its first scale: what one learned of overflows is lost. Make one, once."
                self.tell("each step uses a new GradScaler", cost)
        return scaled

    def grad(self, original, outputs, *args, **kwargs):
        """Marks gradients of scaled outputs, of which a loss may be made."""
        if self.seen.hooks.is_off():
            return original(outputs, *args, **kwargs)
        found, ends = original(outputs, *args, **kwargs), [each for each in _tensors(outputs) if each.grad_fn]
        self.taken += any(each is weight for each in _list(args and args[0]) for weight in self.seen.trained.values())
        if any("loss" in node.metadata for each in ends for node in _region(each)):
            for each in [each for each in found if each is not None and each.grad_fn]:
                each.grad_fn.metadata["scaled gradient"] = True
        return found

    def before_backward(self, region):
        penalty = any("scaled gradient" in node.metadata for node in region)
        if penalty and not _divides_by_scale(region, self.seen.scaler):
            cost = "As part of a loss they are too large by the scale: divide them by `scaler.get_scale()` first."
            self.tell("torch.autograd.grad was given a scaled loss, and its gradients were used", cost)
        if self.unscaled:
            found = [_local(weight.grad) for weight in _held(self.unscaled) if weight.grad is not None]
            self.kept = [(gradient, _sample(gradient)) for gradient in found if gradient.any()]

    def after_backward(self, region):
        scaled = self.unscaled and any("loss" in node.metadata for node in region)
        if scaled and any(not torch.equal(_sample(gradient), before) for gradient, before in self.kept):
            cost = "The sum is of two sizes: call unscale_ once, after the last of the passes that add up."
            self.tell("a backward adds scaled gradients to those that unscale_ has divided", cost)

    def unscale_(self, original, scaler, optimizer):
        if scaler.is_enabled():
            if (self.seen.passes or self.taken) and not self.scaled:
                cost = "Gradients are divided by a scale that the loss was not multiplied by."
                self.tell("backward was called on a loss that scaler.scale has not seen", cost)
            if self.scaled and self.not_scaled:
                cost = "Its gradients are divided by a scale that it was not multiplied by: scale each loss."
                what = f"of {self.scaled + self.not_scaled} losses for one step, {self.not_scaled} were not scaled"
                self.tell(what, cost, say=certain if len(self.seen.optimizers) < 2 else likely)
            if not self.unscaled and not self.stepped:  # all gradients are scaled yet
                self.seen.looks.note_norm("norm before unscale_")
            self.unscaled[optimizer] += 1
        original(scaler, optimizer)  # it may refuse
        if scaler.is_enabled() and self.kept and self.unscaled[optimizer] > 1:
            where = f"unscale_ was called {self.unscaled[optimizer]} times for one step"
            cost = "Earlier gradients are divided by the scale again: nearly nothing is left. Call it once."
            self.tell("unscale_ is called on gradients that it unscaled already", cost, where)

    def step(self, original, scaler, optimizer, *args, **kwargs):
        self.tries += not self.seen.optimizers or optimizer is self.seen.optimizers[0]
        if self.tries > 3 and not self.updates and scaler.is_enabled():
            self.tell("scaler.update is never called", "The scale stays too high after an overflow.")
        rate = [group.get("lr") for group in optimizer.param_groups if isinstance(group.get("lr"), float)]
        self.went_on += self.rates.get(optimizer, rate) != rate
        self.in_step, self.rates[optimizer] = True, rate
        try:
            return original(scaler, optimizer, *args, **kwargs)
        finally:
            self.in_step = False
            self.unscaled.pop(optimizer, None)
            self.stepped.add(optimizer)

    def update(self, original, scaler, *args, **kwargs):
        self.updates, self.scaled, self.not_scaled = self.updates + 1, 0, 0
        return original(scaler, *args, **kwargs)

    def before_step(self, optimizer):
        """Before an optimizer's own step, which the scaler takes, or the loop."""
        if not self.in_step:
            self.tries += optimizer is self.seen.optimizers[0]
            if _is_on(self.seen.scaler):
                self._step_of_the_loop(optimizer)
        self.rates.pop(optimizer, None)
        self.unscaled.pop(optimizer, None)

    def _step_of_the_loop(self, optimizer):
        """A step that the scaler does not take."""
        if self.scaled and not self.unscaled[optimizer]:
            held = set(map(id, _held([optimizer])))
            where = _whole(self.seen.plain, [name for name, each in self.seen.trained.items() if id(each) in held])
            cost = "Gradients are still multiplied by the scale, and an inf in them is not skipped: call scaler.step."
            self.tell("optimizer.step was called without scaler.step or unscale_", cost, where)
        if optimizer in self.stepped:
            cost = "Each pass counts twice, and a skipped step is taken, with its inf: remove one call."
            self.tell("optimizer.step is called again after scaler.step", cost)
        if self.unscaled[optimizer]:
            cost = "An inf in the gradients is not skipped: it gets into weights and states. Call scaler.step."
            self.tell("optimizer.step was called after unscale_, and scaler.step was not", cost)


def _own_scale(loss):
    """The large number that a loop multiplies its loss by; 0 if it does not."""
    kept = _saved(loss.grad_fn) if loss.grad_fn and _op(loss.grad_fn) == "mul" else {}
    factors = [float(each) for each in map(kept.get, OPERANDS) if isinstance(each, torch.Tensor) and each.numel() == 1]
    return max([each for each in factors if each >= 64 and math.log2(each).is_integer()], default=0)


def _divides_by_scale(region, scaler):
    """Whether one of autograd's nodes divides by the scale, or multiplies by its inverse."""
    factors = [(_op(node), _saved(node).get("other")) for node in region if _op(node) in ("mul", "div")]
    factors = [(op, float(each)) for op, each in factors if isinstance(each, torch.Tensor) and each.dim() == 0]
    sizes = [each if op == "mul" else 1 / each for op, each in factors]
    return any(math.isclose(size * scaler.get_scale(), 1, rel_tol=0.01) for size in sizes)
