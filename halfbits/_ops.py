"""A look at the operations of one pass: `Operations` for forward and loss, `Slopes` for the backward."""

import math
import re
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halfbits._tensors import (
    EIGHT,
    FLOATS,
    FP16,
    FP32,
    SIXTEEN,
    bad_kind,
    has_numbers,
    is_finite,
    largest,
    nodes_from,
    readable,
    saved,
    short,
    spacing,
    tensors_in,
)
from halfbits.report import certain, likely

ITEM = torch.ops.aten._local_scalar_dense.default
WHOLE = (torch.int64, torch.int32, torch.int16)
GIVEN = re.compile("empty|resize|masked_fill|full|where|scalar_tensor|copy_|fill_|uniform|normal|random|set_|_foreach")
SUMS = re.compile("(add|sub|lerp|mul|div)_?$")
POLES = re.compile("sqrt|log$|log2|log10|pow|div|reciprocal|norm")  # their slope, or they, are infinite at 0
UNITS = ("threshold", "hardtanh", "sigmoid", "tanh", "gelu", "silu", "leaky_relu", "hardsigmoid", "softplus", "elu")
UNITS = tuple(f"{name}_backward" for name in UNITS)
MOST = 2**22  # numbers of a tensor that is compared before and after


class Origin(NamedTuple):
    """Where a number that is not finite came from. `phase`: "input", "weights", "forward", "loss" or "backward".

    `why`: "format", the same operation on the same numbers is finite in float32; "reason", its operands tell why;
    "range", it is not finite in float32 either; "" if that is not known.
    """

    phase: str
    module: str
    op: str
    words: str
    kind: str = ""
    why: str = ""

    def __str__(self):
        return self.words


def place(phase, module):
    if phase in ("forward", "backward"):
        return f"in the {phase}, in {module or 'the model'}"
    if phase == "step":
        return "in the optimizer's step"
    return "in the loss, or elsewhere outside of the model"


