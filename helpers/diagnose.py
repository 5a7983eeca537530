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
import functools
import gc
import math
import re
import statistics
import traceback
import warnings
import weakref
from collections import Counter, deque
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
LARGEST = torch.finfo(FP16).max  # 65504
SIXTEEN = (FP16, BF16)
FLOATS = (*SIXTEEN, FP32, torch.float64)
SAMPLE = 1024  # values of a tensor from which shares are estimated
RECORDS = 128  # looks that are kept; beyond, every second one goes
AUTOCAST = weakref.WeakKeyDictionary()  # of a model that was watched: the dtype of its autocast, None if it was not on


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


def _short(dtype):
    return str(dtype).removeprefix("torch.")


def _some(names, most=4):
    names = [name or "the model" for name in names]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _count(tensors):
    """ "4,810 float32, 64 float16": how many numbers of each dtype."""
    counts = Counter()
    for tensor in tensors:
        counts[_short(tensor.dtype)] += tensor.numel()
    return ", ".join(f"{count:,} {dtype}" for dtype, count in counts.most_common())


def _local(tensor):
    """The numbers that this process holds: the shard of a DTensor, the values of a sparse tensor."""
    tensor = tensor.detach()
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
        return tensor
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _tensors(value):
    """All tensors of floats in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        return [value] if value.dtype in FLOATS else []
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, each.name) for each in fields(value)]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for each in inner for tensor in _tensors(each)]


def _mapped(change, value):
    """Nested arguments with `change` made to their tensors."""
    if isinstance(value, dict):
        return {key: _mapped(change, each) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_mapped(change, each) for each in value)
    return change(value) if isinstance(value, torch.Tensor) else value


def _floats(value):
    """Nested arguments with float32 for tensors in 16 bits."""
    return _mapped(lambda tensor: tensor.float() if tensor.dtype in SIXTEEN else tensor, value)


def _ends(tensors):
    """The smallest and the largest number of each tensor, NaN if one is: two lists. It waits for a GPU."""
    ends = [torch.stack(torch.aminmax(_local(each))).float() for each in tensors if _local(each).numel()]
    return torch.stack([end.to(ends[0].device) for end in ends]).T.tolist() if ends else ([0.0], [0.0])


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


def _sample(tensor):
    values = _local(tensor).reshape(-1)
    return values[:: max(1, values.numel() // SAMPLE)].to(FP32, copy=True)


def _percent(places, among):
    return 100 * (places & among).sum() / among.sum().clamp(min=1)


def _device(model):
    return next((weight.device for weight in model.parameters()), torch.device("cpu"))


def _gpus(device):
    """What torch.random.fork_rng keeps besides the CPU's state."""
    return [device] if device.type == "cuda" else []


def _list(value):
    return list(value) if isinstance(value, (tuple, list)) else [value] if value is not None else []


def _is_on(scaler):
    """Whether a loss scaler works; one that cannot say so, as DeepSpeed's, does."""
    return scaler is not None and (not hasattr(scaler, "is_enabled") or scaler.is_enabled())


def _plain(model):
    """The model inside the wrappers of torch.compile and DistributedDataParallel."""
    while hasattr(model, "_orig_mod") or isinstance(model, nn.parallel.DistributedDataParallel):
        model = getattr(model, "_orig_mod", None) or model.module
    return model


def _is_compiled(module):
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def _is_fsdp(model):
    return any(hasattr(module, "_get_fsdp_state") for module in model.modules())


def _world():
    """How many processes train together; 0 for one alone."""
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return size if size > 1 else 0


def _groups(optimizers):
    return [group for one in optimizers for group in one.param_groups]


def _whole(model, names):
    """The same weights in fewer words: modules all of whose weights are among the names, then the weights left."""
    left, whole = set(names), []
    for name, module in model.named_modules():
        inside = {f"{name}.{weight}".lstrip(".") for weight, _ in module.named_parameters()}
        if inside and inside <= left:
            whole.append(name or "all weights")
            left -= inside
    return whole + [name for name in names if name in left]


# audit: each function yields what it finds in a model, its optimizers and its scaler


def _masters(model, optimizers, scaler):
    """16-bit weights that train, and whether someone keeps them in FP32."""
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    low = {name: weight for name, weight in trained.items() if weight.dtype in SIXTEEN}
    fp16 = [name for name, weight in low.items() if weight.dtype == FP16]
    if low and (kept := _who_keeps_masters([*low.values()], optimizers)):
        yield note(f"16-bit weights, {kept}")
    elif low:
        half_a_step, decay = _lost_decay(low.values(), optimizers)
        cost = f"An update below {half_a_step:.2g} of its weight is rounded away"
        cost += f", and weight decay (lr * weight_decay = {decay:.2g})" if decay else ""
        what = f"16-bit weights that train, without FP32 masters: {_count(low.values())}"
        foreign = any(not type(one).__module__.startswith("torch.") and not one.state for one in optimizers)
        cost += ", if this optimizer keeps none" if foreign else ""
        case = "Sharded without masters" if _is_fsdp(model) else "The small learning rate"
        say = note if foreign else likely
        yield say(what, _whole(model, [*low]), f"{cost}. Load or cast what trains as FP32.", case)
    if fp16 and _is_on(scaler):
        fused = any(group.get("fused") for group in _groups(optimizers))
        cost = f"`{'unscale_' if fused else 'scaler.step'}` raises 'Attempting to unscale FP16 gradients'. Train FP32 "
        cost += "weights; autocast makes the fp16."
        say = likely if fused or not optimizers else certain
        yield say("a GradScaler over trained fp16 weights", _whole(model, fp16), cost, "Fine-tuning in fp16")


def _lost_decay(weights, optimizers):
    """Half a step of 16-bit weights, relative to them, and the largest lr * weight_decay below it; 0 if none is."""
    half_a_step = 2.0**-9 if BF16 in {weight.dtype for weight in weights} else 2.0**-12
    decays = [float(group["lr"] * group.get("weight_decay", 0)) for group in _groups(optimizers) if "lr" in group]
    return half_a_step, max([each for each in decays if each < half_a_step], default=0)


def _who_keeps_masters(low, optimizers):
    """Who keeps trained 16-bit weights in FP32, in words; "" if nobody is seen to."""
    held = [weight for group in _groups(optimizers) for weight in group["params"]]
    if held and not {id(weight) for weight in held} & {id(weight) for weight in low}:
        return "FP32 masters in the optimizer" if any(weight.dtype == FP32 for weight in held) else ""
    if any(getattr(one, "bf16_stochastic_round", False) for one in optimizers):
        return "rounded stochastically"
    kept = [each for one in optimizers for each in _tensors(vars(one)) if each.dtype == FP32]
    low = [_local(weight) for weight in low if weight.dim() > 1 and _largest([weight])][:8]  # not 0, as states may be
    same = lambda weight, each: weight.shape == each.shape and torch.equal(weight, each.to(weight.dtype))
    found = low and all(any(same(weight, _local(each)) for each in kept) for weight in low)
    return "and the optimizer keeps FP32 copies" if found else ""


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
        cost = "Overflow ends at a low scale: these gradients are bad for another reason."
        where = "below 1" if scale < 1 else "at its minimum"
        yield likely(f"the scale is {where}: {scale:g}", "", cost, "The scale that only falls")
    if any(weight.dtype == BF16 for weight in model.parameters() if weight.requires_grad):
        cost = "bf16 needs no scale; on CUDA, unscaling is 'not implemented for BFloat16' in some versions."
        yield likely("a GradScaler over bf16 weights", "", cost)


def _states(model, optimizers, scaler):
    """What 16 bits and odd settings do to an optimizer's states and constants."""
    for one, group in [(each, group) for each in optimizers for group in each.param_groups]:
        name, states = type(one).__name__, [one.state.get(weight, {}) for weight in group["params"]]
        pairs = [(state["exp_avg"], state["exp_avg_sq"]) for state in states if {"exp_avg", "exp_avg_sq"} <= {*state}]
        zero = [(_local(m) != 0) & (_local(v) == 0) for m, v in pairs if v.dtype == FP16]
        zero = max([float(each.float().mean()) for each in zero], default=0)
        eps, beta, rate = group.get("eps", 1), group.get("betas", (0, 0))[-1], float(group.get("lr", 1))
        fp16 = {weight.dtype for weight in group["params"]} >= {FP16} and not group.get("fused")
        if fp16 and 0 < eps <= 2.0**-25:
            cost = "Where the second moment is 0 too, the step divides by 0: inf or NaN. FP32 weights, or eps=1e-4."
            yield certain(f"{name}'s eps = {eps:g} is 0 in fp16", "", cost, "Adam in fp16")
        if zero > 0.01:
            cost = "Squares of small gradients are 0 in fp16: such weights take huge steps. Keep it in FP32."
            yield certain(f"{name}'s second moment in fp16 is 0: up to {zero:.0%}", "exp_avg_sq", cost)
        if 0 < 1 - beta < 2.0**-8 and any(v.dtype == BF16 for _, v in pairs):
            cost = f"A decay by {beta:g} is less than half a step of bf16: it never falls. Keep it in FP32."
            yield likely(f"{name}'s second moment in bf16", "exp_avg_sq", cost)
        if rate == 0 or not math.isfinite(rate):
            yield (certain if rate else note)(f"a learning rate of {rate:g}", name)
        if low := [key for key, each in group.items() if isinstance(each, torch.Tensor) and each.dtype in SIXTEEN]:
            cost = "A schedule's small factors are rounded away: it stands still, or jumps. Keep it in FP32."
            yield likely(f"{name}'s settings as tensors of 16 bits", low, cost)


def _training(model, optimizers, scaler):
    """What trains, and what the optimizer holds."""
    weights, groups = dict(model.named_parameters()), _groups(optimizers)
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    held = [weight for group in groups for weight in group["params"]]
    missing = [name for name, weight in trained.items() if not any(weight is each for each in held)]
    same_shapes = {tuple(weight.shape) for weight in trained.values()} <= {tuple(weight.shape) for weight in held}
    if groups and len(missing) == len(trained) > 0 and same_shapes:
        if not any(weight.dtype in SIXTEEN for weight in trained.values()):  # else it holds masters
            cost = "The model was built again, moved or wrapped after it: `step` changes other weights."
            yield certain("the optimizer holds none of the model's weights", "", cost, "No inf checks")
    elif groups and missing:
        cost = "Only another optimizer moves them."
        yield likely("trainable weights that the optimizer lacks", _whole(model, missing), cost)
    adapter = re.compile("lora|adapter|ia3|prefix|prompt", re.IGNORECASE)
    parts = tuple(f"{name}." for name, part in model.named_modules() if adapter.search(type(part).__name__) and name)
    adapters = [name for name in weights if adapter.search(name) or (name.startswith(parts) and ".base" not in name)]
    frozen = [name for name in weights if name not in trained]
    if adapters and not set(adapters) & set(trained):
        cost = "requires_grad is False: perhaps they were frozen together with what they were put into."
        yield likely("adapters that are frozen", _whole(model, adapters), cost)
    if frozen:
        words = f"frozen {_count(weights[name] for name in frozen)}; trained {_count(trained.values()) or 'nothing'}"
        yield note(words, _whole(model, frozen))


