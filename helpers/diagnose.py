"""What is wrong with a mixed-precision run: `audit` looks at it before it starts, `watch` while it trains.

This one file can be copied into any project; it needs torch and pandas (and matplotlib, to plot).

    print(audit(model, optimizer, scaler))          # no step needed

    with watch(model, optimizer, scaler) as seen:   # raises NonFinite at the first bad number
        train()
    print(seen)

The first line that is printed is the verdict: the most probable cause, with its place, evidence and mend. Cases are
headings of notebook 14, the clinic, where each is shown and mended.
"""

import copy
import dis
import functools
import gc
import inspect
import math
import re
import sys
import traceback
import warnings
import weakref
from collections import Counter, deque
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.weak import WeakTensorKeyDictionary

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
LARGEST = torch.finfo(FP16).max  # 65504
ZERO = 2.0**-25  # from here down, numbers are 0 in fp16
SIXTEEN = (FP16, BF16)
FLOATS, WHOLE = (*SIXTEEN, FP32, torch.float64), (torch.int64, torch.int32)
SAMPLE = 1024  # values of a tensor from which shares are estimated
RECORDS = 128  # looks that are kept; beyond, every second one goes
AUTOCAST = weakref.WeakKeyDictionary()  # of a model that was watched: the dtype of its autocast, None if it was not on


# 1. Findings and reports


class Finding(NamedTuple):
    """`severity`: "certain" was observed, with its mechanism, or follows from what is there; "likely" does harm in most
    runs; "note" is a fact. `case`: a heading of the clinic, "" where it has none."""

    what: str
    where: str
    severity: str
    cost: str
    case: str

    def __str__(self):
        where, case = f" ({self.where})" if self.where else "", f"Case: {self.case}." if self.case else ""
        return " ".join(filter(None, [f"{self.severity}: {self.what}{where}.", self.cost, case]))


def certain(what, where="", cost="", case="", severity="certain"):
    """A Finding. `where` may be a list of names."""
    return Finding(what, where if isinstance(where, str) else _some(where), severity, cost, case)


likely = functools.partial(certain, severity="likely")
note = functools.partial(certain, severity="note")


class Report:
    """Findings, worst first. Printed: `verdict`, what was looked at, and the others; `findings` is a DataFrame."""

    def __init__(self, findings, seen=""):
        order = ["certain", "likely", "note"]
        rows = sorted(dict.fromkeys(findings), key=lambda finding: order.index(finding.severity))
        bad = bool(rows) and rows[0].severity != "note"
        self.findings = pd.DataFrame(rows, columns=list(Finding._fields))
        self.verdict = f"Verdict, {rows[0]}" if bad else "Verdict: nothing wrong was found."
        self.lines = [self.verdict, *([seen] if seen else []), *map(str, rows[bad:])]

    def __repr__(self):
        return "\n".join(self.lines)


def _some(names, most=4):
    names = [name or "the model" for name in names]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# 2. Small questions to tensors, models, optimizers and processes


def _short(dtype):
    return str(dtype).removeprefix("torch.")


def _percent(places, among):
    return 100 * (places & among).sum() / among.sum().clamp(min=1)


def _device(model):
    return next((weight.device for weight in model.parameters()), torch.device("cpu"))


def _gpus(device):
    """What torch.random.fork_rng keeps besides the CPU's state."""
    return [device] if device.type in ("cuda", "xpu") else []


def _is_compiled(module):
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def _trained(model):
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def _gradients(weights):
    """Those that are there, by name."""
    return {name: weight.grad for name, weight in weights.items() if weight.grad is not None}


def _module_of(weight):
    """The name of the module that a weight's name begins with."""
    return weight.rpartition(".")[0]


def _child(name, child):
    return f"{name}.{child}".lstrip(".")


def _is_fsdp(model):
    return any(hasattr(module, "_get_fsdp_state") for module in model.modules())


def _policy(module):
    """The dtypes that FSDP2 uses in a module; None if it does not shard it."""
    return vars(module._get_fsdp_state())["_mp_policy"] if hasattr(module, "_get_fsdp_state") else None


def _last_whole(dtype):
    """The end of the whole numbers that a format holds one by one: 256 in bf16, 2048 in fp16."""
    return 2 / torch.finfo(dtype).eps


def _spacing(size, dtype):
    """How far apart the neighbours of a number are."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(size))


def _op(node):
    """What a node of autograd is the backward of."""
    return re.sub(r"Backward\d*$", "", node.name()).lower()


def _stops(value):
    """Whether a sum of outputs stops a run: -inf alone may be a mask."""
    return math.isnan(value) or value == math.inf


def _in(phase, module):
    return f"in the {phase}, in {module or 'the model'}"


def _is_on(scaler):
    """Whether a loss scaler works; one that cannot say so, as DeepSpeed's, does."""
    return scaler is not None and (not hasattr(scaler, "is_enabled") or scaler.is_enabled())


def _list(value):
    return list(value) if isinstance(value, (tuple, list)) else [value] if value is not None else []


def _world():
    """How many processes train together; 0 for one alone."""
    return dist.is_available() and dist.is_initialized() and (dist.get_world_size() > 1) * dist.get_world_size()


def _groups(optimizers):
    return [group for one in optimizers for group in one.param_groups]


def _held(optimizers):
    return [weight for group in _groups(optimizers) for weight in group["params"]]


def _count(tensors):
    """ "4,810 float32, 64 float16": how many numbers of each dtype."""
    counts = Counter()
    for tensor in tensors:
        counts[_short(tensor.dtype)] += tensor.numel()
    return ", ".join(f"{count:,} {dtype}" for dtype, count in counts.most_common())


def _spacings(values, dtype):
    """How far apart the neighbours of each number are, those of fp16's smallest too."""
    eps, least = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    return torch.ldexp(torch.full_like(values, eps), torch.frexp(values).exponent - 1).clamp(min=least * eps)


def _went_through(tensor):
    """The 16-bit format whose numbers are all that a tensor holds, to the last bit, by more than chance; None else."""
    values, whole = _sample(tensor), not tensor.is_floating_point()
    values = values[(values != 0) & values.isfinite()].unique()
    for dtype in (BF16, FP16):
        steps = _spacings(values, dtype).clamp(min=float(whole))
        many = steps.log2().sum() > 16 if whole else len(values) > 3  # some are multiples by chance
        if many and torch.equal(values, values.to(dtype).float()):
            last_bit = (values / steps % 2)[steps > whole].mean() > 0.2
            regular = whole and not (values % steps.max()).any()  # as every 20th
            return dtype if last_bit and not regular else None
    return None


