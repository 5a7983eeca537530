"""What is wrong with a mixed-precision run before it starts: `audit`.

    from halfbits import audit

    print(audit(model, optimizer, scaler))  # no step needed

The first line that is printed is the verdict: the most probable cause, with its place, evidence and fix. Cases are
headings of notebook 14, the clinic. Each function here but the first and last yields what it finds in a model, its
optimizers and its scaler.
"""

import math
import re

import torch
from torch import nn

from halfbits._tensors import (
    BF16,
    FLOATS,
    FP16,
    FP32,
    LARGEST,
    SIXTEEN,
    ZERO,
    as_list,
    bad_kind,
    count_by_dtype,
    device_of,
    fewer_names,
    groups_of,
    held_by,
    is_on,
    largest,
    local,
    plain,
    readable,
    short,
    tensors_in,
)
from halfbits.report import Report, certain, likely, note, some


def check_given(model, optimizer, scaler):
    """The optimizers as a list, and the scaler; TypeError for what is none."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the first argument is a torch.nn.Module, and not a {type(model).__name__}")
    optimizers = list(optimizer.values()) if isinstance(optimizer, dict) else as_list(optimizer)
    for one in optimizers:
        if isinstance(one, torch.optim.lr_scheduler.LRScheduler):
            raise TypeError("a scheduler was given as the optimizer: give `scheduler.optimizer`")
        if not hasattr(one, "param_groups"):
            raise TypeError(f"an optimizer is wanted, or a list of them, and not a {type(one).__name__}")
    scaler = getattr(scaler, "_scaler", scaler)  # timm's NativeScaler, and others that wrap one
    known = "is_enabled", "cur_scale", "loss_scale"
    if scaler is not None and not any(hasattr(scaler, name) for name in known):
        raise TypeError(f"the scaler is a torch.amp.GradScaler or None, and not {scaler!r}")
    return optimizers, scaler


def _places(model, optimizers, scaler):
    """Weights that have no numbers here."""
    weights = dict(model.named_parameters())
    if meta := [name for name, weight in weights.items() if weight.is_meta]:
        cost = "They hold no numbers, and cannot train: the model was offloaded, or never filled. Load it without "
        cost += "device_map, or fill it with `model.to_empty(device=...)` and a checkpoint."
        say = likely if len(meta) == len(weights) else certain
        yield say("weights on the meta device", fewer_names(model, meta), cost)
    lazy = [name for name, each in weights.items() if isinstance(each, nn.parameter.UninitializedTensorMixin)]
    if lazy:
        yield note("lazy weights, which get their shape from the first batch", lazy)


def _scales(model, optimizers, scaler):
    """What a GradScaler, or another loss scaler with a `cur_scale`, is about to do."""
    if not is_on(scaler):
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
    if any(weight.dtype == BF16 and weight.requires_grad for weight in model.parameters()):
        cost = "bf16 needs no scale; on CUDA, unscaling is 'not implemented for BFloat16' in some versions. "
        cost += "Cast what trains to float32, or train in bf16 without a scaler."
        yield likely("a GradScaler over bf16 weights", "", cost)
    steps = any(any(one.state.values()) for one in optimizers)
    if steps and scale == 65536 and hasattr(scaler, "state_dict") and scaler.state_dict()["_growth_tracker"] == 0:
        what = "the optimizer has taken steps before, the scaler counts none: its scale is 65,536"
        cost = "After a resume, scaler.load_state_dict was left out. The first steps are skipped, until the scale fits."
        yield likely(what, "", cost, "Training changes after a resume")


def _masters(model, optimizers, scaler):
    """16-bit weights that train, and whether someone keeps them in FP32."""
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    low = {name: weight for name, weight in trained.items() if weight.dtype in SIXTEEN and not weight.is_meta}
    if not low:
        return
    if kept := who_keeps_masters(low.values(), optimizers):
        yield note(f"16-bit weights, {kept}")
    else:
        half_a_step = 2.0**-9 if any(weight.dtype == BF16 for weight in low.values()) else 2.0**-12
        decays = [float(group["lr"] * group.get("weight_decay", 0)) for group in groups_of(optimizers) if "lr" in group]
        decay = max([each for each in decays if each < half_a_step], default=0)
        cost = f"An update below {half_a_step:.2g} of its weight is rounded away"
        cost += f", and weight decay (lr * weight_decay = {decay:.2g})" if decay else ""
        foreign = any(not type(one).__module__.startswith("torch.") and not one.state for one in optimizers)
        cost += f"{', if this optimizer keeps none' if foreign else ''}. Load or cast what trains as FP32."
        what = f"16-bit weights that train, without FP32 masters: {count_by_dtype(low.values())}"
        sharded = any(hasattr(module, "_get_fsdp_state") for module in model.modules())
        case = "Weights do not change with FSDP2" if sharded else "Weights do not change in 16 bits"
        evaluated = not optimizers and not model.training  # as an average's copy
        yield (note if foreign or evaluated else likely)(what, fewer_names(model, low), cost, case)
    fp16 = [name for name, weight in low.items() if weight.dtype == FP16]
    if fp16 and is_on(scaler):
        fused = any(group.get("fused") for group in groups_of(optimizers))
        case, by = "Attempting to unscale FP16 gradients", "unscale_" if fused else "scaler.step"
        cost = f"`{by}` raises '{case}.' Train FP32 weights; autocast makes the fp16."
        say = likely if fused or not optimizers else certain
        yield say("a GradScaler over trained fp16 weights", fewer_names(model, fp16), cost, case)


def who_keeps_masters(low, optimizers):
    """Who keeps trained 16-bit weights in FP32, in words; "" if nobody is seen to."""
    low, held = list(low), held_by(optimizers)
    if held and not set(map(id, held)) & set(map(id, low)):
        return "FP32 masters in the optimizer" if any(weight.dtype == FP32 for weight in held) else ""
    if any(getattr(one, "bf16_stochastic_round", False) for one in optimizers):
        return "rounded stochastically"
    kept = [local(each) for one in optimizers for each in tensors_in([*vars(one).values()], 6) if each.dtype == FP32]
    some_low = [local(weight) for weight in low if weight.dim() > 1 and local(weight).any()][:8]
    same = [
        any(each.shape == weight.shape and torch.equal(weight, each.to(weight.dtype)) for each in kept)
        for weight in some_low
    ]
    return "and the optimizer keeps FP32 copies" if same and all(same) else ""


def states_of(model, optimizers, scaler):
    """What 16 bits and odd settings do to an optimizer's states and constants."""
    kept = [(key, each) for one in optimizers for state in one.state.values() for key, each in state.items()]
    if spoilt := {str(key) for key, each in kept if bad_kind(tensors_in(each))}:
        yield certain("states of the optimizer that are not finite", sorted(spoilt), "They stay so.")
    for one, group in [(each, group) for each in optimizers for group in each.param_groups]:
        name, states = type(one).__name__, [one.state.get(weight, {}) for weight in group["params"]]
        squares = [state["exp_avg_sq"] for state in states if "exp_avg_sq" in state]
        eps, beta = group.get("eps", 1), group.get("betas", (0, 0))[-1]
        fp16 = any(weight.dtype == FP16 for weight in group["params"]) and all(each.dtype == FP16 for each in squares)
        if fp16 and 0 < eps <= ZERO and not group.get("fused"):
            cost = "Where the second moment is 0 too, the step divides by 0: inf or NaN. FP32 weights, or eps=1e-4."
            yield certain(f"{name}'s eps = {eps:g} is 0 in fp16", "", cost, "Weights are NaN after one step of Adam")
        masters = [pair for state in states for pair in state.items() if re.search("master|fp32", str(pair[0]))]
        if low := {str(key) for key, kept in masters if any(each.dtype in SIXTEEN for each in tensors_in(kept))}:
            cost = "Updates are rounded away. Optimizer.load_state_dict casts states to their weights' dtype."
            yield certain(f"{name}'s masters are in 16 bits", sorted(low), cost, "Weights do not change in 16 bits")
        counts = [each for state in states for each in tensors_in(state.get("step")) if each.dtype in SIXTEEN]
        if counts:
            count, last = max(counts), 2 / torch.finfo(counts[0].dtype).eps
            what = f"{name}'s step counter, {count:g}, is {short(counts[0].dtype)}, which stops at {last:,.0f}"
            cost = "Schedules by it stand still, as after a checkpoint in 16 bits. Keep it in FP32."
            yield (certain if count + 1 == count else likely)(what, "step", cost)
        if 0 < 1 - beta < 2.0**-8 and any(each.dtype == BF16 for each in squares):
            cost = f"A decay by {beta:g} is less than half a step of bf16: it never falls. Keep it in FP32."
            yield likely(f"{name}'s second moment in bf16", "exp_avg_sq", cost)
        rate = float(group.get("lr", 1))
        if rate == 0 or not math.isfinite(rate):
            yield (certain if rate else note)(f"a learning rate of {rate:g}", name)


