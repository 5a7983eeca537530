"""The search in the pass that `watch` has just seen: for what made its first number that is not finite; and, while all
is finite, for what its ops hide, and why gradients are 0."""

import dis
import inspect
import math
import re
import traceback
from contextlib import nullcontext, suppress

from halfbits._rounding import _rounded_numbers
from halfbits._tensors import (
    FLOATS,
    FP16,
    ZERO,
    _gradients,
    _in,
    _is_compiled,
    _is_fsdp,
    _is_on,
    _kinds,
    _largest,
    _list,
    _module_of,
    _op,
    _short,
    _whole,
    _world,
)
from halfbits.auditing import _low_hooks
from halfbits.origin import Origin, _again, _bad_input, _first, _Ops, _ops_made
from halfbits.report import _some, certain, likely, note


def _origin(seen, phase, bad, intact):
    """`bad`: the labels of what is not finite. `intact`: whether the weights are still those of that pass."""
    origin, incoming = None, ("incoming", "") in bad
    if phase == "loss" and ("root", "") in bad:  # -inf, which might have been a mask, and was none
        phase = "forward"
    if intact and phase == "loss":
        origin = seen.loss.origin()
    elif intact and incoming:
        origin = seen.why or (seen.loss and seen.loss.culprit) or _first(*_made_in(seen))
    elif intact:
        origin = (phase == "forward" and _already_there(seen)) or _first(*_made_in(seen))
        origin = origin or (phase == "backward" and seen.loss and seen.loss.culprit)  # in a gradient of a gradient
    return origin or _place(seen, "incoming" if incoming and phase == "backward" else phase, bad, intact)


def _why_skipped(seen):
    """What made the gradients of the last pass bad, if it was no overflow that a lower scale ends."""
    if seen.loss and seen.loss.culprit:
        return seen.loss.culprit
    made = _first(*_made_in(seen))
    return made if made and made.phase in ("forward", "input") and made.kind != "-inf" else None


def _can_be_done_again(seen):
    """Under FSDP2, whose hooks a second pass disturbs, only once, at the end of a run in one process."""
    return "batch" in (seen.saved or {}) and not (_is_fsdp(seen.model) and (_world() or not seen.ends))


def _made_in(seen):
    """The Origins of the last pass, and those of a good pass before it."""
    if not _can_be_done_again(seen):
        return [], []
    with seen.hooks.quiet():
        made, failed = _ops_made(seen.model, seen.saved)
        seen.saved["usual"] = _ops_made(seen.model, seen.good | {"gradients": {}})[0] if made and seen.good else []
    if failed:
        seen.tell(note(failed))
    batch = ((), {}) if _kinds(seen.saved["gradients"].values()) else seen.saved["batch"]  # those came in bad already
    return made, seen.saved["usual"], batch


def _already_there(seen):
    """Bad weights, or statistics that this pass used: in training batch norm only writes them."""
    written = {name for name, module in seen.plain.named_modules() if module.training}
    buffers = {name: each for name, each in seen.plain.named_buffers() if each.dtype in FLOATS}
    used = [name for name in buffers if "running_" not in name or _module_of(name) not in written]
    bad = [name for name, each in seen.weights.items() if each.dtype in FLOATS and _kinds([each])]
    bad += [name for name in used if _kinds([buffers[name]]) - {"-inf"}]
    if not bad:
        return _bad_input(*seen.saved["batch"])
    why = "before the first step"
    if seen.steps or seen.passes:
        why, gradients = "a step or a statistic made them so", "bad" if seen.bad_pass == seen.passes else "finite"
        why += f"; the gradients before it were {gradients}" if seen.hooks.not_judged < seen.passes else ""
    return Origin("weights", _module_of(bad[0]), "", f"in the weights already ({why}): {_some(bad)}")


def _place(seen, phase, bad, intact):
    """Where, if it is not known by what op."""
    names = [name for kind, name in bad if kind == ("output" if phase == "forward" else "gradient")]
    if phase == "forward":
        module = names[0] if names else ""
        return Origin(phase, module, "", f"{_in(phase, module)} or since the module before")
    if phase == "loss":
        region = seen.loss.region if seen.loss else ()
        ops = " of ".join([_op(node) for node in region if "loss" not in node.metadata][:-4:-1])
        return Origin(phase, "", ops, f"in the loss ({ops}): all that the model put out is finite")
    if phase == "incoming":
        return Origin("backward", "", "", "in the backward of the loss: what reaches the model's output is bad already")
    names, order = list(map(_module_of, names)), [*seen.looks.dtypes]
    module = max(names, key=lambda name: order.index(name) if name in order else -1, default="")
    if intact and (low := _low_hooks(seen.model)) and not _world():
        words = f"in the communication hook {_some(low)}, which casts: the same pass has finite gradients without it"
        return Origin(phase, "", low[0], words)
    words = f"in the backward, of {module or 'the model'} or of what follows it"
    words += "; or another process's, by the reduction" if _world() else ""
    if any(map(_is_compiled, seen.model.modules())) and (seen.saved or {}).get("gradients") and intact:
        words += ". Uncompiled the same pass has finite gradients: compiled code made it, as where a region with "
        words += "autocast disabled is compiled, and its backward runs under autocast all the same"
    return Origin(phase, module, "", words)