def _modules(model, optimizers, scaler):
    """Positions, statistics and small constants in 16 bits."""
    fp16 = {name: part for name, part in model.named_modules() if any(w.dtype == FP16 for w in part.parameters(False))}
    eps = {name: getattr(part, "eps", None) or 1 for name, part in fp16.items()}
    if eps := [f"{name}.eps = {value:g}" for name, value in eps.items() if value <= 2.0**-25]:
        yield likely("an eps that is 0 in fp16", eps, "It guards no division.", "Vectors of length 1")
    buffers = [name for name, buffer in model.named_buffers() if buffer.dtype in SIXTEEN]
    if places := [name for name in buffers if re.search("inv_freq|position|rotary|freqs", name)]:
        cost = "bf16 counts to 256 and fp16 to 2048 in steps of 1: later positions fall together."
        yield likely("positions in 16 bits", places, cost)
    if running := [name for name in buffers if "running_" in name]:
        yield likely("running statistics in 16 bits", running, "They stop moving near their value.")


def _sharding(model, optimizers, scaler):
    """The policies of FSDP2, which casts whole modules."""
    for name, module in model.named_modules():
        if hasattr(module, "_get_fsdp_state"):
            policy = vars(module._get_fsdp_state())["_mp_policy"]
            words = f"param_dtype {_short(policy.param_dtype)}, reduce_dtype {_short(policy.reduce_dtype)}"
            if policy.param_dtype in SIXTEEN and policy.reduce_dtype in (None, *SIXTEEN):
                cost = "Set reduce_dtype=torch.float32."
                yield likely(f"FSDP2 reduces gradients in 16 bits: {words}", [name], cost)
            elif policy.param_dtype:
                yield note(f"FSDP2's policy: {words}", [name])


SETTINGS = _scales, _masters, _states, _training, _modules, _sharding


def _numbers(model, optimizers, scaler):
    """Weights, buffers, states and gradients that are not finite, or beyond fp16's end."""
    weights = {name: weight for name, weight in model.named_parameters() if weight.dtype in FLOATS}
    gradients = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    buffers = {name: each for name, each in model.named_buffers() if each.dtype in FLOATS}
    states = [(key, each) for one in optimizers for state in one.state.values() for key, each in state.items()]
    bad = {name for name, each in (weights | buffers).items() if _kinds([each]) - {"-inf"}}  # a mask's
    if spoilt := [name for name in weights if name in bad]:
        yield certain("weights that are not finite", spoilt, "Go back to a checkpoint.")
    if spoilt := [name for name in buffers if name in bad]:
        cost = "Evaluation uses them: NaN there, and none in training. A skipped step does not undo them."
        yield certain("buffers that are not finite", spoilt, cost, "NaN in evaluation only")
    if spoilt := {str(key) for key, each in states if _kinds(_tensors(each))}:
        yield certain("states of the optimizer that are not finite", sorted(spoilt), "They stay so.")
    if not _is_on(scaler) and (wild := [name for name, gradient in gradients.items() if _kinds([gradient])]):
        yield certain("gradients that are not finite", wild, "The next step spoils all.")
    sizes = {name: _largest([weight]) for name, weight in weights.items()}
    over = [f"{name}: {size:,.0f}" for name, size in sizes.items() if LARGEST < size < math.inf]
    if over and AUTOCAST.get(model, FP16 if _is_on(scaler) else None) == FP16:
        yield likely("weights above 65504", over, "fp16 makes inf of them.", "The convolution")
    large = {name: _largest([each]) for name, each in buffers.items() if name not in bad and each.dtype != FP16}
    if over := [f"{name}: {size:,.0f}" for name, size in large.items() if LARGEST < size < math.inf]:
        yield note("buffers above 65504", over, "`.half()` makes inf of them.")


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
        yield likely("autocast is on around this call", "", cost, "The loss that stands still")
    used = {weight.dtype for weight in model.parameters()} | {AUTOCAST.get(model)}
    slow = [_short(dtype) for dtype, there in _native(device).items() if dtype in used and not there]
    divisor = 16 if any("float8" in type(each).__name__.lower() for each in model.modules()) else 8
    sizes = {name: tuple(weight.shape[:2]) for name, weight in model.named_parameters() if weight.dim() > 1}
    odd = [f"{name} {size}" for name, size in sizes.items() if 1 not in size and any(one % divisor for one in size)]
    words += f"; no {' or '.join(slow)} units ({device})" if slow else ""
    words += f"; not multiples of {divisor}, which Tensor Cores want: {_some(odd, 2)}" if odd else ""
    yield note(words, "", "", "No faster step" if slow or odd else "")


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
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    parts = {"weights": model.parameters(), "buffers": model.buffers(), "states": states, "gradients": gradients}
    counts = {what: _count(tensors) for what, tensors in parts.items()}
    yield note("; ".join(f"{what}: {words}" for what, words in counts.items() if words) or "no weights")


def _cast_by_fsdp(module, args, kwargs):
    """Inputs that FSDP2 has cast, and whose last digits are gone."""
    policy = vars(module._get_fsdp_state())["_mp_policy"] if hasattr(module, "_get_fsdp_state") else None
    if policy is None or not policy.cast_forward_inputs or policy.param_dtype not in SIXTEEN:
        return
    for each in _tensors((args, kwargs)):
        if each.dtype in SIXTEEN and 2 / torch.finfo(each.dtype).eps < (size := _largest([each])) < math.inf:
            step = torch.finfo(each.dtype).eps * 2.0 ** math.floor(math.log2(size))
            what = f"an input is {_short(each.dtype)}, up to {size:,.0f}, where neighbours are {step:g} apart"
            cost = (
                "FSDP2 casts inputs to param_dtype, times and positions too: cast_forward_inputs=False, or scale them."
            )
            yield likely(what, "", cost)


def _low_hooks(model):
    """DDP's communication hooks that reduce in few bits."""
    hooks = [getattr(hook, "__name__", str(hook)) for hook, _ in getattr(model, "_comm_hooks", ())]
    return [name for name in hooks if re.search("16|power|quant", name)]


def _wrappers(model):
    """What lies around a model: torch.compile, and DDP's hooks, which may reduce in 16 bits."""
    if low := _low_hooks(model):
        cost = "It casts gradients to reduce them: in fp16, those below 6e-8 become 0, and those above 65504 inf."
        yield likely("a communication hook of DDP", low, cost)
    if compiled := [name for name, module in model.named_modules() if _is_compiled(module)]:
        yield note("compiled", compiled, "Inside, `watch` sees no module: it replays uncompiled.")


def audit(model, optimizer=None, scaler=None):
    """Look at a model, its optimizer (or several, in a list) and its scaler as they are; no step is needed.

    Returns a Report. Printed it is sentences, the verdict first; `.findings` is a DataFrame of what was found, where,
    how severe it is ("certain", "likely", "note": see `Finding`), what it costs, and the clinic's case that mends it.
    It reads all weights once, and on a GPU waits for it. Under FSDP2 each process tells of its own shards.

    Examples
    --------
    >>> model = torch.nn.Linear(8, 8).half()
    >>> report = audit(model, torch.optim.Adam(model.parameters()), torch.amp.GradScaler("cpu"))
    >>> report.findings.query("severity == 'certain'")["case"].tolist()
    ['Fine-tuning in fp16', 'Adam in fp16']
    """
    parts, run = (*SETTINGS, _numbers, _switches, _inventory), (_plain(model), _list(optimizer), scaler)
    with torch.no_grad():
        return Report([*(each for part in parts for each in part(*run)), *_wrappers(model)])


# A pass, op by op


class Origin(NamedTuple):
    """Where a number that is not finite came from. `phase`: "input", "weights", "forward", "loss", "backward", or
    "divergence". `why`: "format", the same op on the same numbers is finite in float32; "range", it is not; "reason",
    the operands tell it, as a divisor of 0; "" if that is not known. `given`: what of its operands was not finite."""

    phase: str
    module: str
    op: str
    words: str
    kind: str = ""
    why: str = ""
    given: tuple = ()

    def __str__(self):
        return self.words


def _reason(op, first=None, second=None, *others):
    """Why an op has no finite result, in words, if its operands tell it; "" else."""
    if "softmax" in op and first is not None and (masked := (first == -math.inf).all(-1)).any():
        return f"{int(masked.sum())} of its rows hold nothing but -inf: all of it is masked"
    masks = [each for each in others if each is not None and each.dim() > 1] if "attention" in op else ()
    if any((~each if each.dtype == torch.bool else each == -math.inf).all(-1).any() for each in masks):
        return "rows of its mask let nothing through: all of it is masked"
    if op == "div" and second is not None and (zero := second == 0).any():
        hint = ", where float32 may hold a number" if second.dtype == FP16 else ""
        whole = not second.is_floating_point() or (second.max() >= 1 and bool((second == second.round()).all()))
        hint = ": a count is 0, as of an empty mask" if whole else hint
        return f"it divides by 0 at {int(zero.sum()):,} of {zero.numel():,} places{hint}"
    if first is None or op not in ("log", "log2", "log10", "rsqrt", "reciprocal", "sqrt"):
        return ""
    zero, negative = int((first == 0).sum()) if op != "sqrt" else 0, int((first < 0).sum()) if op != "reciprocal" else 0
    if zero:
        small = ", where float32 may hold a number: compute it in float32" if first.dtype in SIXTEEN else ""
        return f"its operand is 0 at {zero:,} of {first.numel():,} places{small}"
    return f"its operand is negative at {negative:,} of {first.numel():,} places" if negative else ""


def _in_float32(call, args, kwargs, device):
    """The tensors that the same op makes of the same numbers in float32; none where it cannot."""
    with suppress(Exception), torch.random.fork_rng(_gpus(device)):
        dtypes = {key: FP32 for key, each in kwargs.items() if each in SIXTEEN}
        places = [FP32 if isinstance(each, torch.dtype) and each in SIXTEEN else each for each in args]
        return _tensors(call(*_floats(places), **_floats(kwargs) | dtypes))
    return []


def _made(phase, module, op, call, args, kwargs, output):
    """An Origin if an op made a number that is not finite of such that are; it is done again in float32."""
    inputs, outputs = _tensors((args, kwargs)), _tensors(output)
    after = _kinds(outputs)
    before = _kinds(inputs) if after else set()
    numbers = [each for each in (*args, *kwargs.values()) if isinstance(each, float)]
    if before or any(map(math.isinf, numbers)):
        after &= {"nan"} - before  # an inf that was there already, or was asked for
    if not after:
        return None
    kind = next(each for each in ("nan", "inf", "-inf") if each in after)
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    negative = op == "pow" and isinstance(args[1], float) and args[1] < 0
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
    where = f"in the {phase}" if phase == "loss" else f"in the {phase}, in {module or 'the model'}"
    return Origin(phase, module, op, f"{where}: {words}", kind, why, tuple(before))


UNITS = {"threshold_backward": "ReLU", "hardtanh_backward": "clamp", "sigmoid_backward": "sigmoid"}
UNITS |= {"tanh_backward": "tanh", "gelu_backward": "GELU", "silu_backward": "SiLU", "leaky_relu_backward": "LeakyReLU"}
ZEROS = "format", "unit", "operand", "other"  # the sooner, the more it tells
FACTORIES = ("empty", "zeros", "ones", "full", "new_", "rand")
SCATTERS = ("index_add", "scatter_add", "index_put", "cumsum")  # they add in the dtype of their output


