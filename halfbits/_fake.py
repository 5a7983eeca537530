"""Models run on fake tensors, which have a shape, a dtype and a device, but no memory and no values."""

import contextlib
import logging
import os
import re
import sys
import traceback
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

# Not the user's model: torch, this package, and what runs a context manager as a decorator.
_NOT_THE_MODEL = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parent}{os.sep}", contextlib.__file__)


class Autocast(torch.autocast):
    """Autocast for a device that may be missing, where torch.autocast would switch itself off."""

    def __init__(self, device_type, dtype=None, enabled=True, cache_enabled=None):
        super().__init__(device_type, dtype, enabled=False, cache_enabled=cache_enabled)
        self._enabled = enabled


def made_on_meta(make):
    """What `make()` returns, made on the meta device, without memory; for real where it asks for values."""
    with suppress(Exception), torch.device("meta"):
        return make()
    return make()


def on_device(tensor, device_type, fake, dtype=None):
    """A copy of a tensor or parameter on a device; if `fake`, within FakeTensorMode, one without memory, of `dtype`."""
    if fake:
        dtype = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        copied = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=device_type)
    else:
        copied = tensor.detach().to(device_type, copy=True)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copied, tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def tensors_of(model):
    """The tensors of a module and of those in it, each once: parameters, buffers and plain attributes."""
    leaves = tree_leaves([value for module in model.modules() for value in vars(module).values()])
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())


# What torch says where fake tensors do not do, as a regular expression, and what it means.
_REFUSALS = {
    r"DataDependent|DynamicOutputShape|\.numpy\(\)": (
        "asks for values{place}, as .item(), an if or a mask as an index does, and fake tensors have none: {values}"
    ),
    r"FakeTensors first|same device|expected device|weight type \(torch.FloatTensor\)|(two|different) devices": (
        "uses tensors from outside or on another device{place}: pass every module and tensor as an argument, make "
        "them attributes of a module, and make new ones on that device"
    ),
    "hasPrimaryContext|unpack_hook|does not require grad": (
        "runs backward itself, or an op that does{place}; only a forward pass can be traced"
    ),
    "fake impl|cannot pickle|ScriptObject": "cannot be copied or run without values by this torch{place}",
    "no NVIDIA driver|not compiled with CUDA": "asks the GPU itself{place}, and there is none",
    "invalid for this instance": "has an autograd.Function in Python, for which this torch is too old",  # 2.11 is
    "set the storage of a tensor": (
        "has a tensor or a generator within an object of its own; make it an attribute of a module"
    ),
    "indices.*(scalar type|long or int)": (
        "takes whole numbers (nn.Embedding?), and was given others{place}; a prediction's inputs may be a function"
    ),
    "^(RuntimeError|IndexError).*(shape|size|dim|channels|elements)": (
        "meets sizes that do not fit together{place}; give it inputs of the shape that it takes"
    ),
}


@contextmanager
def in_words(what, values):
    """Say as a ValueError what keeps `what` from being run on fake tensors, where torch speaks of its own insides.

    values: the way on for a model that asks for values.
    """
    try:
        yield
    except (AssertionError, RuntimeError, TypeError, IndexError) as error:
        said = f"{type(error).__name__}: {error}"
        for pattern, words in _REFUSALS.items():
            if re.search(pattern, said):
                words = words.format(place=_place(error), values=values)
                raise ValueError(f"{what} {words} ({said.splitlines()[0]})") from None
        raise


def _place(error):
    """The line of the model's code, outside of torch and of this package, that an error came from; "" for none."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_MODEL)]
    return f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


@contextmanager
def fake_tensors(device_type):
    """Tensors are fake within, torch does not log their errors, and the device answers as if it were there."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with FakeTensorMode(), patch.object(log, "disabled", True), ExitStack() as answers:
        if device_type == "cuda":
            answers.enter_context(KernelsOfCuda())
            if not torch.cuda.is_available():
                of_ampere = patch.object(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
                answers.enter_context(of_ampere)
        answers.enter_context(_FiniteNumbers())
        yield


@contextmanager
def no_packed_sequences():
    """Transformers looks at the tokens' positions: does a row hold several sequences? Fake tensors cannot tell, and it
    would make an attention mask for them, which no real run with one sequence a row makes.
    """
    masking = sys.modules.get("transformers.masking_utils")
    if not hasattr(masking, "find_packed_sequence_indices"):
        yield
        return
    with patch.object(masking, "find_packed_sequence_indices", lambda position_ids: None):
        yield


_RNNS = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
_OF_FINITE_NUMBERS = {"isfinite": True, "isinf": False, "isnan": False}


class _FiniteNumbers(TorchFunctionMode):
    """A model that looks whether its numbers are finite is told that they are, as in a run that is sound."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.__name__ in _OF_FINITE_NUMBERS:
            with _disable_current_modes():
                answer = torch.tensor(_OF_FINITE_NUMBERS[func.__name__])
                result.constant = answer.expand(result.shape)  # what a fake tensor answers an `if` with
        return result


class KernelsOfCuda(TorchFunctionMode):
    """Attention by the kernel that CUDA would take. Without a GPU, torch finds none that supports a fused kernel.

    RNNs run without cuDNN, which asks for the device, and whose memory fake tensors do not know.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and (args[0] if args else kwargs["query"]).dim() == 4:
            return _attention(*args, **kwargs)
        if func in _RNNS:
            with torch.backends.cudnn.flags(enabled=False):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    if attn_mask is None and query.dtype != torch.float32:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        return kernel(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa and torch.__version__ < "2.15":  # 2.11 has no other fused kernel for it, 2.15 has
        kernel = scaled_dot_product_attention
        return kernel(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True)
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:-1], key.size(-2))
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale)[0]
