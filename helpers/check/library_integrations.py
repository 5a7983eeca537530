"""Exercises of the notebook on libraries."""

import functools
import math

import torch

from helpers.check.exercise import called, equal, exercise


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


_EXACT = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]]), torch.zeros(2)]  # of norm 5


def _clipped(gradients, max_norm):
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))
    return [gradient * min(1.0, max_norm / norm) for gradient in gradients]


def _unscaled(gradients, scale):
    return [gradient / scale for gradient in gradients]


@exercise(
    cases=[(1024.0, 1.0), (65536.0, 100.0)],
    mistakes={
        "They are still scaled.": lambda gradients, scale, max_norm: _clipped(gradients, max_norm * scale),
        "You clip first: the norm is then that of the scaled gradients.": lambda gradients, scale, max_norm: _unscaled(
            _clipped(gradients, max_norm), scale
        ),
        "Nothing is clipped: the norm of all together is 5.": lambda gradients, scale, max_norm: _unscaled(
            gradients, scale
        ),
        "A norm below max_norm should be left as it is.": lambda gradients, scale, max_norm: (
            [gradient / scale * max_norm / 5 for gradient in gradients]
        ),
        "One norm, of all together, gives one factor for all.": lambda gradients, scale, max_norm: (
            [_clipped([g], max_norm)[0] if g.any() else g for g in _unscaled(gradients, scale)]
        ),
    },
    observe=lambda answer, scale, max_norm: tuple(answer([g * scale for g in _EXACT], scale, max_norm)),
    same=functools.partial(equal, rel=1e-4),
    show=lambda scale, max_norm: f"gradients [3, 0], [[4]] and [0, 0], times {scale:g}, and max_norm {max_norm:g}",
)
def unscale_and_clip(gradients, scale, max_norm):
    """`unscale_and_clip(gradients, scale, max_norm)` are the gradients unscaled, then clipped by their global norm."""
    return _clipped(_unscaled(gradients, scale), max_norm)


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
