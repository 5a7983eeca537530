"""Typical wrong answers to the exercises of notebook 10 get a reply that fits them."""

import math

import pytest
import torch

from helpers import check


def renamed(old, names, **fixed):
    return {names.get(flag, flag): fixed.get(flag, value) for flag, value in old.items()}


def clipped(gradients, max_norm):
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))
    return [gradient * min(1.0, max_norm / norm) for gradient in gradients]


def unscaled(gradients, scale):
    return [gradient / scale for gradient in gradients]


@pytest.mark.parametrize(
    ("name", "answer", "reply"),
    [
        ("translate", lambda old: old, "precision should be '16-mixed'"),
        (
            "translate",
            lambda old: renamed(old, {"gpus": "devices", "distributed_backend": "strategy"}, precision="16-mixed"),
            "accelerator should be 'gpu'",
        ),
        (
            "unscale_and_clip",
            lambda gradients, scale, max_norm: unscaled(clipped(gradients, max_norm), scale),
            "you clip first",
        ),
        (
            "unscale_and_clip",
            lambda gradients, scale, max_norm: (
                [clipped([g], max_norm)[0] for g in unscaled(gradients, scale) if g.any()] + [torch.zeros(2)]
            ),
            "One norm, of all together",
        ),
        ("unscale_and_clip", lambda gradients, scale, max_norm: clipped(gradients, max_norm * scale), "still scaled"),
        ("unscale_and_clip", lambda gradients, scale, max_norm: unscaled(gradients, scale), "nothing is clipped"),
        (
            "unscale_and_clip",
            lambda gradients, scale, max_norm: [g / scale * max_norm / 5 for g in gradients],
            "left as it is",
        ),
        ("optimizer_steps", lambda images, batch, k, epochs: images // batch // k * epochs, "round up"),
        (
            "optimizer_steps",
            lambda images, batch, k, epochs: math.ceil(math.ceil(images / batch) * epochs / k),
            "before you multiply",
        ),
    ],
)
def test_wrong_answer_gets_a_reply_that_fits(name, answer, reply, capsys):
    getattr(check, name)(answer)
    said = capsys.readouterr().out
    assert said.startswith("Not right yet: ") and reply in said
