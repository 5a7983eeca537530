"""The close looks of a watch: at one pass of `every`, and at the ops between the model's passes."""

import functools
import gc
import math
import re
import traceback
import warnings
import weakref
from contextlib import contextmanager, suppress

import pandas as pd
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.weak import WeakTensorKeyDictionary

from halfbits._rounding import _compared, _decays, _rounded_numbers, _Sums
from halfbits._tensors import (
    AUTOCAST,
    BF16,
    FP16,
    FP32,
    SIXTEEN,
    _gradients,
    _held,
    _is_fsdp,
    _local,
    _mapped,
    _module_of,
    _norms,
    _percent,
    _sample,
    _short,
    _spacings,
    _tensors,
    _together,
    _trained,
)
from halfbits.auditing import _longest_steps
from halfbits.origin import NonFinite, _made
from halfbits.report import likely, note

RECORDS = 128  # looks that are kept; beyond, every second one goes
NUMBER = r"\d[\d.,]*(e[+-]?\d+)?"


class _Between(TorchDispatchMode):
    """Looks for numbers that are too coarse in losses and metrics, in the close look and the first evaluations."""

    def __init__(self, seen):
        super().__init__()
        self.supports_higher_order_operators = True
        self.seen, self.evaluations, self.is_on = seen, 0, False
        self.sums, self.within = _Sums(1), None  # those in the forward of an evaluation, where it looks at nothing else
        self.given = WeakTensorKeyDictionary()  # what was computed of outputs without gradients: the model's dtype

    @classmethod
    def ignore_compile_internals(cls):
        return True  # a compiled loss stays so

    def on(self, training, within=False):
        self.within = _Sums() if within else None
        self.evaluations += not training
        due = self.seen.looks.number >= self.seen.passes if training else self.evaluations < 2000
        if due and not _is_fsdp(self.seen.model) and _get_current_dispatch_mode() is None:
            self.is_on = bool(self.__enter__())

    def off(self):
        if self.is_on and _get_current_dispatch_mode() is self:
            self.is_on = bool(self.__exit__(None, None, None))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not hasattr(func, "overloadpacket"):
            return func(*args, **kwargs or {})  # a higher-order operator, as flex_attention or cond
        kwargs, op = kwargs or {}, func.overloadpacket.__name__
        if self.within:
            output, found = self.within.do("in the forward of an evaluation", op, func, args, kwargs)
            self.seen.coarse |= {re.sub(NUMBER, "", each.what): each for each in found}
            return output
        fp16 = any(each.dtype == FP16 for each in _tensors((args, kwargs)))
        given = _mapped(torch.clone, args) if fp16 and func._schema.is_mutable else args
        output, found = self.sums.do("between the model's passes", op, func, args, kwargs)
        with suppress(Exception):  # as of complex numbers
            if fp16 and (origin := _made("loss", "", op, func, given, kwargs, output)) and origin.kind == "inf":
                words = origin.words.replace("in the loss", "between the model's passes")
                found += [likely(words, "", "Compute it in float32.")] if origin.why == "format" else []
            own = any(each in self.given for each in _tensors(args))  # in the precision that the model computes in
            found += [] if own else _compared(op, args)
            found += [*_decays(op, args), *self._other_precision(op, args, output)]
            if op.startswith(("nll_loss", "gather", "index", "embedding", "scatter")):
                found += _rounded_numbers(args, f"given to {op}, between the model's passes")
        self.seen.coarse |= {re.sub(NUMBER, "", each.what): each for each in found}  # the last of the same words
        return output

    def _other_precision(self, op, args, output):
        """Outputs without gradients, as of a rollout, beside those of a pass in another precision."""
        then = next((self.given[each] for each in _tensors(args) if each in self.given), None)
        if then and not (op == "_to_copy" and output.dtype in SIXTEEN):  # else it is stored
            self.given.update({each: then for each in _tensors(output) if not each.requires_grad})
        pair = _tensors(args[:2]) if op in ("sub", "div") else []
        old = [each for each in pair if each in self.given and not each.requires_grad]
        if len(pair) == 2 and len(old) == 1 and {each.requires_grad for each in pair} == {True, False}:
            now = _dtype_within(self.seen.saved["autocast"], self.seen.plain)
            apart = (pair[0].detach().float() - pair[1].detach().float()).abs().median()
            if now != then and 20 * _spacings(old[0].float(), now if now in SIXTEEN else then).median() > apart:
                what = f"{op} of outputs in {_short(now)} and of the model's in {_short(then)}, without gradients"
                cost = "Part of the difference is the other precision, as of log-probabilities: compute both alike."
                yield likely(what, "in the loss", cost)


def _dtype_within(cast, model):
    """What a model computes in, by autocast's settings and its weights."""
    weight = next(model.parameters(), None)
    return cast["dtype"] if cast["enabled"] else FP32 if weight is None else weight.dtype


