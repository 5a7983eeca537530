"""halfbits/errors.toml: every fix runs that a CPU can run, on small things whose dtypes do not fit each other."""

import os

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfbits import errors
from tests.weekly.test_messages_raised import BF16, FP8, HALF, language_model, ones, process_group

FIXES = errors.messages().set_index("slug")
NOT_RUN = {  # and why not
    "cannot-convert-a-mps-tensor-to-float64-dtype": "a Mac",
    "must-flatten-tensors-with-uniform-dtype": "a GPU: FSDP1 wants one",
    "scaled-mm-scale-a-and-scale-b-must-be-float": "a GPU of today",
    "scaled-mm-mat2-must-be-col-major": "a GPU of today",
    "lightning-amp-with-fp16-is-not-supported-on-cpu": "it fails where there is no GPU, as it says",
    "your-setup-doesn-t-support-bf16-gpu": "a GPU",
    "at-most-one-of-fp16-and-bf16-can-be-true": "a GPU",
    "loss-0-grad-norm-nan": "a GPU",
    "a-tensor-with-all-nans-was-produced-in-unet": "Diffusers is not installed",
    "invalid-value-encountered-in-cast": "Diffusers is not installed",
    "pipelines-loaded-with-dtype-float16-cannot-run-with-cpu-device": "Diffusers is not installed",
    "unet-loaded-as-datatype-float16": "Diffusers is not installed",
    "ultralytics-amp-checks-failed": "Ultralytics is not installed",
    "bfloat16-is-only-supported-on-gpus-with-compute-capability-8": "vLLM is not installed",
    "you-cannot-perform-fine-tuning-on-purely-quantized-models": "bitsandbytes is not installed",
    "matmul8bitlt-inputs-will-be-cast-to-float16": "bitsandbytes is not installed",
    "you-cannot-cast-a-bitsandbytes-model-in-a-new-dtype": "bitsandbytes is not installed",
    "bnb-4bit-compute-dtype-float32-will-lead-to-slow-inference": "bitsandbytes is not installed",
    "onnxruntime-unexpected-input-data-type": "ONNX Runtime is not installed",
    "fabric-call-fabric-backward-instead-of-loss-backward": "Fabric asks for fp16, and that for a GPU",
}


class Named(dict):
    """A dict whose keys are attributes too."""

    __getattr__ = dict.get


def step(dtype=torch.float32):
    """A model whose loss was scaled and sent backward, its optimizer and its scaler."""
    model, scaler = nn.Linear(16, 16).to(dtype), torch.amp.GradScaler("cpu")
    loss = model(ones(8, 16, dtype=dtype)).sum()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler.scale(loss).backward(retain_graph=True)
    return {"model": model, "loss": loss, "optimizer": optimizer, "scaler": scaler}


def world(folder):
    """What most fixes name."""
    things = step() | {"device": torch.device("cpu"), "x": ones(8, 16), "w": ones(16, 16, dtype=HALF), "lr": 0.1}
    things |= {"checkpoint": {"scaler": torch.amp.GradScaler("cpu", enabled=False).state_dict()}, "path": folder / "s"}
    things |= {"before": 1.0, "scheduler": torch.optim.lr_scheduler.ExponentialLR(things["optimizer"], 0.5)}
    things |= {"name": folder / "model", "folder": folder / "run", "ds_config": {}, "last_part": True}
    things |= {"weights": list(things["model"].parameters()), "self": things["model"], "batch": {}, "config": None}
    things |= dict.fromkeys(("layer", "block", "compiled"), things["model"]) | {"op": torch.mm, "loss_of": F.mse_loss}
    things |= {"logits": ones(8, 4), "output": ones(8, 4, dtype=HALF), "targets": ones(8, 4), "target": ones(8, 4)}
    things |= {"q": ones(1, 1, 2, 4), "k": ones(1, 1, 2, 4), "v": ones(1, 1, 2, 4, dtype=BF16)}
    things |= {"index": torch.tensor([0, 2]), "rows": torch.tensor([0, 2]), "position": torch.tensor([0, 2])}
    things |= {"mask": ones(4, 4, dtype=HALF), "padding": ones(4, 4), "scores": ones(4, 4, dtype=HALF)}
    things |= {"codes": ones(4, 4).to(FP8), "scale": ones(1), "array": np.full(4, 1e5, np.float32)}
    return things


