"""What is wrong with a mixed-precision run while it trains: `watch`.

    from halfbits import watch

    with watch(model, optimizer, scaler) as seen:  # raises NonFinite at the first bad number
        train()
    print(seen)

The first line that is printed is the verdict, then what was looked at, and what was not. Cases are headings of notebook
14, the clinic, where each is shown and mended.
"""

import functools
import math
import threading
from collections import deque
from pathlib import Path

import pandas as pd
import torch
from torch import nn

from halfbits import _origins
from halfbits._listening import HUB, Boundary, NonFinite
from halfbits._looks import Look, norms_of
from halfbits._ops import Origin, Slopes, place
from halfbits._scaling import Scaling, rate_of
from halfbits._tensors import (
    LARGEST,
    SIXTEEN,
    bad_kind,
    device_of,
    ends,
    held_by,
    ids_held_by,
    is_compiled,
    is_on,
    kind_of,
    nodes_from,
    plain,
    readable,
    sample,
    short,
    tensors_in,
)
from halfbits._verdicts import case_of, certain_so_far, growth, verdicts, what_was_seen
from halfbits.auditing import check_given
from halfbits.report import Report, some

LOOKS = 32  # that are kept; beyond, every second one goes
SIZES = "output", "gradient", "weight gradient"
FAST_PATH = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class watch:
    """Watch a training run, as a context manager or by `start()` and `stop()`.

    It raises `NonFinite` at the first loss, output or gradient that is not finite, and says where that number came
    from. Gradients that overflow under a GradScaler, those in a penalty too, are its routine: it raises where more than
    `patience` steps in a row were skipped.

    On a CPU, and on a GPU with `every=1`, it reads the numbers of each pass, and raises before the optimizer's step.
    Else it reads them once in `every` passes; then nothing can be done again, and no operation is named.

    In one pass of `every` it looks closely: at each operation of forward, loss and backward, at the gradients of each
    module, and at what the step does to the weights. `table()` has that by module, `findings` what it means.

    It leaves the run as it is. Nothing is attached to model, optimizer or scaler; an error of its own ends a part of
    the looking and not the run, and is told by `print`. While it is on, hooks for all modules and optimizers hang in
    PyTorch, and `torch.autograd.backward`, `torch.compile`, `GradScaler.step` and the entry of autocast's regions are
    wrapped. What is compiled is seen from outside; a bad pass of it is done again uncompiled.

    Parameters
    ----------
    model : torch.nn.Module
    optimizer : optimizer, or a list of several; others that hold weights of the model are found when they step
    scaler : torch.amp.GradScaler; one that is not given is found when it steps
    every : int, the passes between two close looks, 1 or more
    save : path of the file in which batch, weights and origin of the bad pass are saved; None saves nothing
    warn : bool, keep the first number that is not finite in `problem`, instead of raising
    patience : int, optimizer steps in a row that may be skipped under a scaler

    `passes` counts the backward passes that reached the model, `steps` the optimizer steps that were taken, `skipped`
    those that a scaler left out.

    Raises TypeError and ValueError, at once, for what cannot be watched.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        every: int = 100,
        save: str | Path | None = "not_finite.pt",
        warn: bool = False,
        patience: int = 20,
    ):
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every is the number of passes between two close looks, 1 or more, and not {every!r}")
        self.optimizers, scaler = check_given(model, optimizer, scaler)
        self.scaling = Scaling(scaler)
        self.model, self.plain, self.device = model, plain(model), device_of(model)
        there = self.device.type in ("cuda", "xpu") and torch.get_device_module(self.device).is_available()
        self.gpus = [self.device] if there else []  # not those of fake tensors
        self.every, self.save, self.warn, self.patience = every, save, warn, patience
        self.at_once = self.device.type == "cpu" or every == 1
        self.boundary, self.started, self.compiled, self.sees_modules = Boundary(), False, False, True
        self.names, self.parts, self.undo = {}, {}, []
        self.weights, self.trained, self.ids, self.first_ids = {}, {}, set(), {}
        self.passes = self.steps = self.skipped = self.evaluations = 0
        self.problem = self.culprit_here = None  # a NonFinite; what made the gradients of this pass bad
        # What close looks found.
        self.look = self.update_look = self.look_done = self.coarse = None
        self.looks, self.old_looks, self.looked_at, self.sees_operations = [], [], 0, False
        self.found, self.hidden, self.zero_weights, self.zero_made = {}, {}, set(), ""
        self.dtypes, self.kept_float32, self.cut, self.missing = {}, set(), set(), None
        # The run.
        self.losses, self.autocast, self.elsewhere, self.unseen = deque(maxlen=256), set(), "", {}
        self.inside, self.phase, self.stepping, self.step_from = [], "loop", [], 0
        self.notes, self.pending, self.arrived, self.before = [], [], [], {}
        self.batch = self.slopes = self.random = self.setting = self.rate = None
        self.asked = False  # whether gradients were asked for within this pass
        self.stepped_in_backward, self.taken, self.bad_gradients, self.sees_forward = False, 0, 0, False
        self.first_numbers = {}  # samples of the weights at the first look
        self.late = None  # a look at a step, whose result is copied into the model after it
        self.left = {}  # the version of a gradient of a step that was skipped, and whether a backward added to it
        self.all_zero = 0  # looks in which all gradients were 0
        # Devices whose autocast was entered, whether any module ran in it, and what a wrapper of the forward entered.
        self.regions, self.region_is_used, self.within = set(), False, None
        self.probe, self.stale = None, False  # what autocast has cast before a step, and serves after it

    # Starting, stopping, and what can be asked.

    def start(self):
        self.started = True
        self.boundary.call("the run", self._start)
        return self

    def _start(self):
        self.thread = threading.get_ident()
        compiled = {name: module for name, module in self.plain.named_modules() if is_compiled(module)}
        if compiled or is_compiled(self.model):
            self.unseen[f"the inside of what is compiled ({some(compiled or [''])})"] = True
        self._refresh()
        self.first_ids = {name: id(weight) for name, weight in self.trained.items()}
        self.undo = list(filter(None, map(HUB.around_compiled, compiled.values())))
        HUB.add(self)

    __enter__ = start

    def stop(self):
        """Take everything down; read what was not read yet, and raise if that is bad."""
        self._leave_run()
        self.boundary.call("numbers", self._read)

    def __exit__(self, kind, error, trace):
        self._leave_run()
        if kind is None:
            self.boundary.call("numbers", self._read)

    def _leave_run(self):
        self.boundary.call("the end", HUB.remove, self)
        self.boundary.call("operations", self._end_look)
        while self.undo:
            self.undo.pop()()
        for look in self.old_looks:
            look.close()
        if self.slopes:
            self.slopes.remove()
        self.names, self.parts, self.batch, self.notes, self.slopes = {}, {}, None, [], None

    def wants_modules(self):
        return self.sees_modules and "modules" not in self.boundary.closed

    def leave_modules(self):
        """A part of the model was compiled in place: hooks would be compiled into it."""
        self.sees_modules = False
        self.unseen["the model's forward, as module.compile() was called on it or on a part"] = True
        self.leave_operations()

    def leave_operations(self):
        """Something was compiled: under a mode that sees operations, it would not be used."""
        self.compiled = True
        self.unseen["operations, as torch.compile is used in this process"] = True
        self.boundary.call("operations", self._end_look)

    @property
    def report(self):
        """The Report of what was found until now."""
        if not self.started:
            return Report([], stopped="It has not started: use `with watch(model) as seen:`.")
        found = self.boundary.call("the verdict", verdicts, self) or []
        closed = self.boundary.closed.items()
        stopped = " ".join(f"watch has stopped looking at {part}, because {why}." for part, why in closed)
        is_bad = any(finding.severity != "note" for finding in found)
        return Report(found, *what_was_seen(self, is_bad), stopped)

    @property
    def findings(self):
        """A DataFrame: what was found, where, how severe it is, what it costs, and the clinic's case."""
        return self.report.findings

    def __repr__(self):
        return repr(self.report)

    def history(self):
        """What the close looks measured: a DataFrame with the columns pass, module, what and value."""
        looks = self.looks + ([self.look] if self.look else [])
        rows = [(look.number, *row) for look in looks for row in look.rows()]
        return pd.DataFrame(rows, columns=["pass", "module", "what", "value"])

    def table(self):
        """The close looks by module, of each measure the largest; a DataFrame.

        A headroom says how many times the largest number could double before it passes fp16's 65,504. "% zero" and
        "% 0 in fp16" are shares of the gradient of a module's output; "% updates lost" of those of its weights.
        """
        rows = self.history()
        table = rows.pivot_table(index="module", columns="what", values="value", aggfunc="max", sort=False)
        table = table.drop(columns="moved", errors="ignore")
        for what in [what for what in SIZES if what in table]:
            table[f"{what} headroom"] = table.pop(what).map(_headroom)
        table.insert(0, "dtype", [short(self.dtypes.get(name, "")) for name in table.index])
        order = [name for name, _ in self.plain.named_modules() if name in table.index]
        return table.reindex(order).dropna(how="all", subset=table.columns[1:])

    # The forward pass.

    def _refresh(self):
        """The modules and weights as they are now: lazy ones have got their shape, and adapters may have come."""
        self.parts = dict(self.plain.named_modules())  # kept, so that no new module gets the id of an old one
        self.names = {id(module): name for name, module in self.parts.items()}
        outer = self.model
        while outer is not self.plain:  # its wrappers
            self.names[id(outer)] = ""
            outer = getattr(outer, "_orig_mod", None) or outer.module
        self.weights = dict(self.plain.named_parameters())
        self.trained = {name: weight for name, weight in self.weights.items() if weight.requires_grad}
        self.ids = {id(weight) for weight in self.weights.values()}

    def cares_for(self, module):
        """Whether a module is one of the model's; of what runs inside of it, only while it looks closely."""
        name = self._name(module)
        if name is None or not self.inside or name == self.inside[0]:
            return name is not None
        looks = self.look is not None and not self.look.loss_only
        return bool(looks or self.scaling.attention or HUB.replaying or _in_transform()) or not self.at_once

    def _name(self, module):
        """The name of one of the model's modules, or of what was compiled of one; None for others."""
        name = self.names.get(id(module))
        return name if name is not None else self.names.get(id(getattr(module, "_orig_mod", None)))

    def enter(self, module):
        name = self._name(module)
        if torch.jit.is_tracing():
            return
        if threading.get_ident() != self.thread:
            self.unseen["forwards in another thread, where autocast of this one is not on"] = True
            return
        self.inside.append(name)
        if len(self.inside) == 1 and not self._looks_away():
            self._begin_forward()

    def leave(self, module, args, kwargs, output):
        name = self._name(module)
        if name not in self.inside or threading.get_ident() != self.thread or torch.jit.is_tracing():
            return
        while self.inside.pop() != name:
            pass
        outputs = tensors_in(output)
        looks = self.look is not None and not self.look.loss_only
        if looks or _in_transform():
            self._see_dtype(name, module, outputs)
        if _in_transform():
            self.unseen["the numbers within transforms of torch.func"] = True
            return
        if HUB.replaying or self.scaling.attention or looks:
            for each in outputs:
                self._mark(each, "module", name)
        if self._looks_away():
            return
        if not self.inside:
            self.autocast.add(self.within)
        if output is None:
            return
        if looks:
            self.look.output(name, module, outputs)
        if not self.at_once:
            self.notes += [("output", name, ends(each)) for each in readable(outputs)]
        if not self.inside:
            self._end_forward(name, args, kwargs, outputs)

    def enter_region(self, kind):
        self.regions.add(kind)
        if len(self.inside) == 1 and kind == self.device.type and not self._looks_away():  # its forward, or a wrapper
            self.within = self.within or torch.get_autocast_dtype(kind)

    def _looks_away(self):
        """What runs is no pass of the run: it is done again, by this or in a checkpointed backward, or transformed."""
        return HUB.replaying or _in_transform() or torch._C._current_graph_task_id() != -1

    def where(self):
        """What is running: the phase, and the innermost module."""
        in_a_gradient = self.phase == "loop" and torch._C._current_graph_task_id() != -1  # by torch.autograd.grad
        return "backward" if in_a_gradient else self.phase, self.inside[-1] if self.inside else ""

    def _mark(self, tensor, key, value):
        """A note on the node that made a tensor. It goes with the node, and keeps nothing alive."""
        if tensor.grad_fn is not None:
            tensor.grad_fn.metadata.setdefault(f"halfbits {key} {id(self)}", value)

    def marked(self, node, key):
        return node.metadata.get(f"halfbits {key} {id(self)}")

    def is_output(self, node):
        return self.marked(node, "output") or "CompiledFunction" in node.name()

    def _is_ours(self, node):
        """Whether a node of autograd made an output of the model, or holds one of its weights."""
        return self.is_output(node) or id(getattr(node, "variable", None)) in self.ids

    def _see_dtype(self, name, module, outputs):
        kind = self.device.type
        if outputs:
            self.dtypes[name] = outputs[0].dtype
            autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            if self.inside:
                self.autocast.add(autocast)
            if autocast in SIXTEEN and type(module) in CAST and outputs[0].dtype == torch.float32:
                self.kept_float32.add(name)

    def _begin_forward(self):
        self.phase, training, kind = "forward", torch.is_grad_enabled(), self.device.type
        if self.look:
            self.look.begins += 1
            if self.look.done or self.look.begins > 8:
                self._end_look()
        on = torch.is_autocast_enabled(kind)
        self.setting = {"device_type": kind, "enabled": on, "dtype": torch.get_autocast_dtype(kind)}
        self.within = self.setting["dtype"] if on else None
        self._look_for_stale_casts()
        if self.late:
            self.late.after_step(self.rate)
            self.late = None
        others = [each for each in ("cuda", "cpu", "mps", "xpu") if each != kind and torch.is_autocast_enabled(each)]
        self.elsewhere = "" if on else others[0] if others else self.elsewhere
        if self.at_once:
            on_gpus = [torch.get_device_module(gpu).get_rng_state(gpu) for gpu in self.gpus]
            self.random = [torch.get_rng_state(), *on_gpus]
        self.evaluations += not training
        some_evaluation = self.evaluations < 3 or self.evaluations % self.every == 0
        due = self._is_due() if training else some_evaluation
        if self.look is None and (due or (training and self.passes == 0)):
            self._begin_look(training, loss_only=not due)

    def _end_forward(self, name, args, kwargs, outputs):
        self.phase, training, self.sees_forward = "loop", torch.is_grad_enabled(), True
        if self.at_once:
            self.batch = name, args, kwargs, self.random, self.setting
            if bad_kind(outputs) in ("nan", "inf"):
                self._stop(_origins.of_forward(self, name, args, kwargs), self.passes + 1)
            self.batch = self.batch if training else None
        self.notes += [("root", name, ends(each)) for each in readable(outputs)] if not self.at_once else []
        for each in outputs:
            self._mark(each, "output", True)
            if each.grad_fn is not None and training:
                each.grad_fn.register_prehook(self._incoming_hook(each.output_nr))
        if training and self.look and not self.look.loss_only:
            self.look.root(outputs, tensors_in((args, kwargs)))
        if len(self.notes) > 100_000:  # forward passes without a backward pass
            self.notes = []

    def _incoming_hook(self, place):
        def look(gradients):
            if not HUB.replaying and place < len(gradients) and self.started:
                self.boundary.call("the backward", self._incoming, gradients[place])

        return look

    def _incoming(self, gradient):
        """The gradient that reaches the model's output."""
        found = readable([gradient] if gradient is not None else [])
        self.asked |= self.phase != "backward"  # by torch.autograd.grad, as for a penalty
        self.notes += [("incoming", "", ends(each)) for each in found]
        if self.at_once and self.batch and found and gradient.nbytes <= 2**26:
            self.arrived.append(gradient.detach())

    # Close looks.

    def _is_due(self):
        """Whether the next pass is to be looked at closely, asked once for each."""
        number = self.passes + 1
        due = self.looked_at < number and number % self.every == 2 % self.every
        self.looked_at = number if due else self.looked_at
        return due

    def _begin_look(self, training, loss_only=False):
        self._refresh()
        for look in self.looks[-2:]:
            look.pack()
        self.look = Look(self.passes + 1, self.boundary, self.where, loss_only)
        self.look.done = not training
        if training and not loss_only:
            self.update_look = self.look
            if self.stepping:  # the forward is in the closure of a step
                self.look.before_step(self.trained)
        self.old_looks = [look for look in self.old_looks if not look.close()]
        fast = any(isinstance(part, FAST_PATH) and not part.training for part in self.plain.modules())
        if fast:
            self.unseen["the operations of nn.TransformerEncoder in evaluation, which has a fast path"] = True
        elif not self.old_looks and not self.compiled:
            self.look.open()

    def _end_look(self):
        look, self.look = self.look, None
        if look is None:
            return
        if not look.close():
            self.old_looks.append(look)
        self.sees_operations |= look.opened and not look.loss_only
        self.found |= look.operations.findings
        for origin in look.operations.made:
            if origin.why == "format" and origin.kind != "-inf" and origin.phase != "backward":
                self.hidden[origin.module, origin.op] = origin
        if look.coarse:
            self.coarse = look.coarse
        if look.operations.zero and self.zero_weights:
            self.zero_made = look.operations.zero
        self.cut |= look.cut
        if not look.loss_only:
            self.looks.append(look)
        if len(self.looks) > LOOKS:
            self.looks = self.looks[::2]

    # The backward pass.

    def before_backward(self, tensors):
        if HUB.replaying:
            return
        if not self.sees_modules and self._is_due():
            self._end_look()
            self._begin_look(True)
        self.phase, self.arrived = "backward", []
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        self.before = {name: _version_of(weight.grad) for name, weight in self.trained.items()}
        root = roots[0]
        if root.grad_fn is None or not readable([root]) or root.numel() != 1:
            return
        scale = self.scaling.before_backward(root)
        loss = root.detach().float().reshape(())
        loss = loss if scale is None else loss / scale.to(loss.device)
        self.notes.append(("loss", "", torch.stack([loss, loss])))
        if self.at_once:
            is_bad = not math.isfinite(loss.item()) and (scale is None or root.dtype != torch.float16)
            routine = scale is not None and self.asked  # of a scaler: a gradient that overflowed is in the loss
            if is_bad and not routine and any(map(self._is_ours, nodes_from(root.grad_fn, 20_000))):
                self._stop(_origins.of_loss(self, root), self.passes + 1)
            most = 20_000 if self.scaling.attention else 200
            module_at = functools.partial(self.marked, key="module")
            ended = (lambda node: False) if self.scaling.attention else self.is_output
            if not self.is_output(root.grad_fn) or self.scaling.attention:
                self.slopes = Slopes(self.boundary, root.grad_fn, module_at, ended, most)
                if not self.slopes.complete:
                    self.slopes.remove()

    def leave_backward(self):
        self.phase = "loop" if not self.stepping else "step"
        if self.slopes:
            self.slopes.remove()

    def after_backward(self):
        if HUB.replaying:
            return
        self.leave_backward()
        slopes, self.slopes = self.slopes, None
        found = {}
        for name, weight in self.trained.items():
            if weight.grad is not None and _version_of(weight.grad) != self.before.get(name):
                found.update(zip([name], readable([weight.grad])))
                version, _ = self.left.pop(name, (None, False))
                if version is not None and version == self.before.get(name):
                    self.left[name] = _version_of(weight.grad), True
        if not found and not self.stepped_in_backward:
            self.notes = []  # another network's, whose gradients do not reach this one
            return
        self.passes += 1
        self.scaling.attention = max(0, self.scaling.attention - 1)
        notes, self.notes = self.notes, []
        if found:
            norms = norms_of(list(found.values()))
            self.zero_weights = self._zero_weights(found, norms)
            if self.look and not self.look.done and not self.look.loss_only:
                self.look.after_backward(found)
                self.look.norm, self.look.norms = norms.norm(), dict(zip(found, norms))
            notes += [("gradient", name, torch.stack([norm, norm])) for name, norm in zip(found, norms)]
        if self.look:
            self.look.done = True
        self.pending.append((self.passes, notes))
        if slopes and slopes.culprit and self.scaling.attention and not self.asked:
            self.scaling.culprit, self.scaling.attention = slopes.culprit, 0
        self.culprit_here = slopes.culprit if slopes else None
        if self.at_once or self.passes % self.every == 0:
            self._read()
        self.batch, self.arrived, self.stepped_in_backward, self.asked = None, [], False, False

    def _zero_weights(self, found, norms):
        """The weights with a gradient of 0 everywhere, where others have one."""
        if not self.look or self.look.loss_only or not self.at_once:
            return self.zero_weights
        zero = {name for name, norm in zip(found, norms.tolist()) if norm == 0}
        self.all_zero += len(zero) == len(found)
        return zero if len(zero) < len(found) else set()

    def _read(self):
        """Wait for all that was noted, and judge it, pass by pass."""
        pending, self.pending = self.pending, []
        for number, notes in pending:
            if notes:
                values = torch.stack([value.to(self.device, torch.float32) for *_, value in notes]).tolist()
                self._judge(number, [(kind, name, *value) for (kind, name, _), value in zip(notes, values)])

    def _judge(self, number, notes):
        intact = self.at_once and number == self.passes
        losses = [low for kind, _, low, _ in notes if kind == "loss"]
        self.losses += [loss for loss in losses if math.isfinite(loss)]
        outputs = [name for kind, name, *value in notes if kind == "output" and kind_of(*value) in ("nan", "inf")]
        if any(kind == "root" and kind_of(*value) in ("nan", "inf") for kind, _, *value in notes):
            where = outputs[0] if outputs else ""
            words = f"{place('forward', where)} or since the module before"
            self._stop(Origin("forward", where, "", words), number, intact)
        if any(not math.isfinite(loss) for loss in losses) and not self.scaling.scaled:
            words = f"{place('loss', '')}: all that the model put out is finite"
            self._stop(Origin("loss", "", "", words), number, intact)
        bad = [name for kind, name, *value in notes if kind == "gradient" and kind_of(*value)]
        if bad and intact:  # perhaps only the squares in a norm are not
            bad = [name for name in bad if bad_kind([self.trained[name].grad])]
        self.bad_gradients = number if bad else self.bad_gradients
        if bad and not self.scaling.scaled:
            incoming = any(kind == "incoming" and kind_of(*value) for kind, _, *value in notes)
            self._stop(_origins.of_backward(self, bad, incoming, intact), number, intact)

    # Optimizer and scaler.

    def _holds(self, optimizer):
        """Whether it moves weights of this model, or was given."""
        known = any(optimizer is one for one in self.optimizers)
        if not known and not self.ids.isdisjoint(ids_held_by([optimizer])):
            self.optimizers.append(optimizer)
            known = True
        return known

    def before_step(self, optimizer):
        if not self._holds(optimizer):
            return
        self.stepping.append(id(optimizer))
        look = self.update_look
        if self.stepping.count(id(optimizer)) > 1:  # the step of the class that it is made from
            return
        self.step_from, self.phase = self.passes, "step"
        if torch.is_autocast_enabled(self.device.type) and torch.is_autocast_cache_enabled() and not self.stale:
            self._put_in_autocast_s_cache()
        self.scaling.passed_by(optimizer)
        if self.look and self.look.sees_operations and not _is_in_16_bits(optimizer):
            self.look.pause()
        if look:
            look.before_step(self.trained)
            self.first_numbers = self.first_numbers or {name: old for name, _, old in look.weights}
            held = ids_held_by([optimizer])
            look.names = [name for name in look.gradients if id(self.trained.get(name)) in held] or [*look.gradients]
            look.made = norms_of([look.norms[name] for name in look.names]).norm() if look.names else None
            look.at_step = self._norm_of_gradients(look)
            given = getattr(optimizer, "grad_scale", None)
            if given is not None and look.at_step is not None:  # a fused step divides by itself
                look.at_step = look.at_step / given.to(look.at_step.device)
            look.scale = self.scaling.scale_at_step()
            look.turned = self._direction(look)

    def _put_in_autocast_s_cache(self):
        """A number of our own, cast as weights are: if the region outlives the step, so does the cast."""
        with torch.enable_grad():
            self.probe = torch.ones(1, 1, device=self.device, requires_grad=True)
            torch.mm(self.probe, self.probe)
        with torch.no_grad():
            self.probe.fill_(2)

    def _look_for_stale_casts(self):
        if self.probe is not None and self.setting["enabled"]:
            with torch.enable_grad():
                self.stale |= torch.mm(self.probe, self.probe).detach().item() == 1
        self.probe = None

    def after_step(self, optimizer):
        if id(optimizer) not in self.stepping:
            return
        self.stepping.reverse()
        self.stepping.remove(id(optimizer))
        self.stepping.reverse()
        if id(optimizer) in self.stepping:
            return
        self.phase = "backward" if self.slopes else "loop"
        if self.look:
            self.look.resume()
        self.stepped_in_backward = bool(self.slopes)
        self.steps += 1
        self.scaling.not_scaled = self.scaling.not_scaled if self.scaling.within else 0
        self.rate = rate_of(optimizer)
        look, backward_within = self.update_look, self.step_from < self.passes
        if look and look.weights and look.gradients:
            self.update_look = None
            if backward_within:
                look.at_step = None
            self.look_done = look
            look.after = self._norm_of_gradients(look) if not backward_within else None
            held = ids_held_by([optimizer])
            if held.isdisjoint(self.ids):  # it holds masters, which the loop copies into the model
                self.late = look
                return
            missing = {name for name, each in self.trained.items() if id(each) in held and each.grad is None}
            self.missing = missing if self.missing is None else self.missing & missing
            look.after_step(self.rate)

    def _norm_of_gradients(self, look):
        weights = [self.trained[name] for name in look.names if name in self.trained]
        found = readable([weight.grad for weight in weights if weight.grad is not None])
        return norms_of(found).norm() if found else None

    def _direction(self, look):
        """The cosine between the gradients after the backward and now; None where there is nothing to compare."""
        then, now = [], []
        for name in look.names:
            for each in readable([self.trained[name].grad] if self.trained[name].grad is not None else []):
                then.append(look.gradients[name])
                now.append(sample(each))
        if not then or [each.shape for each in then] != [each.shape for each in now]:
            return None
        return torch.cosine_similarity(torch.cat(then).float(), torch.cat(now).float(), dim=0)

    def before_scaler_step(self, scaler, optimizer):
        if is_on(scaler) and self._holds(optimizer):
            self.scaling.before_step(scaler)
            self.taken = self.steps
            held = ids_held_by([optimizer]) if self.left else ()
            added = [name for name, (_, added) in self.left.items() if added and id(self.trained.get(name)) in held]
            self.scaling.left_over |= bool(added)

    def after_scaler_step(self, scaler, optimizer):
        if not self.scaling.within:
            return
        called = self.steps > self.taken
        took = self.scaling.after_step(scaler, optimizer, called, self.at_once)
        if called and not took:  # a fused step left it out by itself: what was measured was no step
            self.steps -= 1
            if self.look_done and self.update_look is None:
                self.look_done.forget_step()
                self.update_look = self.look_done
        if not took:
            self.skipped += 1
            held = ids_held_by([optimizer])
            bad = {name: each.grad for name, each in self.trained.items() if id(each) in held}
            self.left |= {name: (_version_of(gradient), False) for name, gradient in bad.items()}
        if self.scaling.streak() > self.patience:
            words = f"{self.scaling.streak()} optimizer steps in a row were skipped, as their gradients were not finite"
            origin = self.scaling.culprit or Origin("backward", "", "", "in the backward")
            self._stop(origin._replace(words=f"{words}; {origin}"), self.passes, False)

    # The end.

    def _stop(self, origin, number, intact=True):
        """Save what there is, and raise."""
        if self.problem is not None:
            return
        grown = growth(self.losses)
        case = "" if grown else case_of(origin)
        words = f"pass {number:,}, after {self.steps:,} optimizer steps: {origin}."
        words += f" {grown}, so this is the end of it, and perhaps not its cause." if grown else ""
        known = self.boundary.call("the verdict", certain_so_far, self)
        words = f"{known}. Then, {words}" if known else words
        path = _origins.save(self, number, origin) if intact and self.save else None
        words += f" Saved: {path}." if path else ""
        words += f" See the clinic: {case}." if case else ""
        if not intact and not self.at_once:
            words += " The weights have changed since; with every=1 it stops at once, and names the operation."
        self.problem = NonFinite(words, origin, path, case)
        if not self.warn:
            self._leave_run()
            raise self.problem


def _in_transform():
    """Whether a transform of torch.func is at work, as vmap or grad."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _version_of(gradient):
    return None if gradient is None else (id(gradient), gradient._version)


def _is_in_16_bits(optimizer):
    """Whether any of what it moves, or keeps, is."""
    kept = tensors_in([*optimizer.state.values()])
    return any(each.dtype in SIXTEEN for each in [*held_by([optimizer]), *kept])


def _headroom(size):
    """How often a number can double before fp16's largest is passed; negative beyond."""
    if size > 0:
        return math.log2(LARGEST) - math.log2(size)
    return math.inf if size == 0 else math.nan
