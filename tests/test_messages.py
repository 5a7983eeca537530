"""data/messages.toml: every message that a CPU can raise is raised here, each is found when it is pasted, leads to a
heading, and has a fix that is Python."""

import ast
import importlib
import json
import logging
import pickle
import re
import traceback
import warnings
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
import vl_convert
from sklearn.metrics import mean_squared_error
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from helpers import explore, messages

MESSAGES = messages.load()
SYMPTOMS = messages.load("symptom")
HALF, BF16, FP8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
NOT_RAISED = {  # and why not
    "amp-unscale-not-implemented-for-bfloat16": "CUDA's kernel; the CPU's takes bf16",
    "cuda-out-of-memory-in-cross-entropy": "a GPU",
    "current-cuda-device-does-not-support-bfloat16": "an old GPU",
    "does-not-support-bfloat16-compilation-natively": "an old GPU",
    "flashattention-only-support-fp16-and-bf16-data-type": "a GPU",
    "flash-attention-2-only-supports-float16-and-bfloat16": "flash-attn is not installed",
    "cufft-only-supports-powers-of-two-in-half-precision": "a GPU",
    "cannot-convert-a-mps-tensor-to-float64-dtype": "a Mac",
    "mps-bfloat16-is-only-supported-on-macos-14": "a Mac",
    "a-tensor-with-all-nans-was-produced-in-unet": "the program is not installed",
    "loss-is-nan-stopping-training": "the script is not installed",
    "invalid-value-encountered-in-cast": "whether NumPy says so depends on the processor",
    "deepspeed-current-loss-scale-already-at-minimum": "DeepSpeed is not installed",
    "deepspeed-overflow-skipping-step": "DeepSpeed is not installed",
    "deepspeed-torch-autocast-is-enabled-outside": "DeepSpeed is not installed",
    "mixed-precision-arg-cannot-be-set-when-deepspeed-config": "DeepSpeed is not installed",
    "apex-gradient-overflow-skipping-step": "apex is not installed",
    "fairseq-minimum-loss-scale-reached": "fairseq is not installed",
    "fairseq-gradient-overflow-detected": "fairseq is not installed",
    "cuda-out-of-memory": "a GPU",
    "cublas-status-when-calling-cublasgemmex": "a GPU",
    "scaled-mm-is-only-supported-on-compute-capability-8-9": "an old GPU",
    "insufficient-for-fp8-mixed-precision-training": "an old GPU",
    "device-compute-capability-or-higher-required-for-fp8-execution": "Transformer Engine is not installed",
    "triton-type-fp8e4nv-not-supported-in-this-architecture": "an old GPU",
    "bfloat16-is-only-supported-on-gpus-with-compute-capability-8": "vLLM is not installed",
    "bnb-4bit-compute-dtype-float32-will-lead-to-slow-inference": "bitsandbytes is not installed",
    "matmul8bitlt-inputs-will-be-cast-to-float16": "bitsandbytes is not installed",
    "fp16-mixed-precision-requires-a-device": "a device that Accelerate does not know",
    "upcasted-low-precision-parameters": "FSDP1 in Accelerate, with several processes",
    "te-data-types-for-parameters-must-match": "Transformer Engine is not installed",
    "te-fp8-execution-requires-dimensions-divisible-by-8-and-16": "Transformer Engine is not installed",
    "flashattention-only-supports-ampere-gpus-or-newer": "an old GPU",
    "no-operator-found-for-memory-efficient-attention": "xFormers is not installed",
    "ultralytics-amp-checks-failed": "Ultralytics is not installed",
    "ptxas-feature-bf16-requires-target-sm-80": "an old GPU",
    "unable-to-find-an-engine-to-execute-this-computation": "an old GPU",
    "tensorfloat32-tensor-cores-available-but-not-enabled": "a GPU",
    "fp16-mixed-precision-training-can-only-be-used-on-cuda-devices": "Transformers 5 says it no longer",
    "blockwise-quantization-only-supports-16-32-bit-floats": "bitsandbytes is not installed",
    "pipelines-loaded-with-dtype-float16-cannot-run-with-cpu-device": "Diffusers is not installed",
    "unet-loaded-as-datatype-float16": "Diffusers is not installed",
    "onnxruntime-unexpected-input-data-type": "ONNX Runtime is not installed",
}


