"""The exercise of the notebook on speed."""

import functools

from helpers.check.exercise import equal, exercise


def _time(combine, flops, moved, rate, bandwidth):
    return combine(flops / rate, moved / bandwidth), "compute" if flops / rate > moved / bandwidth else "memory"


@exercise(
    cases=[(8e12, 1e9, 4e12, 1e12), (1e9, 6e12, 1e12, 2e12), (0, 1e6, 1e12, 1e9)],
    mistakes={
        "You add up two times that pass at once: the longer one counts.": lambda *op: _time(lambda a, b: a + b, *op),
        "The longer of the two times counts, not the shorter.": functools.partial(_time, min),
        "It waits for what takes longer.": lambda *op: (best_time.reference(*op)[0], "memory"),
        "Return two values, the seconds and the word.": lambda *op: best_time.reference(*op)[0],
        "First the seconds, then the word.": lambda *op: best_time.reference(*op)[::-1],
    },
    same=functools.partial(equal, rel=1e-6),
    show=lambda flops, moved, rate, bandwidth: (
        f"{flops:g} FLOPs at {rate:g} FLOP/s and {moved:g} bytes at {bandwidth:g} bytes/s"
    ),
)
def best_time(flops, bytes, rate, bandwidth):
    """`best_time(flops, bytes, rate, bandwidth)` is the time of an op by the roofline, and what it waits for."""
    return _time(max, flops, bytes, rate, bandwidth)