class Operations(TorchDispatchMode):
    """Looks at the result of each operation, and at its operands where the result is striking.

    `made`: an Origin for each operation that made a number that is not finite of numbers that are. `findings`: what
    rounding did, as Findings by kind, operation and module. `eights`: what casts to FP8 did, by module.
    """

    supports_higher_order_operators = True

    def __init__(self, boundary, where, loss_only=False):
        super().__init__()
        self.loss_only = loss_only
        self.boundary, self.where = boundary, where  # `where()` is (phase, module)
        self.active, self.made, self.findings, self.eights, self.zero = True, [], {}, {}, ""
        self.log_probabilities = set()  # storages of what log_softmax gave in 16 bits
        self.made_here = set()  # storages; what is not among them is older than this look

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is ITEM and not isinstance(args[0], torch.Tensor):
            return args[0]  # modes are given Python's number for what `.item()` is asked of
        if not self.active or self.boundary.busy or not self.boundary.call("operations", self._wants, func, args):
            return func(*args, **kwargs)
        overwritten = self.boundary.call("operations", self._begin, func, args)
        output = func(*args, **kwargs)
        self.boundary.call("operations", self._look, func, args, kwargs, output, overwritten)
        return output

    def _wants(self, func, args):
        """Not what only looks at the same memory, or is of higher order; nor a step in float32, seen as a whole."""
        if not isinstance(func, torch._ops.OpOverload) or func.is_view:
            return False
        if self.loss_only and self.where()[0] != "loop":
            return False
        in_float32 = not args or getattr(args[0], "dtype", FP16) not in SIXTEEN
        return not (in_float32 and self.where()[0] == "step")

    def _begin(self, func, args):
        """What an operation in place is about to overwrite, and the numbers of a sum or an average."""
        if not func._schema.is_mutable:
            return None
        first = args[0][0] if args and isinstance(args[0], list) and args[0] else args[0] if args else None
        if not has_numbers(first):
            return None
        older = first.dtype in SIXTEEN and first.numel() <= MOST and _storage_of(first) not in self.made_here
        return first, first.detach().clone() if older and SUMS.search(func.overloadpacket.__name__) else None

    def _look(self, func, args, kwargs, output, overwritten):
        op = func.overloadpacket.__name__
        phase, _ = self.where()
        self._whole_numbers(op, args, output)
        if op == "_to_copy" and output.dtype in EIGHT:
            self._eight_bits(args[0], output)
        if overwritten and overwritten[1] is not None:
            first, before = overwritten
            values = [each[0] if isinstance(each, list) else each for each in args]
            self._sums_and_decays(op, before, values, kwargs, first.detach())
        if func._schema.is_mutable:
            return
        outputs = readable(tensors_in(output))
        self.made_here.update(_storage_of(each) for each in outputs)
        if not GIVEN.search(op) and not all(map(is_finite, outputs)):
            self._not_finite(op, func, args, kwargs, outputs)
        if op in ("topk", "argmax", "argmin"):
            self._ties(op, args, output)
        elif op == "_log_softmax" and output.dtype in SIXTEEN:
            self.log_probabilities.add(_storage_of(output))
        elif op == "gather" and outputs and _storage_of(args[0]) in self.log_probabilities:
            size = largest(outputs[0])
            what = f"log-probabilities are {short(output.dtype)}, up to {size:,.3g} in size, where neighbours are "
            what += f"{spacing(size, output.dtype):.2g} apart" if math.isfinite(size) else "far apart"
            cost = "Ratios, and sums over tokens, are off by as much. Take log_softmax of `logits.float()`."
            self._add("probabilities", likely(what, place(*self.where()), cost))
        elif op in ("sin", "cos") and args[0].dtype in SIXTEEN:
            self._angles(op, args[0])
        elif op == "cumsum" and output.dtype in SIXTEEN:
            self._running_sum(args[0], output, args[1])
        elif phase == "backward" and outputs:
            self._becomes_zero(op, args, outputs)
        elif op in ("add", "mul") and phase == "loop" and self._is_older(args[0], output):
            self._sums_and_decays(op, args[0].detach(), args, kwargs, output.detach())

    def _is_older(self, first, output):
        """Whether it is a sum or average in 16 bits from before this look, and not too large to be compared."""
        if not has_numbers(first) or first.dtype not in SIXTEEN or first.numel() > MOST:
            return False
        return first.shape == output.shape and _storage_of(first) not in self.made_here

    def _add(self, kind, finding):
        self.findings[kind, self.where()] = finding

    def _not_finite(self, op, func, args, kwargs, outputs):
        kind = bad_kind(outputs)
        inputs = readable(tensors_in((args, kwargs)))
        if not kind or not inputs or bad_kind(inputs):
            return
        scalars = [each for each in args if isinstance(each, float)]
        if any(math.isinf(each) for each in scalars):
            return
        phase, module = self.where()
        reason, why = _reason_of(op, args), "reason"
        if not reason:
            again = in_float32(func, args, kwargs)
            why = "format" if again and not bad_kind(again) else "range"
            reason = "not finite in float32 either"
            if why == "format":
                reason = f"in float32 it is finite, up to {max(map(largest, again)):,.3g}"
        sizes = dict.fromkeys(f"{short(each.dtype)} up to {largest(each):,.3g}" for each in inputs)
        name = "the cast" if op == "_to_copy" else op
        result = f"{kind.replace('nan', 'NaN')} ({short(outputs[0].dtype)})"
        words = f"{place(phase, module)}: {name} made {result} of {' and '.join(sizes)} ({reason})"
        self.made.append(Origin("loss" if phase == "loop" else phase, module, op, words, kind, why))

    def _becomes_zero(self, op, args, outputs):
        """The first gradient that is 0 everywhere, made of one that is not."""
        given = readable(args[:1])
        if self.zero or not given or not (op in UNITS or op == "_to_copy"):
            return
        if any(largest(each) > 0 for each in outputs) or not largest(given[0]) > 0:
            return
        _, module = self.where()
        name = "the cast" if op == "_to_copy" else f"{op}, as of units that are saturated or dead,"
        self.zero = f"{place('backward', module)}: {name} made 0 ({short(outputs[0].dtype)}) of a gradient up to "
        self.zero += f"{largest(given[0]):.2g}"

    def _whole_numbers(self, op, args, output):
        """Positions, times or indices that 16 bits cannot count one by one."""
        small = isinstance(output, torch.Tensor) and 1 < output.numel() <= 2**20
        if not small or op not in ("arange", "_to_copy") or self.where()[0] == "backward":
            return
        if op == "arange" and output.dtype in SIXTEEN:
            given, kept = output.numel(), len(output.unique())
            what = f"arange made {given:,} numbers in {short(output.dtype)}, of which {kept:,} are different"
        elif op == "_to_copy" and output.dtype in SIXTEEN and has_numbers(output) and _are_whole(args[0]):
            given, kept = len(args[0].unique()), len(output.unique())
            what = f"whole numbers up to {int(args[0].abs().max()):,} were cast to {short(output.dtype)}: "
            what += f"of {given:,} different ones {kept:,} are left"
        elif op == "_to_copy" and output.dtype in WHOLE and args[0].dtype in SIXTEEN:
            size, last = largest(args[0]), 2 / torch.finfo(args[0].dtype).eps
            given, kept = int(size > last), 0
            what = f"whole numbers up to {size:,.0f} are made of {short(args[0].dtype)}"
        else:
            return
        if kept < given:
            dtype = output.dtype if output.dtype in SIXTEEN else args[0].dtype
            cost = (
                f"{short(dtype)} counts one by one to {2 / torch.finfo(dtype).eps:,.0f}. Positions, times and labels "
            )
            cost += "want float32 until they are divided or looked up."
            self._add("whole", likely(what, place(*self.where()), cost))

    def _eight_bits(self, given, output):
        """What a cast to FP8 does to the numbers that it is given, which are scaled already."""
        if not has_numbers(given):
            return
        given, kept = given.detach().float(), output.float()
        there, top = given != 0, torch.finfo(output.dtype).max
        error = (kept - given).norm() / given.norm().clamp(min=1e-30)
        _, module = self.where()
        row = self.eights.setdefault(
            module, {"fp8 amax": 0.0, "% 0 in fp8": 0.0, "% cut in fp8": 0.0, "fp8 error": 0.0}
        )
        row["fp8 amax"] = max(row["fp8 amax"], float(given.abs().max()))
        row["% 0 in fp8"] = max(row["% 0 in fp8"], percent(there & (kept == 0), there))
        row["% cut in fp8"] = max(row["% cut in fp8"], percent((given.abs() > top), there))
        row["fp8 error"] = max(row["fp8 error"], float(error))

    def _ties(self, op, args, output):
        """A choice among numbers that rounding made equal."""
        values = args[0].detach()
        if not has_numbers(values) or values.dim() == 0 or values.numel() > MOST or not _is_rounded(values):
            return
        dim = args[2] if op == "topk" and len(args) > 2 else args[1] if op != "topk" and len(args) > 1 else -1
        if dim is None or values.shape[dim] < 2:
            return
        if op == "topk":
            last, chosen = output[0].amin(dim, keepdim=True), args[1]
        else:
            last, chosen = (values.amax if op == "argmax" else values.amin)(dim, keepdim=True), 1
        at_least = (values >= last) if op != "argmin" else (values <= last)
        tied = (at_least.sum(dim, keepdim=True) > chosen) & (last != 0)
        share = percent(tied, torch.ones_like(tied))
        if tied.numel() > 7 and share > 5:
            what = f"{op} of rounded numbers ({short(values.dtype)}) chooses among equal numbers in {share:.0f}% of "
            what += f"{tied.numel():,} rows"
            cost = "Rounding made them equal, and it takes the first: another choice than float32. Choose in float32."
            self._add("ties", likely(what, place(*self.where()), cost))

    def _angles(self, op, angles):
        if not has_numbers(angles):
            return
        size = largest(angles)
        apart = spacing(size, angles.dtype) if math.isfinite(size) else 0
        if apart >= 0.25:
            what = f"{op} of {short(angles.dtype)} up to {size:,.0f}, where neighbours are {apart:g} apart"
            cost = "The angle is off by up to half of that. Compute angles in float32, in a region with "
            cost += f"torch.autocast('{angles.device.type}', enabled=False): a region of another device has no effect."
            self._add("angles", certain(what, place(*self.where()), cost))

    def _running_sum(self, given, total, dim):
        steps = total.detach().float().diff(dim=dim) if total.dim() else total
        added = given.detach().narrow(dim, 1, given.shape[dim] - 1) != 0 if total.dim() else None
        share = percent((steps == 0) & added, added) if total.dim() and total.numel() <= MOST else 0
        if share > 1:
            what = f"cumsum in {short(total.dtype)} stands still in {share:.0f}% of its steps, at {largest(total):,.4g}"
            self._add("cumsum", certain(what, place(*self.where()), "Add up in float32, or in whole numbers."))

    def _sums_and_decays(self, op, before, args, kwargs, after):
        """A running sum or average in 16 bits that takes nothing up any more, or that no decay changes."""
        name = op.removeprefix("_foreach_").rstrip("_")
        if name in ("mul", "div"):
            factor = args[1] if not isinstance(args[1], torch.Tensor) else args[1].item() if args[1].numel() == 1 else 1
            still = (after == before) & (before != 0) & before.isfinite()
            if (
                isinstance(factor, float)
                and 0.9 < factor < 1.1
                and factor != 1
                and 2 * still.sum() > (before != 0).sum()
            ):
                what = f"a decay by {factor:.6g} leaves numbers in {short(after.dtype)} as they were"
                cost = "It is less than half of the way to the next number. Keep the average in float32."
                self._add("decay", certain(what, place(*self.where()), cost))
            return
        if self.where()[0] == "step":  # what a step does to weights is measured as a whole
            return
        added = args[1] - before if name == "lerp" else args[1]
        added = torch.as_tensor(added, device=before.device).detach() * kwargs.get("alpha", 1)
        asked = (added != 0) & (before != 0) & before.isfinite()
        still = asked & (after == before)
        count = int(still.sum())
        if count and 10 * count >= int(asked.sum()):
            least = before[still].abs().min()
            if 3 * count >= int(asked.sum()) or bool((still | ~asked)[before.abs() >= least].all()):
                many = added.expand(before.shape)[still].abs().float().mean()
                what = f"a sum in {short(after.dtype)} that has come to {float(least):,.4g} takes up 0 for {many:,.3g}"
                cost = "What is added is less than half of the way to the next number. Keep the sum in float32."
                self._add("sum", certain(what, place(*self.where()), cost))


