"""Checks of notebook 10, libraries."""

import math

import torch

from helpers.check.replies import says

_OLD_FLAGS = [
    ({"precision": 16, "max_epochs": 3}, {"precision": "16-mixed", "max_epochs": 3}),
    ({"gpus": 2, "distributed_backend": "ddp"}, {"accelerator": "gpu", "devices": 2, "strategy": "ddp"}),
    ({"gpus": 0, "nb_gpu_nodes": 1}, {"accelerator": "cpu", "num_nodes": 1}),
    ({"use_amp": True, "amp_level": "O1", "amp_backend": "apex"}, {"precision": "16-mixed"}),
    ({"use_amp": False, "gradient_clip_val": 0.5}, {"gradient_clip_val": 0.5}),
    ({"precision": 16, "amp_level": "O3"}, {"precision": "16-true"}),
    ({"precision": 16, "amp_level": "O0", "gpus": None}, {"precision": "32-true", "accelerator": "cpu"}),
]


@says
def translate(answer):
    """`answer(old)` are the arguments of today's Trainer for a dict of old flags."""
    for old, right in _OLD_FLAGS:
        given = answer(dict(old))
        for flag in right | dict(given):
            if given.get(flag) != right.get(flag):
                fault = f"should be {right[flag]!r}" if flag in right else "does not belong there"
                return f"from {old} you make {given}: {flag} {fault}"
    return None


@says
def unscale_and_clip(answer):
    """`answer(gradients, scale, max_norm)` are the gradients unscaled, then clipped by their global norm."""
    exact = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]]), torch.zeros(2)]
    for scale, max_norm in [(1024.0, 1.0), (65536.0, 100.0)]:
        given = answer([gradient * scale for gradient in exact], scale, max_norm)
        replies = {
            scale * min(1.0, max_norm / 5): "they are still scaled",
            min(1.0, max_norm / 5 / scale): "you clip first: the norm is then that of the scaled gradients",
            1.0: "nothing is clipped: the norm of all together is 5",
            max_norm / 5: "a norm below max_norm should be left as it is",
            min(1.0, max_norm / 5): None,
        }
        wrong = "not all have the same factor. One norm, of all together, gives one factor for all"
        for factor, reply in replies.items():
            if all(torch.allclose(mine, factor * right, rtol=1e-4, atol=0) for mine, right in zip(given, exact)):
                wrong = reply
        if wrong or len(given) != 3:
            return f"gradients [3, 0], [[4]] and [0, 0], times {scale:g}; max_norm {max_norm:g}: {wrong}"
    return None


@says
def optimizer_steps(answer):
    """`answer(images, batch, k, epochs)` are the steps when every epoch ends with one."""
    for images, batch, k, epochs in [(1797, 64, 1, 1), (1792, 64, 4, 2), (1797, 64, 3, 4), (5, 8, 4, 3)]:
        given, batches = answer(images, batch, k, epochs), math.ceil(images / batch)
        right = math.ceil(batches / k) * epochs
        case = f"{images} images in batches of {batch}, k={k}, {epochs} epochs: {right} steps, and you say {given}"
        if given == right:
            continue
        if given in (images // batch // k * epochs, batches // k * epochs):
            return f"{case}. What is left over counts too: round up"
        early = given == math.ceil(batches * epochs / k)
        return f"{case}. Every epoch ends with a step: round up before you multiply" if early else case
