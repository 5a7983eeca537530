"""Exercises of the notebook on faster training."""

import functools
import weakref

import torch

from helpers.check.exercise import Reply, equal, exercise


def _bytes():
    images = torch.arange(2 * 4 * 6 * 3).mul(7).remainder(256).to(torch.uint8).reshape(2, 4, 6, 3)
    images[0, 0, 0, 0] = 255
    return [(images,)]


def _floats(answer, images):
    handed_in = images.clone()
    given = answer(handed_in)
    if not isinstance(given, torch.Tensor):
        raise Reply(f"you return {type(given).__name__}. Stay with tensors, which can be on a device.")
    return {
        "the sum of the bytes that were handed in": handed_in.sum().item(),
        "your batch": given,
        "the device of a batch on 'meta'": answer(images.to("meta")).device.type,
    }


def _changed(images):
    images.add_(1)
    return images.permute(0, 3, 1, 2) / 255


@exercise(
    cases=_bytes,
    mistakes={
        "The values go up to 255. Divide by 255.": lambda images: images.permute(0, 3, 1, 2).float(),
        "Divide by 255, so that the largest byte becomes 1.": lambda images: images.permute(0, 3, 1, 2).float() / 256,
        "// cuts off. Make it float before you divide, with /.": lambda images: (
            images.permute(0, 3, 1, 2) // 255
        ).float(),
        "The colours are mixed up: reshape cuts them apart. Use permute.": lambda images: (
            images.reshape(2, 3, 4, 6).float() / 255
        ),
        "The colours come second. Use permute.": lambda images: images.float() / 255,
        "Red and blue have changed places.": lambda images: images.permute(0, 3, 1, 2).flip(1).float() / 255,
        "Rows and columns have changed places. Permute to (0, 3, 1, 2).": lambda images: (
            images.permute(0, 3, 2, 1).float() / 255
        ),
        "Make it float32.": lambda images: images.permute(0, 3, 1, 2).double() / 255,
        "Work on a copy, such as images.float().": _changed,
        "Stay with tensors, which can be on a device.": lambda images: images.numpy().transpose(0, 3, 1, 2) / 255,
        "Take no detour over NumPy or .cpu().": lambda images: (
            torch.zeros(2) if images.is_meta else images.permute(0, 3, 1, 2) / 255
        ),
    },
    observe=_floats,
    same=functools.partial(equal, rel=2e-7),
    show=lambda images: "",
)
def to_float01(images):
    """`to_float01(images)` turns uint8 (N, H, W, 3) into float32 (N, 3, H, W) in [0, 1], the input left as it was."""
    return images.permute(0, 3, 1, 2).float().div(255)


_READS = {"item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__format__", "__array__"}


class _Loss(torch.Tensor):
    """A tensor that counts how often the host reads it, or what was computed from it."""

    reads = 0

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        name = getattr(function, "__name__", "")
        _Loss.reads += name in _READS
        with torch._C.DisableTorchFunctionSubclass():
            given = function(*arguments, **(options or {}))
        return given.as_subclass(cls) if type(given) is torch.Tensor else given


class _Saved:
    """A tensor that autograd saved; alive as long as its graph."""

    def __init__(self, tensor):
        self.tensor = tensor.detach()


def _watched(answer, losses):
    """What `answer(step, batches)` returns, and what it did with the losses of the steps."""
    weight = torch.ones(3, requires_grad=True)
    batches = [(torch.full((3,), loss), torch.tensor(1.0)) for loss in losses]
    alive, graphs, reads = weakref.WeakSet(), [], []

    def pack(tensor):
        alive.add(saved := _Saved(tensor))
        return saved

    def step(images, factor):
        graphs.append(len(alive) // 2)  # each loss saves two tensors
        reads.append(_Loss.reads)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            loss = (weight * images).mean() * factor
        return loss.as_subclass(_Loss)

    _Loss.reads = 0
    given = answer(step, batches)
    return {
        "the number of calls of step": len(graphs),
        "the kind of what you return": type(given).__name__.replace("_Loss", "Tensor"),
        "the number of losses read before the last step": reads[-1],
        "the number of older graphs kept alive": max(0, max(graphs) - 1),
        "the number of tensors read after the loop": _Loss.reads - reads[-1],
        "the mean of the losses": float(given.detach()) if isinstance(given, torch.Tensor) else given,
    }


def _summed(step, batches):
    total = 0
    for batch in batches:
        total = total + step(*batch).detach()
    return total


def _graph_of_the_sum(step, batches):
    total = 0
    for batch in batches:
        total = total + step(*batch)
    return total.item() / len(batches)


def _read_later(step, batches):
    losses = [step(*batch).detach() for batch in batches]
    return sum(loss.item() for loss in losses) / len(losses)


@exercise(
    cases=[([4.0, 1.0, 1.0, 2.0, 2.0, 5.0],)],
    mistakes={
        "Keep loss.detach(): a loss holds its graph, and a sum those of all.": _graph_of_the_sum,
        "Each read waits for the device. Read once, after the loop.": lambda step, batches: (
            sum(step(*batch).item() for batch in batches) / len(batches)
        ),
        "Join the losses on the device, and read once.": _read_later,
        "That is the sum. Divide by the number of batches.": lambda step, batches: _summed(step, batches).item(),
        "Read it once, after the loop, with .item().": lambda step, batches: _summed(step, batches) / len(batches),
        "That is the loss of the last batch. Add them all up.": lambda step, batches: [
            step(*batch).detach() for batch in batches
        ][-1].item(),
        "Call step for every batch.": lambda step, batches: step(*batches[0]).item(),
        "Divide by the number of batches.": lambda step, batches: _summed(step, batches).item() / 7,
    },
    observe=_watched,
    same=functools.partial(equal, rel=1e-6),
    show=lambda losses: f"losses of {losses}",
)
def mean_loss(step, batches):
    """`mean_loss(step, batches)` is the mean of step(*batch), a float; no graphs kept, no read in each step."""
    return _summed(step, batches).item() / len(batches)