class _Ops(TorchDispatchMode):
    """Looks at the ops of a pass. `made`: Origins; `coarse`: Findings of numbers that 16 bits cannot tell apart;
    `zeros`: where gradients became 0, as (why, words), `why` as in ZEROS."""

    def __init__(self, model):
        super().__init__()
        self.model, self.phase, self.inside, self.hooks = model, "forward", [], []
        self.made, self.coarse, self.zeros = [], [], []

    def __enter__(self):
        for name, module in self.model.named_modules():
            enter, leave = functools.partial(self._enter_module, name), functools.partial(self._leave_module, name)
            self.hooks.append(module.register_forward_pre_hook(enter))
            self.hooks.append(module.register_forward_hook(leave, always_call=True))
        return super().__enter__()

    def __exit__(self, *error):
        while self.hooks:
            self.hooks.pop().remove()
        return super().__exit__(*error)

    def _enter_module(self, name, module, args):
        self.inside.append(name)

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
        output, module = func(*args, **kwargs), self.inside[-1] if self.inside else ""
        if op == "_to_copy" and args[0].dtype in SIXTEEN and output.dtype in (torch.int32, torch.int64):
            self._look_at_numbers(module, args[0])
        if op.startswith(FACTORIES) or not _tensors(output):
            return output
        if _tensors((args, kwargs)) and (origin := _made(self.phase, module, op, func, given, kwargs, output)):
            self.made.append(origin)
        if self.phase == "backward":
            self._look_at_zeros(module, op, func, args, kwargs, output)
        elif isinstance(output, torch.Tensor) and output.dtype in SIXTEEN and output.numel() > 1:
            self._look_at_steps(module, op, args, output)
            if op.startswith(SCATTERS):
                self._look_at_sums(module, op, func, given, kwargs, output)
        return output

    def _look_at_zeros(self, module, op, func, args, kwargs, output):
        """A gradient that is 0 everywhere, made of one that is not."""
        given = [each for each in _tensors(args) if each.numel() > 1]
        outputs = [each for each in _tensors(output) if each.numel() > 1]
        if not given or all(_largest([each]) for each in outputs) or not _largest(given[:1]):
            return
        where, dtype = f"in the backward, in {module or 'the model'}", _short(outputs[0].dtype)
        size, again = _largest(given[:1]), _in_float32(func, args, kwargs, given[0].device)
        if op in UNITS:
            own = not [*dict(self.model.named_modules()).get(module, self.model).parameters()]
            where = f"in {module}" if own else f"between {module or 'the output'} and the module before it"
            dead = "gets no number above 0" if "ReLU" in UNITS[op] else "is saturated"
            self.zeros.append(("unit", f"{where}, {UNITS[op]} {dead}, anywhere: its units are dead"))
        elif any(_largest([each]) == 0 for each in given[1:]):
            self.zeros.append(("operand", f"{where}: {op} multiplies by numbers that are all 0"))
        elif op == "_to_copy" or (again and _largest(again)):
            by = "the cast" if op == "_to_copy" else op
            self.zeros.append(("format", f"{where}: {by} made 0 ({dtype}) of gradients up to {size:.2g}"))
        else:
            self.zeros.append(("other", f"{where}: {op} made 0 of gradients up to {size:.2g}"))

    def _look_at_steps(self, module, op, args, output):
        """Whole numbers, angles and columns of numbers that 16 bits make equal."""
        size, eps = _largest([output]), torch.finfo(output.dtype).eps
        dtype, last = _short(output.dtype), 2 / eps
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if op in ("sin", "cos") and source.dtype in SIXTEEN and math.isfinite(far := _largest([source])) and far > 0:
            if (step := eps * 2.0 ** math.floor(math.log2(far))) > 0.5:
                what = f"{op} of {dtype} up to {far:,.0f}, where neighbours are {step:g} apart: a period is 6.28"
                cost = "Compute angles in float32; FSDP2 casts inputs too, if told to."
                self.coarse.append(likely(what, module, cost))
        elif op == "arange" or (op in ("_to_copy", "cumsum") and size > last):
            whole = torch.arange(output.numel()) if op != "_to_copy" else source.unique()
            if size > last and (whole.diff() == 1).all() and (left := output.unique().numel()) < len(whole):
                what = f"{len(whole):,} whole numbers in a row become {left:,} in {dtype}"
                cost = f"Above {last:,.0f} neighbours fall together. Keep positions in FP32."
                self.coarse.append(likely(what, module, cost))
            elif op == "_to_copy" and source.dtype not in SIXTEEN and not source.requires_grad and source.dim() < 4:
                self._look_at_columns(module, source, output)

    def _look_at_columns(self, module, source, output):
        """Columns of an input whose differences a cast takes away, as of a year, or whole numbers, as times."""
        columns, dtype = source.reshape(-1, source.shape[-1] if source.dim() > 1 else 1)[:256].T[:64], output.dtype
        for place, (before, after) in enumerate(zip(columns, columns.to(dtype))):
            had, left, size = before.unique().numel(), after.unique().numel(), before.abs().max()
            whole = size > 2 / torch.finfo(dtype).eps and torch.equal(before, before.round())
            few_steps = before.max() - before.min() < 4 * torch.finfo(dtype).eps * size
            if had > 2 and (left < had if few_steps else whole and left < 2 * had / 3):
                ends = f"{before.min():,.6g} to {before.max():,.6g}"
                what = f"column {place} of an input, {ends}: its {had} values become {left} in {_short(dtype)}"
                self.coarse.append(likely(what, module, "Subtract its mean, or scale it, before it is cast."))

    def _look_at_numbers(self, module, source):
        """Whole numbers that come out of 16 bits, as names of rows."""
        last, size = 2 / torch.finfo(source.dtype).eps, _largest([source])
        if last < size < math.inf:
            what = f"whole numbers up to {size:,.0f} come out of {_short(source.dtype)}"
            cost = f"Above {last:,.0f} neighbours fall together. Keep indices as integers."
            self.coarse.append(likely(what, module, cost))

    def _look_at_sums(self, module, op, func, args, kwargs, output):
        """Sums by place, which stand still where the terms are too small for them."""
        again = _in_float32(func, args, kwargs, output.device)
        if again and not _kinds([output, *again]):
            apart = ((output.float() - again[0].float()).abs() / again[0].float().abs().clamp(min=1e-9)).amax()
            place = (output.float() - again[0].float()).abs().argmax()
            if apart > 0.1:
                here, right = (float(each.reshape(-1)[place]) for each in (output, again[0]))
                what = f"{op} in {_short(output.dtype)} adds up to {here:,.4g} what is {right:,.4g} in float32"
                self.coarse.append(likely(what, module, "Its sum stands still, as a count does. Add in float32."))


def _first(made, usual):
    """The first of some Origins that a good pass has not as well; not a mask's -inf, but what fails by it."""
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
        return first
    source = next((each for each in reversed(earlier) if each.module == first.module), earlier[-1])
    return source._replace(words=f"{source.words}; of that, {first.op} made NaN")