def said(function):
    """What function() says in exceptions, warnings, logs and prints, as a text."""
    texts = StringIO()
    handler = logging.StreamHandler(texts)
    loggers = [logging.getLogger(name) for name in ("transformers", "lightning.pytorch")]
    with warnings.catch_warnings(record=True) as warned, redirect_stdout(texts):
        warnings.simplefilter("always")
        for logger in loggers:
            logger.addHandler(handler)
        try:
            function()
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
        finally:
            for logger in loggers:
                logger.removeHandler(handler)
    return texts.getvalue() + "\n".join(f"{each.category.__name__}: {each.message}" for each in warned)


def ones(*shape, dtype=torch.float32, **more):
    return torch.ones(*shape, dtype=dtype, **more)


def started(dtype=torch.float32):
    """A model with scaled gradients, its optimizer and its scaler."""
    model, scaler = nn.Linear(4, 4).to(dtype), torch.amp.GradScaler("cpu")
    scaler.scale(model(ones(2, 4, dtype=dtype)).sum()).backward()
    return torch.optim.SGD(model.parameters(), 0.1), scaler


def step_with_moments(dtype):
    weight = nn.Parameter(ones(4))
    optimizer, weight.grad = torch.optim.AdamW([weight], foreach=True), ones(4)
    optimizer.step()
    optimizer.state[weight]["exp_avg"] = ones(4, dtype=dtype)
    optimizer.step()


@contextmanager
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