def _storage_of(tensor):
    return tensor.untyped_storage().data_ptr()


def _are_whole(tensor):
    """Whether all are whole numbers, in an integer dtype or in float32, and one of them is past 256."""
    if tensor.dtype in WHOLE:
        return True
    if tensor.dtype != FP32 or not has_numbers(tensor) or tensor.numel() > 2**16:
        return False
    return bool((tensor == tensor.round()).all()) and 256 < largest(tensor) <= 2**16


def _is_rounded(tensor):
    """Whether all numbers are some of bf16's, or of fp16's, whatever the dtype is."""
    return tensor.dtype in SIXTEEN or any(torch.equal(tensor, tensor.to(each).to(tensor.dtype)) for each in SIXTEEN)


def percent(places, among):
    return float(100 * (places & among).sum() / among.sum().clamp(min=1))


def in_float32(func, args, kwargs):
    """The same operation on float32 copies of the same numbers: its tensors; [] if that cannot be done."""
    random = torch.Tag.nondeterministic_seeded in func.tags
    if func._schema.is_mutable or random or func.overloadpacket.__name__ == "_to_copy":
        kept = [each for each in readable(tensors_in(args)) if func.overloadpacket.__name__ == "_to_copy"]
        return [each.float() for each in kept]

    def change(value):
        if isinstance(value, torch.Tensor):
            return value.detach().float() if value.dtype in SIXTEEN else value.detach()
        if type(value) in (tuple, list):
            return type(value)(change(each) for each in value)
        return value

    options = {key: FP32 if value in SIXTEEN else change(value) for key, value in kwargs.items()}
    return readable(tensors_in(func(*change(args), **options)))