LOW = ones(2, 4, dtype=HALF)  # a 16-bit result
OTHERS = {  # what these name is another thing
    "attempting-to-unscale-fp16-gradients": lambda: step(HALF) | {"x": ones(8, 16, dtype=HALF)},
    "expected-target-dtype-to-be-long": lambda: {"target": ones(8)},
    "expected-tensor-for-argument-indices-to-have-scalar-types-long-int": lambda: {
        "embedding": nn.Embedding(4, 4),
        "ids": ones(2, dtype=HALF),
    },
    "tensors-used-as-indices-must-be-long": lambda: {"index": ones(2)},
    "expected-m1-and-m2-in-the-backward-of-a-function": lambda: {
        "ctx": Named(saved_tensors=(ones(2), ones(2))),
        "gradient": ones(2, dtype=BF16),
    },
    "all-tensors-must-have-the-same-dtype-bilinear": lambda: {
        "bilinear": nn.Bilinear(4, 4, 4),
        "left": LOW,
        "right": LOW,
    },
    "rnn-input-dtype-does-not-match-weight-dtype": lambda: {"lstm": nn.LSTM(16, 4)},
    "input-and-hidden-tensors-are-not-the-same-dtype": lambda: {
        "lstm": nn.LSTM(4, 4),
        "x": ones(2, 1, 4),
        "state": [ones(1, 1, 4, dtype=BF16)] * 2,
    },
    "mixed-dtype-cpu-expect-parameter-to-have-scalar-type-of-float": lambda: {"norm": nn.LayerNorm(4).half()},
    "mismatch-dtype-between-input-and-weight-rms-norm": lambda: {"norm": nn.RMSNorm(4)},
    "input-dtypes-must-be-the-same-baddbmm": lambda: {
        "bias": ones(1, 2, 2),
        "q": ones(1, 2, 2, dtype=BF16),
        "k": ones(1, 2, 2, dtype=BF16),
    },
    "prelu-type-promoting-not-supported": lambda: {"prelu": nn.PReLU(), "x": LOW},
    "expected-dtype-float-for-end-lerp": lambda: {"average": ones(2, 4), "weight": LOW, "decay": 0.9},
    "expected-out-tensor-to-have-dtype": lambda: {"result": LOW, "w": ones(16, 16)},
    "index-put-requires-the-source-and-destination-dtypes-match": lambda: {"buffer": ones(4, 4), "result": LOW},
    "scatter-expected-self-dtype-to-be-equal-to-src-dtype": lambda: {"sums": ones(4), "values": ones(2, dtype=HALF)},
    "index-copy-self-and-source-expected-to-have-the-same-dtype": lambda: {"cache": ones(4, 4), "keys": LOW},
    "index-add-self-and-source-must-have-the-same-scalar-type": lambda: {"sums": ones(4, 4), "values": LOW},
    "masked-scatter-expected-self-and-source-to-have-same-dtypes": lambda: {
        "embeddings": ones(2, 4),
        "mask": LOW > 0,
        "features": LOW,
    },
    "attempting-to-assign-a-gradient-with-dtype": lambda: {
        "master": nn.Parameter(ones(2, 4)),
        "weight": Named(grad=LOW),
    },
    "value-cannot-be-converted-to-type-half-without-overflow": lambda: {"mask": ones(4, 4) > 0},
    "invalid-usage-of-tensors-with-different-dtypes": lambda: {"gathered": [ones(8, 16, dtype=HALF)]},
    "fsdp-expects-uniform-original-parameter-dtype": lambda: {"model": nn.Linear(4, 4)},
    "expected-attn-mask-dtype-to-match-query-dtype": lambda: {"mask": LOW},
    "no-operator-found-for-memory-efficient-attention": lambda: {"v": ones(1, 1, 2, 4)},
    "linalg-low-precision-dtypes-not-supported": lambda: {"x": torch.eye(4, dtype=HALF)},
    "not-implemented-for-half": lambda: {"op": torch.linalg.matrix_norm, "x": LOW},
    "promotion-for-float8-types-is-not-supported": lambda: {"x": ones(4, 4)},
    "expected-scalar-type-float-but-found-half": lambda: {"op": torch.mm},
    "got-unsupported-scalartype-bfloat16": lambda: {"x": ones(2, dtype=BF16)},
    "cannot-convert-ndarray-of-type-bfloat16": lambda: {"array": np.ones(2, ml_dtypes.bfloat16)},
    "quantile-input-tensor-must-be-either-float-or-double": lambda: {"x": LOW},
    "view-as-complex-is-only-supported-for-half-float-and-double": lambda: {"q": ones(2, 4, dtype=BF16)},
    "expected-parameter-of-distribution-to-satisfy-the-constraint": lambda: {
        "head": nn.Linear(4, 4).half(),
        "features": LOW,
    },
    "function-returned-nan-values-in-its-0th-output": lambda: {"squares": torch.zeros(2)},
    "only-tensors-of-floating-point-dtype-can-require-gradients": lambda: {"codes": ones(2, dtype=torch.uint8)},
    "cuda-out-of-memory-in-cross-entropy": lambda: {"parts": [(ones(2, requires_grad=True), ones(2))] * 2},
    "cuda-out-of-memory": lambda: {"build_model": lambda: nn.Linear(16, 16), "shape": (8, 16)},
    "not-implemented-for-float4": lambda: {"x": ones(16, 16, dtype=BF16)},
    "fairseq-minimum-loss-scale-reached": lambda: {"batch": ones(8, 16)},
    "casting-fp32-inputs-back-for-flash-attn-compatibility": lambda: {"model": lambda: Named(loss=0.0)},
}


@pytest.mark.parametrize("slug", sorted(set(FIXES.index) - set(NOT_RUN)))
def test_a_fix_runs_as_it_is_written(slug, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    entry = FIXES.loc[slug]
    if "from_pretrained" in entry.fix:
        language_model().save_pretrained(tmp_path / "model")
    things = world(tmp_path) | OTHERS.get(slug, dict)() | {"torch": torch}
    before = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    try:
        if any(word in entry.needs for word in ("distributed", "fsdp")):
            with process_group():
                exec(f"{entry.needs}\n{entry.fix}", things)
        else:
            exec(f"{entry.needs}\n{entry.fix}", things)
    finally:
        torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision = before


def test_fixes_that_are_not_run_are_there():
    assert set(NOT_RUN) | set(OTHERS) <= set(FIXES.index)