def _local(tensor):
    """The numbers that this process holds: the shard of a DTensor, the values of a sparse tensor."""
    tensor = tensor.detach()
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
        return tensor
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _tensors(value, dtypes=FLOATS):
    """All tensors of floats in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        return [value] if value.dtype in dtypes else []
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, each.name) for each in fields(value)]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for each in inner for tensor in _tensors(each, dtypes)]


def _mapped(change, value):
    """Nested arguments with `change` made to their tensors."""
    if isinstance(value, dict):
        return {key: _mapped(change, each) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_mapped(change, each) for each in value)
    return change(value) if isinstance(value, torch.Tensor) else value


def _float(tensor):
    return tensor.float() if tensor.dtype in SIXTEEN else tensor


def _floats(value):
    """Nested arguments with float32 for tensors in 16 bits."""
    return _mapped(_float, value)


def _ends(tensors):
    """The smallest and the largest number of each tensor, NaN if one is: two lists. It waits for a GPU."""
    # A CPU's autocast to bf16 refuses to stack what is fp16, and the other way round.
    ends = [torch.stack([*map(_float, torch.aminmax(_local(each)))]) for each in tensors if _local(each).numel()]
    return _together(ends, ends[0].device).T.tolist() if ends else ([0.0], [0.0])


def _kinds(tensors):
    """Which of "nan", "inf" and "-inf" are among the numbers."""
    low, high = _ends(tensors)
    there = {"nan": any(map(math.isnan, low)), "inf": math.inf in high, "-inf": -math.inf in low}
    return {kind for kind, is_there in there.items() if is_there}


def _largest(tensors):
    low, high = _ends(tensors)
    return max(*high, *(-each for each in low))


def _norms(tensors, order=2):
    """The norm of each tensor, without waiting for it: finite only if all of it is."""
    tensors = [_local(tensor) for tensor in tensors]
    wide = None if any(tensor.dtype == torch.float64 for tensor in tensors) else FP32  # in fp16 a norm overflows early
    return [norm.float() for norm in torch._foreach_norm(tensors, order, dtype=wide)] if tensors else []


def _together(values, device):
    """Numbers in one tensor, without waiting for it; modules may lie on several devices."""
    values = [_float(each if each.device == device else each.to(device, non_blocking=True)) for each in values]
    return torch.stack(values) if values else torch.zeros(1, device=device)


def _sample(tensor):
    values = _local(tensor).reshape(-1)
    return values[:: max(1, values.numel() // SAMPLE)].to(FP32, copy=True)


def _compiled(model):
    """What torch.compile has made of a model, if it has: the loop calls that."""
    dynamo = sys.modules.get("torch._dynamo")  # slow to import, and not there if nothing is compiled
    things = [each for each in gc.get_objects() if type(each) is dynamo.OptimizedModule] if dynamo else []
    return next((each for each in things if _plain(each) is model), model)


def _plain(model):
    """The model inside the wrappers of torch.compile and DistributedDataParallel."""
    while hasattr(model, "_orig_mod") or isinstance(model, nn.parallel.DistributedDataParallel):
        model = getattr(model, "_orig_mod", None) or model.module
    return model


def _whole(model, names):
    """The same weights in fewer words: modules all of whose weights are among the names, then the weights left."""
    left, whole = set(names), []
    for name, module in model.named_modules():
        inside = {_child(name, weight) for weight, _ in module.named_parameters()}
        if inside and inside <= left:
            whole.append(name or "all weights")
            left -= inside
    return whole + [name for name in names if name in left]


# 3. audit: each function yields what it finds in a model, its optimizers and its scaler


def _scales(model, optimizers, scaler):
    """What a GradScaler, or another loss scaler with a `cur_scale`, is about to do."""
    if not _is_on(scaler):
        if scaler is not None:
            yield note("the GradScaler is disabled", "", "Gradients are not scaled: in fp16 small ones become 0.")
        return
    scale = scaler.get_scale() if hasattr(scaler, "get_scale") else getattr(scaler, "cur_scale", 1)
    if scale == 0 or not math.isfinite(scale):
        yield certain(f"the scale is {scale:g}", "", "Gradients become 0, inf or NaN by it, whatever they were.")
    elif scale < 1 or scale == getattr(scaler, "min_scale", None):
        where = "below 1" if scale < 1 else "at its minimum"
        cost = "Overflow ends at a low scale: these gradients are bad for another reason."
        yield likely(f"the scale is {where}: {scale:g}", "", cost, "Loss scale falls in every step")
    backoff = scaler.get_backoff_factor() if hasattr(scaler, "get_backoff_factor") else 0.5
    if backoff > 0.8:
        steps = math.log(0.5) / math.log(backoff) if backoff < 1 else math.inf
        cost = f"It halves in {steps:.0f} skipped steps. The default is 0.5."
        yield likely(f"an overflow takes {1 - backoff:.0%} off the scale (backoff_factor={backoff:g})", "", cost)
    if any(weight.dtype == BF16 for weight in _trained(model).values()):
        cost = "bf16 needs no scale; on CUDA, unscaling is 'not implemented for BFloat16' in some versions."
        yield likely("a GradScaler over bf16 weights", "", cost)


def _masters(model, optimizers, scaler):
    """16-bit weights that train, and whether someone keeps them in FP32."""
    low = {name: weight for name, weight in _trained(model).items() if weight.dtype in SIXTEEN}
    if low and (kept := _who_keeps_masters(low.values(), optimizers)):
        yield note(f"16-bit weights, {kept}")
    elif low:
        half_a_step, decay = _lost_decay(low.values(), optimizers)
        foreign = any(not type(one).__module__.startswith("torch.") and not one.state for one in optimizers)
        decays = f", and weight decay (lr * weight_decay = {decay:.2g})" if decay else ""
        unless = ", if this optimizer keeps none" if foreign else ""
        cost = f"An update below {half_a_step:.2g} of its weight is rounded away{decays}{unless}. "
        cost += "Load or cast what trains as FP32."
        what = f"16-bit weights that train, without FP32 masters: {_count(low.values())}"
        case = "Weights do not change with FSDP2" if _is_fsdp(model) else "Weights do not change in 16 bits"
        evaluated = not optimizers and not model.training  # as an average's copy
        yield (note if foreign or evaluated else likely)(what, _whole(model, low), cost, case)
    fp16 = [name for name, weight in low.items() if weight.dtype == FP16]
    if fp16 and _is_on(scaler):
        fused = any(group.get("fused") for group in _groups(optimizers))
        case, by = "Attempting to unscale FP16 gradients", "unscale_" if fused else "scaler.step"
        cost = f"`{by}` raises '{case}.' Train FP32 weights; autocast makes the fp16."
        say = likely if fused or not optimizers else certain
        yield say("a GradScaler over trained fp16 weights", _whole(model, fp16), cost, case)


def _lost_decay(weights, optimizers):
    """Half a step of 16-bit weights, relative to them, and the largest lr * weight_decay below it; 0 if none is."""
    half_a_step = 2.0**-9 if BF16 in {weight.dtype for weight in weights} else 2.0**-12
    decays = [float(group["lr"] * group.get("weight_decay", 0)) for group in _groups(optimizers) if "lr" in group]
    return half_a_step, max([each for each in decays if each < half_a_step], default=0)


def _who_keeps_masters(low, optimizers):
    """Who keeps trained 16-bit weights in FP32, in words; "" if nobody is seen to."""
    held = _held(optimizers)
    if held and not set(map(id, held)) & set(map(id, low)):
        return "FP32 masters in the optimizer" if any(weight.dtype == FP32 for weight in held) else ""
    if any(getattr(one, "bf16_stochastic_round", False) for one in optimizers):
        return "rounded stochastically"
    kept = [_local(each) for one in optimizers for each in _tensors(vars(one)) if each.dtype == FP32]
    low = [_local(weight) for weight in low if weight.dim() > 1 and _largest([weight])][:8]  # not 0, as states may be
    same = lambda weight, each: weight.shape == each.shape and torch.equal(weight, each.to(weight.dtype))
    found = low and all(any(same(weight, each) for each in kept) for weight in low)
    return "and the optimizer keeps FP32 copies" if found else ""


def _longest_steps(optimizers):
    """How far Adam moves a number of float32 at most, without decay, by the weight's id: Kingma and Ba 2015, 2.1."""
    found = {}
    for one in optimizers:
        for group in one.param_groups if re.search(r"(?<![NR])Adam(?!ax)", type(one).__name__) else ():
            first, second = map(float, group.get("betas", (0.9, 0.999)))
            longest = float(group.get("lr", 0)) * max(1, (1 - first) / math.sqrt(1 - second))
            found |= {id(weight): longest for weight in group["params"] if weight.dtype == FP32}
    return found


def _states(model, optimizers, scaler):
    """What 16 bits and odd settings do to an optimizer's states and constants."""
    kept = [(key, each) for one in optimizers for state in one.state.values() for key, each in state.items()]
    if spoilt := {str(key) for key, each in kept if _kinds(_tensors(each))}:
        yield certain("states of the optimizer that are not finite", sorted(spoilt), "They stay so.")
    for one, group in [(each, group) for each in optimizers for group in each.param_groups]:
        name, states = type(one).__name__, [one.state.get(weight, {}) for weight in group["params"]]
        squares = [state["exp_avg_sq"] for state in states if "exp_avg_sq" in state]
        eps, beta, rate = group.get("eps", 1), group.get("betas", (0, 0))[-1], float(group.get("lr", 1))
        fp16 = any(weight.dtype == FP16 for weight in group["params"]) and all(each.dtype == FP16 for each in squares)
        if fp16 and 0 < eps <= ZERO and not group.get("fused"):
            cost = "Where the second moment is 0 too, the step divides by 0: inf or NaN. FP32 weights, or eps=1e-4."
            yield certain(f"{name}'s eps = {eps:g} is 0 in fp16", "", cost, "Weights are NaN after one step of Adam")
        masters = [pair for state in states for pair in state.items() if re.search("master|fp32", str(pair[0]))]
        if low := {str(key) for key, kept in masters if any(each.dtype in SIXTEEN for each in _tensors(kept))}:
            cost = "Updates are rounded away. Optimizer.load_state_dict casts states to their weights' dtype."
            yield certain(f"{name}'s masters are in 16 bits", sorted(low), cost, "Weights do not change in 16 bits")
        if low := [state["step"] for state in states if _tensors(state.get("step"), SIXTEEN)]:
            count, dtype = max(low), low[0].dtype
            cost = "Decays and schedules by it stand still, as after a checkpoint in 16 bits. Keep it in FP32."
            what = f"{name}'s step counter, {count:g}, is {_short(dtype)}, which stops at {_last_whole(dtype):,.0f}"
            yield (certain if count + 1 == count else likely)(what, "step", cost)
        if 0 < 1 - beta < 2.0**-8 and any(each.dtype == BF16 for each in squares):
            cost = f"A decay by {beta:g} is less than half a step of bf16: it never falls. Keep it in FP32."
            yield likely(f"{name}'s second moment in bf16", "exp_avg_sq", cost)
        if _is_on(scaler) and group.get("fused") and group.get("momentum") and not any(states):
            cost = "If the first step is skipped, it is made of uninitialised memory, and used. Leave fused=True out."
            yield likely(f"the momentum of a fused {name}, with a GradScaler", "", cost)
        if rate == 0 or not math.isfinite(rate):
            yield (certain if rate else note)(f"a learning rate of {rate:g}", name)
        if low := [key for key, each in group.items() if isinstance(each, torch.Tensor) and each.dtype in SIXTEEN]:
            cost = "A schedule's small factors are rounded away: it stands still, or jumps. Keep it in FP32."
            yield likely(f"{name}'s settings as tensors of 16 bits", low, cost)


