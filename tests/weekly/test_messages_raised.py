"""halfbits/errors.toml: every message that a CPU can raise is raised, is found, and is of the kind that is listed."""

import importlib
import logging
import pickle
import re
import traceback
import warnings
from contextlib import contextmanager, redirect_stdout
from io import StringIO

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from sklearn.metrics import mean_squared_error
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from halfbits import errors, explain

pytestmark = pytest.mark.weekly
MESSAGES = errors.messages()
HALF = torch.float16
BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn
CPU = torch.device("cpu")
FIRST = torch.tensor([0])
ELSEWHERE = (  # who raises what cannot be raised here: what is not installed, and kernels of CUDA and MPS
    "^(DeepSpeed|apex|fairseq|Transformer Engine|vLLM|bitsandbytes|xFormers|Ultralytics|Diffusers|ONNX Runtime|XLA|"
    r"flash-attention|stable-diffusion-webui|torchvision .*references)|\((CUDA|MPS|XPU|ROCm, CUDA)\)"
)
NOT_RAISED = {  # and why not
    "current-cuda-device-does-not-support-bfloat16": "an old GPU",
    "does-not-support-bfloat16-compilation-natively": "an old GPU",
    "flash-attention-2-only-supports-float16-and-bfloat16": "flash-attn is not installed",
    "invalid-value-encountered-in-cast": "whether NumPy says so depends on the processor",
    "mixed-precision-arg-cannot-be-set-when-deepspeed-config": "DeepSpeed is not installed",
    "insufficient-for-fp8-mixed-precision-training": "an old GPU",
    "triton-type-fp8e4nv-not-supported-in-this-architecture": "an old GPU",
    "fp16-mixed-precision-requires-a-device": "a device that Accelerate does not know",
    "bf16-mixed-precision-requires-a-supported-device": "a GPU or a Mac that has no bf16",
    "mixed-precision-with-mps-device-requires-pytorch": "a Mac, and an old torch",
    "some-parameters-are-on-the-meta-device": "a model that does not fit",
    "no-vectorized-isa-for-compiled-code": "whether torch.compile says so depends on the processor",
    "triton-type-fp8e4b8-not-supported-in-this-architecture": "another GPU",
    "upcasted-low-precision-parameters": "FSDP1 in Accelerate, with several processes",
    "tensorfloat32-tensor-cores-available-but-not-enabled": "a GPU",
    "fp16-mixed-precision-training-can-only-be-used-on-cuda-devices": "Transformers 5 says it no longer",
    "binary-cross-entropy-is-unsafe-to-autocast": "notebooks 04 and 14 raise it",
    "mix-of-the-legacy-and-new-apis-to-set-the-tf32-status": "notebook 11 raises it",
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


def half(*shape):
    return ones(*shape, dtype=HALF)


def bf16(*shape):
    return ones(*shape, dtype=BF16)


def started(dtype=torch.float32):
    """The optimizer and the scaler of a model with scaled gradients."""
    model = nn.Linear(4, 4).to(dtype)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(ones(2, 4, dtype=dtype)).sum()).backward()
    return torch.optim.SGD(model.parameters(), 0.1), scaler


def scaler_calls(*methods, dtype=torch.float32):
    """The scaler's methods of these names are called one after the other."""
    optimizer, scaler = started(dtype)
    for method in methods:
        getattr(scaler, method)(optimizer)


def step_with_moments(dtype):
    weight = nn.Parameter(ones(4))
    weight.grad = ones(4)
    optimizer = torch.optim.AdamW([weight], foreach=True)
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


def two_dtypes():
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4).bfloat16())


def in_a_group(function):
    with process_group() as mesh:
        function(mesh)


def unscaled(dtype):
    torch._amp_foreach_non_finite_check_and_unscale_([ones(4).to(dtype)], torch.zeros(1), ones(1))


def attention(value_dtype=torch.float32, mask=None):
    query = ones(1, 1, 2, 4)
    F.scaled_dot_product_attention(query, query, query.to(value_dtype), mask)