def _reason_of(op, args):
    """Why an operation has no finite result, in words, if its operands tell it; "" else."""
    op = op.rstrip("_")
    tensors = [each.detach() for each in args if isinstance(each, torch.Tensor) and each.dtype in FLOATS]
    if not tensors:
        return ""
    first = tensors[0]
    if op == "div" and len(tensors) > 1:
        return _zeros_in(tensors[1], "it divides by 0")
    if op in ("log", "log2", "log10", "rsqrt", "reciprocal"):
        return _zeros_in(first, "its operand is 0") or (_negative_in(first) if op != "reciprocal" else "")
    if op == "pow" and isinstance(args[1], float | int) and args[1] < 0:
        return _zeros_in(first, "its operand is 0")
    if op == "log1p" and (ended := int((first <= -1).sum())):
        return f"its operand is -1 at {ended:,} of {first.numel():,} places"
    if op == "sqrt":
        return _negative_in(first)
    if op in ("acos", "asin", "atanh", "erfinv") and (ended := int((first.abs() >= 1).sum())):
        return f"its operand is 1 or more in size at {ended:,} of {first.numel():,} places"
    if "softmax" in op and first.dim() and (masked := int((first == -math.inf).all(-1).sum())):
        return f"{masked:,} of its rows hold nothing but -inf: all of it is masked"
    return ""