def _moments(model, optimizers, scaler):
    """What 16 bits have left of an optimizer's moments, as a checkpoint that was compressed."""
    states = [(one, state) for one in optimizers for state in one.state.values()]
    states = [(one, state) for one, state in states if {"exp_avg", "exp_avg_sq"} <= {*state}]
    for one, state in states:
        zero = (_local(state["exp_avg"]).abs() > 1e-15) & (_local(state["exp_avg_sq"]) == 0)
        if zero.float().mean() > 0.01:
            cost = "In fp16, as of a checkpoint, small squares are 0: such weights take huge steps. Keep it in FP32."
            yield certain(f"{type(one).__name__}'s second moment is 0, as in fp16, where the first is not", "", cost)
    averaged = all(group.get("betas", (0,))[0] > 0 for group in _groups(optimizers))  # else exp_avg is the gradient
    for key in ("exp_avg", "exp_avg_sq") if averaged else ():
        kept = [state[key] for _, state in states[:64] if state[key].dtype == FP32 and _local(state[key]).numel() > 32]
        formats = set(map(_went_through, kept))
        if len(formats) == 1 and (dtype := formats.pop()):
            cost = f"They were stored so, as in a checkpoint: coarse, and 0 below what {_short(dtype)} holds."
            yield likely(f"all numbers of the float32 state {key} are {_short(dtype)}'s", "", cost)


def _resumed(model, optimizers, scaler):
    """An optimizer that has taken steps, and a scaler that counts none."""
    steps, counts = any(any(one.state.values()) for one in optimizers), hasattr(scaler, "state_dict") and _is_on(scaler)
    if steps and counts and scaler.state_dict()["_growth_tracker"] == 0:
        what = f"the optimizer has taken steps before, the scaler counts none: its scale is {scaler.get_scale():,.10g}"
        cost = "After a resume: scaler.load_state_dict was left out. The first steps are skipped, until the scale fits."
        yield (likely if scaler.get_scale() == 65536 else note)(what, "", cost, "Training changes after a resume")


def _training(model, optimizers, scaler):
    """What trains, and what the optimizer holds."""
    weights, trained, held = dict(model.named_parameters()), _trained(model), _held(optimizers)
    ids, shapes = set(map(id, held)), {tuple(weight.shape) for weight in held}
    missing = [name for name, weight in trained.items() if id(weight) not in ids]
    if held and len(missing) == len(trained) > 0 and shapes >= {tuple(weight.shape) for weight in trained.values()}:
        if not any(weight.dtype in SIXTEEN for weight in trained.values()):  # else it holds masters
            cost = "The model was built again, moved or wrapped after it: `step` changes other weights."
            yield certain("the optimizer holds none of the model's weights", "", cost, "No inf checks were recorded")
    elif held and missing:
        own, new = set(map(id, weights.values())), {tuple(weights[name].shape) for name in missing}
        gone = {tuple(each.shape) for one in optimizers for each in one.state if id(each) not in own}
        merged = gone and not any(len(shape) > 1 for shape in gone & new)
        cost = "Those that it trained are gone, as merged adapters." if merged else "Only another optimizer moves them."
        yield (note if merged else likely)("trainable weights that the optimizer lacks", _whole(model, missing), cost)
    adapter = re.compile("lora|adapter|ia3|prefix|prompt", re.IGNORECASE)
    parts = tuple(f"{name}." for name, part in model.named_modules() if adapter.search(type(part).__name__) and name)
    adapters = [name for name in weights if adapter.search(name) or (name.startswith(parts) and ".base" not in name)]
    if adapters and not set(adapters) & set(trained):
        cost = "requires_grad is False: perhaps they were frozen together with what they were put into."
        yield likely("adapters that are frozen", _whole(model, adapters), cost)
    if frozen := [name for name in weights if name not in trained]:
        words = f"frozen {_count(weights[name] for name in frozen)}; trained {_count(trained.values()) or 'nothing'}"
        yield note(words, _whole(model, frozen))


def _adapters(model):
    """The frozen 16-bit matrices beside which two trained ones make an update: (name, matrix, update)."""
    for parent, module in () if _is_fsdp(model) else model.named_modules():
        weights = [(name, weight) for name, weight in module.named_parameters() if weight.dim() == 2]
        base = [(_child(parent, name), each) for name, each in weights if not each.requires_grad]
        pair = sorted([each for _, each in weights if each.requires_grad], key=len)  # rank x inputs, outputs x rank
        if (len(weights), len(base), len(pair)) == (3, 1, 2) and pair[1].shape[1] == len(pair[0]):
            update = pair[1].detach()[:256].float() @ pair[0].detach().float()
            if update.shape == base[0][1][:256].shape and base[0][1].dtype in SIXTEEN:
                yield *base[0], update