@contextmanager
def _kept(model):
    """Puts the random state, buffers, and what modules keep as attributes back."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    with torch.random.fork_rng(_gpus(_device(model))):
        try:
            yield
        finally:
            for module, before in attributes:
                vars(module).update(before)
            for buffer, before in buffers:
                buffer.data.copy_(before)


def _again(model, saved, ops):
    """A saved pass again, uncompiled, while `ops` looks on: gradients of weights by name. It changes nothing."""
    model, (args, kwargs), cast = _plain(model), saved["batch"], saved["autocast"]
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    with _kept(model), ExitStack() as around:
        around.enter_context(torch.compiler.set_stance("force_eager"))
        around.enter_context(torch.set_grad_enabled(bool(saved["gradients"])))
        torch.set_rng_state(saved["random"][0].cpu())  # a file's is where map_location put it
        for device, state in zip(_gpus(_device(model)), saved["random"][1:]):
            torch.cuda.set_rng_state(state.cpu(), device)
        around.enter_context(ops)
        with torch.autocast(**cast, cache_enabled=False):
            outputs = _tensors(model.get_submodule(saved["module"])(*args, **kwargs))
        if not saved["gradients"]:
            return {}
        ops.phase = "backward"
        # Views, as hooks see only what starts there.
        starts = [outputs[place].view_as(outputs[place]) for place in saved["gradients"]]
        gradients = [each.to(start.dtype) for start, each in zip(starts, saved["gradients"].values())]
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


def _bad_input(args, kwargs):
    named = [*((f"args.{place}", each) for place, each in enumerate(args)), *kwargs.items()]
    bad = [name for name, each in named if _kinds(_tensors(each)) - {"-inf"}]
    return Origin("input", "", "", f"in the input: {_some(bad)}") if bad else None


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
    return _bad_input(*saved["batch"]) or _first(_ops_made(model, saved)[0], saved["usual"])


# The loss, by what autograd keeps of it

OPERANDS = "self", "other"
CALLS = {"mul": torch.mul, "div": torch.div, "pow": torch.pow, "log": torch.log, "mseloss": F.mse_loss}
RISKY = {"sqrt", "rsqrt", "pow", "log", "div", "reciprocal", "norm", "linalgvectornorm", "acos", "asin", "cdist", "std"}


def _op(node):
    return re.sub(r"Backward\d*$", "", node.name()).lower()


def _saved(node):
    """What a node of autograd keeps: "self", "other", "result", "target", "exponent"..."""
    names = [name for name in dir(node) if name.startswith("_saved_")]
    return {name.removeprefix("_saved_"): getattr(node, name) for name in names}


def _terms(node):
    """How many numbers a sum or a mean adds up; 0 for other ops."""
    kept = _saved(node) if _op(node) in ("sum", "mean") else {}
    sizes = kept.get("self_sym_sizes", ())
    dims = [dim - 2**64 * (dim >= 2**63) for dim in kept.get("dim") or range(len(sizes))]  # autograd keeps -1 so
    return math.prod(sizes[dim] for dim in dims) if sizes else 0


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
            known = not bad and op in CALLS and len(operands) == 1 + (op != "log")
            if known and (origin := _made("loss", "", op, CALLS[op], operands, {}, CALLS[op](*operands))):
                return origin
            why = _reason(op, *(each if isinstance(each, torch.Tensor) else None for each in map(kept.get, OPERANDS)))
            if kept.get("reduction") == 1 and "total_weight" in kept and kept["total_weight"] == 0:
                why = "it averages over 0 targets: all are ignored"
            if why:
                return Origin("loss", "", op, f"in the loss: {op}: {why}", "", "reason")
            if "target" in bad:
                return Origin("input", "", op, f"in the target of the loss ({op})")
            if bad:
                return self._maker(node, op, *next(iter(bad.items())))
        return None

    def _maker(self, node, op, key, tensor):
        """The Origin of a bad operand or result that a node keeps, while all before it was finite."""
        kind = f"{'NaN' if 'nan' in _kinds([tensor]) else 'inf'} ({_short(tensor.dtype)})"
        sources = [each for each, _ in node.next_functions]
        maker = sources[OPERANDS.index(key)] if key in OPERANDS[: len(sources)] else next(filter(None, sources), None)
        if key.startswith("result"):
            end = "; fp16's exp ends at 11.09" if op == "exp" and tensor.dtype == FP16 else ""
            return Origin("loss", "", op, f"in the loss: {op} made {kind}{end}")
        if maker is None or "output" in maker.metadata:
            words = (
                f"in the loss: {op} was given {kind} that is not of the model's output: it needs no gradient, as data, "
            )
            return Origin("loss", "", op, words + "a mask, a weight of the loss, or what is computed of a buffer")
        before = [each for each, _ in maker.next_functions if each is not None]
        further = [each for one in before for each, _ in one.next_functions if each is not None]
        terms = _terms(maker) or max(map(_terms, before + further), default=0)
        of = (
            f" of {'' if _terms(maker) else 'a sum of '}{terms:,} numbers{' each' * bool(_terms(maker))}"
            if terms
            else ""
        )
        given = _tensors([_saved(each).get("result") for each in before])
        of += f", up to {_largest(given):,.3g}" if given else ""
        return Origin("loss", "", _op(maker), f"in the loss: {_op(maker)} made {kind}{of}; {op} got it")


# What `watch` keeps of a run: the order of calls, the trend, the looks


class _Calls:
    """The calls of a GradScaler and of the optimizers' steps: those that are missing, double or misplaced are told."""

    def __init__(self, seen):
        self.seen, self.scalers, self.met = seen, weakref.WeakSet(), 0
        self.tries = self.updates = self.scaled = 0  # steps tried, updates, losses scaled since the last update
        self.not_scaled = 0  # backward passes of other losses since the last update
        self.unscaled, self.kept, self.in_step = Counter(), False, False
        self.stepped = weakref.WeakSet()  # by the scaler, since a loss was scaled

    def scale(self, original, scaler, outputs):
        scaled = original(scaler, outputs)
        self.scaled += scaler.is_enabled() and not isinstance(outputs, torch.Tensor)
        if isinstance(outputs, torch.Tensor) and outputs.grad_fn is not None and scaler.is_enabled():
            if any("loss" in node.metadata for node in _region(outputs)):
                cost = "Gradients are unscaled once: they stay multiplied by the scale."
                self.seen.tell(certain("scaler.scale is called twice on the same loss", "", cost))
            scaled.grad_fn.metadata["loss"] = outputs.detach()
            self.seen.scaler, self.scaled, self.met = scaler, self.scaled + 1, self.met + (scaler not in self.scalers)
            self.scalers.add(scaler)
            self.stepped.clear()
            if self.met > 2 and self.met > self.tries:
                cost = "Each starts at its first scale: what one learned of overflows is lost. Make one, once."
                self.seen.tell(certain("each step uses a new GradScaler", "", cost))
        return scaled

    def unscale_(self, original, scaler, optimizer):
        if scaler.is_enabled():
            if self.seen.passes and not self.scaled:
                cost = "Gradients are divided by a scale that the loss was not multiplied by."
                self.seen.tell(certain("backward was called on a loss that scaler.scale has not seen", "", cost))
            if self.kept and self.unscaled[optimizer]:
                what = f"unscale_ was called {self.unscaled[optimizer] + 1} times for one step"
                cost = "Gradients of the earlier passes are divided by the scale again: nearly nothing is left of them."
                cost += " Call unscale_, clip, step and update once, after the last of the passes that add up."
                self.seen.tell(certain("unscale_ is called on gradients that it unscaled already", what, cost))
            if self.scaled and self.not_scaled:
                cost = "Its gradients are divided by a scale that it was not multiplied by: scale each loss."
                say = certain if len(self.seen.optimizers) < 2 else likely
                what = f"of {self.scaled + self.not_scaled} losses for one step, {self.not_scaled} were not scaled"
                self.seen.tell(say(what, "", cost))
            self.seen.looks.note_norm("norm before unscale_")
            self.unscaled[optimizer] += 1
        return original(scaler, optimizer)

    def step(self, original, scaler, optimizer, *args, **kwargs):
        self.tries += not self.seen.optimizers or optimizer is self.seen.optimizers[0]
        if self.tries > 3 and not self.updates and scaler.is_enabled():
            self.seen.tell(certain("scaler.update is never called", "", "The scale stays too high after an overflow."))
        self.in_step = True
        try:
            return original(scaler, optimizer, *args, **kwargs)
        finally:
            self.in_step = False
            self.unscaled.pop(optimizer, None)
            self.stepped.add(optimizer)

    def update(self, original, scaler, *args, **kwargs):
        self.updates, self.scaled, self.not_scaled = self.updates + 1, 0, 0
        return original(scaler, *args, **kwargs)

    def stepping(self, optimizer):
        """Before an optimizer's own step."""
        if self.seen.enabled() and self.scaled and not (self.in_step or self.unscaled[optimizer]):
            cost = "Gradients are still multiplied by the scale, and an inf in them is not skipped: call scaler.step."
            held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
            where = _whole(self.seen.plain, [name for name, weight in self.seen.trained if id(weight) in held])
            self.seen.tell(certain("optimizer.step was called without scaler.step or unscale_", where, cost))
        if self.seen.enabled() and not self.in_step and optimizer in self.stepped:
            cost = "Each pass counts twice, and a step that the scaler skips is taken, with its inf: remove one call."
            self.seen.tell(certain("optimizer.step is called again after scaler.step", "", cost))
        self.tries += optimizer is self.seen.optimizers[0] and not self.in_step
        self.unscaled.pop(optimizer, None)


class Pass(NamedTuple):
    """What is kept of a pass: its loss, the norm of its gradients, unscaled, the weight with the largest, the rate."""

    loss: float
    norm: float
    largest: str
    rate: float


def _growth(trend):
    """How loss and gradients grew over the last passes, in words; "" if they did not."""
    found = []
    for what, key in (("the loss", "loss"), ("the norm of the gradients", "norm")):
        passes = [each for each in trend if math.isfinite(getattr(each, key))]
        series = [abs(getattr(each, key)) for each in passes]
        if len(series) < 3:
            continue
        wide = 3 if len(series) > 7 else 1
        smooth = [statistics.median(series[place : place + wide]) for place in range(len(series) - wide + 1)]
        start = smooth.index(min(smooth))
        near = series[max(0, start - 8) : start + 8] if wide > 1 else smooth[start : start + 1]
        before, after = statistics.median(near), smooth[-1]
        far = 30 if key == "loss" else 1000
        if after > far * before > 0 and after > 5 * smooth[0]:
            where = next(place for place, each in enumerate(smooth) if place > start and each > far / 3 * before)
            words = f"{what} grew from {before:.3g} to {series[-1]:.3g} in {len(series) - start} passes"
            found.append(words + (f", first of all that of {passes[where].largest}" if key == "norm" else ""))
    rates = [each.rate for each in trend if each.rate > 0]
    if found and rates:
        rose = f"rose from {rates[0]:.2g} to {rates[-1]:.2g}" if rates[-1] > 2 * rates[0] else f"is {rates[-1]:.2g}"
        found.append(f"the learning rate {rose}")
    return ", and ".join(found)


HEADROOMS = ("output", "gradient", "weight gradient")
SHARES = "% zero", "% 0 in fp16", "update/weight", "% updates lost", "% sums lost"


def _headroom(size):
    """How often a number can double before fp16's largest is passed; negative beyond."""
    return math.log2(LARGEST) - math.log2(size) if size > 0 else math.inf if size == 0 else math.nan


def _copies(model):
    """Pairs of numbers in 16 bits and the weights that they copy, as an average or a teacher does: in this process's
    modules of the same class and names, and in its lists and dicts of tensors with the same shapes."""
    found, things = [], gc.get_objects()
    modules = [each for each in things if issubclass(type(each), nn.Module)]
    for part in (model, *model.children()):
        weights = dict(part.named_parameters())
        if not any(weight.requires_grad for weight in weights.values()):
            continue
        twins = [dict(each.named_parameters()) for each in modules if type(each) is type(part) and each is not part]
        kept = [[*twin.values()] for twin in twins if twin.keys() == weights.keys()]
        lists = [each for each in things if type(each) in (list, tuple, dict) and len(each) == len(weights)]
        kept += [[*(each.values() if type(each) is dict else each)] for each in lists]
        for copied in kept:
            if all(isinstance(each, torch.Tensor) and not each.requires_grad for each in copied):
                pairs = [(each, weight) for each, weight in zip(copied, weights.values()) if each.dtype in SIXTEEN]
                if pairs and all(each.shape == weight.shape for each, weight in pairs):
                    found.append(pairs)
    return found


