"""What is wrong with a mixed-precision run while it trains: `watch`.

    from halfbits import watch

    with watch(model, optimizer, scaler) as seen:  # raises NonFinite at the first bad number
        train()
    print(seen)

The first line that is printed is the verdict: the most probable cause, with its place, evidence and mend. Cases are
headings of notebook 14, the clinic, where each is shown and mended.
"""

import math
import warnings
from collections import deque
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist

from halfbits._hooks import _Hooks
from halfbits._looks import _Between, _copies, _Looks
from halfbits._loss import _Calls
from halfbits._search import _case_of, _inspect, _origin, _where_raised, _why_skipped
from halfbits._tensors import (
    LARGEST,
    _compiled,
    _device,
    _gradients,
    _groups,
    _is_on,
    _kinds,
    _list,
    _local,
    _norms,
    _plain,
    _sample,
    _stops,
    _trained,
    _world,
)
from halfbits._verdicts import JUDGES, _growth, _long_steps, _nothing
from halfbits.auditing import _adapters, _moments, _resumed
from halfbits.origin import NonFinite, Origin
from halfbits.report import Report, _some, note

HEADROOMS = ("output", "gradient", "weight gradient")
SHARES = "% zero", "% 0 in fp16", "update/weight", "% updates lost", "% sums lost"


def _headroom(size):
    """How often a number can double before fp16's largest is passed; negative beyond."""
    return math.log2(LARGEST) - math.log2(size) if size > 0 else math.inf if size == 0 else math.nan


