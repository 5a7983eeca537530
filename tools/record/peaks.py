"""Stage c: the peak memory of eight networks and of a decoder, to be held against what is predicted."""

from functools import cache, partial

import pandas as pd
import torch

from helpers import hardware
from tools.record import decoder, measure
from tools.record.session import Unit, use_float32

NETWORKS = ["tf_efficientnet_b0", "regnety_008", "resnet50", "convnext_tiny", "vit_small_patch16_224"]
NETWORKS += ["mixer_s32_224", "swin_tiny_patch4_window7_224", "mobilenetv3_small_100"]
WAYS = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16, "pure bf16": None}
SIZE = (224, 224)


def ways_of(device):
    """The ways that this device has units for."""
    bf16 = hardware.native_formats(device)["bf16"] is not False
    return [way for way in WAYS if bf16 or "bf16" not in way]


def units(session):
    """One unit per network, and one for the decoder."""
    names = NETWORKS if session.full else ["test_efficientnet", "test_resnet"]
    found = [Unit("c", name, partial(of_a_network, name=name), 5) for name in names]
    return [*found, Unit("c", "decoder", of_the_decoder, 8)]


def dtype_of(way):
    return torch.bfloat16 if way == "pure bf16" else torch.float32


def of_a_network(session, name):
    """The peak of a training step in each way: the step that `predict_memory` imagines."""
    import timm

    use_float32("ieee")
    batch, size = (32, SIZE) if session.full else (2, (64, 64))
    for way in ways_of(session.device):
        model = timm.create_model(name, num_classes=1).to(session.device, dtype_of(way))
        images = torch.randn(batch, 3, *size[::-1], device=session.device, dtype=dtype_of(way))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        step = partial(train_step, model, optimizer, images, WAYS[way], loss_of_images)
        results = {"memory": measure.memory(step, session.device), "weights": count(model)}
        session.save("06 memory", way, {"model": name, "batch": batch, "size": size}, results)
        model = images = optimizer = step = None  # or the next way would count them


def of_the_decoder(session):
    """The same for the decoder, with AdamW. Here the key is `peak`, as notebook 06 reads images from `memory`."""
    use_float32("ieee")
    shape, sequences, length = decoder.shape_of(session)
    for way in ways_of(session.device):
        model = decoder.Decoder(*shape).to(session.device, dtype_of(way))
        tokens = torch.randint(shape[-1], (sequences, length), device=session.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        step = partial(train_step, model, optimizer, tokens, WAYS[way], decoder.loss_of)
        config = {"shape": shape, "sequences": sequences, "tokens": length, "optimizer": "adamw"}
        results = {"peak": measure.memory(step, session.device), "weights": count(model)}
        results["predicted"] = predicted_decoder(tuple(shape), sequences, length, way)
        session.save("06 decoder memory", way, config, results)
        model = tokens = optimizer = step = None


def train_step(model, optimizer, inputs, dtype, loss_of):
    optimizer.zero_grad()
    with torch.autocast(inputs.device.type, dtype, enabled=dtype is not None):
        loss = loss_of(model(inputs), inputs)
    loss.backward()
    optimizer.step()


def loss_of_images(output, _):
    return torch.nn.functional.binary_cross_entropy_with_logits(output, 0 * output)


def count(model):
    return sum(weight.numel() for weight in model.parameters())


@cache
def predicted(name, batch, size, way):
    """The predicted peak of a step on images, in bytes."""
    import timm

    from halfbits import predict_memory

    width, height = size
    build = partial(timm.create_model, name, num_classes=1)
    return predict_memory(build, (batch, 3, height, width), way.replace(" ", "_")).peak


@cache
def predicted_decoder(shape, sequences, length, way):
    """The predicted peak of a step of the decoder with AdamW, in bytes."""
    from halfbits import predict_memory

    def tokens():
        return torch.randint(shape[-1], (sequences, length))

    def loss(logits):
        targets = torch.zeros(sequences, length, dtype=torch.long, device=logits.device)
        return decoder.loss_of(logits, targets)

    build = partial(decoder.Decoder, *shape)
    return predict_memory(build, tokens, way.replace(" ", "_"), "adamw", loss=loss).peak


def report(found):
    """Measured beside predicted, a row per step."""
    rows = []
    names = {"FP32": "fp32", "FP32 (TF32)": "fp32", "fp16 + GradScaler": "fp16"}
    for record in measure.progress(found, desc="Predicting memory"):
        what, results = record["what"], record["results"]
        way = names.get(what["arm"], what["arm"])
        config = what["config"]
        read = results.get("memory", results.get("peak", {})).get("allocated")
        if way not in WAYS or not isinstance(read, int):
            continue
        if what["experiment"] == "06 decoder memory":
            model = "decoder"
            expected = predicted_decoder(tuple(config["shape"]), config["sequences"], config["tokens"], way)
        elif "model" in config:
            model = f"{config['model']}, {config['batch']} x {config['size'][1]} x {config['size'][0]}"
            expected = predicted(config["model"], config["batch"], tuple(config["size"]), way)
        else:
            continue
        rows.append((model, way, read / 1e9, expected / 1e9, read / expected))
    table = pd.DataFrame(rows, columns=["step", "way", "allocated (GB)", "predicted (GB)", "ratio"])
    return [table.set_index("step")] if rows else []