def _merged(model, optimizers, scaler):
    """What rounding would take of adapters that are merged into a base of 16 bits."""
    rows = {name: (matrix.detach()[:256], update) for name, matrix, update in _adapters(model)}
    lost = [float(_percent((old + update).to(old.dtype) == old, update != 0)) for old, update in rows.values()]
    if lost and (share := sorted(lost)[len(lost) // 2]) > 50:
        cost = "Most of it is below half a step of the base: keep them apart, or merge into a float32 copy."
        yield note(f"merged into their 16-bit base, adapters would lose {share:.0f}% of their update", [*rows], cost)


def _modules(model, optimizers, scaler):
    """Positions, statistics and small constants in 16 bits."""
    fp16 = {name: part for name, part in model.named_modules() if any(w.dtype == FP16 for w in part.parameters(False))}
    eps = {name: getattr(part, "eps", None) or 1 for name, part in fp16.items()}
    if eps := [f"{name}.eps = {value:g}" for name, value in eps.items() if value <= ZERO]:
        yield likely("an eps that is 0 in fp16", eps, "It guards no division.", "Normalized vectors are NaN in fp16")
    named = dict([*model.named_parameters(), *model.named_buffers()])
    for name, each in [pair for pair in named.items() if pair[1].dtype in SIXTEEN and pair[1].dim() == 1]:
        values, steps = _sample(each).unique(), _sample(each).diff()
        decays = 1 < len(values) < each.numel() / 2 and values[0] > 0.9 and values[-1] <= 1
        in_order = 8 < len(values) < 0.9 * len(steps) and bool((steps <= 0).all() or (steps >= 0).all())
        if "norm" not in name and (decays or in_order):
            what = f"{each.numel()} numbers, {values[0]:.5g} to {values[-1]:.5g}, are {len(values)} different ones in "
            cost = "As decays or a schedule they are coarse, and 1 forgets nothing. Keep them in float32."
            yield likely(f"{what}{_short(each.dtype)}", name, cost)
    buffers = [name for name, buffer in model.named_buffers() if buffer.dtype in SIXTEEN]
    for dtype, far, say in ((BF16, 512, likely), (FP16, 4096, note)):  # where an angle may be off by 1
        if places := [name for name in buffers if re.search("inv_freq|freqs", name) and named[name].dtype == dtype]:
            cost = f"Angles are off by up to 1/{far} of themselves: near position {far:,} by 1. Keep them in float32."
            yield say(f"frequencies of positions in {_short(dtype)}", places, cost)
    if places := [name for name in buffers if re.search("position|rotary", name) and "freq" not in name]:
        cost = "bf16 counts to 256 and fp16 to 2048 in steps of 1: later positions fall together."
        yield likely("positions in 16 bits", places, cost)
    if running := [name for name in buffers if "running_" in name]:
        say = likely if model.training else note
        yield say("running statistics in 16 bits", running, "In training they stop moving near their value.")


def _sharding(model, optimizers, scaler):
    """The policies of FSDP2, which casts whole modules."""
    for name, module in model.named_modules():
        if (policy := _policy(module)) and policy.param_dtype:
            words = f"param_dtype {_short(policy.param_dtype)}, reduce_dtype {_short(policy.reduce_dtype)}"
            own = {each.dtype for each in module.parameters()} if torch.__version__ >= "2.15" else {policy.param_dtype}
            if policy.param_dtype in SIXTEEN and not {*SIXTEEN}.isdisjoint({policy.reduce_dtype} - {None} or own):
                yield likely(f"FSDP2 reduces gradients in 16 bits: {words}", [name], "Set reduce_dtype=torch.float32.")
            else:
                yield note(f"FSDP2's policy: {words}", [name])
            if policy.param_dtype == FP16 and not _is_on(scaler):
                cost = "Small gradients become 0 in the backward. Add a GradScaler, or use bf16."
                yield likely("FSDP2 computes in fp16, and nothing scales the loss", [name], cost)


def _numbers(model, optimizers, scaler):
    """Weights, buffers, states and gradients that are not finite, or beyond fp16's end."""
    weights = {name: weight for name, weight in model.named_parameters() if weight.dtype in FLOATS}
    if spoilt := [name for name, each in weights.items() if _kinds([each]) - {"-inf"}]:
        yield certain("weights that are not finite", spoilt, "Go back to a checkpoint.")
    yield from _spoilt(model)
    if not _is_on(scaler) and (wild := [name for name, each in _gradients(weights).items() if _kinds([each])]):
        yield certain("gradients that are not finite", wild, "The next step spoils all.")
    over = _beyond_fp16(weights.items())
    if over and AUTOCAST.get(model, FP16 if _is_on(scaler) else None) == FP16:
        yield likely("weights above 65504", over, "fp16 makes inf of them.", "Convolution gives inf in fp16")
    if over := _beyond_fp16(model.named_buffers()):
        yield note("buffers above 65504", over, "`.half()` makes inf of them.")


def _beyond_fp16(named):
    sizes = {name: _largest([each]) for name, each in named if each.dtype in FLOATS and each.dtype != FP16}
    return [f"{name}: {size:,.0f}" for name, size in sizes.items() if LARGEST < size < math.inf]


def _spoilt(model):
    named = [(name, each) for name, each in model.named_buffers() if each.dtype in FLOATS]
    if buffers := [name for name, each in named if _kinds([each]) - {"-inf"}]:  # a mask's
        cost = "Evaluation uses them, and training does not. A skipped step does not undo them, nor does fp16 hold all."
        yield certain("buffers that are not finite", buffers, cost, "Loss is NaN only in evaluation")


def _switches(model, optimizers, scaler):
    """Sums in fp16, TF32 by the old switches and the new, autocast around this call, units and sizes of this device."""
    device, matmul = _device(model), torch.backends.cuda.matmul
    words = f"TF32: products {matmul.fp32_precision}, convolutions {torch.backends.cudnn.conv.fp32_precision}"
    try:
        _ = matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    except RuntimeError:
        cost = "Whoever reads allow_tf32 gets a RuntimeError. Use one kind of switch for all."
        yield likely(f"old and new TF32 switches are mixed: {words}", "", cost)
    if getattr(matmul, "allow_fp16_accumulation", False):
        yield likely("fp16 products are summed in fp16", "allow_fp16_accumulation", "Long sums overflow.")
    if torch.is_autocast_enabled(device.type):
        cost = "A region that spans steps keeps its cast copies of the weights: forward does not see their changes."
        yield likely("autocast is on around this call", "", cost, "Loss stays the same in every step")
    used = {weight.dtype for weight in model.parameters()} | {AUTOCAST.get(model)}
    slow = [_short(dtype) for dtype, there in _native(device).items() if dtype in used and not there]
    tables = {f"{name}.weight" for name, part in model.named_modules() if isinstance(part, nn.Embedding)}
    weights = [(name, weight) for name, weight in model.named_parameters() if weight.dim() > 1 and name not in tables]
    sizes = {name: tuple(weight.shape[:2]) for name, weight in weights}
    odd = [f"{name} {size}" for name, size in sizes.items() if 1 not in size and any(one % 8 for one in size)]
    words += f"; no {' or '.join(slow)} units ({device})" if slow else ""
    words += f"; not multiples of 8, which Tensor Cores want: {_some(odd, 2)}" if odd else ""
    yield note(words, "", "", "Step is slower in 16 bits" if slow or odd else "")


def _native(device):
    """Whether the device has units for a format; empty where this is not known."""
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        return {FP16: capability >= (7, 0) or capability == (6, 0), BF16: capability >= (8, 0)}
    flags = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    names = {FP16: ("avx512_fp16", "amx_fp16", "fp16_arith"), BF16: ("avx512_bf16", "amx_bf16", "bf16")}
    return {dtype: any(flags.get(name) for name in those) for dtype, those in names.items()} if flags else {}


def _inventory(model, optimizers, scaler):
    """The dtypes of everything."""
    states = [each for one in optimizers for state in one.state.values() for each in _tensors(state) if each.dim()]
    gradients = _gradients(dict(model.named_parameters())).values()
    parts = {"weights": model.parameters(), "buffers": model.buffers(), "states": states, "gradients": gradients}
    counts = {what: _count(tensors) for what, tensors in parts.items()}
    yield note("; ".join(f"{what}: {words}" for what, words in counts.items() if words) or "no weights")


def _low_hooks(model):
    """DDP's communication hooks that reduce in few bits."""
    hooks = [getattr(hook, "__name__", str(hook)) for hook, _ in getattr(model, "_comm_hooks", ())]
    return [name for name in hooks if re.search("16|power|quant", name)]


def _wrappers(model):
    """What lies around a model: torch.compile, and DDP's hooks, which may reduce in 16 bits."""
    if low := _low_hooks(model):
        cost = "It casts gradients to reduce them: in fp16, those below 6e-8 become 0, and those above 65504 inf."
        bf16 = all("bf16" in name for name in low)
        cost = "It rounds gradients to 8 bits, and adds them so." if bf16 else cost
        yield (note if bf16 else likely)("a communication hook of DDP", low, cost)
    if compiled := [name for name, module in model.named_modules() if _is_compiled(module)]:
        yield note("compiled", compiled, "Inside, `watch` sees no module: it replays uncompiled.")


SETTINGS = _scales, _masters, _states, _moments, _training, _modules, _sharding
AUDIT = *SETTINGS, _resumed, _merged, _numbers, _switches, _inventory


def audit(model, optimizer=None, scaler=None):
    """Look at a model, its optimizer (or several, in a list) and its scaler as they are; no step is needed.

    Returns a Report: printed, the verdict first; `.findings` is a DataFrame of what was found, where, how severe it is
    (see `Finding`), what it costs, and the clinic's case that mends it. Under FSDP2 it tells of this process's shards.

    Examples
    --------
    >>> model = torch.nn.Linear(8, 8).half()
    >>> report = audit(model, torch.optim.Adam(model.parameters()), torch.amp.GradScaler("cpu"))
    >>> report.findings.query("severity == 'certain'")["case"].tolist()
    ['Attempting to unscale FP16 gradients', 'Weights are NaN after one step of Adam']
    """
    run = _plain(model), _list(optimizer), scaler
    with torch.no_grad():
        return Report([*(each for part in AUDIT for each in part(*run)), *_wrappers(model)])


# 4. A pass again, op by op


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


def _in_float32(call, args, kwargs, device):
    """The tensors that the same op makes of the same numbers in float32; none where it cannot."""
    with suppress(Exception), torch.random.fork_rng(_gpus(device), device_type=device.type):
        dtypes = {key: FP32 for key, each in kwargs.items() if each in SIXTEEN}
        places = [FP32 if isinstance(each, torch.dtype) and each in SIXTEEN else each for each in args]
        return _tensors(call(*_floats(places), **_floats(kwargs) | dtypes))
    return []


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
FACTORIES = ("empty", "zeros", "ones", "full", "new_", "rand")
ADDS = ("add", "add_", "index_add_", "scatter_add_", "index_put_")
NUMBER = r"\d[\d.,]*(e[+-]?\d+)?"
PARTS = ("index", "select", "slice", "gather", "view")
COARSE = ("_to_copy", "sin", "cos", "arange", "cumsum")


class _Wide:
    """A forward as float32 would do it, beside the one in 16 bits: each op again, on what float32 gave so far. `far`: a
    Finding of the first op whose result is far from float32's, though its operands were near."""

    def __init__(self, device):
        self.device, self.right, self.far = device, WeakTensorKeyDictionary(), []

    def do(self, op, func, args, kwargs):
        """What the op makes of float32's numbers: nothing if there are no 16 bits, or if they are random."""
        dtypes = [each for each in [*args, *kwargs.values()] if isinstance(each, torch.dtype)]
        near = any(each in self.right or each.dtype in SIXTEEN for each in _tensors((args, kwargs)))
        low = near or set(dtypes) & set(SIXTEEN)
        if not low or torch.Tag.nondeterministic_seeded in func.tags or op.startswith(FACTORIES):
            return []
        given = functools.partial(self._given, func._schema.is_mutable)
        return _in_float32(func, _mapped(given, args), _mapped(given, kwargs), self.device)

    def _given(self, written, tensor):
        if tensor in self.right:
            return self.right[tensor][0]
        return tensor.clone() if written else tensor

    def compare(self, module, op, args, output, right):
        outputs, given = _tensors(output), [self.right[each][1:] for each in _tensors(args) if each in self.right]
        before, source = max(given, default=(0.0, ""))
        for place, (each, wide) in enumerate(zip(outputs, right) if len(outputs) == len(right) else ()):
            off = float((each.float() - wide).norm() / wide.norm()) if each.shape == wide.shape else math.nan
            if each.dtype in SIXTEEN and not source:
                source = f"{'cast' if op == '_to_copy' else op} to {_short(each.dtype)} in {module or 'the model'}"
            self.right[each] = wide, off, source
            if place == 0 and op in ("addmm", "convolution", "add") and each.dtype in SIXTEEN and each.numel() > 31:
                self.far += _offset(module, op, each.dtype, wide)
            first = place == 0 and not self.far  # others are what a norm saves, as a mean near 0
            if first and 0.1 < off < math.inf and before < 0.01 and each.numel() > 1 and op != "_to_copy":
                what = f"{op} gives numbers that are {off:.0%} off float32's, of operands that are {before:.1%} off"
                cost = f"16 bits are too coarse for what it is given; they came in by {source}. Compute it in float32."
                self.far.append(likely(what, module, cost))


def _offset(module, op, dtype, right):
    """Numbers whose digits an offset takes away."""
    spread, size = float(right.std()), float(right.abs().median())
    if 1 < size < LARGEST and 1e-6 * size < spread < _spacing(size, dtype):
        apart = f"where {_short(dtype)}'s neighbours are {_spacing(size, dtype):g} apart"
        what = f"{op} gives numbers near {size:,.4g} that differ by {spread:.2g}, {apart}"
        yield likely(what, module, "Add the offset in float32, to the result.")


class _Sums:
    """Sums in 16 bits without gradients: whether they still take up what is added, of those with so many terms."""

    def __init__(self, terms=128):  # within a model fewer may be its blocks
        self.terms, self.counts = terms, WeakTensorKeyDictionary()

    def do(self, where, op, func, args, kwargs):
        """What the op gives, and Findings."""
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        count = 0 if first is None else self.counts.get(first, 0)
        adds = first is not None and op in ADDS and first.dtype in SIXTEEN and not first.requires_grad
        due = adds and count >= self.terms and (first.numel() <= SAMPLE or count % 64 == 0)
        before, found = first.float() if due else None, []
        output = func(*args, **kwargs)
        if (adds and output.dtype in SIXTEEN) or (count and op in PARTS):
            self.counts[output] = count + adds
        with suppress(Exception):
            right = _in_float32(func, (before.clone(), *args[1:]), kwargs, before.device) if due else []
            found = [*_added(where, before, right[0], output)] if right else []
        return output, found


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


def _coarse(module, op, args, output):
    """Findings of whole numbers, angles, columns and decays that 16 bits make equal."""
    source = args[0] if args and isinstance(args[0], torch.Tensor) else output
    if op == "_to_copy" and output.dtype in WHOLE and source.dtype == FP32:
        yield from _rounded_numbers([output], f"an index, in {module or 'the model'}")
    dtype = source.dtype if source.dtype in SIXTEEN else output.dtype
    if dtype not in SIXTEEN or not output.numel() or not op.startswith(COARSE):
        return
    size, last = _largest([source] if source.dtype in SIXTEEN else []), _last_whole(dtype)
    together = f"Above {last:,.0f} neighbours fall together. Keep"
    if op == "_to_copy" and output.dtype in (torch.int32, torch.int64) and last < size < math.inf:
        what = f"whole numbers up to {size:,.0f} come out of {_short(dtype)}"
        yield likely(what, module, f"{together} indices as integers.")
    elif op in ("sin", "cos") and 0 < size < math.inf and (step := _spacing(size, dtype)) > 0.5:
        what = f"{op} of {_short(dtype)} up to {size:,.0f}, where neighbours are {step:g} apart: a period is 6.28"
        yield likely(what, module, "Compute angles in float32; FSDP2 casts inputs too, if told to.")
    elif op == "_to_copy" and output.numel() > 2 and source.max() < 1 and output.min() == 1:
        what = f"all {output.numel():,} numbers, {source.min():.5g} to {source.max():.5g}, become 1 in {_short(dtype)}"
        yield likely(what, module, "As decays they forget nothing, and 1 minus them is 0. Keep them in float32.")
    elif op in ("arange", "cumsum", "_to_copy") and output.dtype in SIXTEEN and _largest([output]) > last:
        whole = source.unique() if op == "_to_copy" else torch.arange(output.numel())
        if (whole.diff() == 1).all() and (left := output.unique().numel()) < len(whole):
            what = f"{len(whole):,} whole numbers in a row become {left:,} in {_short(dtype)}"
            yield likely(what, module, f"{together} positions in FP32.")
        elif op == "_to_copy" and source.dtype not in SIXTEEN and not source.requires_grad and source.dim() < 4:
            yield from _coarse_columns(module, source, dtype)


def _coarse_columns(module, source, dtype):
    """Columns of an input whose differences a cast takes away, as of a year, or whole numbers, as times."""
    columns = source.reshape(-1, source.shape[-1] if source.dim() > 1 else 1)[:256].T[:64]
    for place, (before, after) in enumerate(zip(columns, columns.to(dtype))):
        had, left, size = before.unique().numel(), after.unique().numel(), before.abs().max()
        whole = size > _last_whole(dtype) and torch.equal(before, before.round())
        few_steps = before.max() - before.min() < 4 * torch.finfo(dtype).eps * size
        if had > 2 and (left < had if few_steps else whole and left < 2 * had / 3):
            ends = f"{before.min():,.6g} to {before.max():,.6g}"
            what = f"column {place} of an input, {ends}: its {had} values become {left} in {_short(dtype)}"
            yield likely(what, module, "Subtract its mean, or scale it, before it is cast.")


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
        torch.set_rng_state(saved["random"][0].cpu())  # a file's is where map_location put it
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


def _state(model, weights=None):
    """The numbers of all weights and buffers, by names that do not tell what was compiled. It is not `state_dict()`,
    at which FSDP2 takes its gathered weights away, on the process that calls it."""
    named = [*(weights or model.named_parameters()), *model.named_buffers()]
    return {name.replace("_orig_mod.", ""): _local(tensor) for name, tensor in named}


def replay(path, model):
    """Run the pass that `watch` saved again: the `Origin` of its first number that is not finite, or None.

    `model` is built as it was, not compiled; it gets the saved weights. The backward pass is run if the gradient of the
    model's output was saved, which it is up to 64 MB; the loss is not. Under FSDP2 all processes call it, each with its
    own file. A file may run code when it is loaded: load only your own.
    """
    saved = torch.load(path, weights_only=False, map_location=_device(model))
    if saved["origin"].phase in ("loss", "divergence") or _kinds(saved["gradients"].values()):
        return saved["origin"]  # made outside of the model
    state = _state(_plain(model))
    if state.keys() != saved["state"].keys():
        raise ValueError(f"{path} holds other weights: {_some(sorted(state.keys() ^ saved['state'].keys()))}")
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(saved["state"][name])
    _plain(model).train(saved["training"])
    return _bad_input(*saved["batch"]) or _first(_ops_made(model, saved)[0], saved["usual"], saved["batch"])


# 5. The loss, by what autograd keeps of it

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


# 6. The calls of a GradScaler and of the optimizers' steps


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


# 7. Between the model's passes, and the trend


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


def _decays(op, args):
    """A decay so near to 1 that 16 bits do not hold it."""
    decay = re.fullmatch("(_foreach_)?(mul|lerp)_?", op)
    factor, kept = (args[-1], _tensors(args[:1])[:1]) if decay else (None, [])
    if not (isinstance(factor, float) and kept and kept[0].dtype in SIXTEEN and not kept[0].requires_grad):
        return
    if 0 < abs(factor - ("mul" in op)) < torch.finfo(kept[0].dtype).eps / 4:
        cost = "Less than half a step: as of an average, it stands still. Keep it in FP32."
        what = f"a factor of {factor:g} in {_short(kept[0].dtype)}"
        yield likely(what, f"{decay[2]}, between the model's passes", cost)


def _added(where, before, right, output):
    """A sum that has become too large for what it takes up, as 256 in bf16 for a 1."""
    got, more = (output.float() - before).abs(), (right - before).abs()
    off = ~((got - more).abs() <= more / 10) & more.isfinite()
    lost = (got - more)[off].abs().sum() > more[more.isfinite()].sum() / 5
    if lost or 2 * off.sum() > (more != 0).sum():
        none, place = not got[off].any(), more.masked_fill(~off, -1).argmax()
        total, got, more = (float(each.reshape(-1)[place]) for each in (output.abs(), got, more))
        what = f"a sum in {_short(output.dtype)} that has come to {total:g} takes up {got:.3g} for {more:.3g}"
        cost = "What is added is rounded away, as in a metric, an average of weights, a sampler's steps: use float32."
        yield (certain if none and "between" in where else likely)(what, where, cost)


def _compared(op, args):
    """Numbers that were stored in 16 bits, beside others that are nearer to them than 16 bits can tell."""
    pair = _tensors(args[:2]) if op in ("sub", "div", "mse_loss", "smooth_l1_loss", "kl_div") else []
    for fine, coarse in (pair, pair[::-1]) if len(pair) == 2 and pair[0].shape == pair[1].shape else ():
        dtype = None if coarse.requires_grad else _went_through(coarse)
        if fine.dtype == FP32 and dtype and not _went_through(fine):
            apart = (_sample(fine) - _sample(coarse)).abs().median()
            if apart < 2 * (step := _spacings(_sample(coarse), dtype).median()):
                what = f"{op} of float32 and of numbers that went through {_short(dtype)}: they are {apart:.2g} apart, "
                cost = "Mostly that is rounding, as of log-probabilities that were stored: keep them in FP32."
                yield likely(f"{what}where neighbours are {step:.2g} apart", "in the loss", cost)


def _rounded_numbers(value, where):
    """Ids or labels that are no longer what they were."""
    for dtype in filter(None, map(_went_through, _tensors(value, WHOLE))):
        above = f"above {_last_whole(dtype):,.0f} neighbours fell together"
        cost = "As of ids or labels in a batch that was cast: keep them as integers."
        yield likely(f"whole numbers that went through {_short(dtype)}: {above}", where, cost)


def _growth(seen):
    """How loss, gradients and weights grew over the last passes, in words; "" if they did not."""
    passes, found = pd.DataFrame([*seen.trend], columns=["loss", "norm", "largest", "rate"]), []
    for what, key, far in (("the loss", "loss", 30), ("the norm of the gradients", "norm", 1000)):
        finite = passes[passes[key].abs() < math.inf]
        series, wide = finite[key].abs(), 3 if len(finite) > 7 else 1
        if len(series) < 3:
            continue
        smooth = [*series.rolling(wide).median().dropna()]
        start = smooth.index(min(smooth))
        near = series.iloc[max(0, start - 8) : start + 8] if wide > 1 else series.iloc[[start]]
        before, after = near.median(), smooth[-1]
        if after > far * before > 0 and after > 5 * smooth[0]:
            words = f"{what} grew from {before:.3g} to {series.iloc[-1]:.3g} in {len(series) - start} passes"
            first = next(place for place, each in enumerate(smooth) if place > start and each > far / 3 * before)
            found.append(words + (f", first of all that of {finite.largest.iloc[first]}" if key == "norm" else ""))
    total = lambda norms: math.hypot(*_together(norms, seen.device).tolist())
    now, start = total(_norms(seen.trained.values())), total(seen.first_norms)
    if 0 < 10 * start < now < math.inf:
        found.append(f"the norm of all weights is {now / start:,.0f} times that at the start")
    rates = [rate for rate in passes.rate if rate > 0]
    if found and rates:
        rose = f"rose from {rates[0]:.2g} to {rates[-1]:.2g}" if rates[-1] > 2 * rates[0] else f"is {rates[-1]:.2g}"
        found.append(f"the learning rate {rose}")
    return ", and ".join(found)


# 8. The close look


def _headroom(size):
    """How often a number can double before fp16's largest is passed; negative beyond."""
    return math.log2(LARGEST) - math.log2(size) if size > 0 else math.inf if size == 0 else math.nan


HEADROOMS = ("output", "gradient", "weight gradient")
SHARES = "% zero", "% 0 in fp16", "update/weight", "% updates lost", "% sums lost"


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


# 9. watch


class NonFinite(RuntimeError):
    """The first number that is not finite: `origin`, an `Origin`; `path`, what was saved, or None; `case`."""

    def __init__(self, words, origin=None, path=None, case=""):
        super().__init__(words)
        self.origin, self.path, self.case = origin, path, case


class watch:
    """Watch a training run, as a context manager or by `start()` and `stop()`; on all processes of a run or on none.

    It raises `NonFinite` at the first loss, output or gradient that is not finite, and names module and op, and whether
    the number was in the input, in the weights already, or made by the forward, the loss or the backward; or says that
    the run had grown for many passes, so that an overflow was its end and not its cause. Gradients that overflow under
    a GradScaler are its routine: it raises where the scale falls below 1, or where `patience` steps in a row fail. On
    a CPU, and on a GPU with `every=1`, it raises before the optimizer's step. Else it reads once in `every` passes:
    then module and pass are right, but the step is done, and nothing can be saved.

    In one pass of `every`, and at first in evaluations, it looks closely, at the ops of losses and metrics too:
    `table()`, `history()`, and `findings`, which `print` tells. In the second pass, and ever more seldom after it, it
    does the pass again, twice, uncompiled: it looks at each op, and whether gradients double with the loss.

    Parameters
    ----------
    optimizer : optimizer, or a list of several; others that hold weights of the model are found when they step
    scaler : torch.amp.GradScaler; one that is not given is found when it is used
    every : int, the passes between two looks
    save : path of the file for `replay`; None saves nothing. Of several processes, each adds its rank.
    warn : bool, warn instead of raising, once
    patience : int, optimizer steps in a row that may be skipped under a scaler

    `passes` counts the backward passes, `steps` those of the first optimizer, `skipped` the falls of the scale. While
    it watches, `torch.autograd.grad` and `backward` are wrapped, and four methods of `GradScaler`.
    """

    def __init__(self, model, optimizer=None, scaler=None, every=100, save="not_finite.pt", warn=False, patience=20):
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
            words += f" Saved for `replay`: {path}."
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

    def history(self):
        """A row a look: the pass, the scale and its falls until then, and the least headroom, in doublings, of all
        outputs and of all gradients at outputs."""
        rows = [(number, scale, skipped) for number, *_, scale, skipped in self.looks.records]
        history = pd.DataFrame(rows, columns=["pass", "scale", "skipped"])
        largest = self.looks.rows().pivot_table("value", "pass", "what", "max")
        for what in ("output", "gradient"):
            history[f"{what} headroom"] = history["pass"].map(largest.get(what, {})).map(_headroom)
        return history

    def plot(self):
        """A figure: the headroom of outputs and gradients by module, and over time."""
        import matplotlib.pyplot as plt

        table, history = self.table(), self.history()
        kinds = [kind for kind in table if kind.endswith("headroom")]
        if not kinds:
            raise ValueError("saw nothing: no outputs to plot")
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 1.5 + 0.22 * len(table)), layout="constrained")
        for kind, color, marker in zip(kinds, ("#4f9d9a", "#b077b5", "#8a8d99"), "osd"):
            names = [name or "the model" for name in table.index]
            left.plot(table[kind], names, marker, color=color, label=kind.removesuffix(" headroom"))
            if kind in history:
                right.plot(history["pass"], history[kind], marker=marker, color=color)
        left.axvline(0, color="#8e63c7", linestyle="--")
        right.axhline(0, color="#8e63c7", linestyle="--")
        left.set(xlabel="doublings to 65504")
        left.invert_yaxis()
        left.legend(frameon=False)
        right.set(xlabel="pass", ylabel="least headroom, doublings")
        least, kind = table[kinds].min(axis=None), table[kinds].min().idxmin()
        where = f"{kind.removesuffix(' headroom')} of {table[kind].idxmin() or 'the model'}"
        figure.suptitle(f"Least headroom: {least:.1f} doublings, {where}", x=0.01, ha="left")
        return figure

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


