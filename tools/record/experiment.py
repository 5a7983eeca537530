"""Stage b: the experiment of the blog post that the suite began with, at full size."""

from functools import partial

import numpy as np
import pandas as pd
import torch

from helpers import DATA, hardware
from helpers.measure import kept_for_backward
from tools.record import measure
from tools.record.session import Unit, raise_if_stopped, use_float32

LAYOUTS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}
LOSS_STEPS = 200
criterion = torch.nn.BCEWithLogitsLoss()


def arms_of(device):
    """As in notebook 07: which dtype autocast has, and which float32 the rest."""
    has = hardware.native_formats(device)
    arms = {"FP32": {"dtype": None, "float32": "ieee"}}
    if has["TF32"]:
        arms["FP32 (TF32)"] = {"dtype": None, "float32": "tf32"}
    if device.type != "cpu":
        arms["fp16 + GradScaler"] = {"dtype": torch.float16, "float32": "tf32"}
    if device.type == "cpu" or has["bf16"] is not False:
        arms["bf16"] = {"dtype": torch.bfloat16, "float32": "tf32"}
    return arms


def units(session):
    """For each layout the times of all arms, then memory and energy; then the losses of each arm."""
    found = []
    for layout in LAYOUTS:
        found.append(Unit("b", f"time, {layout}", partial(times, layout=layout), 35))
        found.append(Unit("b", f"memory and energy, {layout}", partial(memory, layout=layout), 25))
    for arm in arms_of(session.device):
        found.append(Unit("b", f"{LOSS_STEPS} losses, {arm}", partial(losses, arm=arm), 12))
    return found


def settings(session):
    """Model, width and height, and images per step."""
    if session.full:
        return "tf_efficientnet_b0", (384, 512), 32
    return "test_efficientnet", (32, 32), 8


def build(session, dtype, layout, lr):
    """A new model with its optimizer and its scaler; the same weights each time."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model(settings(session)[0], num_classes=1)
    model.to(session.device, memory_format=LAYOUTS[layout])
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scaler = torch.amp.GradScaler(session.device.type, enabled=dtype is torch.float16)
    return model, optimizer, scaler


def loss_of(arm, model, images, labels):
    with torch.autocast(images.device.type, arm["dtype"], enabled=arm["dtype"] is not None):
        return criterion(model(images), labels)


def train_step(arm, model, optimizer, scaler, images, labels):
    use_float32(arm["float32"])
    optimizer.zero_grad()
    loss = loss_of(arm, model, images, labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


def resident_batch(session, layout):
    """Random images and labels that stay on the device, as many as fit."""
    _, (width, height), images = settings(session)

    def batch_of(count):
        numbers = torch.rand(count, 3, height, width, device=session.device)
        labels = torch.arange(count, device=session.device)[:, None] % 2
        return numbers.contiguous(memory_format=LAYOUTS[layout]), labels.float()

    def one_step_each(count):
        for arm in arms_of(session.device).values():
            train_step(arm, *build(session, arm["dtype"], layout, lr=0.0), *batch_of(count))

    return batch_of(measure.fitting_batch(one_step_each, images))


def config_of(session, layout, batch, **more):
    model, size, _ = settings(session)
    config = {"model": model, "size": size, "batch": len(batch), "layout": str(LAYOUTS[layout])}
    return config | {"data": "random numbers"} | more


def times(session, layout):
    """The times of all arms, taken in turns, with FP32 a second time as a control."""
    images, labels = resident_batch(session, layout)
    arms = arms_of(session.device)
    steps = {}
    for name, arm in (*arms.items(), ("FP32 again", arms["FP32"])):
        steps[name] = partial(train_step, arm, *build(session, arm["dtype"], layout, lr=0.0), images, labels)
        measure.warm_up(steps[name], session.device, at_most=10)
    slowest = max(measure.time_block(step, 1, session.device) for step in steps.values())
    per_block = max(2, min(10, round(0.5 / slowest)))
    found = measure.compare(steps, session.device, len(images), rounds=10, steps=per_block)
    for name, arm in arms.items():
        blocks = found.seconds[found.arm == name].tolist()
        results = {"block_seconds": blocks, "images_per_step": len(images)}
        results["control"] = found.seconds[found.arm == "FP32 again"].tolist()
        session.save("07 step", name, config_of(session, layout, images), results, arm["float32"])
    raise_if_stopped(found)


def memory(session, layout):
    """Peak memory by four counters, what is kept for backward, and joules per image, of each arm."""
    images, labels = resident_batch(session, layout)
    for name, arm in arms_of(session.device).items():
        model, *others = build(session, arm["dtype"], layout, lr=0.0)
        kept = kept_for_backward(model, partial(loss_of, arm, model, images, labels))
        step = partial(train_step, arm, model, *others, images, labels)
        results = {"memory": measure.memory(step, session.device), "kept_for_backward": kept}
        results["joules_per_image"] = measure.energy(step, len(images), session.device, seconds=3)
        session.save("07 memory", name, config_of(session, layout, images), results, arm["float32"])
        model = others = step = None  # or the next arm would count them


def digits(count, size):
    """The suite's first images and labels, read with Pillow, which timm brings along: OpenCV may be missing."""
    from PIL import Image

    folder = DATA / "digits"
    table = pd.read_csv(folder / "train.csv").head(count)
    pictures = []
    for row in table.itertuples():
        with Image.open(folder / row.path / row.image) as picture:
            pixels = np.asarray(picture.convert("RGB").resize(size), dtype=np.float32)
        pictures.append(torch.from_numpy(pixels / 255).permute(2, 0, 1))
    labels = torch.tensor(table.label.to_numpy(), dtype=torch.float32)
    return torch.stack(pictures), labels[:, None]


def losses(session, arm):
    """The losses of 200 steps on the suite's digits, with the same batches in each arm."""
    _, size, batch = settings(session)
    steps = LOSS_STEPS if session.full else 4
    images, labels = (part.to(session.device) for part in digits(256 if session.full else 16, size))
    settings_of_arm = arms_of(session.device)[arm]
    parts = build(session, settings_of_arm["dtype"], "NCHW", lr=0.02)
    order = torch.Generator().manual_seed(0)
    found = []
    for _ in measure.progress(range(steps), desc=arm):
        some = torch.randint(len(images), (batch,), generator=order).to(session.device)
        found.append(train_step(settings_of_arm, *parts, images[some], labels[some]))
    results = {"losses": torch.stack(found).tolist()}
    config = config_of(session, "NCHW", range(batch), lr=0.02, steps=steps) | {"data": "digits"}
    session.save("07 losses", arm, config, results, settings_of_arm["float32"])


def report(found):
    """One table per card and layout: time and speed of each arm."""
    tables = []
    steps = [record for record in found if record["what"]["experiment"] == "07 step"]
    for layout in {record["what"]["config"].get("layout") for record in steps}:
        mine = [record for record in steps if record["what"]["config"].get("layout") == layout]
        blocks = {record["what"]["arm"]: pd.Series(record["results"]["block_seconds"]) for record in mine}
        frame = pd.DataFrame(blocks).dropna().rename_axis("round").reset_index()
        frame = frame.melt("round", var_name="arm", value_name="seconds")
        table = measure.summary(frame, mine[-1]["results"]["images_per_step"], "FP32")
        tables.append(table.rename_axis(layout))
    return tables