class watch:
    """Watch a training run, as a context manager or by `start()` and `stop()`; on all processes of a run or on none.

    It raises `NonFinite` at the first loss, output or gradient that is not finite, and names module and op, and whether
    the number was in the input, in the weights already, or made by the forward, the loss or the backward; or says that
    the run had grown for many passes, so that an overflow was its end and not its cause. Gradients that overflow under
    a GradScaler are its routine: it raises where the scale falls below 1, or where `patience` steps in a row fail. On
    a CPU, and on a GPU with `every=1`, it raises before the optimizer's step. Else it reads once in `every` passes:
    then module and pass are right, but the step is done, and nothing can be saved.

    In one pass of `every`, and at first in evaluations, it looks closely, at the ops of losses and metrics too:
    `table()`, and `findings`, which `print` tells. In the second pass, and ever more seldom after it, it does the pass
    again, twice, uncompiled: it looks at each op, and whether gradients double with the loss.

    Parameters
    ----------
    optimizer : optimizer, or a list of several; others that hold weights of the model are found when they step
    scaler : torch.amp.GradScaler; one that is not given is found when it is used
    every : int, the passes between two looks
    save : path of the file in which the batch, weights and origin of the bad pass are saved; None saves nothing. Of
        several processes, each adds its rank.
    warn : bool, warn instead of raising, once
    patience : int, optimizer steps in a row that may be skipped under a scaler

    `passes` counts the backward passes, `steps` those of the first optimizer, `skipped` the falls of the scale. While
    it watches, `torch.autograd.grad` and `backward` are wrapped, and four methods of `GradScaler`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        every: int = 100,
        save: str | Path | None = "not_finite.pt",
        warn: bool = False,
        patience: int = 20,
    ):
        self.model, self.optimizers, self.scaler = _compiled(model), _list(optimizer), scaler
        self.every, self.save, self.warn, self.patience = every, save, warn, patience
        self.plain, self.device = _plain(model), _device(model)
        self.at_once = self.device.type == "cpu" or every == 1  # read each pass: a replay finds module and op
        self.passes = self.steps = self.skipped = self.grown = 0
        self.scales = {}  # the last of each scaler
        self.trend, self.scale, self.cast, self.own_scale = deque(maxlen=256), math.nan, None, 0  # of the last passes
        self.streak, self.last_bad, self.bad_pass = 0, -1, -1  # bad gradients: steps in a row, the last step and pass
        self.saved = self.good = self.loss = None  # the last pass, the last good one, the last `_Loss`
        self.earlier = []  # the forwards of this pass before the last
        self.told, self.hidden, self.coarse, self.zero = {}, {}, {}, None  # Findings, and Origins that later ops hide
        self.problem = self.error = self.why = None  # a NonFinite, another error, the Origin of skipped steps
        self.flat, self.ends = "", False  # what makes a loss 0 whatever the model gives; whether this pass is the last
        self.warned = self.cast_twice = self.inspects = False  # autocast changes a backward; a look at ops is due
        self.calls, self.looks, self.hooks, self.between = _Calls(self), _Looks(self), _Hooks(self), _Between(self)

    def __exit__(self, kind, error, trace):
        if isinstance(error, Exception) and not isinstance(error, NonFinite):
            self.error = _where_raised(self, error)
            error.add_note(f"watch: {self.error}")
        self.stop(check=kind is None)

    def start(self):
        self.weights = dict(self.plain.named_parameters())
        self.dtypes = {name: weight.dtype for name, weight in self.weights.items()}
        self.trained = {name: weight for name, weight in _trained(self.plain).items() if weight.numel()}
        self.first_norms = _norms(self.trained.values())
        self.looks.copies = _copies(self.plain)
        self.looks.bases = [(matrix, _sample(matrix)) for _, matrix, _ in _adapters(self.plain)]
        self.tell(*_moments(*self.run), *_resumed(*self.run))
        self.hooks.attach()
        return self

    __enter__ = start

    def stop(self, check=True):
        """Take all hooks away; read what was not read yet, and raise if that is bad."""
        self.hooks.detach()
        if check:
            self.read()
            self.decide()
            if self.skips() and self.at_once and not self.why:
                self.why = _why_skipped(self)
        self.looks.keep()

    def tell(self, *findings):
        """The same words are told once."""
        for each in findings:
            self.told.setdefault(each.what, each)

    def skips(self):
        """How many of the last steps were skipped in a row."""
        return self.streak if 0 <= self.calls.tries - 1 <= self.last_bad else 0

    def end_of_pass(self):
        """After a backward: read and judge what is due, now and then by doing the pass again."""
        if self.at_once or self.passes % self.every == 0:
            self.read()
        if self.loss:
            self.loss.region = []
        looks, rest = divmod(self.passes - 1, self.every)
        self.inspects |= self.passes == 2 or (rest == 0 and looks in (1, 4, 16, 64, 256))
        if self.inspects and self.saved["gradients"] and not self.problem:  # another network's pass has none
            self.inspects = False
            _inspect(self)
        if self.passes % self.every == 0:
            self.decide()

    def read(self):
        """Wait for all that was noted, and judge it, pass by pass."""
        for number, step, labels, values in self.hooks.read_pending():
            self._judge(number, step, labels, values, number == self.passes and bool(self.hooks.undo))
        if not self.at_once and math.isnan(self.hooks.evaluation.item()) and self.problem is None:
            self._report(Origin("forward", "", "", "in an evaluation: its output"), self.passes, intact=False)

    def _judge(self, number, step, labels, values, intact):
        """Whether a pass was finite. `intact`: the weights are still those of that pass."""
        of = lambda kind: [value for (one, _), value in zip(labels, values) if one == kind]
        loss = [*of("loss"), *filter(math.isfinite, of("penalty"))]
        scale, gradients = of("scale"), of("gradient")
        if scale:
            name = next(name for kind, name in labels if kind == "scale")  # two networks may have a scaler each
            self.skipped += scale[0] < self.scales.get(name, math.nan)
            self.grown += scale[0] > self.scales.get(name, math.nan)
            self.scale = self.scales[name] = scale[0]
        if loss and (of("incoming") or not of("root")):  # else it is another network's, as a GAN has two
            largest = labels[values.index(max(gradients))][1] if gradients else ""
            rate = next((float(group.get("lr", 0)) for group in _groups(self.optimizers)), 0)
            self.trend.append((loss[0], math.hypot(*gradients) / (sum(scale) or 1), largest, rate))
        finite = all(map(math.isfinite, of("incoming") + gradients))
        if not finite and intact:  # perhaps only the squares in a norm are not
            finite = not _kinds(_gradients(self.weights).values())
        if any(map(_stops, of("root"))):
            self.explain("forward", labels, values, number, intact)
        elif not all(map(math.isfinite, loss)):
            self.explain("loss", labels, values, number, intact)
        elif finite:
            self.good = self.saved if self.at_once else None
        else:
            self.streak = self.streak + (step != self.last_bad) if self.last_bad >= step - 1 else 1
            self.last_bad, self.bad_pass = step, number
            if not _is_on(self.scaler) or self.streak > self.patience or (scale or [1])[0] < 1:
                self.explain("backward", labels, values, number, intact)
            elif self.streak == 3 and intact and not self.why:
                self.why = _why_skipped(self)

    def explain(self, phase, labels, values, number=None, intact=True):
        """Find where a number that is not finite comes from, save the pass, and stop."""
        if self.problem is None:
            bad = [label for label, value in zip(labels, values) if not math.isfinite(float(value))]
            self.ends = not self.warn
            origin = _origin(self, phase, bad, intact)
            self._report(origin, self.passes + 1 if number is None else number, intact)

    def _report(self, origin, number, intact):
        """Save, and raise or warn; in a run of several processes that is for a later `decide`."""
        if origin.phase != "input" and origin.why != "reason" and (grown := _growth(self)):
            words = f"training diverges: {grown}; at the end of that, {origin}"
            origin = origin._replace(phase="divergence", words=words)
        words = f"pass {number}, after {self.steps} optimizer steps: {origin}."
        running = [(name, buffer) for name, buffer in self.plain.named_buffers() if "running_" in name]
        if intact and (spoilt := [name for name, buffer in running if _kinds([buffer])]):
            words += f" Not finite since: {_some(spoilt)}; a skipped step does not undo that."
        path = _save(self, number, origin) if intact and self.save and "batch" in (self.saved or {}) else None
        if path:
            words += f" Saved: {path}."
        elif not intact:
            words += " The weights have changed since: go on from a checkpoint with every=1 to have the pass saved."
        self.looks.keep()
        known = [each.what for each in [*self.told.values(), *_long_steps(self)] if each.severity == "certain"]
        words = f"{'; '.join(known)}. Then, {words}" if known else words
        case = _case_of(origin)
        self.problem = NonFinite(words + (f" See the clinic: {case}." if case else ""), origin, path, case)
        if not _world():
            self.decide()

    def decide(self):
        """Stop, all processes or none."""
        problem = self.problem
        if _world():
            bad = torch.tensor(float(problem is not None), device=self.device)
            dist.all_reduce(bad, dist.ReduceOp.MAX)
            if bad.item():
                said = [None] * _world()
                dist.all_gather_object(said, problem and str(problem))
                words = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(said) if each)
                problem = NonFinite(words, *((problem.origin, problem.path, problem.case) if problem else ()))
        if problem is not None and not self.warn:
            self.stop(check=False)
            raise problem
        if problem is not None and not self.warned:
            self.warned = True
            warnings.warn(str(problem), RuntimeWarning, stacklevel=2)

    def table(self):
        """A row a module, over the looks so far. Headrooms of its outputs, of the gradients at its outputs and of those
        of its weights: how often the largest could double before it is past 65504. Of the gradients at its outputs, as
        they come, scaled: the percentages of values that are 0, and that would become 0 in fp16. The norm of its
        updates relative to its weights'. The percentages that rounding takes away of updates, and of what a pass adds
        to gradients in 16 bits."""
        rows = self.looks.rows()
        rows = rows[rows.what.isin([*HEADROOMS, *SHARES])]
        groups = rows.groupby(["module", "what"], sort=False).value
        order = rows.module.unique()  # pandas 2.2 mixes values up in unstack(sort=False)
        sizes, means = groups.max().unstack().reindex(order), groups.mean().unstack().reindex(order)
        table = pd.DataFrame({"dtype": pd.Series(self.looks.dtypes, dtype=object)}, index=sizes.index)
        for what in [what for what in HEADROOMS if what in sizes]:
            table[f"{what} headroom"] = sizes[what].map(_headroom)
        return table.join(means[[what for what in SHARES if what in means]])

    @property
    def run(self):
        return self.plain, self.optimizers, self.scaler

    @property
    def report(self):
        words = f"Seen: {self.passes:,} passes, {self.steps:,} optimizer steps"
        if _is_on(self.scaler):
            now = "" if math.isnan(self.scale) else f", now {self.scale:,.10g}"
            words += f", {self.skipped} falls of the scale{now}"
        told = [*([self.error] if self.error else []), *self.told.values()]
        told += [each for judge in JUDGES for each in judge(self) if each.what not in self.told]
        told += _nothing(self) if all(each.severity == "note" for each in told) else []
        return Report(told, f"{words}.")

    @property
    def findings(self):
        return self.report.findings

    def __repr__(self):
        return repr(self.report)


def _state(model, weights=None):
    """The numbers of all weights and buffers, by names that do not tell what was compiled. It is not `state_dict()`,
    at which FSDP2 takes its gathered weights away, on the process that calls it."""
    named = [*(weights or model.named_parameters()), *model.named_buffers()]
    return {name.replace("_orig_mod.", ""): _local(tensor) for name, tensor in named}


def _save(seen, number, origin):
    """Write the batch, weights and origin of the bad pass; the path, or None."""
    path = Path(seen.save)
    path = path.with_stem(f"{path.stem}_{dist.get_rank()}") if _world() else path
    state = _state(seen.plain, seen.weights.items())
    try:
        torch.save(seen.saved | {"state": state, "pass": number, "origin": origin}, path)
    except Exception as error:  # a full disk, a batch that cannot be pickled
        seen.tell(note(f"nothing was saved: {type(error).__name__}: {error}"))
        return None
    return str(path)