RAISERS = {  # what raises, warns of or logs the message of that name
    "gradscaler-source-state-dict-is-empty": lambda: torch.amp.GradScaler("cpu").load_state_dict(
        torch.amp.GradScaler("cpu", enabled=False).state_dict()
    ),
    "outputs-must-be-a-tensor-or-an-iterable-of-tensors": lambda: torch.amp.GradScaler("cpu").scale(1.0),
    "gradscaler-is-enabled-but-cuda-is-not-available": lambda: torch.amp.GradScaler("cuda"),
    "cuda-is-not-available-disabling-autocast": lambda: torch.autocast("cuda"),
    "autocast-target-dtype-is-not-supported": lambda: torch.autocast("cpu", torch.float32),
    "autocast-expected-device-type-of-type-str": lambda: torch.autocast(torch.device("cpu")),
    "torch-cuda-amp-autocast-is-deprecated": lambda: torch.cuda.amp.autocast(),
    "torch-cuda-amp-custom-fwd-is-deprecated": lambda: torch.cuda.amp.custom_fwd(print),
    "expected-target-dtype-to-be-long": lambda: F.cross_entropy(ones(2, 3), ones(2)),
    "expected-tensor-for-argument-indices-to-have-scalar-types-long-int": lambda: nn.Embedding(4, 4)(
        ones(2, dtype=HALF)
    ),
    "tensors-used-as-indices-must-be-long": lambda: ones(4)[ones(2)],
    "bitwise-and-not-implemented-for-half": lambda: ones(2, dtype=HALF) & ones(2, dtype=torch.bool),
    "masked-fill-only-supports-boolean-masks": lambda: ones(2).masked_fill_(ones(2, dtype=HALF), 0),
    "result-type-float-cannot-be-cast-to-long": lambda: F.binary_cross_entropy_with_logits(
        ones(2), torch.tensor([0, 1])
    ),
    "all-tensors-must-have-the-same-dtype-bilinear": lambda: nn.Bilinear(4, 4, 4)(
        ones(2, 4, dtype=HALF), ones(2, 4, dtype=HALF)
    ),
    "input-and-hidden-tensors-are-not-the-same-dtype": lambda: nn.LSTM(4, 4)(
        ones(2, 1, 4), [ones(1, 1, 4, dtype=BF16)] * 2
    ),
    "mat1-and-mat2-must-have-the-same-dtype": lambda: nn.Linear(4, 4)(ones(2, 4, dtype=HALF)),
    "expected-m1-and-m2-to-have-the-same-dtype": lambda: ones(2, 2) @ ones(2, 2, dtype=BF16),
    "input-type-and-bias-type-should-be-the-same": lambda: nn.Conv2d(1, 1, 1)(ones(1, 1, 2, 2, dtype=HALF)),
    "mixed-dtype-cpu-expect-parameter-to-have-scalar-type-of-float": lambda: nn.LayerNorm(4).half()(ones(2, 4)),
    "rnn-input-dtype-does-not-match-weight-dtype": lambda: nn.LSTM(4, 4)(ones(2, 1, 4, dtype=HALF)),
    "input-dtypes-must-be-the-same-baddbmm": lambda: torch.baddbmm(
        ones(1, 2, 2), ones(1, 2, 2, dtype=BF16), ones(1, 2, 2, dtype=BF16)
    ),
    "prelu-type-promoting-not-supported": lambda: nn.PReLU()(ones(2, dtype=HALF)),
    "tensors-of-the-same-index-must-be-on-the-same-device": lambda: step_with_moments(HALF),
    "expected-dtype-float-for-end-lerp": lambda: ones(2).lerp_(ones(2, dtype=HALF), 0.5),
    "found-dtype-float-but-expected-half": lambda: F.binary_cross_entropy(ones(2, dtype=HALF), ones(2)),
    "expected-out-tensor-to-have-dtype": lambda: torch.mm(ones(2, 2), ones(2, 2), out=ones(2, 2, dtype=HALF)),
    "scatter-expected-self-dtype-to-be-equal-to-src-dtype": lambda: ones(4).scatter_add_(
        0, torch.tensor([0]), ones(1, dtype=HALF)
    ),
    "index-copy-self-and-source-expected-to-have-the-same-dtype": lambda: ones(4).index_copy_(
        0, torch.tensor([0]), ones(1, dtype=HALF)
    ),
    "index-add-self-and-source-must-have-the-same-scalar-type": lambda: ones(4).index_add_(
        0, torch.tensor([0]), ones(1, dtype=HALF)
    ),
    "masked-scatter-expected-self-and-source-to-have-same-dtypes": lambda: ones(4).masked_scatter_(
        ones(4, dtype=torch.bool), ones(4, dtype=HALF)
    ),
    "value-cannot-be-converted-to-type-half-without-overflow": lambda: ones(4, dtype=HALF).masked_fill(
        ones(4, dtype=torch.bool), -1e9
    ),
    "none-of-the-inputs-have-requires-grad-true": lambda: checkpoint(nn.Linear(4, 4), ones(2, 4), use_reentrant=True),
    "view-as-complex-is-only-supported-for-half-float-and-double": lambda: torch.view_as_complex(
        ones(2, 2, dtype=BF16)
    ),
    "linalg-low-precision-dtypes-not-supported": lambda: torch.linalg.inv(ones(2, 2, dtype=HALF)),
    "not-implemented-for-float8": lambda: ones(2).to(FP8).sum(),
    "not-implemented-for-float4": lambda: ones(2).to(torch.float4_e2m1fn_x2),
    "promotion-for-float8-types-is-not-supported": lambda: ones(2).to(FP8) + ones(2),
    "not-implemented-for-half": lambda: torch.cdist(ones(2, 2, dtype=HALF), ones(2, 2, dtype=HALF)),
    "fft-unsupported-dtype-half": lambda: torch.fft.fft(ones(4, dtype=HALF)),
    "quantile-input-tensor-must-be-either-float-or-double": lambda: ones(4, dtype=HALF).quantile(0.5),
    "expected-scalar-type-float-but-found-half": lambda: ones(1, 2, 2).bmm(ones(1, 2, 2, dtype=HALF)),
    "got-unsupported-scalartype-bfloat16": lambda: ones(2, dtype=BF16).numpy(),
    "cannot-convert-ndarray-of-type-bfloat16": lambda: torch.from_numpy(np.ones(2, ml_dtypes.bfloat16)),
    "probability-tensor-contains-either-inf-nan-or-element-less-than-0": lambda: torch.multinomial(
        torch.tensor([np.nan, 1.0]), 1
    ),
    "expected-parameter-of-distribution-to-satisfy-the-constraint": lambda: torch.distributions.Categorical(
        logits=torch.full((4, 2), np.nan), validate_args=True
    ),
    "all-elements-of-input-should-be-between-0-and-1": lambda: F.binary_cross_entropy(torch.tensor([np.nan]), ones(1)),
    "input-contains-nan": lambda: mean_squared_error([1.0], [np.nan]),
    "overflow-encountered-in-cast": lambda: np.float32([1e9]).astype(np.float16),
    "no-module-named-apex": lambda: importlib.import_module("apex"),
    "only-tensors-of-floating-point-dtype-can-require-gradients": lambda: nn.Parameter(ones(2, dtype=torch.uint8)),
    "nn-module-to-only-accepts-floating-point-dtypes": lambda: nn.Linear(2, 2).to(torch.int8),
    "your-setup-doesn-t-support-bf16-gpu": lambda: arguments(bf16=True),
    "at-most-one-of-fp16-and-bf16-can-be-true": lambda: arguments(fp16=True, bf16=True, use_cpu=True),
    "tf32-requires-ampere-or-a-newer-gpu-arch": lambda: arguments(tf32=True),
    "unknown-mixed-precision-mode": lambda: accelerator("float16"),
    "lightning-optimizer-does-not-allow-for-gradient-clipping": lambda: fit(
        lambda weights: torch.optim.SGD(weights, fused=True), gradient_clip_val=1.0
    ),
    "lightning-amp-and-the-lbfgs-optimizer-are-not-compatible": lambda: fit(torch.optim.LBFGS),
    "lightning-amp-with-fp16-is-not-supported-on-cpu": lambda: trainer(precision="16-mixed"),
    "lightning-precision-16-is-supported-for-historical-reasons": lambda: trainer(precision=16),
    "lightning-precision-is-invalid": lambda: trainer(precision="fp16"),
}


