"""The table of docs/halfbits.md: what `watch` costs, beside two instruments that people use for the same question.

uv run python -m tools.overhead             # about a quarter of an hour on two cores, which should be idle

Bare and watched runs take turns (bare, watched, watched, bare), each with a fresh model and a fresh watch, so that a
machine that slows down does so for both. What is compared is the processor's time of whole runs.
"""

import statistics
import time
import warnings
from contextlib import contextmanager, nullcontext
from pathlib import Path

import timm
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.debug_utils import DebugUnderflowOverflow

from halfbits import watch
from helpers.measure import progress

MANUAL = Path(__file__).resolve().parent.parent / "docs" / "halfbits.md"
BEGIN = "<!-- overhead table: python -m tools.overhead -->\n"
END = "<!-- end of the overhead table -->"
STEPS, ROUNDS = 100, 2
STEPS_OF_OTHERS = 25  # each of their steps costs the same, and detect_anomaly's several times as much


def language_model():
    options = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=2048, use_cache=False, **options))
    tokens = torch.randint(0, 2048, (2, 128))
    return model, lambda: model(input_ids=tokens, labels=tokens).loss, torch.bfloat16


def image_network():
    model = timm.create_model("resnet18", num_classes=10)
    images, labels = torch.randn(8, 3, 96, 96), torch.randint(0, 10, (8,))
    return model, lambda: nn.functional.cross_entropy(model(images), labels), None


def small_network():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    rows, labels = torch.randn(64, 64), torch.randint(0, 10, (64,))
    return model, lambda: nn.functional.cross_entropy(model(rows), labels), torch.bfloat16


LOOPS = {
    "Llama of 6 layers, bf16 autocast": language_model,
    "ResNet-18, float32": image_network,
    "two linear layers, bf16 autocast": small_network,
}


@contextmanager
def underflow_and_overflow(model, optimizer):
    """It hooks itself into the model, and prints frames only where something is found."""
    DebugUnderflowOverflow(model)
    yield


@contextmanager
def anomaly(model, optimizer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Anomaly Detection has been enabled"
        with torch.autograd.detect_anomaly(check_nan=True):
            yield


def watched(model, optimizer):
    return watch(model, optimizer, save=None)


AROUND = {
    "watch": watched,
    "detect_anomaly": anomaly,
    "DebugUnderflowOverflow": underflow_and_overflow,
}


def run(build, around, count):
    """The processor's seconds of a run, and the median step in seconds by the clock."""
    torch.manual_seed(0)
    model, loss_of, dtype = build()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    steps, began = [], time.process_time()
    with around(model, optimizer):
        for _ in range(count):
            start = time.perf_counter()
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = loss_of()
            loss.backward()
            optimizer.step()
            steps.append(time.perf_counter() - start)
    return time.process_time() - began, statistics.median(steps)


def compared(build, around):
    """The median ratio of watched and bare runs, the smallest and largest, and a bare step's seconds."""
    ratios, bare_steps = [], []
    count = STEPS if around is watched else STEPS_OF_OTHERS
    for _ in range(ROUNDS):
        first, step = run(build, bare, count)
        second, _ = run(build, around, count)
        third, _ = run(build, around, count)
        last, _ = run(build, bare, count)
        ratios += [second / first, third / last]
        bare_steps.append(step)
    return statistics.median(ratios), min(ratios), max(ratios), statistics.median(bare_steps)


def bare(model, optimizer):
    return nullcontext()


def main():
    for build in LOOPS.values():  # what is slow only once
        run(build, watched, 5)
    lines = [f"| loop | {' | '.join(f'`{name}`' for name in AROUND)} |", "|---|" + "---|" * len(AROUND)]
    pairs = [(name, what) for name in LOOPS for what in AROUND]
    found = {pair: compared(LOOPS[pair[0]], AROUND[pair[1]]) for pair in progress(pairs)}
    for name in LOOPS:
        cells = []
        for what in AROUND:
            middle, least, most, step = found[name, what]
            cells.append(f"{middle:.2f} ({least:.2f} to {most:.2f})")
        lines.append(f"| {name}, {1e3 * step:,.0f} ms a step | {' | '.join(cells)} |")
    note = (
        f"*Processor time of {STEPS} steps ({STEPS_OF_OTHERS} for the others) beside that of bare runs: the median and "
    )
    note += f"the range of {2 * ROUNDS} pairs, on "
    note += f"{torch.get_num_threads()} cores of a CPU, with torch {torch.__version__.partition('+')[0]}.*"
    text = "\n".join([*lines, "", note, ""])
    manual = MANUAL.read_text(encoding="utf-8")
    before, rest = manual.split(BEGIN)
    _, after = rest.split(END)
    MANUAL.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
