"""Exercises of the notebook on libraries."""

import math

import torch

from helpers.check.exercise import called, exercise


def _translated(old, levels=True, cpu=True, use_amp=True):
    """Today's flags for old ones, right or with a rule left out."""
    new = dict(old)
    half = (new.pop("use_amp", False) and use_amp) or new.get("precision") == 16
    precision = {"O0": "32-true", "O3": "16-true"}.get(new.pop("amp_level", "O1") if levels else "O1", "16-mixed")
    new.pop("amp_backend", None)
    if half:
        new["precision"] = precision
    if "gpus" in new:
        gpus = new.pop("gpus")
        new |= {"accelerator": "gpu", "devices": gpus} if gpus or not cpu else {"accelerator": "cpu"}
    return _renamed(new)


def _renamed(old):
    names = {"nb_gpu_nodes": "num_nodes", "distributed_backend": "strategy", "gpus": "devices"}
    return {names.get(flag, flag): value for flag, value in old.items()}


@exercise(
    cases=[
        ({"precision": 16, "max_epochs": 3},),
        ({"gpus": 2, "distributed_backend": "ddp"},),
        ({"gpus": 0, "nb_gpu_nodes": 1},),
        ({"use_amp": True, "amp_level": "O1", "amp_backend": "apex"},),
        ({"use_amp": False, "gradient_clip_val": 0.5},),
        ({"precision": 16, "amp_level": "O3"},),
        ({"precision": 16, "amp_level": "O0", "gpus": None},),
    ],
    mistakes={
        "precision=16 is spelt '16-mixed' now.": lambda old: old,
        "gpus=2 is accelerator='gpu' and devices=2.": lambda old: _renamed(
            old | {"precision": "16-mixed"} if "precision" in old else old
        ),
        "Without a GPU the accelerator is 'cpu', and there are no devices to count.": lambda old: _translated(
            old, cpu=False
        ),
        "use_amp=True asks for '16-mixed'.": lambda old: _translated(old, use_amp=False),
        "amp_level says which precision, and goes.": lambda old: _translated(old, levels=False),
        "amp_level goes, but 'O0' is '32-true' and 'O3' is '16-true'.": lambda old: _translated(
            {flag: value for flag, value in old.items() if flag != "amp_level"}
        ),
    },
    observe=lambda answer, old: str(dict(sorted(called(answer, old).items()))),
    show=str,
)
def translate(old):
    """`translate(old)` are the arguments of today's Trainer for a dict of old flags."""
    return _translated(old)


@exercise(
    cases=[(1797, 64, 1, 1), (1792, 64, 4, 2), (1797, 64, 3, 4), (5, 8, 4, 3)],
    mistakes={
        "What is left over counts too: round up.": lambda images, batch, k, epochs: images // batch // k * epochs,
        "The last group of batches is smaller, and counts too: round up.": lambda images, batch, k, epochs: (
            math.ceil(images / batch) // k * epochs
        ),
        "Every epoch ends with a step: round up before you multiply.": lambda images, batch, k, epochs: math.ceil(
            math.ceil(images / batch) * epochs / k
        ),
    },
    show=lambda images, batch, k, epochs: f"{images} images in batches of {batch}, k={k} and {epochs} epochs",
)
def optimizer_steps(images, batch, k, epochs):
    """`optimizer_steps(images, batch, k, epochs)` are the steps when every epoch ends with one."""
    return math.ceil(math.ceil(images / batch) / k) * epochs


def _in_torch(config, off=False, fixed=True, power=True, autocast=True):
    """DeepSpeed's blocks in torch's terms, right or with a rule left out."""
    blocks = {name: config.get(name, {}) for name in ("fp16", "bf16", "torch_autocast")}
    on = next((name for name, block in blocks.items() if block.get("enabled", off) or (off and block)), None)
    answer = {"weights": torch.float32, "autocast": None, "scale": 1}
    if on == "fp16":
        dynamic = 2 ** (blocks[on].get("initial_scale_power", 16) if power else 16)
        answer |= {"weights": torch.float16, "scale": (fixed and blocks[on].get("loss_scale", 0)) or dynamic}
    elif on == "bf16":
        answer["weights"] = torch.bfloat16
    elif on:
        answer["autocast"] = getattr(torch, blocks[on]["dtype"])
        answer["scale"] = 65536 if answer["autocast"] == torch.float16 else 1
        answer["weights"] = torch.float32 if autocast else answer["autocast"]
    return answer


@exercise(
    cases=[
        ({},),
        ({"fp16": {"enabled": True, "loss_scale": 0}},),
        ({"fp16": {"enabled": True, "loss_scale": 128}},),
        ({"fp16": {"enabled": True, "initial_scale_power": 12}},),
        ({"fp16": {"enabled": False, "loss_scale": 128}, "bf16": {"enabled": True}},),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}},),
    ],
    mistakes={
        "A loss_scale that is not 0 is the scale.": lambda config: _in_torch(config, fixed=False),
        "A dynamic scale begins at 2 to the power that initial_scale_power says.": lambda config: _in_torch(
            config, power=False
        ),
        "A block that is not enabled says nothing.": lambda config: _in_torch(config, off=True),
        "torch_autocast leaves the weights in float32.": lambda config: _in_torch(config, autocast=False),
        "Only fp16 needs a scale: elsewhere it is 1.": lambda config: _in_torch(config) | {"scale": 65536},
    },
    show=str,
)
def in_torch(config):
    """`in_torch(config)` says of a DeepSpeed configuration: the dtypes of weights and autocast, and the first scale."""
    return _in_torch(config)
