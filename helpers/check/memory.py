"""Exercises of the notebook about memory."""

import functools

import torch

from helpers.check.exercise import Reply, exercise
from helpers.measure import kept_for_backward


class _Views(torch.nn.Module):
    """Keeps one tensor for two ops, a view of it for a third, and of another tensor nothing but a view."""

    def forward(self, x):
        return x.sin() * x.cos() + x[:, 2:].cos().sum() + (x + 1)[:, :3].cos().sum()


def _networks():
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), _Views()
    convolutions = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3)
    return [
        ("two linear layers and ops that share tensors", torch.nn.Sequential(*linear), torch.randn(16, 8)),
        ("convolution, batch norm, ReLU, convolution", torch.nn.Sequential(*convolutions), torch.randn(2, 3, 9, 9)),
    ]


def _memory(tensor):
    return tensor.untyped_storage().data_ptr()


def _whole(tensor):
    return tensor.untyped_storage().nbytes()


def _part(tensor):
    return tensor.nbytes


def _each(tensor):
    """A key of its own for each tensor that is seen."""
    return object()


def _counted(key, size, left_out=("parameters", "buffers")):
    """A count of `size` for every new `key`, without the model's own tensors of the kinds `left_out`."""

    def kept_bytes(model, images):
        seen, kept = [], {}
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda t: t):
            model(images)
        own = {_memory(tensor) for kind in left_out for tensor in getattr(model, kind)()}
        for tensor in seen:
            if _memory(tensor) not in own:
                kept.setdefault(key(tensor), size(tensor))
        return sum(kept.values())

    return kept_bytes


@exercise(
    cases=_networks,
    mistakes={
        "You count every tensor that is seen, weights too, and shared memory twice.": _counted(_each, _part, ()),
        "The model's own parameters and buffers are not activations.": _counted(_memory, _whole, ()),
        "Batch norm's running statistics are buffers: leave them out.": _counted(_memory, _whole, ("parameters",)),
        "Some tensors share their memory: count it once.": _counted(_each, _part),
        "Some tensors share their memory, and each counts all of it: count it once.": _counted(_each, _whole),
        "A view may begin elsewhere in the same memory: tell memories apart by untyped_storage().data_ptr().": (
            _counted(torch.Tensor.data_ptr, _whole)
        ),
        "A view keeps the whole memory that it is part of: its size is untyped_storage().nbytes().": (
            _counted(_memory, _part)
        ),
        "The output is not all that is kept.": lambda model, images: model(images).nbytes,
    },
    observe=lambda answer, name, network, images: answer(network, images),
    show=lambda name, network, images: name,
)
def kept_bytes(model, images):
    """`kept_bytes(model, images)` is the bytes that forward keeps for backward, the model's own tensors left out."""
    return sum(kept_for_backward(model, functools.partial(model, images)).values())


def _searched(answer, right, memory):
    calls = []

    def peak(batch):
        calls.append(batch)
        if batch > 100_000 or len(calls) > 5000:
            raise ValueError(f"the search does not end: call {len(calls)} asks for batch {batch}")
        return memory + batch * batch - right * right

    batch = answer(peak, memory)
    if batch == right and len(calls) > 25:
        raise Reply(f"you call peak {len(calls)} times to find {right}. 25 calls are enough.")
    return batch


def _doubled(peak, memory):
    return max([2**power for power in range(12) if peak(2**power) <= memory], default=0)


def _one_at_a_time(peak, memory):
    batch = 1
    while peak(batch) <= memory:
        batch += 1
    return batch - 1


def _on_a_line(peak, memory):
    return max(0, int(16 + 16 * (memory - peak(16)) / (peak(32) - peak(16))))


@exercise(
    cases=[(7, 1000), (1, 1000), (0, 1000), (21, 1000), (1000, 2_000_000), (64, 9000)],
    mistakes={
        "25 calls are enough.": _one_at_a_time,
        "That one does not fit.": lambda peak, memory: _one_at_a_time(peak, memory) + 1,
        "One more fits: peak(batch) may equal memory.": lambda peak, memory: _one_at_a_time(peak, memory - 1),
        "You stop at a power of two: more may fit, up to the next one.": _doubled,
        "The peak need not lie on a straight line through two points.": _on_a_line,
        "the search does not end": lambda peak, memory: next(batch for batch in range(9**9) if peak(batch) > 9**9),
    },
    observe=_searched,
    show=lambda right, memory: f"a memory of {memory} bytes that {right} fill",
)
def batch_that_fits(peak, memory):
    """`batch_that_fits(peak, memory)` is the largest batch with peak(batch) <= memory, found with few calls."""
    low, high = 0, 1
    while peak(high) <= memory:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak(middle) <= memory else (low, middle)
    return low
