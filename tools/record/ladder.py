"""Stage e: notebook 08's ladder, one change after the other from a plain loop, with a loader that reads files."""

import itertools
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from helpers import hardware
from tools.record import measure
from tools.record.experiment import settings
from tools.record.session import Unit, raise_if_stopped, use_float32

PLAIN = {"data": "float32", "non_blocking": False, "channels_last": False, "float32": "ieee", "autocast": None}
PLAIN |= {"fused": None, "item": True, "compile": None}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def rungs_of(device):
    """What each rung has, from the bottom to the top."""
    cuda = device.type == "cuda"
    sixteen = "fp16" if hardware.native_formats(device)["bf16"] is False else "bf16"
    changes = {"the plain loop": {}, "again": {}, "channels_last": {"channels_last": True}}
    changes["bytes from the loader"] = {"data": "bytes"}
    changes["decoded cache"] = {"data": "cache"}
    if cuda:
        changes["non_blocking copies"] = {"non_blocking": True}
    if hardware.native_formats(device)["TF32"]:
        changes["TF32"] = {"float32": "tf32"}
    changes[f"{sixteen} autocast"] = {"autocast": sixteen}
    if sixteen == "bf16":
        changes["fused SGD"] = {"fused": True}  # with a GradScaler it would skip steps inside its kernel
    if cuda:
        changes["no .item()"] = {"item": False}
        changes["torch.compile"] = {"compile": "default"}
        changes["CUDA graphs"] = {"compile": "reduce-overhead"}
    rungs = {}
    current = PLAIN
    for name, change in changes.items():
        current = current | change
        rungs[name] = current
    return rungs


def units(session):
    """Each rung against the one before, and the top against the bottom."""
    names = list(rungs_of(session.device))
    pairs = [*itertools.pairwise(names), (names[0], names[-1])]
    return [
        Unit("e", f"{above} against {below}", partial(race, below=below, above=above), 20) for below, above in pairs
    ]


class Floats(Dataset):
    """Float images from 0 to 255, decoded one by one."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        pixels = torch.from_numpy(self.images.resized(index)).permute(2, 0, 1)
        return pixels.float(), self.images.labels[index]


class Bytes(Floats):
    """The same as bytes, height, width and channels last, as the files have them."""

    def __getitem__(self, index):
        return torch.from_numpy(self.images.resized(index)), self.images.labels[index]


class Cache(Floats):
    """The same, decoded once into one file, which is read a batch at a time."""

    def __init__(self, images, file):
        super().__init__(images)
        shape = (len(images), *images.resized(0).shape)
        rows = np.lib.format.open_memmap(file, "w+", np.uint8, shape)
        for number in measure.progress(range(len(images)), desc="Decoding once"):
            rows[number] = images.resized(number)
        rows.flush()
        self.rows = np.load(file, mmap_mode="r")

    def __getitems__(self, indices):
        return torch.from_numpy(self.rows[indices]), self.images.labels[indices]


def whole(batch):
    return batch


def one_thread(_):
    import cv2

    cv2.setNumThreads(0)


def batches_of(session, options, folder):
    """Batches without end, from a loader that shuffles."""
    from helpers.dataset import DATA, ImageDataset, load_table

    _, size, batch = settings(session)
    table = load_table(DATA / "digits" / "train.csv").head(16 * batch)
    images = ImageDataset(table, size, check=False)
    workers = hardware.loader_workers() if session.full and sys.platform == "linux" else 0
    if options["data"] == "cache":
        dataset = Cache(images, Path(folder) / "digits.npy")
        workers = 0
    else:
        dataset = {"float32": Floats, "bytes": Bytes}[options["data"]](images)
    how = {"shuffle": True, "drop_last": True, "pin_memory": session.device.type == "cuda", "num_workers": workers}
    how |= {"collate_fn": whole} if options["data"] == "cache" else {}
    if workers:
        how |= {"persistent_workers": True, "worker_init_fn": one_thread, "multiprocessing_context": "fork"}
    loader = DataLoader(dataset, batch, **how)
    return itertools.chain.from_iterable(itertools.repeat(loader)), workers


def stepper(session, options, folder):
    """A function that loads a batch and takes a step, and how many workers its loader has."""
    import timm

    device = session.device
    memory_format = torch.channels_last if options["channels_last"] else torch.contiguous_format
    torch.manual_seed(0)
    model = timm.create_model(settings(session)[0], num_classes=1).to(device, memory_format=memory_format)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, fused=options["fused"])
    scaler = torch.amp.GradScaler(device.type, enabled=options["autocast"] == "fp16")
    if options["compile"]:
        model.compile(mode=options["compile"], dynamic=False)
    dtype = DTYPES.get(options["autocast"])
    criterion = torch.nn.BCEWithLogitsLoss()
    batches, workers = batches_of(session, options, folder)

    def step():
        use_float32(options["float32"])
        images, labels = next(batches)
        images = images.to(device, non_blocking=options["non_blocking"])
        labels = labels.to(device, non_blocking=options["non_blocking"])
        if images.dtype == torch.uint8:
            images = images.permute(0, 3, 1, 2).float()
        images = images.contiguous(memory_format=memory_format)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if options["item"]:
            loss.item()

    return step, workers


def race(session, below, above):
    """Two rungs against each other, in turns; the seconds of each first step, with its compilation, apart."""
    rungs = rungs_of(session.device)
    torch.compiler.reset()  # what was compiled before does not count here
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        steps = {}
        first = {}
        workers = {}
        for name in (below, above):
            steps[name], workers[name] = stepper(session, rungs[name], tempfile.mkdtemp(dir=folder))
            began = time.perf_counter()
            measure.time_block(steps[name], 1, session.device)
            first[name] = time.perf_counter() - began
            measure.warm_up(steps[name], session.device, steps=3, at_most=8)
        idle = 2 * max(workers.values()) + 2  # more than workers have ready
        found = measure.compare(steps, session.device, settings(session)[2], rounds=6, steps=10 + idle, drop=idle)
        steps = None  # ends the workers
    blocks = found.groupby("arm", sort=False).seconds.apply(list).to_dict()
    results = {"blocks": blocks, "images_per_step": settings(session)[2], "first_step_seconds": first}
    model, size, batch = settings(session)
    config = {"model": model, "size": size, "batch": batch, "workers": workers}
    config["on"] = {name: rungs[name] for name in (below, above)}
    session.save("08 own ladder", f"{above} against {below}", config, results)
    raise_if_stopped(found)