def raises(slug):
    """Adds a function of several lines to RAISERS."""
    return lambda function: RAISERS.setdefault(slug, function)


@raises("attempting-to-unscale-fp16-gradients")
def _():
    optimizer, scaler = started(HALF)
    scaler.step(optimizer)


@raises("unscale-has-already-been-called")
def _():
    optimizer, scaler = started()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


@raises("unscale-is-being-called-after-step")
def _():
    optimizer, scaler = started()
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


@raises("step-has-already-been-called")
def _():
    optimizer, scaler = started()
    scaler.step(optimizer)
    scaler.step(optimizer)


@raises("no-inf-checks-were-recorded")
def _():
    _, scaler = started()
    scaler.step(torch.optim.SGD([nn.Parameter(ones(1))]))


@raises("attempted-step-but-scale-is-none")
def _():
    optimizer, _ = started()
    torch.amp.GradScaler("cpu").step(optimizer)


@raises("closure-use-is-not-supported-with-gradscaler")
def _():
    optimizer, scaler = started()
    scaler.step(optimizer, closure=lambda: 0)


@raises("gradscaler-may-only-be-pickled-at-the-beginning")
def _():
    optimizer, scaler = started()
    scaler.unscale_(optimizer)
    pickle.dumps(scaler)


@raises("lr-scheduler-step-before-optimizer-step")
def _():
    optimizer, _ = started()
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5).step()


@raises("binary-cross-entropy-is-unsafe-to-autocast")
def _():
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode():
            F.binary_cross_entropy(ones(2, dtype=HALF, device="cuda"), ones(2, device="cuda"))
    finally:
        torch.set_autocast_enabled("cuda", False)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient @ w.T, x.T @ gradient


@raises("expected-m1-and-m2-in-the-backward-of-a-function")
def _():
    with torch.autocast("cpu", BF16):
        loss = Product.apply(ones(2, 4), ones(4, 4, requires_grad=True)).sum()
    try:
        loss.backward()
    except RuntimeError:
        print(traceback.format_exc())


@raises("index-put-requires-the-source-and-destination-dtypes-match")
def _():
    ones(4)[torch.tensor([0])] = ones(1, dtype=HALF)


@raises("attempting-to-assign-a-gradient-with-dtype")
def _():
    nn.Parameter(ones(2)).grad = ones(2, dtype=HALF)


@raises("mismatch-dtype-between-input-and-weight-rms-norm")
def _():
    torch.set_warn_always(True)
    try:
        nn.RMSNorm(4)(ones(2, 4, dtype=HALF))
    finally:
        torch.set_warn_always(False)


@raises("invalid-usage-of-tensors-with-different-dtypes")
def _():
    with process_group():
        dist.all_gather([ones(2)], ones(2, dtype=HALF))


@raises("input-tensor-data-type-is-not-supported-for-nccl")
def _():
    with process_group():
        dist.all_reduce(ones(2).to(FP8))


@raises("fsdp-expects-uniform-original-parameter-dtype")
def _():
    with process_group() as mesh:
        fully_shard(model := nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4).bfloat16()), mesh=mesh)
        model(ones(2, 4))


@raises("must-flatten-tensors-with-uniform-dtype")
def _():
    with process_group():
        FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4).half()), device_id=torch.device("cpu"))


@raises("got-mixed-torch-tensor-and-dtensor")
def _():
    with process_group() as mesh:
        distribute_tensor(ones(2), mesh) + ones(2)


@raises("recomputed-values-have-different-metadata")
def _():
    layer, enabled = nn.Linear(4, 4), iter([True, False])

    def block(x):
        with torch.autocast("cpu", BF16, enabled=next(enabled)):
            return layer(x).sin()

    checkpoint(block, ones(2, 4, requires_grad=True), use_reentrant=False).sum().backward()


