"""A progress bar, the time of a block of steps, and the bytes that forward keeps for backward."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from tqdm.auto import tqdm


def progress(iterable: Iterable | None = None, **options) -> tqdm:
    """A tqdm bar that goes when it is done. TQDM_DISABLE=1 hides it, in notebooks too."""
    return tqdm(iterable, leave=False, disable="TQDM_DISABLE" in os.environ, **options)


def time_block(step: Callable, steps: int, device: torch.device, drop: int = 0) -> float:
    """Mean seconds of one of `steps` calls of `step()`, after `drop` calls that are not timed.

    On an accelerator, events mark both ends of the block on the device itself, and the host waits
    once, for the second. On a CPU `time.perf_counter` is read before and after.
    """
    for _ in range(drop):
        step()
    if device.type == "cpu":
        began = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - began) / steps
    start = torch.Event(device, enable_timing=True)
    end = torch.Event(device, enable_timing=True)
    stream = torch.accelerator.current_stream(device)  # the device need not be the current one
    start.record(stream)
    for _ in range(steps):
        step()
    end.record(stream)
    end.synchronize()
    return start.elapsed_time(end) / 1000 / steps


def kept_for_backward(model: torch.nn.Module, forward: Callable) -> dict[str, int]:
    """Bytes that `forward()` keeps for the backward pass, as a dict by dtype name; `model`'s own
    weights are not counted.

    Counted with saved-tensor hooks, each storage once: all that autograd saves, and the same in
    every run. What an operation keeps by itself (a library's workspace) is not seen.

    Examples
    --------
    >>> layer = torch.nn.Linear(4, 4)
    >>> kept_for_backward(layer, lambda: layer(torch.ones(2, 4)))
    {'float32': 32}
    """
    kept = {}  # holds the tensors, or a freed address could be given to another tensor

    def note(tensor):
        # Detached: an output that its own graph keeps would never be freed.
        tensor = tensor.detach()
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward()
    own = [*model.parameters(), *model.buffers()]
    weights = {tensor.untyped_storage().data_ptr() for tensor in own}
    total = Counter()
    for address, tensor in kept.items():
        if address not in weights:
            name = str(tensor.dtype).removeprefix("torch.")
            total[name] += tensor.untyped_storage().nbytes()
    return dict(+total)  # without empty tensors, as cuDNN's batch norm keeps