CASES = {  # the clinic's, by what the words of an Origin hold
    "all of it is masked": "Attention is NaN for rows of padding",
    r"convolution made inf \(float16": "Convolution gives inf in fp16",
    r"mm made inf \(float16": "Model trained in bf16 gives NaN in fp16",
    r"in the loss: (mul|pow|mseloss) made inf \(float16": "Loss is inf but every output is finite",
    "divides by 0.* where float32 may": "Normalized vectors are NaN in fp16",
    "backward.*sqrt": "Loss scale falls in every step",
    "compiled code made it": "Gradients are inf in a compiled float32 layer",
}


def _case_of(origin):
    return next((case for words, case in CASES.items() if re.search(words, origin.words)), "")


RAISED = {  # what an error says, and what it means
    "unscale FP16 gradients": "What trains is fp16: a GradScaler wants FP32 weights, under autocast.",
    "inf checks were recorded": "No weight of this optimizer has a gradient: it holds others, or none was reached.",
    "unscale_.. has already been called": "Once per step, after the last of the passes that add up; then `update`.",
    "called since the last update|called after step": "`scaler.update()` is missing after `scaler.step`.",
    "unsafe to autocast": "Probabilities in fp16 lose what is near 0 and 1: binary_cross_entropy_with_logits.",
    "different metadata": "A checkpointed part does otherwise when it is run again: by a counter, or other autocast.",
    "dtype|scalar type|should be the same": "Two dtypes meet: a part ran outside of autocast, or was cast by hand.",
    "cannot be converted to type|without overflow": "A constant beyond fp16's 65504, as a mask's -1e9.",
    "graph a second time": "A tensor of the last pass was kept, or autocast's cast copies of weights, by two passes.",
    "out of bounds|out of range": "An index or a label beyond the table; in 16 bits, large whole numbers round.",
}


def _where_raised(seen, error):
    """A Finding of an error that stopped the run: the innermost module in its traceback, and what it means."""
    names, inside, own = {id(module): name for name, module in seen.plain.named_modules()}, "", ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        inside = names.get(id(frame.f_locals.get("self")), inside)
        if frame.f_code.co_name == "backward" and "ctx" in frame.f_locals:
            own = " It was raised in a backward of one's own, which runs outside of autocast: torch.amp.custom_bwd."
    said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".rstrip(".: ")
    means = next((means for words, means in RAISED.items() if re.search(words, said)), "")
    means += own * means.startswith("Two dtypes")
    if means.startswith(("Two dtypes", "What trains")):
        now = [f"{n} is {_short(each.dtype)}" for n, each in seen.weights.items() if each.dtype != seen.dtypes[n]]
        means += f" Weights were cast since the watch began: {_some(now)}. `.to` casts the model itself." * bool(now)
    if means.startswith("No weight"):
        bare = [name for name, each in seen.trained.items() if each.grad is None]
        means += f" Without a gradient: {_some(sorted({_module_of(name) for name in bare}))}; a detach?" * bool(bare)
    return certain(f"the run stopped with {said}", inside, means)


def _inspect(seen):
    """Do the pass again and look at each op of it."""
    saved = seen.saved
    found = _gradients({name: weight for name, weight in seen.trained.items() if weight.dim() > 1})
    zero = [name for name, gradient in found.items() if _largest([gradient]) == 0]
    zero = zero if not _kinds(saved["gradients"].values()) else []
    seen.zero = _nothing_arrives(seen, zero, saved["gradients"].values()) if zero else None
    if not _can_be_done_again(seen):
        return
    ops = _Ops(seen.plain)
    try:
        with seen.hooks.quiet():
            gradients = _again(seen.model, saved, ops)
            doubled = _again(seen.model, saved, nullcontext(), times=2)
            if saved["backward in autocast"]:
                outside = _again(seen.model, saved | {"backward in autocast": False}, nullcontext())
                pairs = [(each.float(), outside[name].float()) for name, each in gradients.items()]
                seen.cast_twice |= any(not (one - two).norm() <= 1e-4 * two.norm() for one, two in pairs)
    except Exception:  # some passes cannot be done again: then this look is left out
        return
    for other in seen.earlier:
        with suppress(Exception), seen.hooks.quiet():
            ops.phase = "forward"
            _again(seen.model, other | {"gradients": {}}, ops)
    for each in ops.made:
        if each.phase == "forward" and each.why == "format" and each.kind != "-inf":
            seen.hidden.setdefault((each.module, each.op), each)
    for each in [*_rounded_numbers(saved["batch"], "an input of the model"), *ops.coarse, *ops.wide.far]:
        seen.coarse.setdefault((each.where, each.what.split()[0]), each)
    seen.tell(*_deaf(seen, gradients, doubled))
    if zero and not seen.zero:
        if "format" in ops.zeros:  # what underflows comes back where the loss is large
            with suppress(Exception), seen.hooks.quiet():
                larger = {times: _again(seen.model, saved, nullcontext(), times) for times in (2**8, 2**14)}
                least = 1e-6 * _largest(saved["gradients"].values())  # less is what rounding makes
                sizes = {n: _largest([each[name] for name in zero if name in each]) for n, each in larger.items()}
                if not any(size > n * least for n, size in sizes.items()):
                    del ops.zeros["format"]
        seen.zero = _why_zero(seen, zero, saved, ops.zeros, gradients)


