"""What is wrong with a mixed-precision run before it starts: `audit`.

    from halfbits import audit

    print(audit(model, optimizer, scaler))  # no step needed

The first line that is printed is the verdict: the most probable cause, with its place, evidence and mend. Cases are
headings of notebook 14, the clinic, where each is shown and mended. Each function here but `audit` yields what it finds
in a model, its optimizers and its scaler.
"""

import math
import re

import torch
from torch import nn

from halfbits._tensors import (
    AUTOCAST,
    BF16,
    FLOATS,
    FP16,
    FP32,
    LARGEST,
    SIXTEEN,
    ZERO,
    _child,
    _count,
    _device,
    _gradients,
    _groups,
    _held,
    _is_compiled,
    _is_fsdp,
    _is_on,
    _kinds,
    _largest,
    _last_whole,
    _list,
    _local,
    _percent,
    _plain,
    _policy,
    _sample,
    _short,
    _tensors,
    _trained,
    _went_through,
    _whole,
)
from halfbits.report import Report, _some, certain, likely, note


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


def audit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer] | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Report:
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
