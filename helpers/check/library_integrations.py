"""Exercises of the notebook on libraries."""

import math

import torch

from helpers.check.exercise import called, exercise


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
        "gpus=2 is accelerator='gpu' and devices=2.": ('"accelerator": "gpu", ', ""),
        "Without a GPU the accelerator is 'cpu', with no devices.": (' if gpus else {"accelerator": "cpu"}', ""),
        "use_amp=True asks for '16-mixed'.": ('new.pop("use_amp", False) or ', ""),
        "amp_level says which precision, and goes.": ('new.pop("amp_level", "O1")', '"O1"'),
        "amp_level goes, but 'O0' is '32-true' and 'O3' is '16-true'.": ('{"O0": "32-true", "O3": "16-true"}', "{}"),
    },
    observe=lambda answer, old: str(dict(sorted(called(answer, old).items()))),
)
def translate(old):
    """`translate(old)` are the arguments of today's Trainer for a dict of old flags."""
    names = {"nb_gpu_nodes": "num_nodes", "distributed_backend": "strategy"}
    new = {names.get(flag, flag): value for flag, value in old.items()}
    half = new.pop("use_amp", False) or new.get("precision") == 16
    levels = {"O0": "32-true", "O3": "16-true"}
    precision = levels.get(new.pop("amp_level", "O1"), "16-mixed")
    new.pop("amp_backend", None)
    if half:
        new["precision"] = precision
    if "gpus" in new:
        gpus = new.pop("gpus")
        new |= {"accelerator": "gpu", "devices": gpus} if gpus else {"accelerator": "cpu"}
    return new


@exercise(
    cases=[(1797, 64, 1, 1), (1792, 64, 4, 2), (1797, 64, 3, 4), (5, 8, 4, 3)],
    mistakes={
        "What is left over counts too: round up.": ("math.ceil(images / batch)", "images // batch"),
        "The last group of batches is smaller, and counts too: round up.": ("math.ceil(batches / k)", "batches // k"),
        "Every epoch ends with a step: round up, then multiply.": ("batches / k) * epochs", "batches * epochs / k)"),
    },
    show=lambda images, batch, k, epochs: f"{images} images in batches of {batch}, k={k} and {epochs} epochs",
)
def optimizer_steps(images, batch, k, epochs):
    """`optimizer_steps(images, batch, k, epochs)` are the steps when every epoch ends with one."""
    batches = math.ceil(images / batch)
    return math.ceil(batches / k) * epochs


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
        "A loss_scale that is not 0 is the scale.": ('fp16.get("loss_scale") or ', ""),
        "A dynamic scale begins at 2**initial_scale_power.": ('fp16.get("initial_scale_power", 16)', "16"),
        "A block that is not enabled says nothing.": ('if fp16.get("enabled")', "if fp16"),
        "torch_autocast leaves the weights in float32.": ('["autocast"] = ', '["autocast"] = answer["weights"] = '),
        "Only fp16 needs a scale: elsewhere it is 1.": ('"scale": 1', '"scale": 65536'),
    },
)
def in_torch(config):
    """`in_torch(config)` says of a DeepSpeed configuration: the dtypes of weights and autocast, and the first scale."""
    fp16, bf16, cast = (config.get(name, {}) for name in ("fp16", "bf16", "torch_autocast"))
    answer = {"weights": torch.float32, "autocast": None, "scale": 1}
    if fp16.get("enabled"):
        answer["weights"] = torch.float16
        answer["scale"] = fp16.get("loss_scale") or 2 ** fp16.get("initial_scale_power", 16)
    elif bf16.get("enabled"):
        answer["weights"] = torch.bfloat16
    elif cast.get("enabled"):
        answer["autocast"] = getattr(torch, cast["dtype"])
        answer["scale"] = 65536 if answer["autocast"] == torch.float16 else 1
    return answer
