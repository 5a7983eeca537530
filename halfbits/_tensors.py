"""Small questions to tensors, models, optimizers and processes."""

import gc
import math
import re
import sys
import weakref
from collections import Counter
from dataclasses import fields, is_dataclass

import torch
import torch.distributed as dist
from torch import nn

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
LARGEST = torch.finfo(FP16).max  # 65504
ZERO = 2.0**-25  # from here down, numbers are 0 in fp16
SIXTEEN = (FP16, BF16)
FLOATS, WHOLE = (*SIXTEEN, FP32, torch.float64), (torch.int64, torch.int32)
SAMPLE = 1024  # values of a tensor from which shares are estimated
AUTOCAST = weakref.WeakKeyDictionary()  # of a model that was watched: the dtype of its autocast, None if it was not on


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