def _zeros_in(tensor, words):
    zero = int((tensor == 0).sum())
    hint = ", where float32 may hold a number" if tensor.dtype in SIXTEEN else ""
    return f"{words} at {zero:,} of {tensor.numel():,} places{hint}" if zero else ""


def _negative_in(tensor):
    negative = int((tensor < 0).sum())
    return f"its operand is negative at {negative:,} of {tensor.numel():,} places" if negative else ""


def first_made(made):
    """The Origin that explains the end: the last -inf that is no mask counts, a NaN made of a finite number first."""
    return next((each for each in made if each.kind != "-inf" or each.why == "reason"), made[0] if made else None)


class Slopes:
    """Looks at the nodes of a backward: `culprit` is the first that made a gradient that is not finite of finite ones.

    `module_at(node)` names the module whose output a node made, or is None; nodes for which `ends(node)` are left out.
    """

    def __init__(self, boundary, root, module_at, ends, most):
        self.boundary, self.culprit, self.handles = boundary, None, []
        self.complete = True
        waiting, known = [(root, None)], {root}
        while waiting:
            node, module = waiting.pop()
            name = module_at(node)
            module = module if name is None else name
            hook = self._hook(node, module)
            self.handles.append(node.register_hook(hook))
            for after, _ in node.next_functions:
                if after is not None and after not in known and not ends(after):
                    known.add(after)
                    waiting.append((after, module))
            if len(known) > most:
                self.complete = False
                break

    def _hook(self, node, module):
        def look(gradients, given):
            self.boundary.call("the nodes of the backward", self._look, node, module, gradients, given)

        return look

    def _look(self, node, module, gradients, given):
        if self.culprit is None and (kind := bad_kind(gradients)) and not bad_kind(given):
            op = _op_of(node)
            sizes = {f"{short(each.dtype)} up to {largest(each):,.3g}" for each in readable(given)}
            dtype = next(short(each.dtype) for each in readable(gradients))
            facts = _saved_by(node)
            words = f"{op} made {kind.replace('nan', 'NaN')} ({dtype}) of a gradient in {' and '.join(sizes)}"
            words += f"; {facts}" if facts else ""
            phase = "backward" if module is not None else "loss"
            where = place("backward", module) if module is not None else "in the backward of the loss"
            why = "reason" if facts or kind == "nan" or dtype != "float16" else "format"
            self.culprit = Origin(phase, module or "", op, f"{where}: that of {words}", kind, why)

    def remove(self):
        for handle in self.handles:
            handle.remove()
        self.handles = []


