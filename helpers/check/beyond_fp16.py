"""The exercise of the notebook on FP8."""

import torch
from torch.nn import functional

from helpers.check.exercise import exercise


def _tiles(x, rows, columns):
    padded = functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


@exercise(
    cases=lambda: [
        (torch.tensor([[1.0, -7.0, 2.0], [4.0, 5.0, -6.0], [-3.0, -2.0, -8.0]]), rows, columns)
        for rows, columns in ((1, 3), (3, 1), (1, 2), (2, 2), (2, 3), (4, 4))
    ],
    mistakes={
        "The largest absolute value: -7 counts as 7.": lambda x, rows, columns: _tiles(x, rows, columns).amax((1, 3)),
        "A tile has rows and columns: take the largest over both.": lambda x, rows, columns: (
            _tiles(x, rows, columns).abs().amax(3).flatten(0, 1)
        ),
        "One number a tile: the sizes of 1 should go.": lambda x, rows, columns: (
            _tiles(x, rows, columns).abs().amax((1, 3), keepdim=True)
        ),
        "What is left over at the right and below is a tile too.": lambda x, rows, columns: (
            _tiles(x[: len(x) // rows * rows, : x.shape[1] // columns * columns], rows, columns).abs().amax((1, 3))
        ),
    },
    show=lambda x, rows, columns: f"{x.tolist()} in tiles of {rows} x {columns}",
)
def tile_amax(x, rows, columns):
    """`tile_amax(x, rows, columns)` is the largest absolute value of each tile of a matrix of any size."""
    return _tiles(x, rows, columns).abs().amax((1, 3))