def _copies(model):
    """Numbers in 16 bits that copy a model's weights, as an average or a teacher does: among this process's tensors.
    Each as pairs of a copy and its weight, and a sample of the copies."""
    kinds, near = {torch.Tensor, nn.Parameter}, []
    low = [each for each in gc.get_objects() if type(each) in kinds and each.dtype in SIXTEEN and each.is_leaf]
    own = {_local(each).untyped_storage().data_ptr() for each in _trained(model).values()}  # an average may be a part
    low = [each for each in low if each.layout is torch.strided and each.untyped_storage().data_ptr() not in {0, *own}]
    for weight in [each for each in _trained(model).values() if type(each) is nn.Parameter]:
        sample = _sample(weight)
        same = [each for each in low if each.shape == weight.shape and each.device == weight.device]
        near.append([(each, weight) for each in same if (_sample(each) - sample).norm() < sample.norm() / 2])
    found = zip(*filter(None, near))
    return [(pairs, torch.cat([_sample(each) for each, _ in pairs])) for pairs in found]


def _harmless(method):
    """An error of a watch's own ends the watch, not the run."""

    @functools.wraps(method)
    def guarded(self, *args, **kwargs):
        if not self.seen.hooks.undo:
            return None
        try:
            return method(self, *args, **kwargs)
        except NonFinite:
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            words = f"watch stopped: {type(error).__name__}: {error} (in {frame.name}, line {frame.lineno})"
            self.seen.tell(note(words, "", "The run goes on. It is no fault of the run's: please report it."))
            self.seen.hooks.detach()
            warnings.warn(words, RuntimeWarning, stacklevel=2)

    return guarded