@raises("expected-query-key-and-value-to-have-the-same-dtype")
def _():
    q = ones(1, 1, 2, 4)
    F.scaled_dot_product_attention(q, q, q.bfloat16())


@raises("expected-attn-mask-dtype-to-match-query-dtype")
def _():
    q = ones(1, 1, 2, 4)
    F.scaled_dot_product_attention(q, q, q, ones(2, 2, dtype=HALF))


@raises("casting-fp32-inputs-back-for-flash-attn-compatibility")
def _():
    from transformers.modeling_flash_attention_utils import fa_peft_integration_check, logger

    type(logger).warning_once.cache_clear()
    fa_peft_integration_check(*[ones(1)] * 3, BF16)


@raises("no-available-kernel-aborting-execution")
def _():
    q = ones(1, 1, 2, 4)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.CUDNN_ATTENTION):
        F.scaled_dot_product_attention(q, q, q)


@raises("total-norm-is-non-finite-so-it-cannot-be-clipped")
def _():
    weight = nn.Parameter(ones(1))
    weight.grad = torch.tensor([np.inf])
    nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)


@raises("function-returned-nan-values-in-its-0th-output")
def _():
    with torch.autograd.detect_anomaly():
        (0 * torch.zeros(1, requires_grad=True).sqrt()).backward()


@raises("scaled-mm-expected-size-to-be-divisible-by-16")
def _():
    with FakeTensorMode():
        a, scale = ones(16, 15, device="cuda").to(FP8), ones(1, device="cuda")
        torch._scaled_mm(a, a.t(), scale, scale)


@raises("scaled-mm-scale-a-and-scale-b-must-be-float")
def _():
    with FakeTensorMode():
        a, scale = ones(16, 16, device="cuda").to(FP8), ones(1, device="cuda", dtype=BF16)
        torch._scaled_mm(a, a.t(), scale, scale)


@raises("scaled-mm-mat2-must-be-col-major")
def _():
    with FakeTensorMode():
        a, scale = ones(16, 16, device="cuda").to(FP8), ones(1, device="cuda")
        torch._scaled_mm(a, a, scale, scale)


@raises("float8-dynamic-quantization-requires-cuda-compute-capability-8-9")
def _():
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, quantize_

    quantize_(nn.Sequential(nn.Linear(32, 32)), Float8DynamicActivationFloat8WeightConfig())


@raises("mx-last-dimension-must-be-divisible-by-block-size")
def _():
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    MXTensor.to_mx(ones(2, 15), FP8, 32)


@raises("mix-of-the-legacy-and-new-apis-to-set-the-tf32-status")
def _():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        torch.set_float32_matmul_precision("high")
        matmul.fp32_precision = "ieee"
        assert matmul.allow_tf32 is not None
    finally:
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = before


@raises("fused-requires-all-the-params-to-be-floating-point")
def _():
    weight = ones(2, dtype=torch.complex64, requires_grad=True)
    weight.grad = ones(2, dtype=torch.complex64)
    torch.optim.AdamW([weight], fused=True).step()


def arguments(folder="unused", **more):
    from transformers import TrainingArguments

    return TrainingArguments(folder, report_to="none", **more)


def language_model(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    small = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8)
    return LlamaForCausalLM(LlamaConfig(**small, num_hidden_layers=1, num_attention_heads=1, **more))