def _save(seen, number, origin):
    """Write the pass for `replay`; the path, or None."""
    path = Path(seen.save)
    path = path.with_stem(f"{path.stem}_{dist.get_rank()}") if _world() else path
    state = _state(seen.plain, seen.weights.items())
    try:
        torch.save(seen.saved | {"state": state, "pass": number, "origin": origin}, path)
    except Exception as error:  # a full disk, a batch that cannot be pickled
        seen.tell(note(f"nothing was saved: {type(error).__name__}: {error}"))
        return None
    return str(path)


# 10. The search in the pass that `watch` has just seen: for what made its first number that is not finite


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


# and, while all is finite, for what its ops hide, and why gradients are 0


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


# 11. The verdicts: each function yields what it finds in what was seen; the first of the worst is the verdict

CALM = "A smaller rate, warm-up, or clipping. Whether precision has a part in it: train in float32."


def _settings(seen, severity):
    """Settings that are wrong by themselves, or that may be."""
    measured = "% updates lost" in seen.table()  # then `_rounded` tells of missing masters
    settings = [part for part in SETTINGS if seen.passes and not (measured and part is _masters)]
    parts = [part(*seen.run) for part in settings]
    yield from (each for part in [*parts, _wrappers(seen.model)] for each in part if each.severity == severity)


