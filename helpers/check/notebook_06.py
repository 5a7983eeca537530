"""Checks of notebook 06, memory and speed."""

import functools
import math

import torch

from helpers.check.replies import says
from helpers.measure import kept_for_backward


class _Views(torch.nn.Module):
    """Keeps one tensor for two ops, a view of it for a third, and of another tensor nothing but a view."""

    def forward(self, x):
        return x.sin() * x.cos() + x[:, 2:].cos().sum() + (x + 1)[:, :3].cos().sum()


@says
def kept_bytes(answer):
    """`answer(model, images)` is the bytes that forward keeps for backward, the model's own tensors left out."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), _Views()
    convolutions = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3)
    for name, network, shape in [
        ("two linear layers and ops that share tensors", torch.nn.Sequential(*linear), (16, 8)),
        ("convolution, batch norm, ReLU, convolution", torch.nn.Sequential(*convolutions), (2, 3, 9, 9)),
    ]:
        images, seen = torch.randn(shape), []
        right = sum(kept_for_backward(network, functools.partial(network, images)).values())
        with torch.autograd.graph.saved_tensors_hooks(lambda t, seen=seen: seen.append(t) or t, lambda t: t):
            network(images)
        own, weights = ({t.data_ptr() for t in part} for part in (network.state_dict().values(), network.parameters()))
        memory, size = lambda t: t.untyped_storage().data_ptr(), lambda t: t.untyped_storage().nbytes()
        each = lambda _: object()  # as often as it is seen

        def total(key, size, left_out=frozenset(), seen=seen, memory=memory):
            return sum({key(t): size(t) for t in reversed(seen) if memory(t) not in left_out}.values())

        view = "A view may begin elsewhere in the same memory: tell memories apart by untyped_storage().data_ptr()."
        whole = "A view keeps the whole memory that it is part of: its size is untyped_storage().nbytes()."
        why = {
            total(
                each, lambda t: t.nbytes
            ): "You count every tensor that is seen, weights too, and shared memory twice.",
            total(memory, size): "The model's own parameters and buffers are not activations.",
            total(memory, size, weights): "Batch norm's running statistics are buffers: leave them out.",
            total(each, lambda t: t.nbytes, own): "Some tensors share their memory: count it once.",
            total(each, size, own): "Some tensors share their memory: count it once.",
            total(torch.Tensor.data_ptr, size, own): view,
            total(torch.Tensor.data_ptr, lambda t: t.nbytes, own): view,
            total(memory, lambda t: t.nbytes, own): whole,
        }
        given = answer(network, images)
        if given != right:
            return f"for {name} you count {given} bytes; it keeps {right}. {why.get(given, '')}"
    return None


@says
def best_time(answer):
    """`answer(flops, bytes, rate, bandwidth)` is the time of an op by the roofline, and what it waits for."""
    for flops, moved, rate, bandwidth in [(8e12, 1e9, 4e12, 1e12), (1e9, 6e12, 1e12, 2e12), (0, 1e6, 1e12, 1e9)]:
        right = max(flops / rate, moved / bandwidth), "compute" if flops / rate > moved / bandwidth else "memory"
        given = answer(flops, moved, rate, bandwidth)
        of = f"for {flops:g} FLOPs at {rate:g} FLOP/s and {moved:g} bytes at {bandwidth:g} bytes/s"
        if not isinstance(given, tuple | list) or len(given) != 2 or isinstance(given[0], str):
            return f'you return {given!r}; asked for are two values, first the seconds, then "compute" or "memory"'
        both = flops / rate + moved / bandwidth
        if not math.isclose(given[0], right[0], rel_tol=1e-6):
            added = math.isclose(given[0], both, rel_tol=1e-6)
            why = " You add up two times that pass at once: the longer one counts." if added else ""
            return f"{of} you give {given[0]:g} s; it is {right[0]:g} s.{why}"
        if given[1] != right[1]:
            return f"{of} you say {given[1]!r}; the op waits for {right[1]}"
    return None


@says
def batch_that_fits(answer):
    """`answer(peak, memory)` is the largest batch with peak(batch) <= memory, found with few calls of `peak`."""
    for right, memory in [(7, 1000), (1, 1000), (0, 1000), (21, 1000), (1000, 2_000_000), (64, 9000)]:
        calls = []

        def peak(batch, right=right, memory=memory, calls=calls):
            calls.append(batch)
            if batch > 100_000 or len(calls) > 5000:
                raise ValueError(f"the search does not end: call {len(calls)} asks for batch {batch}")
            return memory + batch * batch - right * right

        given = answer(peak, memory)
        if given != right:
            power = 2 ** max(0, right.bit_length() - 1)
            faults = {
                right + 1: "That one does not fit.",
                power: "You stop at a power of two: more may fit, up to the next one.",
                right - 1: "One more fits: peak(batch) may equal memory.",
            }
            return f"you give {given} where {right} is the largest that fits. {faults.get(given, '')}"
        if len(calls) > 25:
            return f"you call peak {len(calls)} times to find {right}; 25 are enough"
    return None
