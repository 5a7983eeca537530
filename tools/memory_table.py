"""The table of docs/halfbits.md: memory predicted beside what real tensors keep, and what Accelerate says.

uv run python -m tools.memory_table        # some minutes on a CPU
"""

import time
from functools import partial
from operator import attrgetter
from pathlib import Path

import timm
import torch
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from halfbits import predict_memory
from helpers.measure import kept_for_backward, progress

MANUAL = Path(__file__).resolve().parent.parent / "docs" / "halfbits.md"
BEGIN = "<!-- memory table: python -m tools.memory_table -->\n"
END = "<!-- end of the memory table -->"
IMAGE_NETWORKS = {
    "resnet50": 4,
    "tf_efficientnet_b0": 4,
    "mobilenetv3_large_100": 8,
    "convnext_tiny": 4,
    "vit_small_patch16_224": 4,
    "swin_tiny_patch4_window7_224": 4,
}
# SmolLM2-135M: arXiv:2502.02737, and its config.json.
SMOLLM2 = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
MIB = 2**20


def networks():
    """Rows of name, what it is called with in words, a function that builds it, its inputs, its loss."""
    for name, batch in IMAGE_NETWORKS.items():
        images = partial(torch.zeros, batch, 3, 224, 224)
        yield name, f"{batch} images", partial(timm.create_model, name), images, mean_of
    tokens = partial(tokens_of, 2, 256)
    yield "SmolLM2-135M", "2 x 256 tokens", partial(build, LlamaForCausalLM, LlamaConfig(**SMOLLM2)), tokens, loss_of
    yield "GPT-2", "2 x 256 tokens", partial(build, GPT2LMHeadModel, GPT2Config()), tokens, loss_of


def build(kind, config):
    config.use_cache = False
    return kind(config).train()


def tokens_of(sequences, length):
    return dict.fromkeys(["input_ids", "labels"], torch.zeros(sequences, length, dtype=torch.long))


loss_of = attrgetter("loss")


def mean_of(output):
    return output.float().square().mean()


def kept(model, inputs, loss, precision):
    """The bytes that a real forward pass saves for backward."""

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
            return loss(output)

    return sum(kept_for_backward(model, forward).values())


def row(name, words, make, inputs, loss):
    cells = [f"{name}, {words}"]
    model = make()
    seconds = []
    for precision in ("fp32", "bf16"):
        begin = time.perf_counter()
        estimate = predict_memory(lambda: model, inputs, precision, "adamw", "cpu", loss)
        seconds.append(time.perf_counter() - begin)
        if precision == "fp32":
            peak = estimate.peak
        real = kept(model, inputs(), loss, precision)
        error = sum(estimate.activations.values()) / real - 1
        cells.append(f"{real / MIB:,.0f} MiB, {100 * error:+.2f}%")
    bytes_of_model, _ = calculate_maximum_sizes(model)
    accelerate = max(estimate_training_usage(bytes_of_model, "float32").values())
    cells += [f"{seconds[0]:.1f} s", f"{peak / MIB:,.0f} MiB", f"{accelerate / MIB:,.0f} MiB"]
    return "| " + " | ".join(cells) + " |"


def main():
    rows = [row(*network) for network in progress([*networks()], desc="Networks")]
    titles = ["network", "FP32: saved, error", "bf16 autocast: saved, error", "prediction takes"]
    titles += ["peak with AdamW, FP32", "Accelerate says"]
    heading = f"| {' | '.join(titles)} |"
    rule = "|---" * len(titles) + "|"
    note = f"*On two cores of a CPU, with torch {torch.__version__.partition('+')[0]}.*"
    text = MANUAL.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join([heading, rule, *rows, "", note])
    MANUAL.write_text(f"{before}{BEGIN}\n{table}\n\n{END}{after}", encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