def _op_of(node):
    """What a node of autograd is the backward of."""
    return re.sub(r"Backward\d*$", "", node.name()).lower()


def _saved_by(node):
    """What is striking in the tensors that a node kept, in words: zeros, and numbers that are not finite."""
    found, op = [], _op_of(node)
    for name in dir(node):
        if not name.startswith("_saved_"):
            continue
        for tensor in readable(tensors_in(saved(node, name))):
            what = f"its {name.removeprefix('_saved_').replace('self', 'operand')} ({short(tensor.dtype)}) is"
            numbers = [math.inf, -math.inf, *([0.0] if POLES.search(op) else []), *([-1.0] if op == "log1p" else [])]
            for number in numbers:
                if count := int((tensor == number).sum()):
                    found.append(f"{what} {number:g} at {count:,} of {tensor.numel():,} places")
            if count := int(tensor.isnan().sum()):
                found.append(f"{what} NaN at {count:,} of {tensor.numel():,} places")
    return ", ".join(found[:2])


def loss_origin(root, ends):
    """Which operation between the model's outputs and a loss made it not finite, by what the nodes of autograd kept."""
    order = list(nodes_from(root, 200, ends))
    for node in reversed(order):
        op, below = _op_of(node), node.next_functions
        for place_of, name in enumerate(("_saved_self", "_saved_other")):
            kept = readable(tensors_in(saved(node, name)))
            maker = below[place_of][0] if place_of < len(below) else None
            if bad_kind(kept) in ("nan", "inf") and maker is not None:
                dtype = short(kept[0].dtype)
                return f"{_op_of(maker)} made {bad_kind(kept).replace('nan', 'NaN')} ({dtype})", _op_of(maker), ""
        facts, again = _saved_by(node), _done_again(node, op)
        if "inf at" in facts.replace("-inf at", "") or "NaN" in facts or (POLES.search(op) and facts and op != "pow"):
            return f"{op}: {facts}", op, "reason"
        if again is not None and bad_kind([again]):
            sizes = [f"{short(each.dtype)} up to {largest(each):,.3g}" for each in _kept_by(node)]
            return f"{op} made {bad_kind([again])} of {' and '.join(sizes)}", op, "format"
    ops = [_op_of(node) for node in order if _op_of(node) not in ("accumulategrad", "tocopy", "view")]
    return f"{' or '.join(dict.fromkeys(ops[:3]))} made it", ops[0] if ops else "", ""


def _kept_by(node):
    names = [name for name in dir(node) if name in ("_saved_self", "_saved_other")]
    return readable(tensors_in([saved(node, name) for name in names]))


def _done_again(node, op):
    """The result of a node's forward, where what it kept suffices; None else."""
    kept = _kept_by(node)
    if op == "pow" and kept:
        return kept[0].pow(getattr(node, "_saved_exponent", 1))
    if op == "mul" and len(kept) == 2:
        return kept[0] * kept[1]
    if op == "div" and len(kept) == 2:
        return kept[0] / kept[1]
    return None
