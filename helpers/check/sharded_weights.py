"""Exercise of the notebook on sharded weights."""

import functools

from helpers.check.exercise import equal, exercise

_near = functools.partial(equal, rel=1e-6)


@exercise(
    cases=[(1000, 4, 1), (10**6, 4, 2), (10**6, 2, 2), (10**6, 4, 3), (4_008_829, 2, 8)],
    mistakes={
        "The sums go round the ring once, and the finished averages once more.": lambda weights, size, world: (
            (world - 1) / world * weights * size
        ),
        "A process alone sends nothing.": lambda weights, size, world: weights * size,
        "Each sends a part of the sum at a time, 1/world of it.": lambda weights, size, world: (
            2 * (world - 1) * weights * size
        ),
    },
    observe=lambda answer, *ring: float(answer(*ring)),
    same=_near,
    show=lambda weights, size, world: f"{weights:,} weights of {size} bytes and {world} processes",
)
def bytes_sent(weights, bytes_each, world):
    """`bytes_sent(weights, bytes_each, world)` is what a process sends in one ring all-reduce, in bytes."""
    return 2 * (world - 1) / world * weights * bytes_each
