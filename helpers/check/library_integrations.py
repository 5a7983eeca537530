"""Exercises of the notebook on libraries."""

import math

import torch

from helpers.check.exercise import exercise


def _trained(loaded, precision):
    """What Lightning's word makes of a run."""
    name, kind = precision.split("-")
    short = torch.bfloat16 if name == "bf16" else torch.float16
    weights = loaded if kind == "mixed" else short
    scaler = precision == "16-mixed"
    return {"weights": weights, "product": short, "scaler": scaler, "bytes": 4 * weights.itemsize}


def _but(**wrong):
    """The right answer, with each entry of `wrong` computed by its function of the arguments."""
    return lambda *asked: _trained(*asked) | {name: rule(*asked) for name, rule in wrong.items()}


@exercise(
    cases=[
        (torch.float32, "bf16-mixed"),
        (torch.float32, "16-mixed"),
        (torch.float32, "bf16-true"),
        (torch.float32, "16-true"),
        (torch.bfloat16, "bf16-mixed"),
        (torch.bfloat16, "16-true"),
    ],
    mistakes={
        "Mixed leaves the weights as they came; autocast casts in each product.": _but(
            weights=lambda loaded, precision: _trained(loaded, precision)["product"],
            bytes=lambda loaded, precision: 8,
        ),
        "Mixed makes no float32 masters of weights that came in 16 bits.": _but(
            weights=lambda loaded, precision: (
                torch.float32 if precision.endswith("mixed") else _trained(loaded, precision)["weights"]
            ),
            bytes=lambda loaded, precision: 16 if precision.endswith("mixed") else 8,
        ),
        "True casts the weights.": _but(weights=lambda loaded, precision: loaded),
        "Under autocast a linear layer multiplies in 16 bits, whatever the weights are.": _but(
            product=lambda loaded, precision: _trained(loaded, precision)["weights"]
        ),
        "bf16 needs no scaler: it has float32's range.": _but(scaler=lambda _, precision: "mixed" in precision),
        "A word with true brings no scaler.": _but(scaler=lambda _, precision: not precision.startswith("bf16")),
        "Gradients and moments have the weights' dtype: count four numbers of it.": _but(bytes=lambda *_: 16),
        "Weight, gradient and two moments are four numbers.": _but(
            bytes=lambda loaded, precision: 3 * _trained(loaded, precision)["weights"].itemsize
        ),
    },
    show=lambda loaded, precision: f'weights in {loaded} and precision="{precision}"',
)
def trained(loaded, precision):
    """`trained(loaded, precision)` says of a run: dtypes of weights and products, the scaler, the bytes of a weight."""
    return _trained(loaded, precision)


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
