"""Small questions to tensors, models and optimizers. None of them changes what it is asked about."""

import math
from collections import Counter, deque
from dataclasses import fields, is_dataclass

import torch
from torch import nn

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
SIXTEEN = (FP16, BF16)
FLOATS = (*SIXTEEN, FP32, torch.float64)
EIGHT = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
LARGEST = torch.finfo(FP16).max  # 65504
ZERO = 2.0**-25  # from here down, numbers are 0 in fp16
ORDINARY = (torch.Tensor, nn.Parameter, nn.Buffer)


def short(dtype):
    return str(dtype).removeprefix("torch.")


def as_list(value):
    if value is None:
        return []
    return list(value) if isinstance(value, (tuple, list)) else [value]


def plain(model):
    """The model inside the wrappers of torch.compile, DistributedDataParallel and DataParallel."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = getattr(model, "_orig_mod", model)
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        else:
            return model


def is_compiled(module):
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def device_of(model):
    return next((weight.device for weight in model.parameters()), torch.device("cpu"))


def child(parent, name):
    return f"{parent}.{name}" if parent else name


def module_of(weight):
    """The name of the module that a weight's name begins with."""
    return weight.rpartition(".")[0]


def groups_of(optimizers):
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def held_by(optimizers):
    return [weight for group in groups_of(optimizers) for weight in group["params"]]


def ids_held_by(optimizers):
    return set(map(id, held_by(optimizers)))


def is_on(scaler):
    """Whether a loss scaler works; one that cannot say so, as DeepSpeed's, does."""
    return scaler is not None and (not hasattr(scaler, "is_enabled") or scaler.is_enabled())


def local(tensor):
    """The numbers that this process holds: of a DTensor, its own shard."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def has_numbers(tensor):
    """Whether its numbers can be read: not those of lazy, meta, fake, sparse, nested, complex or vmapped tensors."""
    return is_dense(tensor) and tensor.dtype in FLOATS


def is_dense(tensor):
    """The same for numbers of any kind, whole ones too."""
    if type(tensor) not in ORDINARY or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return False
    return tensor.numel() > 0 and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def readable(tensors):
    """Those whose numbers can be read here, each as a plain tensor."""
    found = []
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, nn.parameter.UninitializedTensorMixin):
            tensor = local(tensor) if hasattr(tensor, "to_local") else tensor
            if has_numbers(tensor):
                found.append(tensor.detach())
    return found


def tensors_in(value, depth=4):
    """All tensors in nested tuples, lists, dicts and dataclasses, of any dtype."""
    if isinstance(value, torch.Tensor):
        return [value]
    if depth == 0:
        return []
    inner = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, (tuple, list)):
        inner = value
    elif is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name) for field in fields(value)]
    return [tensor for each in inner for tensor in tensors_in(each, depth - 1)]


def ends(tensor):
    """Its smallest and largest number, as a tensor of shape (2,); both NaN if one is. It does not wait for a GPU."""
    low, high = torch.aminmax(tensor.detach())
    return torch.stack([wide(low), wide(high)])


def nodes_from(root, most, ends=lambda node: False):
    """The nodes of a graph of autograd, from a loss on, without those that `ends` and what is behind them."""
    waiting, known = deque([root]), {root}
    while waiting and most:
        node = waiting.popleft()
        yield node
        most -= 1
        for after, _ in node.next_functions:
            if after is not None and after not in known and not ends(after):
                known.add(after)
                waiting.append(after)


def saved(node, name):
    """What a node of autograd kept under a name; None if nothing, or if a backward has freed it."""
    try:
        return getattr(node, name, None)
    except RuntimeError:
        return None


def wide(tensor):
    """The same numbers in float32, or in float64 if they are."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(FP32)


def kind_of(low, high):
    """ "nan", "inf", "-inf", or "" where all numbers between the ends are finite."""
    if math.isnan(low) or math.isnan(high):
        return "nan"
    if high == math.inf:
        return "inf"
    return "-inf" if low == -math.inf else ""


def is_finite(tensor):
    """Whether all its numbers are finite. It waits for a GPU."""
    low, high = torch.aminmax(tensor)
    return math.isfinite(low) and math.isfinite(high)


def bad_kind(tensors):
    """The worst of what is not finite among the tensors. It waits for a GPU."""
    kinds = {kind_of(*ends(tensor).tolist()) for tensor in readable(tensors) if not is_finite(tensor)}
    return next((kind for kind in ("nan", "inf", "-inf") if kind in kinds), "")


def largest(tensor):
    low, high = ends(tensor).tolist()
    return max(-low, high)


def sample(tensor, most=1024):
    """Up to `most` of its numbers, evenly spread, as copies in float32 or float64."""
    values = tensor.detach().reshape(-1)
    step = max(1, values.numel() // most)
    return wide(values[::step]).clone()


def spacing(size, dtype):
    """How far apart the neighbours of a number are."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(size)) if size > 0 else 0.0


def count_by_dtype(tensors):
    """ "4,810 float32, 64 float16": how many numbers of each dtype."""
    counts = Counter()
    for tensor in tensors:
        if not isinstance(tensor, nn.parameter.UninitializedTensorMixin):
            counts[short(tensor.dtype)] += tensor.numel()
    return ", ".join(f"{count:,} {dtype}" for dtype, count in counts.most_common())


def fewer_names(model, names):
    """The same weights in fewer words: modules all of whose weights are among the names, then the weights left."""
    left, whole = set(names), []
    for name, module in model.named_modules():
        inside = {child(name, weight) for weight, _ in module.named_parameters()}
        if inside and inside <= left:
            whole.append(name or "all weights")
            left -= inside
    return whole + [name for name in names if name in left]
