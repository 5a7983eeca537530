"""How long the stages would take on cards that are not here: from what they launch, so that the first card can prove
it wrong.

A step is taken to last twice its roofline (notebook 06 finds half of it reached), and at least 10 µs per operation,
forward, backward and in the optimizer. Building a model takes a second, compiling one block of the decoder 15, and
compiling EfficientNet 60: these three are guesses.
"""

from functools import cache, partial

import pandas as pd
import torch

from halfbits import GPUS, roofline
from tools.record import casts, decoder, experiment, machine, peaks

CARDS = ("T4", "RTX 4090", "H200")
BUILD, COMPILE_BLOCK, COMPILE_NETWORK, LAUNCH = 1.0, 15.0, 60.0, 10e-6
ARMS = {"FP32": "fp32", "FP32 (TF32)": "tf32", "fp16 + GradScaler": "fp16", "bf16": "bf16", "pure bf16": "pure_bf16"}
ARMS |= {"FP8 tensorwise": "bf16", "FP8 rowwise": "bf16"}  # as fast as bf16 at this width, or slower


def arms_on(card, names):
    """The arms that the card has units for."""
    rates = GPUS.loc[card]
    bf16 = not pd.isna(rates["bf16"])
    tf32 = not pd.isna(rates["tf32"])
    fp8 = card not in ("V100", "T4", "RTX 3090", "A100")
    allowed = {name: bf16 or "bf16" not in name for name in names}
    allowed |= {"FP32 (TF32)": tf32} | dict.fromkeys(decoder.FLOAT8, fp8)
    return [name for name in names if allowed[name]]


@cache
def seconds_of(what, way, card):
    """Seconds of one training step of a network or of the decoder."""
    import timm

    batch, size, optimizer, loss = 32, peaks.SIZE, "sgd_momentum", None
    build = partial(timm.create_model, what, num_classes=1)
    if what == "experiment":
        build = partial(timm.create_model, "tf_efficientnet_b0", num_classes=1)
        size = (384, 512)
    inputs = (batch, 3, size[1], size[0])
    if what == "decoder":
        build = partial(decoder.Decoder, *decoder.SMOLLM2)
        inputs = decoder_tokens
        optimizer, loss = "adamw", decoder_loss
    found = roofline(build, inputs, way, card, optimizer, loss)
    return max(2 * found.seconds, LAUNCH * len(found.ops))


def decoder_tokens():
    return torch.zeros(4, 1024, dtype=torch.long)


def decoder_loss(logits):
    return decoder.loss_of(logits, torch.zeros(4, 1024, dtype=torch.long, device=logits.device))


def stage_a(card):
    total = 5
    for name in machine.DTYPES:
        rate = GPUS.loc[card, name]
        if not pd.isna(rate):
            for size in (1024, 2048, 4096, 8192, 16384):
                once = 2 * size**3 / (0.7e12 * rate)
                total += once * (3 + 5 * max(1, min(100, round(0.05 / once))))
    return total


def stage_b(card):
    steps = [seconds_of("experiment", ARMS[arm], card) for arm in arms_on(card, experiment_arms())]
    slowest = max(steps)
    per_block = max(2, min(10, round(0.5 / slowest)))
    total = 0
    for _ in experiment.LAYOUTS:
        timed = [*steps, steps[0]]  # FP32 twice
        total += sum(BUILD + seconds * (2 + 41 + 10 * (2 + per_block)) for seconds in timed)
        total += sum(BUILD + seconds * 18 + max(3, 10 * seconds) for seconds in steps)
    return total + sum(BUILD + 3 + experiment.LOSS_STEPS * seconds for seconds in steps)


def experiment_arms():
    return ["FP32", "FP32 (TF32)", "fp16 + GradScaler", "bf16"]


def stage_c(card):
    ways = ["fp32", "fp16"] if pd.isna(GPUS.loc[card, "bf16"]) else ["fp32", "fp16", "bf16", "pure_bf16"]
    names = [*peaks.NETWORKS, "decoder"]
    return sum(BUILD + 6 * seconds_of(name, way, card) for name in names for way in ways)


def stage_d(card):
    arms = arms_on(card, list(ARMS))
    total = 0
    for arm in arms:
        seconds = seconds_of("decoder", ARMS[arm], card)
        total += BUILD + (decoder.STEPS + 7) * seconds
        if arm != "FP32":
            total += BUILD + COMPILE_BLOCK + (decoder.STEPS + 7) * seconds
    return total


def stage_e(card):
    idle = 18  # with eight workers
    seconds = seconds_of("experiment", "tf32" if not pd.isna(GPUS.loc[card, "tf32"]) else "fp32", card)
    races = 2 * (BUILD + seconds * (24 + 6 * (10 + 2 * idle)))
    return 13 * races + 5 * COMPILE_NETWORK  # three races have one or two compiled rungs


def stage_f(_):
    return 6.0 * len(casts.NETWORKS)


def table():
    """Seconds by stage and card."""
    stages = {"a": stage_a, "b": stage_b, "c": stage_c, "d": stage_d, "e": stage_e, "f": stage_f}
    found = {card: {stage: 5 + of(card) for stage, of in stages.items()} for card in CARDS}
    found = pd.DataFrame(found).rename_axis("stage (seconds)")
    found.loc["a to d"] = found.loc["a":"d"].sum()
    return found
