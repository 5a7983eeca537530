"""Stage d: training steps of a decoder with the shape of SmolLM2, 135 million random weights."""

import time
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from helpers import DATA, hardware
from tools.record import measure
from tools.record.session import Unit, use_float32

STEPS = 100
# Width, width of the feed-forward layers, layers, heads, heads of keys and values, vocabulary: SmolLM2-135M's
# config.json, as transformers reads it.
SMOLLM2 = (576, 1536, 30, 9, 3, 49152)
SMALL = (64, 128, 2, 4, 2, 512)
FLOAT8 = ("FP8 tensorwise", "FP8 rowwise")


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each after a norm and added to the residual stream."""

    def __init__(self, width, inner, heads, of_keys):
        super().__init__()
        self.heads = heads
        size = width // heads
        self.before_attention = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, of_keys * size, bias=False)
        self.value = nn.Linear(width, of_keys * size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.before_mlp = nn.RMSNorm(width)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x, cosine, sine):
        y = self.before_attention(x)
        query, key, value = (self.split(layer(y)) for layer in (self.query, self.key, self.value))
        query = turned(query, cosine, sine)
        key = turned(key, cosine, sine)
        groups = self.heads // key.shape[1]
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def split(self, x):
        """(batch, tokens, width) as (batch, heads, tokens, size)."""
        size = self.query.out_features // self.heads
        return x.unflatten(-1, (-1, size)).transpose(1, 2)


def turned(x, cosine, sine):
    """Rotary positions: each pair of features is turned by its angle."""
    first, second = x.chunk(2, dim=-1)
    turned_by = torch.cat([-second, first], dim=-1)
    return x * cosine.to(x.dtype) + turned_by * sine.to(x.dtype)


class Decoder(nn.Module):
    """A language model of this shape, whose output layer is its embedding."""

    def __init__(self, width, inner, layers, heads, of_keys, vocabulary):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.blocks = nn.ModuleList(Block(width, inner, heads, of_keys) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.size = width // heads

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        speeds = torch.arange(0, self.size, 2, device=tokens.device, dtype=torch.float32) / self.size
        angles = positions[:, None] * 10_000**-speeds
        angles = torch.cat([angles, angles], dim=-1)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return F.linear(self.norm(x), self.embedding.weight)


def shape_of(session):
    """The model's shape, sequences per step and tokens per sequence."""
    return (SMOLLM2, 4, 1024) if session.full else (SMALL, 2, 32)


def arms_of(device):
    """For each arm: the weights' dtype, autocast's dtype, and what float32 matmuls use."""
    has = hardware.native_formats(device)
    float32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
    arms = {"FP32": (float32, None, "ieee")}
    if has["TF32"]:
        arms["FP32 (TF32)"] = (float32, None, "tf32")
    if device.type == "cpu" or has["bf16"] is not False:
        arms["bf16"] = (float32, bf16, "tf32")
        arms["pure bf16"] = (bf16, None, "tf32")
    if device.type != "cpu":
        arms["fp16 + GradScaler"] = (float32, fp16, "tf32")
    if has["FP8"]:
        for name in FLOAT8:
            arms[name] = (float32, bf16, "tf32")
    return arms


def units(session):
    """Each arm eager, and compiled where there is CUDA."""
    found = [Unit("d", f"{arm}, eager", partial(train, arm=arm, compiled=False), 8) for arm in arms_of(session.device)]
    if session.device.type == "cuda":
        for arm in arms_of(session.device):
            if arm != "FP32":
                found.append(Unit("d", f"{arm}, compiled", partial(train, arm=arm, compiled=True), 15))
    return found


def text(session):
    """Real text without a tokenizer: the bytes of the suite's documents, as tokens of the vocabulary's first 256."""
    files = sorted(DATA.parent.glob("docs/*.md")) + sorted(DATA.parent.glob("h*/*.py"))  # halfbits and helpers
    read = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(read), dtype=torch.uint8).long().to(session.device)


def loss_of(logits, tokens):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def in_float8(model, recipe, emulate):
    """torchao's conversion of the blocks' linear layers. The recipe is "tensorwise" or "rowwise"."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    convert_to_float8_training(model.blocks, config=config)


def train(session, arm, compiled):
    """100 steps with AdamW: losses, seconds per step, tokens per second, peak memory, and compile time apart."""
    weights, autocast, float32 = arms_of(session.device)[arm]
    shape, sequences, length = shape_of(session)
    device = session.device
    use_float32(float32)
    torch.manual_seed(0)
    model = Decoder(*shape).to(device, weights)
    if arm in FLOAT8:
        in_float8(model, arm.removeprefix("FP8 "), emulate=not session.full)
    if compiled:
        torch.compiler.reset()  # what other arms have compiled does not count here
        for block in model.blocks:
            block.compile(dynamic=False)  # one compilation serves all blocks, as they are alike
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scaler = torch.amp.GradScaler(device.type, enabled=autocast is torch.float16)
    corpus = text(session)
    order = torch.Generator().manual_seed(0)
    losses = []

    def step():
        starts = torch.randint(len(corpus) - length, (sequences, 1), generator=order).to(device)
        tokens = corpus[starts + torch.arange(length, device=device)]
        optimizer.zero_grad()
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            loss = loss_of(model(tokens), tokens)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())

    began = time.perf_counter()
    measure.time_block(step, 1, device)
    first = time.perf_counter() - began
    steps = STEPS if session.full else 4
    blocks = []
    for _ in measure.progress(range(steps // 4), desc=f"{arm}, {'compiled' if compiled else 'eager'}"):
        blocks.append(measure.time_block(step, 4, device))
    seconds = sorted(blocks)[len(blocks) // 2]
    results = {"losses": torch.stack(losses).tolist(), "block_seconds": blocks, "first_step_seconds": first}
    results |= {"tokens_per_second": sequences * length / seconds, "peak": measure.memory(step, device)}
    config = {"shape": shape, "sequences": sequences, "tokens": length, "compiled": compiled}
    config |= {"optimizer": "AdamW", "lr": 3e-4, "steps in a block": 4}
    session.save("12 decoder step", f"{arm}, {'compiled' if compiled else 'eager'}", config, results, float32)


def report(found):
    """Speed, peak and last losses of each arm."""
    import pandas as pd

    rows = {}
    for record in found:
        if record["what"]["experiment"] == "12 decoder step":
            results = record["results"]
            last = results["losses"][-20:]
            rows[record["what"]["arm"]] = {
                "tokens/s": results["tokens_per_second"],
                "peak (GB)": results["peak"].get("allocated", float("nan")) / 1e9,
                "loss, last 20": sum(last) / len(last),
                "first step (s)": results["first_step_seconds"],
            }
    return [pd.DataFrame.from_dict(rows, orient="index").rename_axis("decoder")] if rows else []