def _training(model, optimizers, scaler):
    """What trains, and what the optimizer holds."""
    weights, held = dict(model.named_parameters()), held_by(optimizers)
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    ids = set(map(id, held))
    missing = [name for name, weight in trained.items() if id(weight) not in ids]
    if held and len(missing) == len(trained) > 0:
        lazy = any(isinstance(each, nn.parameter.UninitializedTensorMixin) for each in [*held, *trained.values()])
        shapes = {"lazy"} if lazy else {tuple(weight.shape) for weight in held}
        own = set() if lazy else {tuple(weight.shape) for weight in trained.values()}
        if own and own <= shapes and not any(weight.dtype in SIXTEEN for weight in trained.values()):
            cost = "The model was built again, moved or wrapped after it: `step` changes other weights."
            yield likely("the optimizer holds none of the model's weights", "", cost, "No inf checks were recorded")
        else:
            yield note("the optimizer holds none of this model's weights, but others")
    elif held and missing:
        cost = "They stand still unless another optimizer has them."
        yield note("trainable weights that the optimizer lacks", fewer_names(model, missing), cost)
    if frozen := [name for name in weights if name not in trained]:
        count = count_by_dtype(weights[name] for name in frozen)
        words = f"frozen {count}; trained {count_by_dtype(trained.values()) or 'nothing'}"
        yield note(words, fewer_names(model, frozen))