def _stopped(seen):
    """The first number that is not finite."""
    if seen.problem:
        words, phase = str(seen.problem).partition(" See the clinic")[0].rstrip("."), seen.problem.origin.phase
        guess = seen.problem.origin.why == "guess" or (phase == "backward" and not seen.problem.origin.op)
        say = likely if phase == "divergence" or guess else certain
        yield say(words, "", CALM if phase == "divergence" else "", seen.problem.case)


def _hidden(seen):
    """What single ops show, while the loss is finite."""
    if hidden := [*seen.hidden.values()]:
        others = [f"{each.op} of {each.module}" for each in hidden[1:]]
        where = f"also {_some(others)}" if others else ""
        cost = "Later ops hide it, and the loss is finite all the same. Compute it in float32, or in bf16."
        yield likely(hidden[0].words, where, cost)
    yield from seen.coarse.values()


def _skipped(seen):
    """Steps that a scaler skips: its routine, or not."""
    falls = f"the scale fell {seen.skipped} times" + ("" if math.isnan(seen.scale) else f", to {seen.scale:,.10g}")
    many, tries, went_on = 3 * seen.skipped > seen.calls.tries, seen.calls.tries, seen.calls.went_on
    if went_on > 9 and 5 * went_on > tries:
        cost = (
            "A warm-up is over before the first step: schedule only where the optimizer stepped, and lower init_scale."
        )
        yield likely(f"the learning rate went on in {went_on} steps that were skipped, of {tries}", "", cost)
    if seen.problem or (seen.last_bad < 0 and not seen.skipped):
        return
    if seen.why and seen.last_bad >= 0:
        cost = f"A lower scale does not help; {falls}."
        yield certain(f"steps are skipped: {seen.why}", "", cost, _case_of(seen.why))
    elif seen.skips() > 4 and (not many or seen.skips() == tries > 12):
        yield likely(f"the last {seen.skips()} steps were skipped: their gradients are not finite; {falls}")
    elif many and seen.skipped > 5 and seen.grown > 5:
        factor, interval = seen.scaler.get_growth_factor(), seen.scaler.get_growth_interval()
        cost = f"growth_factor={factor:g}, growth_interval={interval}; the defaults, 2 and 2000, skip one step in 2000."
        what = f"{seen.skipped} of {tries} steps are skipped: the scale grows back as fast as it falls"
        yield certain(what, "", cost)
    else:
        cost = f"A scaler's routine{', if too high a start: lower init_scale' if many and tries > 30 else ''}."
        yield note(f"gradients overflowed; {falls}", "", cost, "Loss scale falls in the first steps")