def _deaf(seen, gradients, doubled):
    """Gradients that stay as they are when the loss is doubled."""
    pairs = {name: (each.float(), doubled[name].float()) for name, each in gradients.items() if name in doubled}
    same = [name for name, (one, two) in pairs.items() if 10 * (two - one).norm() < one.norm() < math.inf]
    if same:
        what = "gradients that stay the same when the loss is doubled, by a backward of one's own, or a hook"
        yield (certain if _is_on(seen.scaler) else note)(what, _whole(seen.plain, same), DEAF)


def _own_backwards(seen, region):
    """Backwards of one's own in a loss that never read the gradient that they are given."""
    for node in region:
        function = getattr(node, "_forward_cls", None)
        code = getattr(function and inspect.unwrap(function.backward), "__code__", None)
        if code and not function.backward.__module__.startswith("torch."):
            given = {*code.co_varnames[1 : code.co_argcount + bool(code.co_flags & inspect.CO_VARARGS)]}
            if not given & {name for each in dis.get_instructions(code) for name in _list(each.argval)}:
                what = f"the backward of {function.__name__} never reads the gradient that it is given"
                yield (certain if _is_on(seen.scaler) else note)(what, "in the loss", DEAF)


DEAF = "Multiply by it: else a loss scale does not get through, and unscale_ divides by it all the same."
UNDERFLOW = "They underflow: scale the loss with a GradScaler, or use bf16."


def _nothing_arrives(seen, zero, arriving):
    """A Finding if the gradient that reaches the model's output is 0 everywhere, or, unseen, in the fp16 before it."""
    size, where, dtype = _largest(arriving), _whole(seen.plain, zero), next(iter(arriving)).dtype
    what = f"the gradient that reaches the model's output is 0 everywhere ({_short(dtype)})"
    if 0 < size <= ZERO and "float16" in seen.looks.dtypes.values() and not _can_be_done_again(seen):
        what, dtype = f"the gradient that reaches the model's output, up to {size:.2g}, is 0 in fp16", FP16
    elif size:
        return None
    if seen.flat:
        return certain(f"{what}, and {seen.flat}", where, "A loss that is divided by an inf is 0, and so is its slope.")
    if dtype == FP16 and not _is_on(seen.scaler):
        return certain(what, where, UNDERFLOW)
    return likely(what, where, "The loss does not change with it: it is saturated, cut off, or divided by an inf.")


def _why_zero(seen, zero, saved, zeros, right):
    """A Finding: why gradients are 0 everywhere, by the `zeros` and the `right` gradients of the pass, done again."""
    where, underflow = _whole(seen.plain, zero), UNDERFLOW
    if saved["backward in autocast"]:
        underflow = "They underflow; the backward ran under autocast too: leave the region before it. Scale the loss."
    sizes = {name: _largest([right[name]]) for name in zero if name in right}
    if lost := [name for name, size in sizes.items() if size > 0]:
        what = "gradients that are 0 everywhere, though the same pass, done again, makes them"
        cost = f"There they are up to {max(sizes.values()):.2g}. A hook loses them, as one of DDP that casts to fp16."
        return certain(what, _whole(seen.plain, lost), cost)
    if "format" in zeros:
        underflow = "They underflow, though the loss is scaled: by too little." if _is_on(seen.scaler) else underflow
        return certain(f"gradients that underflow to 0: {zeros['format']}", where, underflow)
    if empty := [name for name in zero if _largest([seen.weights[name]]) == 0]:
        cost = "No underflow: no scale helps. They stay 0, and pass nothing on. Start them with other numbers."
        return certain("weights that are 0, and whose gradient is 0 in float32 too", empty, cost)
    if "unit" in zeros:
        cost = "No underflow: no scale helps. Smaller inputs, a smaller learning rate, or another start."
        return certain(f"weights that get no gradient: {zeros['unit']}", where, cost)
    return note("weights whose gradient is 0 everywhere, in float32 too", where)