def _modules(model, optimizers, scaler):
    """Positions, statistics and small constants in 16 bits."""
    fp16 = {name: part for name, part in model.named_modules() if any(w.dtype == FP16 for w in part.parameters(False))}
    eps = {name: getattr(part, "eps", None) or 1 for name, part in fp16.items()}
    if small := [f"{name}.eps = {value:g}" for name, value in eps.items() if value <= ZERO]:
        yield likely("an eps that is 0 in fp16", small, "It guards no division.", "Normalized vectors are NaN in fp16")
    low = {name: buffer for name, buffer in model.named_buffers() if buffer.dtype in SIXTEEN}
    if places := [name for name in low if re.search("inv_freq|freqs", name)]:
        cost = "Angles of far positions are off by 1 or more, from about 512 on in bf16. Keep them in float32."
        yield note("rotary frequencies in 16 bits", places, cost)
    far = {
        name for name, each in low.items() for one in readable([each]) if largest(one) > 2 / torch.finfo(one.dtype).eps
    }
    if places := [name for name in low if re.search("position|rotary", name) and name in far]:
        cost = "bf16 counts to 256 and fp16 to 2048 in steps of 1: later positions fall together."
        yield likely("positions in 16 bits", places, cost)
    if running := [name for name in low if "running_" in name]:
        say = likely if model.training else note
        yield say("running statistics in 16 bits", running, "In training they stop moving near their value.")


def _sharding(model, optimizers, scaler):
    """The policies of FSDP2, which casts whole modules, and DDP's hooks that cast gradients."""
    for name, module in model.named_modules():
        policy = vars(module._get_fsdp_state())["_mp_policy"] if hasattr(module, "_get_fsdp_state") else None
        if policy is None or policy.param_dtype is None:
            continue
        words = f"param_dtype {short(policy.param_dtype)}, reduce_dtype {short(policy.reduce_dtype)}"
        own = {each.dtype for each in module.parameters()} if torch.__version__ >= "2.15" else {policy.param_dtype}
        reduced = {policy.reduce_dtype} if policy.reduce_dtype else own
        if policy.param_dtype in SIXTEEN and not reduced.isdisjoint(SIXTEEN):
            yield likely(f"FSDP2 reduces gradients in 16 bits: {words}", [name], "Set reduce_dtype=torch.float32.")
        else:
            yield note(f"FSDP2's policy: {words}", [name])