def scaled_product(columns=16, by_column=True, dtype=torch.float32):
    """The FP8 product of a GPU, of fake tensors."""
    with FakeTensorMode():
        left = ones(16, columns, device="cuda").to(FP8)
        scale = ones(1, device="cuda", dtype=dtype)
        torch._scaled_mm(left, left.t() if by_column else left, scale, scale)


RAISERS = {  # what raises, warns of or logs the message of that name
    "attempting-to-unscale-fp16-gradients": lambda: scaler_calls("step", dtype=HALF),
    "amp-unscale-not-implemented-for-complexfloat": lambda: unscaled(torch.complex64),
    "amp-unscale-not-implemented-for-float8": lambda: unscaled(FP8),
    "amp-unscale-not-implemented-for-another-dtype": lambda: unscaled(torch.int64),
    "unscale-has-already-been-called": lambda: scaler_calls("unscale_", "unscale_"),
    "unscale-is-being-called-after-step": lambda: scaler_calls("step", "unscale_"),
    "step-has-already-been-called": lambda: scaler_calls("step", "step"),
    "closure-use-is-not-supported-with-gradscaler": lambda: started()[1].step(None, closure=print),
    "no-inf-checks-were-recorded": lambda: started()[1].step(torch.optim.SGD([nn.Parameter(ones(1))])),
    "attempted-step-but-scale-is-none": lambda: torch.amp.GradScaler("cpu").step(started()[0]),
    "lr-scheduler-step-before-optimizer-step": lambda: torch.optim.lr_scheduler.ExponentialLR(started()[0], 0.5).step(),
    "index-put-requires-the-source-and-destination-dtypes-match": lambda: ones(4).index_put_([FIRST], half(1)),
    "attempting-to-assign-a-gradient-with-dtype": lambda: setattr(nn.Parameter(ones(2)), "grad", half(2)),
    "invalid-usage-of-tensors-with-different-dtypes": lambda: in_a_group(lambda _: dist.all_gather([ones(2)], half(2))),
    "input-tensor-data-type-is-not-supported-for-nccl": lambda: in_a_group(lambda _: dist.all_reduce(ones(2).to(FP8))),
    "must-flatten-tensors-with-uniform-dtype": lambda: in_a_group(
        lambda _: FullyShardedDataParallel(two_dtypes(), device_id=CPU)
    ),
    "fsdp-expects-uniform-original-parameter-dtype": lambda: in_a_group(
        lambda mesh: fully_shard(two_dtypes(), mesh=mesh)(ones(2, 4))
    ),
    "got-mixed-torch-tensor-and-dtensor": lambda: in_a_group(lambda mesh: distribute_tensor(ones(2), mesh) + ones(2)),
    "expected-query-key-and-value-to-have-the-same-dtype": lambda: attention(BF16),
    "expected-attn-mask-dtype-to-match-query-dtype": lambda: attention(mask=half(2, 2)),
    "scaled-mm-expected-size-to-be-divisible-by-16": lambda: scaled_product(columns=15),
    "scaled-mm-scale-a-and-scale-b-must-be-float": lambda: scaled_product(dtype=BF16),
    "scaled-mm-mat2-must-be-col-major": lambda: scaled_product(by_column=False),
    "gradscaler-source-state-dict-is-empty": lambda: torch.amp.GradScaler("cpu").load_state_dict(
        torch.amp.GradScaler("cpu", enabled=False).state_dict()
    ),
    "outputs-must-be-a-tensor-or-an-iterable-of-tensors": lambda: torch.amp.GradScaler("cpu").scale(1.0),
    "gradscaler-is-enabled-but-cuda-is-not-available": lambda: torch.amp.GradScaler("cuda"),
    "cuda-is-not-available-disabling-autocast": lambda: torch.autocast("cuda"),
    "autocast-target-dtype-is-not-supported": lambda: torch.autocast("cpu", torch.float32),
    "autocast-expected-device-type-of-type-str": lambda: torch.autocast(CPU),
    "torch-cuda-amp-autocast-is-deprecated": lambda: torch.cuda.amp.autocast(),
    "torch-cuda-amp-custom-fwd-is-deprecated": lambda: torch.cuda.amp.custom_fwd(print),
    "expected-target-dtype-to-be-long": lambda: F.cross_entropy(ones(2, 3), ones(2)),
    "expected-tensor-for-argument-indices-to-have-scalar-types-long-int": lambda: nn.Embedding(4, 4)(half(2)),
    "tensors-used-as-indices-must-be-long": lambda: ones(4)[ones(2)],
    "bitwise-and-not-implemented-for-half": lambda: half(2) & ones(2, dtype=torch.bool),
    "masked-fill-only-supports-boolean-masks": lambda: ones(2).masked_fill_(half(2), 0),
    "result-type-float-cannot-be-cast-to-long": lambda: F.binary_cross_entropy_with_logits(
        ones(2), torch.tensor([0, 1])
    ),
    "not-implemented-for-long": lambda: F.log_softmax(torch.tensor([[1, 2]]), 1),
    "not-implemented-for-complexhalf": lambda: torch.fft.fft(ones(4)).to(torch.complex32).sum(),
    "not-implemented-for-float": lambda: torch.bincount(ones(2)),
    "a-complex-tensor-meets-another-dtype": lambda: torch.fft.fft(ones(2, 2)) @ ones(2, 2),
    "an-fp8-tensor-meets-another-dtype": lambda: nn.Linear(4, 4)(ones(2, 4).to(FP8)),
    "attn-mask-of-whole-numbers": lambda: attention(mask=ones(2, 2, dtype=torch.int64)),
    "whole-numbers-meet-another-dtype": lambda: nn.Linear(4, 4)(ones(2, 4, dtype=torch.int64)),
    "a-float64-tensor-meets-another-dtype": lambda: nn.Linear(4, 4)(torch.from_numpy(np.ones((2, 4)))),
    "fp16-meets-bf16": lambda: nn.Linear(4, 4).bfloat16()(half(2, 4)),
    "onednn-unsupported-data-type": lambda: nn.LSTM(4, 4)(ones(2, 1, 4), [ones(1, 1, 4, dtype=torch.float64)] * 2),
    "all-tensors-must-have-the-same-dtype-bilinear": lambda: nn.Bilinear(4, 4, 4)(half(2, 4), half(2, 4)),
    "input-and-hidden-tensors-are-not-the-same-dtype": lambda: nn.LSTM(4, 4)(ones(2, 1, 4), [bf16(1, 1, 4)] * 2),
    "mat1-and-mat2-must-have-the-same-dtype": lambda: nn.Linear(4, 4)(half(2, 4)),
    "expected-m1-and-m2-to-have-the-same-dtype": lambda: ones(2, 2) @ bf16(2, 2),
    "input-type-and-bias-type-should-be-the-same": lambda: nn.Conv2d(1, 1, 1)(half(1, 1, 2, 2)),
    "mixed-dtype-cpu-expect-parameter-to-have-scalar-type-of-float": lambda: nn.LayerNorm(4).half()(ones(2, 4)),
    "rnn-input-dtype-does-not-match-weight-dtype": lambda: nn.LSTM(4, 4)(half(2, 1, 4)),
    "input-dtypes-must-be-the-same-baddbmm": lambda: torch.baddbmm(ones(1, 2, 2), bf16(1, 2, 2), bf16(1, 2, 2)),
    "prelu-type-promoting-not-supported": lambda: nn.PReLU()(half(2)),
    "tensors-of-the-same-index-must-be-on-the-same-device": lambda: step_with_moments(HALF),
    "expected-dtype-float-for-end-lerp": lambda: ones(2).lerp_(half(2), 0.5),
    "found-dtype-float-but-expected-half": lambda: F.binary_cross_entropy(half(2), ones(2)),
    "expected-out-tensor-to-have-dtype": lambda: torch.mm(ones(2, 2), ones(2, 2), out=half(2, 2)),
    "scatter-expected-self-dtype-to-be-equal-to-src-dtype": lambda: ones(4).scatter_add_(0, FIRST, half(1)),
    "index-copy-self-and-source-expected-to-have-the-same-dtype": lambda: ones(4).index_copy_(0, FIRST, half(1)),
    "index-add-self-and-source-must-have-the-same-scalar-type": lambda: ones(4).index_add_(0, FIRST, half(1)),
    "masked-scatter-expected-self-and-source-to-have-same-dtypes": lambda: ones(4).masked_scatter_(
        ones(4, dtype=torch.bool), half(4)
    ),
    "value-cannot-be-converted-to-type-half-without-overflow": lambda: half(4).masked_fill(
        ones(4, dtype=torch.bool), -1e9
    ),
    "value-cannot-be-converted-to-type-int-without-overflow": lambda: ones(4, dtype=torch.int8).fill_(-1e9),
    "value-cannot-be-converted-to-type-bfloat16-without-overflow": lambda: bf16(4).fill_(torch.finfo().min),
    "none-of-the-inputs-have-requires-grad-true": lambda: checkpoint(nn.Linear(4, 4), ones(2, 4), use_reentrant=True),
    "view-as-complex-is-only-supported-for-half-float-and-double": lambda: torch.view_as_complex(bf16(2, 2)),
    "linalg-low-precision-dtypes-not-supported": lambda: torch.linalg.inv(half(2, 2)),
    "not-implemented-for-float8": lambda: ones(2).to(FP8).sum(),
    "not-implemented-for-float4": lambda: ones(2).to(torch.float4_e2m1fn_x2),
    "promotion-for-float8-types-is-not-supported": lambda: ones(2).to(FP8) + ones(2),
    "not-implemented-for-half": lambda: torch.cdist(half(2, 2), half(2, 2)),
    "fft-unsupported-dtype-half": lambda: torch.fft.fft(half(4)),
    "quantile-input-tensor-must-be-either-float-or-double": lambda: half(4).quantile(0.5),
    "expected-scalar-type-float-but-found-half": lambda: ones(1, 2, 2).bmm(half(1, 2, 2)),
    "got-unsupported-scalartype-bfloat16": lambda: bf16(2).numpy(),
    "cannot-convert-ndarray-of-type-bfloat16": lambda: torch.from_numpy(np.ones(2, ml_dtypes.bfloat16)),
    "cannot-convert-ndarray-of-type-float8": lambda: torch.from_numpy(np.ones(2, ml_dtypes.float8_e4m3fn)),
    "cannot-convert-ndarray-of-type-longdouble": lambda: torch.from_numpy(np.ones(2, np.longdouble)),
    "cannot-copy-out-of-meta-tensor": lambda: nn.Linear(4, 4, device="meta").to("cpu"),
    "attempted-to-use-an-uninitialized-parameter": lambda: nn.init.ones_(nn.LazyLinear(4).weight),
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


@raises("gradscaler-may-only-be-pickled-at-the-beginning")
def _():
    optimizer, scaler = started()
    scaler.unscale_(optimizer)
    pickle.dumps(scaler)


@raises("transformer-encoder-fast-path-under-autocast")
def _():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    padding = torch.tensor([[False] * 6, [False] * 3 + [True] * 3])
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(True)
    try:
        with torch.no_grad(), torch.autocast("cpu", BF16):
            model(ones(2, 6, 32), src_key_padding_mask=padding)
    except RuntimeError:
        print(traceback.format_exc())
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@raises("unexpected-floating-scalartype-in-autocast-prioritize")
def _():
    with torch.autocast("cpu", BF16):
        torch.cat([half(2), ones(2)])


@raises("inference-tensors-cannot-be-saved-for-backward")
def _():
    with torch.inference_mode():
        x = ones(2, 4)
    nn.Linear(4, 4)(x)


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


@raises("mismatch-dtype-between-input-and-weight-rms-norm")
def _():
    torch.set_warn_always(True)
    try:
        nn.RMSNorm(4)(half(2, 4))
    finally:
        torch.set_warn_always(False)


@raises("recomputed-values-have-different-metadata")
def _():
    layer = nn.Linear(4, 4)
    enabled = iter([True, False])

    def block(x):
        with torch.autocast("cpu", BF16, enabled=next(enabled)):
            return layer(x).sin()

    checkpoint(block, ones(2, 4, requires_grad=True), use_reentrant=False).sum().backward()


@raises("casting-fp32-inputs-back-for-flash-attn-compatibility")
def _():
    from transformers.modeling_flash_attention_utils import fa_peft_integration_check, logger

    type(logger).warning_once.cache_clear()
    fa_peft_integration_check(*[ones(1)] * 3, BF16)


@raises("no-available-kernel-aborting-execution")
def _():
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.CUDNN_ATTENTION):
        attention()


