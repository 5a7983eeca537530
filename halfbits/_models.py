"""The model that a command line names: timm:NAME, hf:PATH of a config, or module:function."""

import importlib
import logging
import os
import re
import sys
from collections.abc import Callable
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch

from halfbits._fake import made_on_meta

KINDS = "timm:NAME, hf:PATH of a folder with a config.json, or module:function"


class _Model(NamedTuple):
    """`build` makes the model. `inputs(shape)` makes what it is called with, `loss` a scalar of what it returns.

    `shape` is that of one image where it is known; () where the function makes the inputs too.
    """

    build: Callable
    inputs: Callable
    loss: Callable | None
    shape: tuple | None


def find_model(name: str) -> _Model:
    """The model of that name. Raises ValueError in one sentence where there is none."""
    kind, _, rest = name.partition(":")
    if not rest:
        raise ValueError(f"{name!r} names no model: it is {KINDS}")
    if kind == "timm":
        return _of_timm(rest)
    if kind == "hf":
        return _of_transformers(rest)
    return _of_a_function(kind, rest)


def _needs(package, prefix):
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ValueError(f"{prefix}: needs the package {package}: install it, or name module:function") from None


def _images(shape):
    return torch.ones(shape)


def _tokens(shape):
    return dict.fromkeys(["input_ids", "labels"], torch.zeros(shape, dtype=torch.long))


def _of_timm(name):
    timm = _needs("timm", "timm")
    if not timm.is_model(name):
        like = get_close_matches(name, timm.list_models(), 3)
        near = f", near it are {', '.join(like)}" if like else ""
        raise ValueError(f"timm has no model {name!r}{near}; timm.list_models() lists all")
    size = timm.get_pretrained_cfg(name)
    shape = (1, *(size.input_size if size else (3, 224, 224)))
    return _Model(lambda: timm.create_model(name), _images, None, shape)


def _of_transformers(path):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the config is here, and nothing else is needed
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # warns of torchao's classes
    transformers = _needs("transformers", "hf")
    transformers.logging.set_verbosity_error()
    folder = Path(path).expanduser()
    if not folder.exists():
        raise ValueError(f"{path} does not exist: give a folder with a config.json, or that file itself")
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        said = str(error).strip().partition("\n")[0]
        raise ValueError(f"{path} holds no configuration of a model ({said})") from None
    if getattr(config, "quantization_config", None):
        raise ValueError(f"{path} is quantized, which is not predicted: remove its quantization_config, and see FP32")
    config.use_cache = False
    architecture = (getattr(config, "architectures", None) or [""])[0]
    if architecture and not re.search("CausalLM|LMHead|MaskedLM|ConditionalGeneration", architecture):
        raise ValueError(
            f"{architecture} has no loss over tokens: name a module:function that returns model and inputs"
        )
    if hasattr(transformers, architecture):
        make = getattr(transformers, architecture)
    else:
        make = transformers.AutoModelForCausalLM.from_config
    return _Model(lambda: make(config).train(), _tokens, attrgetter("loss"), None)


def _of_a_function(module, function):
    sys.path.insert(0, str(Path.cwd()))  # as python -m does
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{module} cannot be imported from this folder ({error}): name {KINDS}") from None
    make = getattr(found, function, None)
    if not callable(make):
        raise ValueError(f"{module} has no function {function!r} that makes a model")
    if isinstance(made_on_meta(make), tuple):
        return _Model(lambda: make()[0], lambda shape: make()[1], None, ())
    return _Model(make, _images, None, None)