def _cast(seen):
    """Autocast and scaler that do not go together."""
    scaled = _is_on(seen.scaler)
    seen_all = seen.looks.dtypes and not any(map(_is_compiled, seen.model.modules()))
    fp32 = seen_all and seen.cast is None and set(seen.looks.dtypes.values()) == {"float32"}
    if seen.saved and seen.saved.get("backward in autocast"):
        cost = "Its products are cast too, also of parts that were taken out. Leave the region before it."
        say = likely if seen.cast_twice else note
        yield say("backward was called under autocast", "", cost, "Gradients are inf in a float32 layer")
    if seen.cast == BF16 and scaled:
        cost = "bf16 has float32's range and needs no scale: it doubles until float32 overflows. Remove the scaler."
        yield likely("bf16 autocast with a GradScaler", "", cost, "Loss scale grows without end in bf16")
    if seen.cast == FP16 and seen.own_scale and not scaled:
        cost = "An inf in the gradients skips no step, and the scale does not adapt: a GradScaler does both."
        yield note(f"the loop multiplies its loss by {seen.own_scale:,g} itself", "", cost)
    elif seen.cast == FP16 and not scaled:
        cost = "Small gradients become 0 in the backward. Add a GradScaler, or use bf16."
        yield likely(f"fp16 autocast without a GradScaler{': it is disabled' if seen.scaler else ''}", "", cost)
    if scaled and fp32 and not seen.problem:
        yield likely("a GradScaler, and no module's output is in 16 bits: autocast is not on")


def _no_gradient(seen):
    """Weights that no gradient reaches: None, or 0."""
    missing, held = sorted(seen.looks.missing or ()), set(map(id, _held(seen.optimizers)))
    cut = sorted(seen.looks.cut & set(map(_module_of, missing)))
    what, cost = "weights that no gradient reaches (None)", "They train (requires_grad), but"
    if seen.looks.moves_without:
        yield note("steps by gradients that the weights do not hold, as masters have")
    elif missing and len(missing) == len(seen.trained):
        cost += " at the step they have none: zero_grad stands between backward and step."
        yield certain(what, _whole(seen.plain, missing), cost)
    elif cut:
        cost += " their forward ran under no_grad, or in a reentrant checkpoint whose inputs require no gradient"
        stepped = [name for name in missing if _module_of(name) in cut and id(seen.trained[name]) in held]
        yield (certain if stepped else note)(what, cut, f"{cost}: use_reentrant=False.")
    elif ran := [name for name in missing if _module_of(name) in seen.looks.dtypes]:
        cost += " nothing leads from the loss to them: a detach, or a forward whose output is not used"
        cost += "; or a forward under no_grad, in the same autocast region, left its cast copies to this one"
        yield likely(what, _whole(seen.plain, ran), f"{cost}.")
    elif missing:
        yield note("weights that are not used", _whole(seen.plain, missing))
    if seen.zero:  # which may be by an inf, by numbers that are off, or the end of a run that grew
        coarse = [each for each in seen.coarse.values() if "made inf" in each.what or "No underflow" in seen.zero.cost]
        yield from coarse
        wild = coarse or any(CALM in each.cost for each in _too_large(seen))
        yield seen.zero._replace(severity="note") if wild else seen.zero


def _norms_seen(seen):
    """What happens to gradients between backward and step, and to weights at the step."""
    rows = seen.looks.rows()
    numbers = {what: group.set_index("pass").value for what, group in rows.groupby("what")}
    get = lambda what: numbers.get(what, pd.Series(dtype=float))
    made, before, step = get("norm after backward"), get("norm before unscale_"), get("norm at the step")
    ratio = (made / before).dropna()
    divided = (ratio < 65) & ((ratio - ratio.round()).abs() < 1e-3)  # by a number of passes or processes
    clipped = ratio[(ratio > 2) & (ratio < math.inf) & ~divided]
    if len(clipped):
        first, last = made[clipped.index[0]], before[clipped.index[0]]
        what = f"the norm of the gradients falls from {first:,.4g} to {last:,.4g} between backward and unscale_"
        cost = "Clipping acts on scaled gradients; unscaling then makes them too small. Call `unscale_` before it."
        to_a_limit = abs(last - float(f"{last:.2g}")) < 1e-3 * last
        if math.isclose(first, last * seen.scale, rel_tol=1e-3):
            yield certain(what, "", "By the scale: the loop divides by it, and unscale_ does it again. Do it once.")
        else:
            yield (certain if to_a_limit else likely)(what, "", cost, "Loss hardly falls with clipping")
    at_step = (step / made).dropna()
    if len(at_step) and (at_step == 0).all():
        cost = "zero_grad stands between backward and step, or a hook clears them."
        yield certain("gradients are 0 at the step, and were not after the backward", "", cost)
    if seen.looks.stale:
        cost = "Gradients that a step has used are still there at the next backward, which adds to them."
        yield likely("gradients are not set to zero", "", cost, "Training diverges without GradScaler")
    moved = get("moved")
    if len(moved) > 1 and moved.max() == 0:
        rates = [float(group.get("lr", 1)) for group in _groups(seen.optimizers)]
        cost = "Rounding takes the updates, or the optimizer holds others." if any(rates) else "The learning rate is 0."
        yield certain("steps that move none of the weights", "", cost)
    for what in [what for what in numbers if "% weights of" in what]:  # bfloat16's may be float16's too
        late = get(what)[(moved.cummax() > 0).shift(fill_value=False).reindex(get(what).index, fill_value=False)]
        if (late > 99).any():
            words = f"float32 weights whose numbers are all {what.split()[-1]}'s, in pass {(late > 99).idxmax():,}"
            cost = "They went there and back since the last step, as for a checkpoint: updates are lost. Cast a copy."
            yield certain(words, "", cost)
            break
    stands = max([each.iloc[-1] for what, each in numbers.items() if what.endswith("stands")], default=0)
    if stands > 30:
        what = f"a copy of the weights in 16 bits, as an average: {stands:.0f}% of it stand still between looks"
        cost = "Of its numbers more than 6% from the weight. Its small steps are rounded away: keep it in FP32."
        yield certain(what, "", cost)