class _Looks:
    """The close look at one pass of `every`: sizes, zeros and updates, as records that are thinned."""

    def __init__(self, seen):
        self.seen, self.records, self.dtypes = seen, [], {}
        self.now, self.on, self.due, self.sums_due, self.number, self.before = {}, False, False, False, 0, []
        self.cut, self.missing = {}, None
        self.copies = []  # pairs, and a sample of what they were

    def find_copies(self):
        copies = _copies(self.seen.plain)
        self.copies = [(pairs, torch.cat([_sample(kept) for kept, _ in pairs])) for pairs in copies]

    def begin(self, number):
        self.keep()
        self.on, self.due, self.sums_due, self.number = True, True, True, number

    def output(self, name, module, output):
        self.dtypes[name] = _short(output.dtype)
        self._size(name, "output", output)
        if torch.is_autocast_enabled(output.device.type):  # perhaps by the model itself
            self.seen.cast = AUTOCAST[self.seen.plain] = torch.get_autocast_dtype(output.device.type)
        if output.requires_grad:
            output.register_hook(functools.partial(self._gradient, name))
        elif not torch.is_grad_enabled() and any(weight.requires_grad for weight in module.parameters(recurse=False)):
            files = [frame.filename for frame in traceback.extract_stack(limit=200)]
            self.cut[name] = any(file.endswith(("utils/checkpoint.py", "utils\\checkpoint.py")) for file in files)

    def _size(self, name, what, tensor):
        if _local(tensor).numel():
            low, high = torch.aminmax(_local(tensor))
            size = torch.maximum(-low, high).float()
            self.now[name, what] = torch.maximum(self.now.get((name, what), size), size)

    def _gradient(self, name, gradient):
        if self.on and gradient.numel():
            self._size(name, "gradient", gradient)
            sample = _sample(gradient)
            there, all_of_it = sample != 0, torch.ones_like(sample, dtype=torch.bool)
            self.now[name, "% zero"] = _percent(~there, all_of_it)
            self.now[name, "% 0 in fp16"] = _percent(there & (sample.to(FP16) == 0), all_of_it)

    def note_norm(self, what):
        if self.due:
            gradients = [weight.grad for _, weight in self.seen.trained if weight.grad is not None]
            self.now["", what] = self.seen.together(_norms(gradients)).norm()

    def old_gradients(self):
        gradients = [weight.grad for _, weight in self.seen.trained if weight.grad is not None]
        return [(gradient, _sample(gradient)) for gradient in gradients if not gradient.is_sparse]

    def note_added(self, old):
        """Of the gradients that a step has used, the norm of those to which this backward has added."""
        added = [sample.norm() for gradient, sample in old if not torch.equal(_sample(gradient), sample)]
        if old:
            self.now["", "old gradient"] = torch.stack(added).max() if added else torch.zeros(())

    def sums_in_16_bits(self):
        """Samples of 16-bit gradients before a pass adds to them, and of what it adds; hooks to be removed."""
        sums, hooks = [], []
        for name, weight in self.seen.trained if self.sums_due else ():
            if weight.grad is not None and weight.grad.dtype in SIXTEEN and type(weight.grad) is torch.Tensor:
                added = []
                hooks.append(weight.register_hook(lambda gradient, added=added: added.append(_sample(gradient))))
                sums.append((name, _sample(weight.grad), added))
        self.sums_due = self.sums_due and not sums
        return sums, hooks

    def gradients(self, found, norms, sums):
        """After a backward, with the gradients of weights that were found."""
        if self.due:
            self.now["", "norm after backward"] = self.seen.together(norms).norm()
        for name, before, added in sums:
            if added:
                lost = _percent(_sample(found[name]) == before, added[0] != 0)
                self.now[name.rpartition(".")[0], "% sums lost"] = lost
        for name, gradient in found.items() if self.on else ():
            self._size(name.rpartition(".")[0], "weight gradient", gradient)
        self.on = False

    def before_step(self):
        if self.due and not self.before:
            self.note_norm("norm at the step")
            weights = [(name, weight) for name, weight in self.seen.trained if weight.grad is not None]
            weights = [(name, weight) for name, weight in weights if not weight.grad.is_sparse]
            weights.sort(key=lambda pair: pair[1].numel())  # of a module's weights the largest is kept
            self.before = [(name, weight, _sample(weight), _sample(weight.grad) != 0) for name, weight in weights]
            missing = {name for name, weight in self.seen.trained if weight.grad is None}
            self.missing = missing if self.missing is None else self.missing & missing

    def read_updates(self):
        """What the last step did to the weights."""
        moved = []
        for name, weight, old, moving in self.before:
            module, new = name.rpartition(".")[0], _sample(weight)
            update = new - old
            self.now[module, "% updates lost"] = _percent(update == 0, moving)
            self.now[module, "update/weight"] = update.norm() / old.norm()  # not finite where it starts at 0
            moved.append(update.abs().max() - 1 * ~moving.any())  # below 0 without a gradient
        if moved:
            self.now["", "moved"] = self.seen.together(moved).max()
        self.due, self.before = self.due and not moved, []

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
            values = self.seen.together([*self.now.values()]).cpu()
            self.records.append((self.number, labels, values, self.seen.scales[-1:], self.seen.skipped))
            self.records = self.records[::2] if len(self.records) > RECORDS else self.records
        self.now = {}

    def rows(self):
        """All that was looked at: a row a number."""
        records = [(number, zip(labels, values.tolist())) for number, labels, values, *_ in self.records]
        rows = [(number, *label, value) for number, pairs in records for label, value in pairs]
        return pd.DataFrame(rows, columns=["pass", "module", "what", "value"])

    def table(self):
        rows = self.rows()
        rows = rows[rows.what.isin([*HEADROOMS, *SHARES])]
        groups = rows.groupby(["module", "what"], sort=False).value
        order = rows.module.unique()  # pandas 2.2 mixes values up in unstack(sort=False)
        sizes, means = groups.max().unstack().reindex(order), groups.mean().unstack().reindex(order)
        table = pd.DataFrame({"dtype": pd.Series(self.dtypes, dtype=object)}, index=sizes.index)
        for what in [what for what in HEADROOMS if what in sizes]:
            table[f"{what} headroom"] = sizes[what].map(_headroom)
        return table.join(means[[what for what in SHARES if what in means]])

    def history(self):
        rows = [(number, (scale or [math.nan])[0], skipped) for number, *_, scale, skipped in self.records]
        history = pd.DataFrame(rows, columns=["pass", "scale", "skipped"])
        largest = self.rows().pivot_table("value", "pass", "what", "max")
        for what in ("output", "gradient"):
            history[f"{what} headroom"] = history["pass"].map(largest.get(what, {})).map(_headroom)
        return history


def _inspect(seen):
    """Do the pass again and look at each op of it: what it hides, and why gradients are 0."""
    saved = seen.saved
    if seen.problem or not saved["gradients"] or "batch" not in saved:
        return
    if _is_fsdp(seen.model):  # whose hooks a second pass would disturb
        fp16 = "float16" in seen.looks.dtypes.values()
        seen.zero = _nothing_arrives(seen, _zero_gradients(seen), saved, most=2.0**-25 if fp16 else 0)
        return
    ops, seen.muted = _Ops(seen.plain), True
    try:
        gradients = _again(seen.model, saved, ops)
    except Exception:  # some passes cannot be done again: then this look is left out
        return
    finally:
        seen.muted = False
    for each in ops.made:
        if each.phase == "forward" and each.why == "format" and each.kind != "-inf":
            seen.hidden.setdefault((each.module, each.op), each)
    for each in ops.coarse:
        seen.coarse.setdefault((each.where, each.what.split()[0]), each)
    zero = _zero_gradients(seen)
    if zero and not _kinds(saved["gradients"].values()):
        seen.zero = _nothing_arrives(seen, zero, saved) or _why_zero(seen, zero, saved, ops, gradients)


def _zero_gradients(seen):
    """The names of matrices whose gradient is 0 everywhere."""
    there = [(name, weight.grad) for name, weight in seen.trained if weight.dim() > 1 and weight.grad is not None]
    return [name for name, gradient in there if _largest([gradient]) == 0]


UNDERFLOW = "They underflow: scale the loss with a GradScaler, or use bf16."


def _nothing_arrives(seen, zero, saved, most=0):
    """A Finding if the gradient that reaches the model's output is nowhere above `most`."""
    size = _largest(saved["gradients"].values())
    if not zero or not size <= most:
        return None
    where, dtype = _whole(seen.plain, zero), _short(next(iter(saved["gradients"].values())).dtype)
    what = f"the gradient that reaches the model's output is 0 everywhere ({dtype})"
    if size:
        what, dtype = f"the gradient that reaches the model's output, up to {size:.2g}, is 0 in fp16", "float16"
    if seen.flat:
        return certain(f"{what}, and {seen.flat}", where, "A loss that is divided by an inf is 0, and so is its slope.")
    if dtype == "float16" and not seen.enabled():
        return certain(what, where, UNDERFLOW)
    return likely(what, where, "The loss does not change with it: it is saturated, cut off, or divided by an inf.")


def _why_zero(seen, zero, saved, ops, right):
    """Why weights have a gradient that is 0 everywhere: a Finding, by what `ops` saw of the same pass, done again."""
    weights, where, underflow = dict(seen.weights), _whole(seen.plain, zero), UNDERFLOW
    if saved["backward in autocast"]:
        underflow = "They underflow; the backward ran under autocast too: leave the region before it. Scale the loss."
    sizes = {name: _largest([right[name]]) for name in zero if name in right}
    if lost := [name for name, size in sizes.items() if size > 0]:
        what = "gradients that are 0 everywhere, though the same pass, done again, makes them"
        cost = f"There they are up to {max(sizes.values()):.2g}. What comes after the backward loses them: a hook on "
        cost += "gradients, or a communication hook that casts to fp16, where what is below 6e-8 becomes 0."
        return certain(what, _whole(seen.plain, lost), cost)
    why, words = min(ops.zeros, key=lambda each: ZEROS.index(each[0]), default=("other", ""))
    empty, cost = [name for name in zero if _largest([weights[name]]) == 0], "No underflow: no scale helps. "
    if why == "format":
        return certain(f"gradients that underflow to 0: {words}", where, underflow)
    if empty:
        cost += "They stay 0, and pass nothing on. Start them with other numbers."
        return certain("weights that are 0, and whose gradient is 0 in float32 too", empty, cost)
    if why == "unit":
        cost += "Smaller inputs, a smaller learning rate, or another start."
        return certain(f"weights that get no gradient: {words}", where, cost)
    return note("weights whose gradient is 0 everywhere, in float32 too", where)


# watch


class NonFinite(RuntimeError):
    """The first number that is not finite: `origin`, an `Origin`; `path`, what was saved, or None; `case`."""

    def __init__(self, words, origin=None, path=None, case=""):
        super().__init__(words)
        self.origin, self.path, self.case = origin, path, case


def _parts(model, name="", known=None):
    """The modules whose outputs can be seen: those without children or with weights of their own, and what is compiled
    from outside."""
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
        yield from _parts(module, f"{name}.{child}".lstrip("."), known)


def _entries(model, name=""):
    """What is called from outside: the model, or, if it has no forward, as a ModuleDict, its parts."""
    if getattr(model.forward, "__func__", None) is not nn.Module.forward:
        return [(name, model)]
    inside = [(f"{name}.{child}".lstrip("."), part) for child, part in model.named_children()]
    return [entry for child, part in inside for entry in _entries(part, child)]


def _attach(module, before, after):
    """Call `before(module, args, kwargs)` and `after(module, args, output)` around a module's forward, outside of its
    compiled code; after an error `output` is None. Returns what undoes it."""
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