def _numbers(model, optimizers, scaler):
    """Weights, buffers and gradients that are not finite, or beyond fp16's end."""
    weights = dict(model.named_parameters())
    if spoilt := [name for name, each in weights.items() if bad_kind([each]) in ("nan", "inf")]:
        yield certain("weights that are not finite", spoilt, "Go back to a checkpoint.")
    yield from spoilt_buffers(model)
    wild = [name for name, each in weights.items() if each.grad is not None and bad_kind([each.grad])]
    if wild and not is_on(scaler):
        yield certain("gradients that are not finite", wild, "The next step spoils all.")
    sizes = {name: largest(each) for name, weight in weights.items() for each in readable([weight])}
    over = [f"{name}: {size:,.0f}" for name, size in sizes.items() if LARGEST < size < math.inf]
    if over and is_on(scaler):
        yield likely("weights above 65504", over, "fp16 makes inf of them.", "Convolution gives inf in fp16")


def spoilt_buffers(model):
    named = [(name, each) for name, each in model.named_buffers() if each.dtype in FLOATS]
    if buffers := [name for name, each in named if bad_kind([each]) in ("nan", "inf")]:  # -inf is a mask's
        cost = "Evaluation uses them, and training does not. A skipped step does not undo them, nor does fp16 hold all."
        yield certain("buffers that are not finite", buffers, cost, "Loss is NaN only in evaluation")


def _switches(model, optimizers, scaler):
    """Autocast around this call; on CUDA, TF32 by the old switches and the new, units and sizes."""
    device, matmul = device_of(model), torch.backends.cuda.matmul
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        cost = "A region that spans steps keeps its cast copies of the weights: forward does not see their changes."
        yield likely("autocast is on around this call", "", cost, "Loss stays the same in every step")
    if device.type != "cuda":
        return
    words = f"TF32: products {matmul.fp32_precision}, convolutions {torch.backends.cudnn.conv.fp32_precision}"
    try:
        _ = matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    except RuntimeError:
        cost = "Whoever reads allow_tf32 gets a RuntimeError. Use one kind of switch for all."
        yield likely(f"old and new TF32 switches are mixed: {words}", "", cost)
    low = {weight.dtype for weight in model.parameters()} & {BF16}
    slow = low and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0)
    tables = {f"{name}.weight" for name, part in model.named_modules() if isinstance(part, nn.Embedding)}
    weights = [(name, weight) for name, weight in model.named_parameters() if weight.dim() > 1 and name not in tables]
    sizes = {name: tuple(weight.shape[:2]) for name, weight in weights}
    odd = [f"{name} {size}" for name, size in sizes.items() if 1 not in size and any(one % 8 for one in size)]
    words += "; no bfloat16 units" if slow else ""
    words += f"; not multiples of 8, which Tensor Cores want: {some(odd, 2)}" if odd else ""
    yield note(words, "", "", "Step is slower in 16 bits" if slow or odd else "")


def _inventory(model, optimizers, scaler):
    """The dtypes of everything."""
    states = [each for one in optimizers for state in one.state.values() for each in tensors_in(state) if each.dim()]
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    parts = {"weights": model.parameters(), "buffers": model.buffers(), "states": states, "gradients": gradients}
    counts = {what: count_by_dtype(tensors) for what, tensors in parts.items()}
    yield note("; ".join(f"{what}: {words}" for what, words in counts.items() if words) or "no weights")


PARTS = _places, _scales, _masters, states_of, _training, _modules, _sharding, _numbers, _switches, _inventory


def audit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer] | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Report:
    """Look at a model, its optimizer (or several, in a list) and its scaler as they are; no step is needed.

    Returns a Report: printed, the verdict first; `.findings` is a DataFrame of what was found, where, how severe it is
    (see `Finding`), what it costs, and the clinic's case that mends it. Under FSDP2 it tells of this process's shards.
    Raises TypeError for what is no model, optimizer or scaler.

    Examples
    --------
    >>> model = torch.nn.Linear(8, 8).half()
    >>> report = audit(model, torch.optim.Adam(model.parameters()), torch.amp.GradScaler("cpu"))
    >>> report.findings.query("severity == 'certain'")["case"].tolist()
    ['Attempting to unscale FP16 gradients', 'Weights are NaN after one step of Adam']
    """
    optimizers, scaler = check_given(model, optimizer, scaler)
    found, stopped = [], []
    with torch.no_grad():
        for part in PARTS:
            try:
                found += part(plain(model), optimizers, scaler)
            except Exception as error:  # an unusual kind of model: the others still look
                stopped.append(f"{part.__name__.strip('_')} ({type(error).__name__}: {error})")
    return Report(found, stopped=f"audit could not look at: {', '.join(stopped)}." if stopped else "")