class _Looks:
    """The close look at one pass of `every`. What it measures goes to `now`, as numbers by (module, what), and becomes
    a record, until a next look, by `keep`."""

    def __init__(self, seen):
        self.seen, self.records, self.now, self.number = seen, [], {}, 0
        self.on = self.due = self.sums_due = False  # until the backward; an update; a sum over passes was looked at
        self.before = []  # weights before a step: name, weight, sample, where its gradient is not 0
        self.longest = {}  # that Adam takes, by id of a weight
        self.old, self.stale = (
            [],
            False,
        )  # gradients that a step used, to which a backward added; whether a step used them
        self.without, self.moves_without = [], False  # weights before a step without gradients; whether it moved them
        self.dtypes, self.cut, self.missing = {}, set(), None  # of outputs; modules and weights without a gradient
        self.copies, self.bases = [], []  # as `_copies` finds them; what adapters are merged into, and its first sample

    def begin(self, number):
        self.keep()
        self.on, self.due, self.sums_due, self.number = True, True, True, number

    def _size(self, name, what, tensor):
        if _local(tensor).numel():
            low, high = torch.aminmax(_local(tensor))
            size = torch.maximum(-low, high).float()
            self.now[name, what] = torch.maximum(self.now.get((name, what), size), size)

    def output(self, name, module, output):
        self.dtypes[name] = _short(output.dtype)
        self._size(name, "output", output)
        if torch.is_autocast_enabled(output.device.type):  # perhaps by the model itself
            self.seen.cast = AUTOCAST[self.seen.plain] = torch.get_autocast_dtype(output.device.type)
        if output.requires_grad:
            output.register_hook(functools.partial(self._gradient, name))
        elif not torch.is_grad_enabled() and any(weight.requires_grad for weight in module.parameters(recurse=False)):
            self.cut.add(name)

    @_harmless
    def _gradient(self, name, gradient):
        if self.on and gradient.numel():
            self._size(name, "gradient", gradient)
            sample = _sample(gradient)
            there, all_of_it = sample != 0, torch.ones_like(sample, dtype=torch.bool)
            self.now[name, "% zero"] = _percent(~there, all_of_it)
            self.now[name, "% 0 in fp16"] = _percent(there & (sample.to(FP16) == 0), all_of_it)

    @contextmanager
    def around_backward(self, stepped):
        """`stepped`: whether a step has used the gradients that are there."""
        found = _gradients(self.seen.trained) if self.on or self.sums_due else {}
        stepped = stepped and len(self.seen.optimizers) == 1  # of several, one's backward may pass through all
        used = [(each, _sample(each)) for each in found.values() if self.on and stepped and not each.is_sparse]
        self.old = [each for each in self.old if each() is not None and _sample(each()).any()]  # not set to zero since
        sums = {name: each for name, each in found.items() if each.dtype in SIXTEEN and type(each) is torch.Tensor}
        sums = {name: (_sample(each), []) for name, each in sums.items()} if self.sums_due else {}
        keep = lambda added: lambda gradient: added.append(_sample(gradient))
        hooks = [self.seen.trained[name].register_hook(keep(added)) for name, (_, added) in sums.items()]
        self.sums_due = self.sums_due and not sums
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.old += [weakref.ref(gradient) for gradient, sample in used if not torch.equal(_sample(gradient), sample)]
        for name, (before, added) in sums.items():
            if added:
                lost = _percent(_sample(self.seen.trained[name].grad) == before, added[0] != 0)
                self.now[_module_of(name), "% sums lost"] = lost

    def gradients(self, found, norms):
        """After a backward, with the gradients of weights that were found."""
        if self.due:
            self.now["", "norm after backward"] = _together(norms, self.seen.device).norm()
        for name, gradient in found.items() if self.on else ():
            self._size(_module_of(name), "weight gradient", gradient)
        self.on = False

    def note_norm(self, what):
        if self.due and (found := _gradients(self.seen.trained)):  # masters may have taken them
            self.now["", what] = _together(_norms(found.values()), self.seen.device).norm()

    def before_step(self, optimizer):
        if self.due and not self.before:
            self.note_norm("norm at the step")
            found = _gradients(self.seen.trained)
            self.stale |= not {id(each()) for each in self.old}.isdisjoint(map(id, found.values()))
            weights = [(name, self.seen.trained[name]) for name, gradient in found.items() if not gradient.is_sparse]
            weights = [(name, weight) for name, weight in weights if _local(weight).numel()]  # not an empty shard
            weights.sort(key=lambda pair: pair[1].numel())  # of a module's weights the largest is kept
            self.before = [(name, weight, _sample(weight), _sample(weight.grad) != 0) for name, weight in weights]
            self.longest = _longest_steps([optimizer])
            held = set(map(id, _held([optimizer])))  # another's weights have gradients at another time
            missing = {name for name, each in self.seen.trained.items() if id(each) in held} - found.keys()
            if not found:  # it may step by gradients of its own
                self.without = [(each, _sample(each)) for each in self.seen.trained.values() if _local(each).numel()]
            self.missing = missing if self.missing is None else self.missing & missing
        self.old = []

    def read_updates(self):
        """What the last step did to the weights."""
        moved, wide = [], [old for _, weight, old, _ in self.before if weight.dtype == FP32]
        for dtype in (BF16, FP16) if wide else ():  # which numbers a cast to 16 bits would not change
            same = torch.cat([old.to(dtype).float() == old for old in wide])
            self.now["", f"% weights of {_short(dtype)}"] = 100 * same.float().mean()
        for name, weight, old, moving in self.before:
            update = _sample(weight) - old
            self.now[_module_of(name), "% updates lost"] = _percent(update == 0, moving)
            usual = math.sqrt(len(old) / 3 / weight.shape[-1]) if weight.dim() == 2 else 0.0  # at PyTorch's start
            ratio, starts = update.norm() / old.norm(), old.norm() < 0.02 * usual
            self.now[_module_of(name), "update/weight"] = torch.where(moving.any() & ~starts, ratio, math.nan)
            if longest := self.longest.get(id(weight)):
                self.now[_module_of(name), "step/longest"] = (update.abs() - 0.1 * old.abs()).max() / longest
            moved.append(update.abs().max() - 1 * ~moving.any())  # below 0 without a gradient
        if moved:
            self.now["", "moved"] = _together(moved, self.seen.device).max()
        self.moves_without |= any(not torch.equal(_sample(weight), old) for weight, old in self.without)
        self.due = self.due and not (moved or self.without)
        self.before, self.without = [], []

    def _look_at_copies(self):
        """Of 16-bit copies that move at all: the percentage that stands, of numbers that are far from the weight."""
        for place, (pairs, old) in enumerate(self.copies):
            new = torch.cat([_sample(kept) for kept, _ in pairs])
            far = (torch.cat([_sample(weight) for _, weight in pairs]) - new).abs() > new.abs() / 16
            moves = (new != old).any() & new.isfinite().all()
            self.now["", f"% copy {place} stands"] = _percent(new == old, far) * moves
            self.copies[place] = (pairs, new)

    def keep(self):
        """The look becomes a record. Beyond RECORDS, every second one goes."""
        self.read_updates()
        if self.now:
            self._look_at_copies()
            labels = tuple(self.now)
            labels = self.records[-1][1] if self.records and self.records[-1][1] == labels else labels
            values = _together(self.now.values(), self.seen.device).cpu()
            self.records.append((self.number, labels, values, self.seen.scale, self.seen.skipped))
            self.records = self.records[::2] if len(self.records) > RECORDS else self.records
        self.now = {}

    def rows(self):
        """All that was looked at: a row a number."""
        records = [(number, zip(labels, values.tolist())) for number, labels, values, *_ in self.records]
        rows = [(number, *label, value) for number, pairs in records for label, value in pairs]
        return pd.DataFrame(rows, columns=["pass", "module", "what", "value"])