@raises("loss-0-grad-norm-nan")
def _():
    from transformers import Trainer

    model = language_model()
    nn.init.constant_(model.lm_head.weight, np.nan)
    texts = [{"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([1, 2])}] * 2
    Trainer(
        model, arguments(max_steps=1, logging_steps=1, use_cpu=True, disable_tqdm=True), train_dataset=texts
    ).train()


@raises("torch-dtype-is-deprecated-use-dtype-instead")
def _():
    from transformers.configuration_utils import logger

    type(logger).warning_once.cache_clear()
    assert language_model().config.torch_dtype is None


@raises("you-cannot-cast-a-bitsandbytes-model-in-a-new-dtype")
def _():
    model = language_model()
    model.is_quantized = True
    model.half()


@raises("you-cannot-perform-fine-tuning-on-purely-quantized-models")
def _():
    from transformers import Trainer

    model = language_model()
    model.is_quantized, model.hf_quantizer = True, None
    Trainer(model, arguments(use_cpu=True))


def accelerator(precision, **more):
    from accelerate import Accelerator

    return Accelerator(cpu=True, mixed_precision=precision)


@raises("acceleratorstate-has-already-been-initialized")
def _():
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator("bf16")
    try:
        accelerator("no")
    finally:
        AcceleratorState._reset_state(True)


def trainer(**more):
    import lightning

    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return lightning.Trainer(accelerator="cpu", max_steps=1, **off, **more)


def fit(optimizer=torch.optim.SGD, loss=1.0, **more):
    """One step of Lightning; its fp16 with a scaler is given as a plugin, for it takes bf16 instead on a CPU."""
    import lightning
    from lightning.pytorch.plugins import MixedPrecision

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def training_step(self, batch):
            result = loss * self.layer(batch).sum()
            self.log("train_loss", result)
            return result

        def configure_optimizers(self):
            return optimizer(self.parameters())

    batches = torch.utils.data.DataLoader(ones(2, 4))
    trainer(plugins=[MixedPrecision("16-mixed", "cpu")], **more).fit(Module(), batches)


@raises("monitored-metric-is-not-finite")
def _():
    from lightning.pytorch.callbacks import EarlyStopping

    fit(loss=np.nan, callbacks=[EarlyStopping("train_loss", check_on_train_epoch_end=True, verbose=True)])


@raises("lightning-bf16-mixed-does-not-use-a-scaler")
def _():
    from lightning.pytorch.plugins import MixedPrecision

    MixedPrecision("bf16-mixed", "cpu", torch.amp.GradScaler("cpu"))


@raises("fabric-call-fabric-backward-instead-of-loss-backward")
def _():
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision

    fabric = Fabric(accelerator="cpu", plugins=[MixedPrecision("16-mixed", "cpu")])
    model = nn.Linear(4, 4)
    model, _ = fabric.setup(model, torch.optim.SGD(model.parameters()))
    model(ones(2, 4)).sum().backward()


@pytest.mark.parametrize("slug", RAISERS)
def test_what_is_raised_is_found_and_of_the_kind_that_is_listed(slug, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # trainers make folders
    entry = MESSAGES.set_index("slug").loc[slug]
    text = said(RAISERS[slug])
    assert re.search(entry.pattern, text, messages.FLAGS), text
    assert slug in list(messages.find(text).slug)[:3], text
    assert entry.kind == "log" or entry.kind in text, text


def test_every_message_is_raised_here_or_it_says_why_not():
    assert set(RAISERS) | set(NOT_RAISED) == set(MESSAGES.slug)
    assert not set(RAISERS) & set(NOT_RAISED)


def test_entries_are_complete_and_their_names_are_those_of_pages():
    assert MESSAGES.slug.is_unique and MESSAGES.slug.str.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*").all()
    assert MESSAGES.message.is_unique
    needed = ["message", "kind", "by", "at", "cause", "fix", "case"]
    assert MESSAGES[needed].notna().all(axis=None) and (MESSAGES[needed] != "").all(axis=None)
    assert MESSAGES.by.str.contains(r"\d|CUDA|MPS|Python").all(), "with the version in which it was read"
    for fix in MESSAGES.fix:
        assert "\n" not in fix and len(fix) <= 110
        ast.parse(fix)


def test_what_stops_a_run_comes_before_what_it_only_logs():
    later = [entry.kind == "log" or entry.kind.endswith("Warning") for entry in MESSAGES.itertuples()]
    assert later == sorted(later) and {True, False} == set(later)


def test_each_message_and_each_of_its_forms_is_found_first():
    for entry in MESSAGES.itertuples():
        for form in [entry.message, *entry.also]:
            pasted = f"[rank0]: Traceback (most recent call last):\n[rank0]: RuntimeError: {form}\n"
            assert messages.find(pasted).slug.iloc[0] == entry.slug, form


PASTED = {  # as people write in issues, of their own dtypes, shapes and ranks
    '  File "train.py", line 88\n    scaler.unscale_(optimizer)\nValueError: Attempting to unscale FP16 gradients.': (
        "attempting-to-unscale-fp16-gradients"
    ),
    r'{"error": "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for \'BFloat16\'"}': (
        "amp-unscale-not-implemented-for-bfloat16"
    ),
    "[rank3]:   return F.linear(input, self.weight, self.bias)\n[rank3]: RuntimeError: mat1 and mat2 must have the "
    "same dtype, but got Float and BFloat16": "mat1-and-mat2-must-have-the-same-dtype",
    "RuntimeError: Input type (torch.cuda.FloatTensor) and weight type (torch.cuda.HalfTensor) should be the same": (
        "input-type-and-bias-type-should-be-the-same"
    ),
    "RuntimeError: expected scalar type BFloat16 but found Float": "expected-scalar-type-float-but-found-half",
    "RuntimeError: \"slow_conv2d_cpu\" not implemented for 'Half'": "not-implemented-for-half",
    "NotImplementedError: \"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'": (
        "amp-unscale-not-implemented-for-bfloat16"
    ),
    "[2024-03-05 11:02:17,204] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. "
    "Attempted loss scale: 4294967296, reducing to 2147483648": "deepspeed-overflow-skipping-step",
    "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.\nException raised "
    "from worker 5": "deepspeed-current-loss-scale-already-at-minimum",
    "{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 1.9e-05, 'epoch': 0.01}\n  1%| | 10/1000": "loss-0-grad-norm-nan",
    "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, k, "
    "&falpha, a, CUDA_R_16F, lda, b, CUDA_R_16F, ldb, &fbeta, c, CUDA_R_16F, ldc, CUDA_R_32F, "
    "CUBLAS_GEMM_DFALT_TENSOR_OP)`": "cublas-status-when-calling-cublasgemmex",
    "RuntimeError: Index put requires the source and destination dtypes\nmatch, got BFloat16 for the destination and "
    "Float for the source.": "index-put-requires-the-source-and-destination-dtypes-match",
    "RuntimeError: expected mat1 and mat2 to have the same dtype, but got: c10::Half != float": (
        "expected-m1-and-m2-to-have-the-same-dtype"
    ),
    "ValueError: Must flatten tensors with uniform dtype but got torch.float32 and torch.uint8\n[2024-04-10] failed": (
        "must-flatten-tensors-with-uniform-dtype"
    ),
    "[rank1]: RuntimeError: Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: (32x8).": (
        "scaled-mm-expected-size-to-be-divisible-by-16"
    ),
    "MisconfigurationException: `precision='bf16'` does not use a scaler, found <ShardedGradScaler object at 0x7f>.": (
        "lightning-bf16-mixed-does-not-use-a-scaler"
    ),
    "RuntimeError: Input type (torch.FloatTensor) and weight type (CPUBFloat16Type) should be the same or input should "
    "be a MKLDNN tensor and weight is a dense tensor": "input-type-and-bias-type-should-be-the-same",
    "[2021-06-08 12:02:45,001] [INFO] [stage3.py:2323:_overflow_clean_up] [deepscale] OVERFLOW! Rank 0 Skipping step. "
    "Attempted loss scale: 16777216.0, reducing to 8388608.0": "deepspeed-overflow-skipping-step",
    "recorded for this optimizer": "no-inf-checks-were-recorded",
    "    loss = mpu.vocab_parallel_cross_entropy(output.float(), labels)\nRuntimeError: CUDA out of memory. Tried to "
    "allocate 9.33 GiB (GPU 0; 10.76 GiB total capacity)": "cuda-out-of-memory-in-cross-entropy",
    "    hidden = self.norm(hidden)\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 MiB. GPU 0 has "
    "a total capacity of 15.89 GiB": "cuda-out-of-memory",
}


@pytest.mark.parametrize("pasted", PASTED)
def test_what_people_paste_reaches_its_entry(pasted):
    assert messages.find(pasted).slug.iloc[0] == PASTED[pasted]


def test_a_stranger_s_error_is_not_found():
    assert messages.find("ZeroDivisionError: division by zero").empty
    assert messages.find("").empty and messages.find("dtype").empty


@pytest.mark.parametrize("line", ["loss: nan", "Epoch 3: train_loss=nan", "step 100 loss nan scale 0.0"])
def test_a_line_of_a_log_leads_to_its_symptom(line):
    assert list(messages.find(line).title) == ["The loss is NaN, or the scale falls."]


@pytest.fixture(scope="module")
def box():
    """The paste box's chart."""
    shown = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explore, "display", lambda data, **_: shown.append(data))
        messages.paste_box()
    return shown[0][explore.VEGA_LITE]


def drawn(spec):
    svg = vl_convert.vegalite_to_svg(spec, vl_version="5.8")
    return " ".join(re.findall(r"<t(?:ext|span)[^>]*>([^<]+)<", svg))


def test_the_box_holds_the_message_that_it_is_given(monkeypatch):
    shown = []
    monkeypatch.setattr(explore, "display", lambda data, **_: shown.append(data))
    messages.paste_box("Attempting to unscale FP16 gradients.")
    assert "float32" in drawn(shown[0][explore.VEGA_LITE])


def test_a_browser_s_expressions_find_what_python_s_find():
    """All texts against all patterns, by Vega."""
    texts = [*MESSAGES.message, *MESSAGES.also.explode().dropna(), *PASTED, *WORDS]
    patterns = [*MESSAGES.pattern, *SYMPTOMS.pattern]
    data = [{"text": text, "at": i, "pattern": pattern} for i, text in enumerate(texts) for pattern in patterns]
    hit = "test(regexp(datum.pattern, 'i'), datum.text) ? 1 : 0"
    count = {"aggregate": [{"op": "sum", "field": "hit", "as": "hits"}], "groupby": ["at"]}
    encoding = {"y": {"field": "at", "type": "ordinal"}, "text": {"field": "hits", "type": "quantitative"}}
    transform = [{"calculate": hit, "as": "hit"}, count]
    spec = {"data": {"values": data}, "transform": transform, "mark": "text", "encoding": encoding | {"y": None}}
    counted = [int(word) for word in drawn(spec).split() if word.isdigit()]
    by_python = [sum(bool(re.search(pattern, text, messages.FLAGS)) for pattern in patterns) for text in texts]
    assert counted == by_python


WORDS = {  # without a message
    "underflow": "Underflow: a number below",
    "overflow": "Overflow: a number past 65,504",
    "gradient underflow": "Underflow: a number below",
    "inf": "Overflow: a number past 65,504",
    "nan": "The loss is NaN, or the scale falls. Ask first",
    "my loss is NaN": "The loss is NaN, or the scale falls. Ask first",
    "slow": "It is not faster. Ask first",
    "memory": "The memory did not drop. Ask first",
    "no memory is saved": "The memory did not drop. Ask first",
    "loss scale": "The loss scale: fp16 needs one",
    "dtype mismatch": "It stops with an error. Paste",
    "报错": "It stops with an error. Paste",
    "溢出": "Overflow: a number past 65,504",
    "梯度溢出": "Overflow: a number past 65,504",
    "下溢": "Underflow: a number below",
    "显存": "The memory did not drop. Ask first",
    "显存不足": "The memory did not drop. Ask first",
    "损失为 nan": "The loss is NaN, or the scale falls. Ask first",
    "损失为nan": "The loss is NaN, or the scale falls. Ask first",
    "变慢": "It is not faster. Ask first",
    "训练没有加速": "It is not faster. Ask first",
    "不收敛": "It learns worse than in FP32, or not at all. Ask first",
}


@pytest.mark.parametrize(
    ("pasted", "answer"),
    [
        *WORDS.items(),
        ("", messages.ASK),
        (next(iter(PASTED)), "notebook 14, Attempting to unscale FP16 gradients"),
        ("the loss is NaN since yesterday", "The loss is NaN, or the scale falls. Ask first"),
        ("it is not faster", "It is not faster. Ask first"),
        ("out of memory", "CUDA out of memory."),
        ("accuracy is worse", "It learns worse than in FP32"),
        ("ZeroDivisionError", "Not known here. Try a few words"),
        ("ZeroDivisionError", "My step is not faster"),
        ("ZeroDivisionError", "audit and watch"),
        ("报错如下: RuntimeError: mat1 and mat2 must have the same dtype", "16-bit tensor, often made under autocast"),
    ],
)
def test_the_box_answers(box, pasted, answer):
    spec = json.loads(json.dumps(box))
    spec["params"][0]["value"] = pasted
    assert answer in drawn(spec)


def test_an_entry_s_parts_stand_below_each_other_and_only_its_title_is_cut(box):
    (rows,) = box["datasets"].values()
    for row in rows:
        parts = [part for part in ("title", "cause", "fix", "case", "page") if row.get(part)]
        for upper, lower in pairwise(parts):
            assert row[f"{lower} top"] >= row[f"{upper} top"] + messages.LINE * len(row[upper]), row
        assert len(row.get("title") or "") <= 2
    assert {*MESSAGES.cause} <= {" ".join(row["cause"]) for row in rows if row.get("cause")}


def test_every_entry_fits_into_the_box(box):
    (rows,) = box["datasets"].values()
    height = box["height"]
    for row in rows:
        parts = [part for part in ("title", "cause", "fix", "case", "page") if row.get(part)]
        if not parts:
            continue  # a way from what is not known
        if row.get("fix"):
            ast.parse("\n".join(row["fix"]))  # what is seen can be copied
            assert max(map(len, row["fix"])) < 74
        assert row[f"{parts[-1]} top"] + messages.LINE * len(row[parts[-1]]) <= height - 2 * messages.LINE, row