@raises("total-norm-is-non-finite-so-it-cannot-be-clipped")
def _():
    weight = nn.Parameter(ones(1))
    weight.grad = torch.tensor([np.inf])
    nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)


@raises("function-returned-nan-values-in-its-0th-output")
def _():
    with torch.autograd.detect_anomaly():
        (0 * torch.zeros(1, requires_grad=True).sqrt()).backward()


@raises("float8-dynamic-quantization-requires-cuda-compute-capability-8-9")
def _():
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, quantize_

    quantize_(nn.Sequential(nn.Linear(32, 32)), Float8DynamicActivationFloat8WeightConfig())


@raises("mx-last-dimension-must-be-divisible-by-block-size")
def _():
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    MXTensor.to_mx(ones(2, 15), FP8, 32)


@raises("fused-requires-all-the-params-to-be-floating-point")
def _():
    weight = ones(2, dtype=torch.complex64, requires_grad=True)
    weight.grad = ones(2, dtype=torch.complex64)
    torch.optim.AdamW([weight], fused=True).step()


def arguments(**more):
    from transformers import TrainingArguments

    return TrainingArguments("unused", report_to="none", **more)


def language_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    small = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8)
    return LlamaForCausalLM(LlamaConfig(**small, num_hidden_layers=1, num_attention_heads=1))


