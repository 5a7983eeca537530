"""Exercises of the notebook on formats beyond fp16."""

import math

import torch
from torch.nn import functional as F

from helpers.check.exercise import exercise
from helpers.formats import FORMATS


@exercise(
    cases=[
        *((amax, "fp8_e4m3fn") for amax in (448.0, 449.0, 512.0, 0.01, 1e-40)),
        *((amax, "fp4_e2m1fn") for amax in (5.0, 0.4, 0.0, 1e39)),
    ],
    mistakes={
        "The largest numbers are cut off: round the exponent up.": ("exponent += 1", "pass"),
        "A smaller scale keeps more of the small numbers.": ("max(exponent", "max(exponent + 1"),
        "E8M0 holds -127 to 127.": ("min(max(exponent, -127), 127)", "exponent"),
    },
    show=lambda amax, name: f"amax {amax:g} in {name}",
)
def block_exponent(amax, name):
    """`block_exponent(amax, name)` is the smallest exponent of an E8M0 scale that leaves nothing past the end."""
    if amax == 0:
        return -127
    exponent = math.frexp(amax)[1] - math.frexp(FORMATS[name].max)[1]
    if amax > FORMATS[name].max * 2.0**exponent:
        exponent += 1
    return min(max(exponent, -127), 127)


@exercise(
    cases=lambda: [
        (torch.tensor([number], dtype=torch.float16), torch.tensor([noise], dtype=torch.int16))
        for noise in (0, 100, 255)
        for number in (1.0, 1.1, -1.1, 1.24, 3e-6, -40000.0, 57344.0, 65504.0, -60000.0, 0.0)
    ],
    mistakes={
        "That is rounding to nearest.": lambda x, noise: x.clamp(-57344, 57344).to(torch.float8_e5m2).half(),
        "Clamp to 57344 first.": (".clamp(-57344, 57344)", ""),
        "The low byte is still there: cut it off.": (" & -256", ""),
    },
    show=lambda x, noise: f"{x.item():g} with noise {noise.item()}",
)
def to_e5m2(x, noise):
    """`to_e5m2(x, noise)` rounds fp16 to E5M2 numbers stochastically, adding `noise` to the bits."""
    bits = x.clamp(-57344, 57344).view(torch.int16) + noise
    return (bits & -256).view(torch.float16)


@exercise(
    cases=lambda: [
        (torch.tensor([[1.0, -7.0, 2.0], [4.0, 5.0, -6.0], [-3.0, -2.0, -8.0]]), rows, columns)
        for rows, columns in ((1, 3), (3, 1), (1, 2), (2, 2), (2, 3), (4, 4))
    ],
    mistakes={
        "The largest absolute value: -7 counts as 7.": ("x.abs()", "x"),
        "A tile has rows and columns: take the largest over both.": ("amax((1, 3))", "amax(3).flatten(0, 1)"),
        "What is left over at the right and below is a tile too.": ("-x.shape[1] % columns", "-(x.shape[1] % columns)"),
    },
    show=lambda x, rows, columns: f"{x.tolist()} in tiles of {rows} x {columns}",
)
def tile_amax(x, rows, columns):
    """`tile_amax(x, rows, columns)` is the largest absolute value of each tile of a matrix of any size."""
    x = F.pad(x.abs(), (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    return x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3))