class watch:
    """Watch a training run, as a context manager or by `start()` and `stop()`; on all processes of a run or on none.

    It raises `NonFinite` at the first loss, output or gradient that is not finite, and names module and op, and whether
    the number was in the input, in the weights already, or made by the forward, the loss or the backward; or says that
    the run had grown for many passes, so that an overflow was its end and not its cause. Gradients that overflow under
    a GradScaler are its routine: it raises where the scale falls below 1, or where `patience` steps in a row fail. On
    a CPU, and on a GPU with `every=1`, it raises before the optimizer's step. Else it reads once in `every` passes:
    then module and pass are right, but the step is done, and nothing can be saved.

    In one pass of `every` it looks closely: `table()`, `history()`, `plot()`, and `findings`, which `print` tells. In
    the second pass, and ever more seldom after it, it does the pass again, uncompiled, and looks at each op.

    Parameters
    ----------
    optimizer : optimizer, or a list of several; others that hold weights of the model are found when they step
    scaler : torch.amp.GradScaler; one that is not given is found when it is used
    every : int, the passes between two looks
    save : path of the file for `replay`; None saves nothing. Of several processes, each adds its rank.
    warn : bool, warn instead of raising, once
    patience : int, optimizer steps in a row that may be skipped under a scaler

    `passes` counts the backward passes, `steps` those of the first optimizer, `skipped` the falls of the scale. While
    it watches, `torch.autograd.backward`, which `loss.backward()` calls, and four methods of `GradScaler` are wrapped.

    Examples
    --------
    >>> model = torch.nn.Linear(2, 1)
    >>> with watch(model, save=None) as seen:
    ...     model(torch.tensor([[1.0, math.inf]])).sum().backward()
    Traceback (most recent call last):
    ...
    helpers.diagnose.NonFinite: pass 1, after 0 optimizer steps: in the input: args.0.
    """

    def __init__(self, model, optimizer=None, scaler=None, every=100, save="not_finite.pt", warn=False, patience=20):
        self.model, self.optimizers, self.scaler = model, _list(optimizer), scaler
        self.every, self.save, self.warn, self.patience = every, save, warn, patience
        self.plain, self.device = _plain(model), _device(model)
        self.at_once = self.device.type == "cpu" or every == 1  # read each pass: a replay finds module and op
        self.order = 2 if self.at_once else math.inf  # of norms: squares overflow, and are faster on a CPU
        self.every_output = not self.at_once or _is_fsdp(model)
        self.passes = self.steps = self.skipped = self.streak = 0
        self.last_bad, self.bad_pass = -1, -1  # the step and the pass of the last bad gradients
        self.told, self.trend, self.scales = {}, deque(maxlen=256), []
        self.problem = self.error = self.saved = self.good = self.loss = self.why = self.cast = self.zero = None
        self.flat = ""  # what makes a finite loss stand still
        self.stops = False  # whether this pass is the last one
        self.hidden, self.coarse = {}, {}
        self.labels, self.values, self.pending, self.undo, self.watched = [], [], [], [], []
        self.inside = self.muted = self.forward_seen = self.warned = self.stepped = False
        self.step_in_autocast = self.stale = self.no_grad_in_autocast = False
        self.evaluation = torch.zeros((), device=self.device)
        self.evaluated = torch.zeros((), device=self.device)  # the largest output in fp16, without gradients
        self.calls, self.looks = _Calls(self), _Looks(self)

    def __enter__(self):
        return self.start()

    def __exit__(self, kind, error, trace):
        if isinstance(error, Exception) and not isinstance(error, NonFinite):
            self.error = _where_raised(self.plain, error)
            error.add_note(f"watch: {self.error}")
        self.stop(check=kind is None)

    def start(self):
        self.weights = list(self.plain.named_parameters())
        self.trained = [(name, weight) for name, weight in self.weights if weight.requires_grad and weight.numel()]
        self.ids = {id(weight) for _, weight in self.weights}
        self.first_norms = _norms([weight for _, weight in self.trained])
        self.looks.find_copies()
        if self.every_output:
            self._see_outputs()
        hooks = register_optimizer_step_pre_hook(self._before_step), register_optimizer_step_post_hook(self._after_step)
        self.undo += [self._see_no_outputs, *(hook.remove for hook in hooks)]
        for name, part in _entries(self.model):
            self.undo.append(_attach(part, functools.partial(self._begin, name), self._end))
        self._wrap(torch.autograd, "backward", self._backward)
        for name in ("scale", "unscale_", "step", "update"):
            self._wrap(torch.amp.GradScaler, name, getattr(self.calls, name))
        return self

    def stop(self, check=True):
        """Take all hooks away; read what was not read yet, and raise if that is bad."""
        while self.undo:
            self.undo.pop()()
        if check:
            self._read()
            self.decide()
            if self.skips() and self.at_once and not self.why:
                self.why = _why_skipped(self)
        self.looks.keep()

    def _wrap(self, owner, name, around):
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(lambda *a, **k: around(original, *a, **k)))
        self.undo.append(lambda: setattr(owner, name, original))

    def _see_outputs(self):
        if not self.watched:
            parts = [(module, functools.partial(self._output, name)) for name, module in _parts(self.model)]
            self.watched = [_attach(module, None, after) for module, after in parts]

    def _see_no_outputs(self):
        while self.watched:
            self.watched.pop()()

    def tell(self, finding):
        """A finding; the same words are told once."""
        self.told.setdefault(finding.what, finding)

    def together(self, values):
        """Numbers in one tensor; modules may lie on several devices."""
        if any(value.device != self.device for value in values):
            values = [value.to(self.device, non_blocking=True) for value in values]
        return torch.stack(values) if values else torch.zeros(1, device=self.device)

    def enabled(self):
        return self.scaler is not None and self.scaler.is_enabled()

    def skips(self):
        """How many of the last steps were skipped in a row."""
        return self.streak if 0 <= self.calls.tries - 1 <= self.last_bad else 0

    # What hooks note of a pass

    def _note(self, kind, name, values):
        self.labels += [(kind, name)] * len(values)
        self.values += values

    def _begin(self, name, module, args, kwargs):
        if torch.compiler.is_compiling() or self.muted:
            return
        self.looks.read_updates()
        self.inside, self.began, kind = True, len(self.values), self.device.type
        cast = {"device_type": kind, "enabled": torch.is_autocast_enabled(kind)}
        cast["dtype"] = torch.get_autocast_dtype(kind)
        random = [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in _gpus(self.device))]
        self.saved = {"module": name, "batch": (args, kwargs), "random": random, "autocast": cast, "gradients": {}}
        self.saved |= {"backward in autocast": False, "training": self.model.training, "usual": []}
        if not torch.is_grad_enabled():
            self.no_grad_in_autocast |= cast["enabled"]
            return
        if cast["enabled"]:
            self.cast = AUTOCAST[self.plain] = cast["dtype"]
        if self.step_in_autocast and cast["enabled"]:
            self.stale |= any(_is_stale(weight, cast["dtype"]) for _, weight in self.trained[:8])
        if self.passes % self.every == 0 and not self.labels:
            self.looks.begin(self.passes + 1)
            self._see_outputs()
            for each in _cast_by_fsdp(module, args, kwargs):
                self.tell(each)

    def _output(self, name, module, args, output):
        if self.muted or torch.compiler.is_compiling() or not (self.inside or torch.is_grad_enabled()):
            return
        for each in _tensors(output):
            self._note("output", name, [_local(each).sum(dtype=FP32)])
            if self.looks.on and each.numel():
                self.looks.output(name, module, each)

    def _end(self, module, args, output):
        if torch.compiler.is_compiling() or self.muted:
            return
        self.inside, outputs = False, _tensors(output)
        sums = [_local(each).sum(dtype=FP32) for each in outputs]
        if self.at_once and any(map(_stops, self.together(sums).tolist())):
            self._explain("forward", self.labels[self.began :], self.values[self.began :])
        if not torch.is_grad_enabled():  # evaluation: its numbers are not kept
            del self.labels[self.began :], self.values[self.began :]
            self.evaluation = self.evaluation + sum(sums) * 0
            for each in [_local(each).abs().amax().float() for each in outputs if each.dtype == FP16 and each.numel()]:
                self.evaluated = torch.maximum(self.evaluated, each)
            return
        self.forward_seen = True
        self._note("root", "", sums)
        for place, each in enumerate(outputs):
            if each.requires_grad:
                each.grad_fn.metadata["output"] = True
                each.register_hook(functools.partial(self._incoming, self.saved, place))
        if len(self.values) > 100_000:  # forward passes without a backward pass
            self.labels, self.values = [], []

    def _incoming(self, saved, place, gradient):
        self._note("incoming", "", _norms([gradient], self.order))
        if gradient.nbytes <= 2**26:
            saved["gradients"][place] = gradient.detach()

    def _backward(self, original, tensors, *args, **kwargs):
        """Stands in for torch.autograd.backward."""
        if torch.compiler.is_compiling() or self.muted or not (self.labels or not self.forward_seen):
            return original(tensors, *args, **kwargs)
        self.saved = self.saved or {"gradients": {}}
        self.saved["backward in autocast"] = torch.is_autocast_enabled(self.device.type)
        loss = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors))
        if loss.numel() == 1:
            self._look_at_loss(loss)
        old = self.looks.old_gradients() if self.looks.on and self.stepped else []
        if self.calls.unscaled:
            self.calls.kept = any(weight.grad is not None and weight.grad.any() for _, weight in self.trained)
        sums, hooks = self.looks.sums_in_16_bits()
        self.muted = True  # what is recomputed for checkpointing does not count
        try:
            original(tensors, *args, **kwargs)
        finally:
            self.muted, self.stepped = False, False
            for hook in hooks:
                hook.remove()
        self.looks.note_added(old)
        self._after_backward(sums)

    def _look_at_loss(self, loss):
        self.loss = _Loss(loss, self.at_once)
        raw = [node.metadata["loss"] for node in self.loss.region if "loss" in node.metadata]
        self.calls.not_scaled += self.enabled() and not raw
        value = (raw[0] if raw else loss.detach()).float().reshape(())
        self._note("loss", "", [value])
        if self.at_once and not math.isfinite(value.item()):
            self._explain("loss", self.labels, self.values)
        elif self.at_once and value.item() == 0 and (origin := self.loss.origin()):
            self.flat = origin.words

    def _after_backward(self, sums):
        found = {name: weight.grad for name, weight in self.weights if weight.grad is not None}
        norms = _norms(found.values(), self.order)
        self.labels += [("gradient", name) for name in found]
        self.values += norms
        self.looks.gradients(found, norms, sums)
        if self.enabled():
            self._note("scale", "", [self.scaler.scale(torch.ones((), device=self.device))])
        self.passes += 1
        if self.values:
            self.pending.append((self.passes, self.calls.tries, self.labels, self.together(self.values)))
        self.labels, self.values = [], []
        if not self.every_output:
            self._see_no_outputs()
        if self.at_once or self.passes % self.every == 0:
            self._read()
        if self.loss:
            self.loss.region = []
        looks, rest = divmod(self.passes - 1, self.every)
        if self.passes == 2 or (rest == 0 and looks in (1, 4, 16, 64, 256)):
            _inspect(self)
        if self.passes % self.every == 0:
            self.decide()

    def _holds(self, optimizer):
        """Whether it is one of this model; one that is met for the first time is added."""
        if not any(optimizer is one for one in self.optimizers):
            if not any(id(weight) in self.ids for group in optimizer.param_groups for weight in group["params"]):
                return False
            self.optimizers.append(optimizer)
        return True

    def _before_step(self, optimizer, *_):
        if self._holds(optimizer):
            self.step_in_autocast |= torch.is_autocast_enabled(self.device.type)
            self.calls.stepping(optimizer)
            self.looks.before_step()

    def _after_step(self, optimizer, *_):
        if self._holds(optimizer):
            self.steps += optimizer is self.optimizers[0]
            self.stepped = True

    # What is read of it

    def _read(self):
        """Wait for all that was noted, and judge it, pass by pass."""
        pending, self.pending = self.pending, []
        values = torch.cat([stack for *_, stack in pending]).tolist() if pending else []
        for number, step, labels, _ in pending:
            self._judge(number, step, labels, values[: len(labels)], number == self.passes and bool(self.undo))
            values = values[len(labels) :]
        if not self.at_once and math.isnan(self.evaluation.item()) and self.problem is None:
            _report(self, Origin("forward", "", "", "in an evaluation: its output"), self.passes, intact=False)

    def _judge(self, number, step, labels, values, intact):
        of = lambda kind: [value for (one, _), value in zip(labels, values) if one == kind]
        loss, scale, gradients = of("loss"), of("scale"), of("gradient")
        if scale:
            self.skipped += bool(self.scales) and scale[0] < self.scales[-1]
            self.scales = [*self.scales[:1], scale[0]]
        if loss:
            largest = labels[values.index(max(gradients))][1] if gradients else ""
            rate = next((float(group.get("lr", 0)) for group in _groups(self.optimizers)), 0)
            self.trend.append(Pass(loss[0], math.hypot(*gradients) / (sum(scale) or 1), largest, rate))
        if any(map(_stops, of("root"))):
            self._explain("forward", labels, values, number, intact)
        elif not all(map(math.isfinite, loss)):
            self._explain("loss", labels, values, number, intact)
        elif not all(map(math.isfinite, of("incoming") + gradients)) and not (intact and self._only_norms_overflow()):
            self.streak = self.streak + (step != self.last_bad) if self.last_bad >= step - 1 else 1
            self.last_bad, self.bad_pass = step, number
            if not self.enabled() or self.streak > self.patience or (scale or [1])[0] < 1:
                self._explain("backward", labels, values, number, intact)
            elif self.streak == 3 and intact and not self.why:
                self.why = _why_skipped(self)
        else:
            self.good = self.saved if self.at_once else None

    def _only_norms_overflow(self):
        """The squares in a norm of numbers above 1e19 overflow where these do not."""
        return not _kinds([weight.grad for _, weight in self.weights if weight.grad is not None])

    def _explain(self, phase, labels, values, number=None, intact=True):
        """Find where a number that is not finite comes from, save the pass, and stop."""
        if self.problem is None:
            bad = [label for label, value in zip(labels, values) if not math.isfinite(float(value))]
            self.stops = not self.warn
            origin = _origin(self, phase, bad, intact)
            _report(self, origin, self.passes + 1 if number is None else number, intact)

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

    # What it has to say

    def table(self):
        """A row a module, over the looks so far. Headrooms of its outputs, of the gradients at its outputs and of those
        of its weights: how often the largest could double before it is past 65504. Of the gradients at its outputs, as
        they come, scaled: the percentages of values that are 0, and that would become 0 in fp16. The norm of its
        updates relative to its weights'. The percentages that rounding takes away of updates, and of what a pass adds
        to gradients in 16 bits."""
        return self.looks.table()

    def history(self):
        """A row a look: the pass, the scale and its falls until then, and the least headroom, in doublings, of all
        outputs and of all gradients at outputs."""
        return self.looks.history()

    def plot(self):
        """A figure: the headroom of outputs and gradients by module, and over time."""
        return _plot(self.table(), self.history())

    @property
    def report(self):
        words = f"Seen: {self.passes:,} passes, {self.steps:,} optimizer steps"
        if self.enabled():
            now = f", now {_shown(self.scales[-1])}" if self.scales else ""
            words += f", {self.skipped} falls of the scale{now}"
        error = [self.error] if self.error else []
        return Report(error + [each for judge in JUDGES for each in judge(self)], f"{words}.")

    @property
    def findings(self):
        return self.report.findings

    def __repr__(self):
        return repr(self.report)


