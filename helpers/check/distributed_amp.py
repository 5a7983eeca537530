"""Exercises of the notebook on many processes."""

import functools
import math

import numpy as np
from torch.utils.data import DistributedSampler

from helpers.check.exercise import equal, exercise

_near = functools.partial(equal, rel=1e-6)


@exercise(
    cases=[
        (length, rank, world) for length, world in [(6, 2), (10, 3), (7, 1), (2, 5), (12, 5)] for rank in range(world)
    ],
    mistakes={
        "All processes must get the same number: go on dealing from the beginning.": lambda length, rank, world: list(
            range(length)
        )[rank::world],
        "Deal the indices like cards, one each in turn.": lambda length, rank, world: list(range(length))[
            rank * length // world : (rank + 1) * length // world
        ],
        "These are the same ones, in another order.": lambda length, rank, world: shard.reference(length, rank, world)[
            ::-1
        ],
        "Nothing is left out: what is short is filled up.": lambda length, rank, world: list(
            range(length - length % world)
        )[rank::world],
    },
    observe=lambda answer, *deal: [int(index) for index in answer(*deal)],
    show=lambda length, rank, world: f"process {rank} of {world} and {length} indices",
)
def shard(length, rank, world):
    """`shard(length, rank, world)` are the indices that DistributedSampler deals to a process, unshuffled."""
    return list(DistributedSampler(range(length), world, rank, shuffle=False))


@exercise(
    cases=[([0.5, 1.0], [10, 10]), ([0.5, 1.0], [30, 10]), ([0.25, math.nan, 0.75], [4, 0, 12])],
    mistakes={
        "A process with more images weighs more.": lambda means, counts: float(np.nanmean(means)),
        "NaN times 0 is NaN; leave out who saw nothing.": lambda means, counts: (
            sum(mean * count for mean, count in zip(means, counts)) / sum(counts)
        ),
    },
    observe=lambda answer, means, counts: float(answer(list(means), list(counts))),
    same=_near,
    show=lambda means, counts: f"means {means} over {counts} images",
)
def mean_over_processes(means, counts):
    """`mean_over_processes(means, counts)` is the mean over all images, from each process's mean and its number."""
    return sum(mean * count for mean, count in zip(means, counts) if count) / sum(counts)