def _long_steps(seen):
    """Steps that Adam cannot take."""
    rows = seen.looks.rows()
    rows = rows[(rows.what == "step/longest") & (rows.value > 3)]
    if len(rows):
        worst = rows.loc[rows.value.idxmax()]
        what = f"a step moves a number {worst.value:,.0f} times as far as Adam can with right moments"
        cost = "Its second moment is 0, or far too small, where the first is not, as in 8 or 16 bits: keep it in FP32."
        yield (certain if worst.value > 10 else likely)(what, worst.module, cost)


def _rounded(seen):
    """What rounding takes away from updates and sums, and steps that are too large for it, by module."""
    table, none = seen.table(), pd.Series(dtype=float)
    low = [weight for weight in seen.trained.values() if weight.dtype in SIXTEEN]
    lost, sums = (shares[shares > 10] for shares in (table.get(f"% {what} lost", none) for what in ("updates", "sums")))
    if low and len(lost) and not _who_keeps_masters(low, seen.optimizers):
        half_a_step, decay = _lost_decay(low, seen.optimizers)
        cost = f"The weights have no FP32 masters: what is below {half_a_step:.2g} of a weight is lost"
        cost += f", lr * weight_decay = {decay:.2g} with it." if decay else "."
        what = f"updates that rounding takes away: up to {lost.max():.0f}%"
        yield likely(what, [*lost.index], cost, "Weights do not change in 16 bits")
    if len(sums):
        what = f"gradients in 16 bits, summed over passes: what a pass adds is rounded away, up to {sums.max():.0f}%"
        yield likely(what, [*sums.index], "Add them up in FP32.")
    headroom = table.get("output headroom", none)
    if (headroom == math.inf).any() and len(seen.looks.records) > 1:
        zero = [*table.index[headroom == math.inf]]
        yield likely("outputs that are 0 everywhere, in all looks", zero, "What follows learns nothing.")


def _too_large(seen):
    """Outputs of which fp16 cannot hold the squares, steps as large as the weights, a loss that grows."""
    if (size := seen.hooks.evaluated.item()) > math.sqrt(LARGEST) / 2:
        cost = f"Squares are up to {size**2:,.0f}, and a sum of a few is past 65504: compute metrics of `.float()`."
        yield likely(f"outputs without gradients, as in evaluation, are float16 up to {size:,.0f}", "", cost)
    sizes = seen.table().get("update/weight", pd.Series(dtype=float))
    what = "a step changes weights by {:.2g} of their size (the median of modules)"
    if (size := sizes[sizes < math.inf].median()) > 0.5:
        yield likely(what.format(size), "", f"The learning rate is too large, in any precision. {CALM}")
    elif 0 < size < 2e-6:
        rate = max([rate for *_, rate in seen.trend], default=0)
        cost = f"Ten thousand such steps move them by {1e4 * size:.2g}. The learning rate is at most {rate:g}."
        yield likely(what.format(size), "", cost)
    rows = seen.looks.rows()
    rows = rows[(rows.what == "update/weight") & (rows.value < math.inf)]
    by_pass = rows.groupby("pass").value.median()
    if len(by_pass) > 2 and by_pass.max() > max(0.7, 20 * by_pass.median()):
        what = f"a single step, in pass {by_pass.idxmax():,}, changed weights by {by_pass.max():.2g} of their size"
        cost = "The optimizer had other numbers than the model: masters or states from before a checkpoint was loaded, "
        yield likely(f"{what}, others by {by_pass.median():.2g}", "", f"{cost}or second moments that fp16 made 0.")
    if not seen.problem and len(seen.trend) > 9 and (growth := _growth(seen)):
        yield likely(f"training diverges: {growth}", "", CALM)


def _merges(seen):
    """Adapters that were, or would be, merged into weights of 16 bits."""
    shares = [100 * float((_sample(base) != old).float().mean()) for base, old in seen.looks.bases]
    if 0 < (share := min(filter(None, shares), default=0)) < 75:
        what = f"adapters were merged into weights of 16 bits, and {share:.0f}% of their numbers changed"
        yield likely(what, "", "The rest of the update is below half a step of the base: merge into a float32 copy.")
    elif not any(shares):
        yield from _merged(*seen.run)


def _unseen(seen):
    """What it could not see, in words."""
    forward = seen.hooks.forward_seen or seen.between.evaluations or seen.problem or seen.error
    unseen = {
        "saw nothing: neither the model's forward nor a backward was called": not (seen.passes or forward),
        "saw nothing of backward: torch.autograd.backward was not called": not (
            seen.passes or seen.problem or seen.error
        ),
        "saw nothing of forward: another module was called, or the compiled one": not forward,
        "saw nothing of updates: the optimizer took no step": not (seen.steps or seen.problem),
    }
    yield from [note(words) for words, is_so in unseen.items() if is_so][:1]
    if compiled := [name for name, module in _parts(seen.model) if _is_compiled(module)]:
        yield note(f"saw nothing inside of what is compiled ({_some(compiled)}), only its outputs")


def _nothing(seen):
    """What to say of a loss that does not fall where nothing is found."""
    losses = [loss for loss, *_ in seen.trend]
    first, last = (sorted(part)[len(part) // 2] for part in (losses[:10], losses[-10:])) if losses else (0, 0)
    if len(losses) < 30 or not 0 < first < 1.002 * last < math.inf:
        return []
    cost = "Not seen from here: data before the model's input, metrics, checkpoints, other processes. Try float32."
    return [note(f"the loss does not fall ({first:.3g} to {last:.3g}), and nothing of precision was found", "", cost)]


def _for_evaluation(seen):
    """What only an evaluation uses."""
    return [] if seen.problem else _spoilt(seen.plain)


SPOILS, MAY = (functools.partial(_settings, severity=severity) for severity in ("certain", "likely"))
JUDGES = [_long_steps, SPOILS, _stopped, _no_gradient, _skipped, _norms_seen, _hidden, _cast]
JUDGES += [_rounded, MAY, _too_large, _merges, _for_evaluation, _unseen]


# 12. bisect


def bisect(model, batch, loss, dtype=FP16, tolerance=0.02):
    """The fewest modules to keep in FP32 so that the loss under autocast is finite and near FP32's.

    From the whole model down: a module is dropped if the rest is enough, and replaced by its children if they are.
    None of those that remain can be left out. It looks at the forward pass only, of an FP32 copy of the model.

    Parameters
    ----------
    batch : the model's arguments: a tuple, a dict, or one tensor
    loss : callable, `loss(output)` is a scalar
    dtype : autocast's
    tolerance : float, of FP32's loss

    Returns a list of names of modules; [] if none is needed, [""] for the whole model. Raises ValueError if the loss is
    not finite in FP32 either.

    Examples
    --------
    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.ReLU())
    >>> _ = torch.nn.init.constant_(model[0].weight, 1e6)
    >>> bisect(model, torch.ones(1, 1), torch.sum)
    ['0']
    """
    model, kind = copy.deepcopy(_plain(model)).float(), _device(model).type
    modules = dict(model.named_modules())
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch if isinstance(batch, tuple) else (batch,), {})

    def loss_of(kept):
        with _kept(model), torch.no_grad(), torch.compiler.set_stance("force_eager"), ExitStack() as around:
            for name in kept:
                around.enter_context(_in_fp32(modules[name], kind))
            with torch.autocast(kind, dtype, cache_enabled=False):
                return float(loss(model(*_floats(args), **_floats(kwargs))))

    right = loss_of([""])
    if not math.isfinite(right):
        raise ValueError(f"the loss is {right} in FP32 too: precision is not the cause")
    good = lambda kept: abs(loss_of(kept) - right) <= tolerance * abs(right)  # false for nan
    kept, settled = [""], []
    while kept := _fewest(kept, lambda names: good(settled + names)):
        name = kept.pop()
        children = [f"{name}.{child}".lstrip(".") for child, _ in modules[name].named_children()]
        if children and good(settled + kept + children):
            kept += children
        else:
            settled.append(name)
    return sorted(settled, key=[*modules].index)


def _fewest(names, good):
    """Names without which `good(names)` fails, each of them."""
    for name in list(names):
        rest = [each for each in names if each != name]
        names = rest if good(rest) else names
    return list(names)


@contextmanager
def _in_fp32(module, kind):
    """Runs a module's forward without autocast, on float32 arguments."""
    forward = module.forward

    def without(*args, **kwargs):
        with torch.autocast(kind, enabled=False):
            return forward(*_floats(args), **_floats(kwargs))

    module.forward = without
    try:
        yield
    finally:
        del module.forward