def _report(seen, origin, number, intact=True):
    """Save, and raise or warn; in a run of several processes that is for `_decide`."""
    grown = _grown(seen) if origin.phase != "input" and origin.why != "reason" else ""
    if grown:
        words = f"training diverges: {grown}; at the end of that, {origin}"
        origin = origin._replace(phase="divergence", words=words)
    case = _case_of(origin)
    words = f"pass {number}, after {seen.steps} optimizer steps: {origin}."
    running = [(name, buffer) for name, buffer in seen.plain.named_buffers() if "running_" in name]
    if intact and (spoilt := [name for name, buffer in running if _kinds([buffer])]):
        words += f" Not finite since: {_some(spoilt)}; a skipped step does not undo that."
    path = _save(seen, number, origin) if intact and seen.save and "batch" in (seen.saved or {}) else None
    if path:
        words += f" Saved for `replay`: {path}."
    elif not intact:
        words += " The weights have changed since: go on from a checkpoint with every=1 to have the pass saved."
    known = [each.what for each in seen.told.values() if each.severity == "certain"]
    words = f"{'; '.join(known)}. Then, {words}" if known else words
    seen.problem = NonFinite(words + (f" See the clinic: {case}." if case else ""), origin, path, case)
    if not _world():
        seen.decide()


def _save(seen, number, origin):
    """Write the pass for `replay`; the path, or None."""
    path = Path(seen.save)
    path = path.with_stem(f"{path.stem}_{dist.get_rank()}") if _world() else path
    state = _state(seen.plain, seen.weights)
    try:
        torch.save(seen.saved | {"state": state, "pass": number, "origin": origin}, path)
    except Exception as error:  # a full disk, a batch that cannot be pickled
        seen.tell(note(f"nothing was saved: {type(error).__name__}: {error}"))
        return None
    return str(path)


def _plot(table, history):
    import matplotlib.pyplot as plt

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


def _stops(value):
    """Whether a sum of outputs stops a run: -inf alone may be a mask."""
    return math.isnan(value) or value == math.inf


def _shown(scale):
    return f"{scale:,.0f}" if 1 <= scale < 1e15 else f"{scale:g}"


def _is_stale(weight, dtype):
    """Whether autocast holds a cast copy of a weight that is not the weight's."""
    if weight.dim() < 2 or hasattr(weight, "to_local"):
        return False
    one = torch.ones(weight.shape[-1], 1, device=weight.device)
    return not torch.equal(torch.matmul(weight, one), torch.matmul(weight.to(dtype), one.to(dtype)))


# The search for what made the first number that is not finite, in the pass that `watch` has just seen


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
    return made if made and made.phase == "forward" and made.kind != "-inf" else None


def _made_in(seen):
    """The Origins of the last pass, and those of a good pass before it."""
    if "batch" not in (seen.saved or {}) or (_is_fsdp(seen.model) and (_world() or not seen.stops)):
        return [], []
    seen.muted = True
    try:
        made, failed = _ops_made(seen.model, seen.saved)
        seen.saved["usual"] = _ops_made(seen.model, seen.good | {"gradients": {}})[0] if made and seen.good else []
    finally:
        seen.muted = False
    if failed:
        seen.tell(note(failed))
    return made, seen.saved["usual"]


def _already_there(seen):
    """Bad weights, or statistics that this pass used: in training batch norm only writes them."""
    used = {f"{name}.running_" for name, module in seen.plain.named_modules() if not module.training}
    buffers = [(name, each) for name, each in seen.plain.named_buffers() if each.dtype in FLOATS]
    buffers = [(n, each) for n, each in buffers if "running_" not in n or n.rpartition("_")[0] + "_" in used]
    bad = [name for name, each in seen.weights if each.dtype in FLOATS and _kinds([each])]
    bad += [name for name, each in buffers if _kinds([each]) - {"-inf"}]
    if not bad:
        return _bad_input(*seen.saved["batch"])
    why = "before the first step"
    if seen.steps or seen.passes:
        gradients = "bad" if seen.bad_pass == seen.passes else "finite"
        why = f"a step or a statistic made them so; the gradients before it were {gradients}"
    return Origin("weights", bad[0].rpartition(".")[0], "", f"in the weights already ({why}): {_some(bad)}")


def _place(seen, phase, bad, intact=False):
    """Where, if it is not known by what op."""
    names = [name for kind, name in bad if kind == ("output" if phase == "forward" else "gradient")]
    if phase == "forward":
        module = names[0] if names else ""
        return Origin(phase, module, "", f"in the forward, in {module or 'the model'} or since the module before")
    if phase == "loss":
        region = seen.loss.region if seen.loss else ()
        ops = " of ".join([_op(node) for node in region if "loss" not in node.metadata][:-4:-1])
        return Origin(phase, "", ops, f"in the loss ({ops}): all that the model put out is finite")
    if phase == "incoming":
        words = "in the backward of the loss: what reaches the model's output is bad already"
        return Origin("backward", "", "", words)
    names, order = [name.rpartition(".")[0] for name in names], [*seen.looks.dtypes]
    module = max(names, key=lambda name: order.index(name) if name in order else -1, default="")
    if intact and (low := _low_hooks(seen.model)) and not _world():
        words = f"in the communication hook {_some(low)}, which casts: the same pass has finite gradients without it"
        return Origin(phase, "", low[0], words)
    shared = "; or another process's, by the reduction" if _world() else ""
    if any(map(_is_compiled, seen.model.modules())) and (seen.saved or {}).get("gradients") and intact:
        shared += (
            ". Uncompiled the same pass has finite gradients: compiled code made it, as where a region with autocast"
        )
        shared += " disabled is compiled, and its backward runs under autocast all the same"
    return Origin(phase, module, "", f"in the backward, of {module or 'the model'} or of what follows it{shared}")


def _grown(seen):
    """How loss, gradients or weights grew until now, in words; "" if they did not."""
    now = math.hypot(*seen.together(_norms(weight for _, weight in seen.trained)).tolist())
    times = now / (math.hypot(*seen.together(seen.first_norms).tolist()) or 1)
    weights = [f"the norm of all weights is {times:,.0f} times that at the start"] if 20 < times < math.inf else []
    return ", and ".join(filter(None, [_growth(seen.trend), *weights]))


CASES = {  # the clinic's, by what the words of an Origin hold
    "all of it is masked": "The empty sentence",
    r"mm made inf \(float16|convolution made inf \(float16": "The convolution",
    r"in the loss: (mul|pow|mseloss) made inf \(float16": "A loss of squares",
    "divides by 0.* where float32 may": "Vectors of length 1",
    "backward.*sqrt": "The scale that only falls",
    "compiled code made it": "The layer taken out and compiled",
}


def _case_of(origin):
    return next((case for words, case in CASES.items() if re.search(words, origin.words)), "")


RAISED = {  # what an error says, and what it means
    "unscale FP16 gradients": "What trains is fp16: a GradScaler wants FP32 weights, under autocast.",
    "inf checks were recorded": "No weight of this optimizer has a gradient: it holds others, or none was reached.",
    "unscale_.. has already been called": "Once per step, after the last of the passes that add up; then `update`.",
    "already been called since the last update": "`scaler.update()` is missing after `scaler.step`.",
    "unsafe to autocast": "Probabilities in fp16 lose what is near 0 and 1: binary_cross_entropy_with_logits.",
    "dtype|scalar type|should be the same": "Two dtypes meet: a part ran outside of autocast, or was cast by hand.",
    "cannot be converted to type|without overflow": "A constant beyond fp16's 65504, as a mask's -1e9.",
    "graph a second time": "A tensor of the last pass was kept, or autocast's cast copies of weights, by two passes.",
    "out of bounds|out of range": "An index or a label beyond the table; in 16 bits, large whole numbers round.",
}


def _where_raised(model, error):
    """A Finding of an error that stopped the run: the innermost module in its traceback, and what it means."""
    names, inside, own = {id(module): name for name, module in model.named_modules()}, "", ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        inside = names.get(id(frame.f_locals.get("self")), inside)
        if frame.f_code.co_name == "backward" and "ctx" in frame.f_locals:
            own = " It was raised in a backward of one's own, which runs outside of autocast: torch.amp.custom_bwd."
    said = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}".rstrip(".: ")
    means = next((means for words, means in RAISED.items() if re.search(words, said)), "")
    return certain(f"the run stopped with {said}", inside, means + own * means.startswith("Two dtypes"))


# What a watch saw, judged: each function yields what it finds; the first of the worst is the verdict


def _called(seen):
    """Calls that are missing, double or misplaced."""
    yield from seen.told.values()
    if seen.step_in_autocast and (seen.stale or seen.steps == 1):
        say, what = likely, "the step was taken under autocast"
        if seen.stale:
            say, what = certain, f"{what}, and the next forward used the weights as cast before it"
        cost = "One region around many steps keeps its first cast copies of the weights: forward sees no update."
        yield say(what, "", cost, "The loss that stands still")


def _settings(seen, severity):
    """Settings that are wrong by themselves, or that may be."""
    measured = "% updates lost" in seen.table()  # then `_rounded` tells of missing masters
    settings = [part for part in SETTINGS if seen.passes and not (measured and part is _masters)]
    parts = [part(seen.plain, seen.optimizers, seen.scaler) for part in settings]
    yield from (each for part in [*parts, _wrappers(seen.model)] for each in part if each.severity == severity)


CALM = "A smaller rate, warm-up, or clipping. Whether precision has a part in it: train in float32."