@raises("loss-0-grad-norm-nan")
def _():
    from transformers import Trainer

    model = language_model()
    nn.init.constant_(model.lm_head.weight, np.nan)
    texts = [{"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([1, 2])}] * 2
    one_step = arguments(max_steps=1, logging_steps=1, use_cpu=True, disable_tqdm=True)
    Trainer(model, one_step, train_dataset=texts).train()


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
    model.is_quantized = True
    model.hf_quantizer = None
    Trainer(model, arguments(use_cpu=True))


def accelerator(precision):
    from accelerate import Accelerator

    return Accelerator(cpu=True, mixed_precision=precision)


@raises("accelerate-pass-a-model-and-an-optimizer-together-when-using-transformerengine")
def _():
    import accelerate.accelerator

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerate.accelerator, "is_transformer_engine_available", lambda: True)
        accelerate.Accelerator._prepare_te(None, nn.Linear(4, 4))


@raises("accelerate-no-fp8-compatible-backend-was-installed")
def _():
    from accelerate.utils import has_transformer_engine_layers

    has_transformer_engine_layers(nn.Linear(4, 4))


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
    assert re.search(entry.pattern, text, errors.FLAGS), text
    assert slug in list(explain(text).slug)[:3], text
    assert entry.kind == "log" or entry.kind in text, text


def test_every_message_is_raised_here_or_it_says_why_not():
    elsewhere = [entry.slug for entry in MESSAGES.itertuples() if re.search(ELSEWHERE, entry.by)]
    assert sorted([*RAISERS, *NOT_RAISED, *elsewhere]) == sorted(MESSAGES.slug)
