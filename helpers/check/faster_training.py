"""Exercises of the notebook on faster training."""

import weakref

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from helpers.check.exercise import Reply, exercise


def _bytes():
    images = torch.arange(2 * 4 * 6 * 3).mul(7).remainder(256).to(torch.uint8).reshape(2, 4, 6, 3)
    images[0, 0, 0, 0] = 255
    return [(images,)]


def _floats(answer, images):
    handed_in = images.clone()
    given = answer(handed_in)
    try:
        on_meta = answer(images.to("meta"))  # a device that holds no numbers
    except Reply:
        raise Reply("Stay with tensors, which can be on a device: take no detour over NumPy or .cpu().") from None
    return {
        "the sum of the bytes that were handed in": handed_in.sum().item(),
        "your batch": given,
        "the device of a batch on 'meta'": on_meta.device.type,
    }


@exercise(
    cases=_bytes,
    mistakes={
        "The values go up to 255. Divide by 255.": (".div(255)", ""),
        "Divide by 255, so that the largest byte becomes 1.": ("255", "256"),
        "// cuts off. Make it float before you divide, with /.": (".float().div(255)", ".floor_divide(255).float()"),
        "The colours are mixed up: use permute, not reshape.": ("permute(0, 3, 1, 2)", "reshape(2, 3, 4, 6)"),
        "Work on a copy, such as images.float().": ("images.permute", "images.bitwise_not_().permute"),
        "take no detour over NumPy or .cpu().": lambda images: images.numpy().transpose(0, 3, 1, 2) / 255,
    },
    observe=_floats,
    rel=2e-7,
)
def to_float01(images):
    """`to_float01(images)` turns uint8 (N, H, W, 3) into float32 (N, 3, H, W) in [0, 1], the input left as it was."""
    return images.permute(0, 3, 1, 2).float().div(255)


class _Reads(TorchFunctionMode):
    """Counts how often the host reads a tensor."""

    count = 0
    names = "item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__format__", "__array__"

    def __torch_function__(self, function, types, arguments=(), options=None):
        self.count += getattr(function, "__name__", "") in self.names
        return function(*arguments, **(options or {}))


def _watched(answer, losses):
    """What `answer(step, batches)` returns, and what it did with the losses of the steps."""
    weight = torch.ones(3, requires_grad=True)
    batches = [(torch.full((3,), loss), torch.tensor(1.0)) for loss in losses]
    saved, graphs, reads = [], [], []

    def step(images, factor):
        graphs.append(sum(reference() is not None for reference in saved))
        reads.append(counter.count)
        images = images.clone()  # kept alive by the graph alone, for the gradient of the weight
        saved.append(weakref.ref(images))
        return (weight * images).mean() * factor

    with _Reads() as counter:
        given = answer(step, batches)
    return {
        "the number of calls of step": len(graphs),
        "the kind of what you return": type(given).__name__,
        "the number of losses read before the last step": reads[-1] - reads[0],
        "the number of older graphs kept alive": max(0, max(graphs) - 1),
        "the number of tensors read after the loop": counter.count - reads[-1],
        "the mean of the losses": float(given),
    }


@exercise(
    cases=[([4.0, 1.0, 1.0, 2.0, 2.0, 5.0],)],
    mistakes={
        "Keep loss.detach(): a loss holds its graph, and a sum those of all.": (".detach()", ""),
        "Each read waits for the device. Read once, after the loop.": lambda step, batches: (
            sum(step(*batch).item() for batch in batches) / len(batches)
        ),
        "Join the losses on the device, and read once.": lambda step, batches: (
            sum(loss.item() for loss in [step(*batch).detach() for batch in batches]) / len(batches)
        ),
        "That is the sum. Divide by the number of batches.": (" / len(batches)", ""),
        "Read it once, after the loop, with .item().": (".item()", ""),
    },
    observe=_watched,
    rel=1e-6,
    show=lambda losses: f"losses of {losses}",
)
def mean_loss(step, batches):
    """`mean_loss(step, batches)` is the mean of step(*batch), a float; no graphs kept, no read in each step."""
    total = 0
    for batch in batches:
        total = total + step(*batch).detach()
    return total.item() / len(batches)


class _Ascending:
    """Rows on a disk that can be read in ascending order only, as h5py wants it; counts the reads."""

    def __init__(self, rows):
        self.rows, self.reads, self.rows_read = rows, 0, 0
        self.shape, self.dtype = rows.shape, rows.dtype

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, indices):
        if not isinstance(indices, slice) and (np.diff(np.atleast_1d(indices)) <= 0).any():
            raise TypeError("Indexing elements must be in increasing order")
        read = self.rows[indices].copy()
        self.reads += 1
        self.rows_read += read.size // self.rows[0].size
        return read


def _batch(answer, indices):
    disk = _Ascending(np.arange(20, dtype=np.uint8)[:, None])  # images of one pixel, which is the number of the image
    given = answer(disk, torch.arange(20.0)[:, None], list(indices))
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise Reply("asked for are two values, (images, labels).")
    images, labels = given
    if not isinstance(images, torch.Tensor):
        raise Reply(f"the images are {type(images).__name__}. Return a tensor: torch.from_numpy makes one.")
    return {
        "the dtype of the images": images.dtype,
        "the number of reads": disk.reads,
        "the number of images read": disk.rows_read,
        "the list of images": images.tolist(),
        "the list of labels": labels.tolist(),
    }


@exercise(
    cases=[([3, 7, 8],), ([14, 2, 9, 5],), ([9, 0, 1, 19, 4, 12],)],
    mistakes={
        "The images are ascending: undo the sorting.": ("[np.argsort(order)]", ""),
        "Both are ascending: undo the sorting.": ("np.argsort(indices)", "np.argsort(indices := sorted(indices))"),
        "The order is to be undone with its inverse: argsort of argsort.": ("np.argsort(order)", "order"),
        "The labels belong in the order that was asked for.": ("labels[indices]", "labels[ascending]"),
        "Return a tensor: torch.from_numpy makes one.": ("torch.from_numpy(read)", "read"),
        "asked for are two values, (images, labels).": (", labels[indices]", ""),
        "must be in increasing order": ("[ascending][np.argsort(order)]", "[indices]"),
    },
    observe=_batch,
    show=lambda indices: f"the indices {indices}",
)
def read_batch(images, labels, indices):
    """`read_batch(images, labels, indices)` reads once, ascending, and returns the batch in the order asked."""
    order = np.argsort(indices)
    ascending = [indices[i] for i in order]
    read = images[ascending][np.argsort(order)]
    return torch.from_numpy(read), labels[indices]