def _stopped(seen):
    """The first number that is not finite."""
    if seen.problem:
        origin, words = seen.problem.origin, str(seen.problem).partition(" See the clinic")[0].rstrip(".")
        diverged = origin is not None and origin.phase == "divergence"
        place_only = origin is not None and origin.phase == "backward" and not origin.op  # by elimination
        say = likely if diverged or place_only else certain
        yield say(words, "", CALM if diverged else "", seen.problem.case)


def _diverging(seen):
    if not seen.problem and (growth := _growth(seen.trend)):
        yield likely(f"training diverges: {growth}", "", CALM)


def _hidden(seen):
    """What single ops show, while the loss is finite."""
    if hidden := [*seen.hidden.values()]:
        table, cost = seen.table(), "Later ops hide it, and the loss is finite all the same."
        zero = "output headroom" in table and table["output headroom"].get(hidden[0].module) == math.inf
        cost += " What this module puts out is 0 everywhere." if zero else ""
        others = [f"{each.op} of {each.module}" for each in hidden[1:]]
        where = f"also {_some(others)}" if others else ""
        yield (certain if zero else likely)(hidden[0].words, where, cost + " Compute it in float32, or in bf16.")
    yield from seen.coarse.values()


def _skipped(seen):
    """Steps that a scaler skips: its routine, or not."""
    falls = f"the scale fell {seen.skipped} times" + (f", to {_shown(seen.scales[-1])}" if seen.scales else "")
    many = 3 * seen.skipped > seen.calls.tries
    if seen.problem or (seen.last_bad < 0 and not seen.skipped):
        return
    if seen.why and seen.last_bad >= 0:
        cost = f"A lower scale does not help; {falls}."
        yield certain(f"steps are skipped: {seen.why}", "", cost, _case_of(seen.why))
    elif seen.skips() > 4 and (not many or seen.skips() == seen.calls.tries > 12):
        yield likely(f"the last {seen.skips()} steps were skipped: their gradients are not finite; {falls}")
    elif many and seen.calls.tries >= 40 and seen.skipped > 15:
        often = f"{seen.skipped} of {seen.calls.tries} steps are skipped: the scale grows back as fast as it falls"
        factor, interval = seen.scaler.get_growth_factor(), seen.scaler.get_growth_interval()
        cost = f"growth_factor={factor:g}, growth_interval={interval}; the defaults, 2 and 2000, skip one step in 2000."
        yield certain(often, "", cost)
    else:
        yield note(f"gradients overflowed; {falls}", "", "A scaler's routine.", "Skipped first steps")


def _cast(seen):
    """Autocast and scaler that do not go together."""
    seen_all = seen.looks.dtypes and not any(map(_is_compiled, seen.model.modules()))
    fp32 = seen_all and seen.cast is None and set(seen.looks.dtypes.values()) == {"float32"}
    if seen.saved and seen.saved.get("backward in autocast"):
        cost = "Its products are cast too, also of parts that were taken out. Leave the region before it."
        yield likely("backward was called under autocast", "", cost, "The layer taken out")
    if seen.cast == BF16 and seen.enabled():
        cost = "bf16 has float32's range and needs no scale: it doubles until float32 overflows. Remove the scaler."
        yield likely("bf16 autocast with a GradScaler", "", cost, "The scale that only rises")
    if seen.cast == FP16 and not seen.enabled():
        off = ": it is disabled" if seen.scaler is not None else ""
        cost = "Small gradients become 0 in the backward. Add a GradScaler, or use bf16."
        yield likely(f"fp16 autocast without a GradScaler{off}", "", cost)
    if seen.enabled() and fp32 and not seen.problem:
        others = [kind for kind in ("cuda", "cpu") if kind != seen.device.type and torch.is_autocast_enabled(kind)]
        device = f"; it is on for {others[0]}, and the model lies on {seen.device.type}" if others else ""
        yield likely(f"a GradScaler, and no module's output is in 16 bits: autocast is not on{device}")


def _no_gradient(seen):
    """Weights that no gradient reaches: None, or 0."""
    looks, missing, what = seen.looks, sorted(seen.looks.missing or ()), "weights that no gradient reaches (None)"
    held = {id(weight) for group in _groups(seen.optimizers) for weight in group["params"]}
    part, weights = lambda name: name.rpartition(".")[0], dict(seen.trained)
    cut = [name for name in sorted(looks.cut) if name in map(part, missing)]
    left = "nothing leads from the loss to them: a detach, or a forward whose output is not used"
    if missing and len(missing) == len(seen.trained):
        left = "at the step they have none: zero_grad stands between backward and step"
        yield certain(what, _whole(seen.plain, missing), f"They train (requires_grad), but {left}.")
    elif cut:
        left = "their forward ran under no_grad"
        if looks.cut[cut[0]]:
            left += ", in a reentrant checkpoint none of whose inputs requires a gradient: use_reentrant=False"
        say = certain if any(id(weights[name]) in held for name in missing if part(name) in cut) else note
        yield say(what, cut, f"They train (requires_grad), but {left}.")
    elif ran := [name for name in missing if part(name) in looks.dtypes]:
        if seen.no_grad_in_autocast and seen.cast:
            left += "; or a forward under no_grad, in the same autocast region, left its cast copies to this one"
        yield likely(what, _whole(seen.plain, ran), f"They train (requires_grad), but {left}.")
    elif missing:
        yield note("weights that are not used", _whole(seen.plain, missing))
    if seen.zero:  # which may be the end of a run that grew
        yield seen.zero._replace(severity="likely") if _growth(seen.trend) else seen.zero


def _evaluated(seen):
    """Outputs of which fp16 cannot hold the squares."""
    if (size := seen.evaluated.item()) > math.sqrt(LARGEST) / 2:
        cost = (
            f"Squares are up to {size**2:,.0f}, and a sum of a few is past 65504: metrics are computed of `.float()`."
        )
        yield likely(f"outputs without gradients, as in evaluation, are float16 up to {size:,.0f}", "", cost)


def _norms_seen(seen):
    """What happens to gradients between backward and step."""
    rows = seen.looks.rows()
    numbers = {what: rows[rows.what == what].set_index("pass").value for what in rows.what.unique()}
    none = pd.Series(dtype=float)
    made, before = numbers.get("norm after backward", none), numbers.get("norm before unscale_", none)
    ratio = (made / before).dropna()
    divided = (ratio < 65) & ((ratio - ratio.round()).abs() < 1e-3)  # by a number of passes or processes
    clipped = ratio[(ratio > 2) & (ratio < math.inf) & ~divided]
    if len(clipped):
        first, last = made[clipped.index[0]], before[clipped.index[0]]
        what = f"the norm of the gradients falls from {first:,.4g} to {last:,.4g} between backward and unscale_"
        cost = "Clipping acts on scaled gradients; unscaling then makes them too small. Call `unscale_` before it."
        to_a_limit = abs(last - float(f"{last:.2g}")) < 1e-3 * last
        yield (certain if to_a_limit else likely)(what, "", cost, "Clipped to a small norm")
    old, moved, step = (numbers.get(what, none) for what in ("old gradient", "moved", "norm at the step"))
    at_step = (step / made).dropna()
    if not seen.enabled() and len(at_step) > 1 and 0 < at_step.max() < 1e-3:
        what = (
            f"clipping takes the norm of the gradients from {made.median():,.0f} to {step.median():.3g}, in every look"
        )
        cost = "Only their direction is left. Some part of the loss is far larger than the rest: print its parts."
        yield likely(what, "", cost)
    if len(at_step) and (at_step == 0).all():
        cost = "zero_grad stands between backward and step, or a hook clears them."
        yield certain("gradients are 0 at the step, and were not after the backward", "", cost)
    if len(old) and old.max() > 0:
        cost = "Gradients that a step has used are still there at the next backward, which adds to them."
        yield likely("gradients are not set to zero", "", cost, "The loop without zero_grad")
    if len(moved) > 1 and moved.max() == 0:
        rates = [float(group.get("lr", 1)) for group in _groups(seen.optimizers)]
        cost = "Rounding takes the updates, or the optimizer holds others." if any(rates) else "The learning rate is 0."
        yield certain("steps that move none of the weights", "", cost)
    stands = [each.iloc[-1] for what, each in numbers.items() if what.endswith("stands")]
    if stands and max(stands) > 30:
        what = f"a copy of the weights in 16 bits, as an average: {max(stands):.0f}% of it stand still between looks"
        far = "Of its numbers that are more than 6% from the weight. Its small steps are rounded away: keep it in FP32."
        yield certain(what, "", far)


def _rounded(seen):
    """What rounding takes away from updates and sums, by module."""
    table = seen.table()
    low = [weight for _, weight in seen.trained if weight.dtype in SIXTEEN]
    lost = table["% updates lost"] if "% updates lost" in table else pd.Series(dtype=float)
    lost, share = lost[lost > 10], lost.max()
    if low and len(lost) and not _who_keeps_masters(low, seen.optimizers):
        half_a_step, decay = _lost_decay(low, seen.optimizers)
        what, cost = f"updates that rounding takes away: up to {share:.0f}%", "The weights have no FP32 masters: "
        cost += f"what is below {half_a_step:.2g} of a weight is lost, lr * weight_decay = {decay:.2g} with it."
        if decay and share < 70:
            what = f"weight decay that 16-bit weights round away: lr * weight_decay = {decay:.2g}"
            cost = f"Half a step is {half_a_step:.2g}; of updates, up to {share:.0f}% are lost too. Keep FP32 masters."
        yield likely(what, [*lost.index], cost, "The small learning rate")
    if "% sums lost" in table and len(sums := table["% sums lost"][table["% sums lost"] > 10]):
        what = f"gradients in 16 bits, summed over passes: what a pass adds is rounded away, up to {sums.max():.0f}%"
        yield likely(what, [*sums.index], "Add them up in FP32.")
    zero = table.index[table["output headroom"] == math.inf] if "output headroom" in table else []
    if len(zero) and len(seen.looks.records) > 1:
        yield likely("outputs that are 0 everywhere, in all looks", [*zero], "What follows learns nothing.")


def _large_steps(seen):
    """Steps as large as the weights."""
    table = seen.table()
    sizes = table["update/weight"] if "update/weight" in table else pd.Series(dtype=float)
    if (size := sizes[sizes < math.inf].median()) > 0.5:
        what = f"a step changes weights by {size:.2g} of their size (the median of modules)"
        yield likely(what, "", f"The learning rate is too large, in any precision. {CALM}")


def _unseen(seen):
    """What it could not see, in words."""
    forward = seen.forward_seen or seen.problem or seen.error
    if not (seen.passes or forward):
        yield note("saw nothing: neither the model's forward nor a backward was called")
    elif not (seen.passes or seen.problem):
        yield note("saw nothing of backward: torch.autograd.backward was not called")
    elif not forward:
        yield note("saw nothing of forward: another module was called, or the compiled one")
    elif not seen.steps:
        yield note("saw nothing of updates: the optimizer took no step")
    if compiled := [name for name, module in _parts(seen.model) if _is_compiled(module)]:
        yield note(f"saw nothing inside of what is compiled ({_some(compiled)}), only its outputs")


SPOILS, MAY = (functools.partial(_settings, severity=severity) for severity in ("certain", "likely"))
JUDGES = [_called, SPOILS, _stopped, _no_gradient, _skipped, _norms_seen, _hidden, _cast]
JUDGES += [_rounded, MAY, _evaluated, _large_steps, _diverging, _unseen]


# bisect


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
