"""Exercises of the notebook that predicts memory and speed."""

import torch

from helpers.check.exercise import Reply, exercise


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


def _size(tensor):
    return tensor.untyped_storage().nbytes()


@exercise(
    cases=_networks,
    mistakes={
        "You count every tensor that is seen, weights too.": ("kept.values()", "tensor.nbytes for tensor in seen"),
        "The model's own parameters and buffers are not activations.": ("*model.parameters(), *model.buffers()", ""),
        "Batch norm's running statistics are buffers: leave them out.": (", *model.buffers()", ""),
        "Some tensors share memory: count it once.": ("_memory(tensor): _size(tensor)", "object(): tensor.nbytes"),
        "A view may begin elsewhere in the same memory.": ("{_memory(tensor): ", "{tensor.data_ptr(): "),
        "A view keeps the whole memory that it is part of.": ("_size(tensor)", "tensor.nbytes"),
    },
    observe=lambda answer, name, network, images: answer(network, images),
    show=lambda name, network, images: name,
)
def kept_bytes(model, images):
    """`kept_bytes(model, images)` is the bytes that forward keeps for backward, the model's own tensors left out."""
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor):
        model(images)
    own = {_memory(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    kept = {_memory(tensor): _size(tensor) for tensor in seen if _memory(tensor) not in own}
    return sum(kept.values())


@exercise(
    cases=[(8e12, 1e9, 4e12, 1e12), (1e9, 6e12, 1e12, 2e12), (0, 1e6, 1e12, 1e9)],
    mistakes={
        "The two times pass at once: the longer one counts.": ("max(arithmetic, traffic)", "arithmetic + traffic"),
        "The longer of the two times counts, not the shorter.": ("max", "min"),
        "It waits for what takes longer.": ("arithmetic > traffic", "arithmetic < traffic"),
        "First the seconds, then the word.": lambda *op: best_time.reference(*op)[::-1],
    },
    rel=1e-6,
)
def best_time(flops, bytes, rate, bandwidth):
    """`best_time(flops, bytes, rate, bandwidth)` is the time of an op by the roofline, and what it waits for."""
    arithmetic, traffic = flops / rate, bytes / bandwidth
    return max(arithmetic, traffic), "compute" if arithmetic > traffic else "memory"


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


@exercise(
    cases=[(7, 1000), (1, 1000), (0, 1000), (21, 1000), (1000, 2_000_000), (64, 9000)],
    mistakes={
        "25 calls are enough.": ("high, 2 * high", "high, high + 1"),
        "That one does not fit.": ("return low", "return high"),
        "One more fits: peak(batch) may equal memory.": ("<= memory", "< memory"),
        "You stop at a power of two: more may fit, up to the next one.": ("while high - low > 1", "while False"),
        "The peak need not lie on a straight line through two points.": lambda peak, memory: max(
            0, int(16 + 16 * (memory - peak(16)) / (peak(32) - peak(16)))
        ),
        "the search does not end": ("while peak(high) <= memory", "while peak(high)"),
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
