"""Checks of notebook 08, faster training."""

import math
import weakref

import numpy as np
import torch

from helpers.check.replies import says


@says
def to_float01(answer):
    """`answer(images)` turns uint8 (N, H, W, 3) into float32 (N, 3, H, W) in [0, 1], the input left as it was."""
    images = torch.arange(2 * 4 * 6 * 3).mul(7).remainder(256).to(torch.uint8).reshape(2, 4, 6, 3)
    images[0, 0, 0, 0] = 255
    before, right = images.clone(), images.permute(0, 3, 1, 2).float().div(255)
    given = answer(images)
    if not isinstance(given, torch.Tensor):
        return f"you return {type(given).__name__}, not a tensor"
    if not torch.equal(images, before):
        return "the bytes that were handed in have changed. Work on a copy, such as images.float()."
    if tuple(given.shape) != (2, 3, 4, 6):
        return f"for images of shape (2, 4, 6, 3) you return the shape {tuple(given.shape)}; it should be (2, 3, 4, 6)"
    if given.dtype != torch.float32:
        return f"your batch is {given.dtype}; it should be torch.float32"
    for fault, words in [
        (right * 255, "the values go up to 255. Divide by 255."),
        (right * 255 / 256, "white is 255/256. Divide by 255, so that the largest byte becomes 1."),
        ((right == 1).float(), "nearly all pixels are 0: // cuts off. Make it float before you divide, with /."),
        (before.reshape(2, 3, 4, 6).float() / 255, "the colours are mixed up: reshape cuts them apart. Use permute."),
        (right.flip(1), "red and blue have changed places"),
        (right.transpose(2, 3).reshape(2, 3, 4, 6), "rows and columns have changed places. Permute to (0, 3, 1, 2)."),
    ]:
        if torch.allclose(given, fault):
            return words
    if not torch.allclose(given, right, atol=2e-7, rtol=0):
        return f"the first pixel is {given[0, :, 0, 0].tolist()}; it should be {right[0, :, 0, 0].tolist()}"
    if given.device != images.device or answer(images.to("meta")).device.type != "meta":
        return "your batch is on another device than the images. Take no detour over NumPy or .cpu()."
    return None


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


@says
def mean_loss(answer):
    """`answer(step, batches)` is the mean of step(*batch), a float; no graphs kept, no read in each step."""
    weight = torch.ones(3, requires_grad=True)
    batches = [(torch.full((3,), float(value)), torch.tensor(1.0)) for value in (4, 1, 1, 2, 2, 5)]
    alive, most, reads, calls = weakref.WeakSet(), 0, [], 0

    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor.detach()

    def pack(tensor):
        alive.add(saved := Saved(tensor))
        return saved

    def step(images, factor):
        nonlocal most, calls
        most, calls = max(most, len(alive)), calls + 1
        reads.append(_Loss.reads)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            loss = (weight * images).mean() * factor
        return loss.as_subclass(_Loss)

    _Loss.reads = 0
    given = answer(step, batches)
    if calls != len(batches):
        return f"step was called {calls} times for {len(batches)} batches"
    if isinstance(given, torch.Tensor):
        return "you return a tensor. Read it once, after the loop, with .item()."
    if len(set(reads)) > 1:
        return f"the loss was read {reads[-1]} times before the last step: each read waits for the device"
    if _Loss.reads > 1:
        return f"after the loop you read {_Loss.reads} tensors, one by one. Join them on the device, and read once."
    graph = 2  # what one loss saves; the last one may still be alive
    if most > 2 * graph:
        return f"before the last step the graphs of {most // graph} losses were alive. Keep loss.detach()."
    right = 2.5
    if isinstance(given, float) and math.isclose(given, right * len(batches)):
        return f"you return {given}, the sum. Divide by the number of batches."
    if isinstance(given, float) and math.isclose(given, 5.0):
        return "you return the loss of the last batch. Add them all up."
    if not isinstance(given, float) or not math.isclose(given, right, rel_tol=1e-6):
        return f"you return {given!r}; the mean of the losses 4, 1, 1, 2, 2, 5 is {right}"
    return None


class _Ascending:
    """Rows on a disk that can be read in ascending order only, as h5py wants it; counts the reads."""

    def __init__(self, rows):
        self.rows, self.reads, self.most = rows, 0, 0
        self.shape, self.dtype = rows.shape, rows.dtype

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, indices):
        self.reads += 1
        if isinstance(indices, slice):
            self.most = max(self.most, len(self.rows[indices]))
            return self.rows[indices].copy()
        chosen = np.atleast_1d(np.asarray(indices))
        if (np.diff(chosen) <= 0).any():
            raise TypeError("Indexing elements must be in increasing order")
        self.most = max(self.most, len(chosen))
        return self.rows[int(indices)].copy() if np.ndim(indices) == 0 else self.rows[chosen]


@says
def read_batch(answer):
    """`answer(images, labels, indices)` reads once, ascending, and returns the batch in the order asked."""
    rows = np.arange(20, dtype=np.uint8)[:, None, None, None].repeat(2, 1).repeat(3, 2).repeat(3, 3)
    labels = torch.arange(20.0).unsqueeze(1)
    for indices in ([3, 7, 8], [14, 2, 9, 5], [9, 0, 1, 19, 4, 12]):
        disk = _Ascending(rows)
        given = answer(disk, labels, list(indices))
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            return "asked for are two values, (images, labels)"
        images, chosen = given
        for name, each in (("images", images), ("labels", chosen)):
            if not isinstance(each, torch.Tensor):
                return f"the {name} are {type(each).__name__}. Return a tensor: torch.from_numpy makes one of an array."
        if images.dtype != torch.uint8:
            return f"the images are {images.dtype}. Leave them uint8: the device makes floats of them."
        if disk.reads > 1:
            return f"you read {disk.reads} times for {len(indices)} images. Ask for all of them at once."
        if disk.most > len(indices):
            return f"you read {disk.most} images for a batch of {len(indices)}"
        if tuple(images.shape) != (len(indices), 2, 3, 3) or tuple(chosen.shape) != (len(indices), 1):
            return f"the shapes are {tuple(images.shape)} and {tuple(chosen.shape)} for {len(indices)} images"
        numbers = images[:, 0, 0, 0].tolist()
        if numbers != indices:
            why = " That is ascending: undo the sorting." if numbers == sorted(indices) else ""
            return f"asked for {indices}, you return the images {numbers}.{why}"
        if chosen.flatten().tolist() != indices:
            return f"the images are {indices}, but their labels are those of {chosen.flatten().int().tolist()}"
    return None
