"""Predictions against what real tensors keep, against torch's own tracker, and against numbers worked out by hand."""

import copy
import logging
import math
import re
import threading
import warnings
from functools import cache
from itertools import product
from operator import attrgetter

import pytest
import timm
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from halfbits import memory, speed
from halfbits._fake import on_device
from halfbits._step import KINDS, OPTIMIZERS, _backward
from halfbits.casts import trace_casts
from halfbits.memory import largest_batch, predict_memory
from halfbits.speed import GPUS, on_gpu, roofline
from helpers.measure import kept_for_backward

NEWER = pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 cannot do it without a device")
OLD = pytest.mark.skipif(torch.__version__ >= "2.12", reason="torch 2.11 refuses it")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
# timm's, small ones first
NAMES = ["test_efficientnet", "test_resnet", "test_vit", "test_convnext", "tf_efficientnet_b0"]
NAMES += ["resnet50", "vit_small_patch16_224", "mobilenetv3_small_100", "regnety_008"]
NAMES += ["convnext_tiny", "swin_tiny_patch4_window7_224", "mixer_s32_224"]
QUICK = [("test_resnet", "fp32"), ("test_efficientnet", "bf16")]
SLOW = [each for each in product(NAMES, ["fp32", "bf16"]) if each not in QUICK]
FAMILIES = [*QUICK, *(pytest.param(*each, marks=pytest.mark.weekly) for each in SLOW)]


class OnDemand(dict):
    """timm's models by name, each made when it is first asked for."""

    def __missing__(self, name):
        torch.manual_seed(0)
        self[name] = timm.create_model(name, num_classes=1)
        return self[name]


@pytest.fixture(scope="module")
def models():
    return OnDemand()


def shape_of(model):
    return 2, *model.default_cfg["input_size"]


@cache
def predicted(model, precision, device_type="cuda"):
    return predict_memory(lambda: model, shape_of(model), precision, "sgd", device_type)


def loss_of(model, batch, precision):
    """Forward and loss on real or fake CPU tensors: of logits, or of a decoder's next tokens."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        output = model(batch)
        return next_token_loss(output) if output.ndim == 3 else binary_cross_entropy_with_logits(output, 0 * output)


def kept_of(model, batch, precision):
    return sum(kept_for_backward(model, lambda: loss_of(model, batch, precision)).values())


@cache
def kept(model, precision):
    return kept_of(model, torch.randn(shape_of(model)), precision)


def tracked_peak(model, batch, precision, optimizer="sgd"):
    """The peak of a step on fake CPU tensors, by torch's MemTracker. The first step makes the optimizer's state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed._tools.mem_tracker import MemTracker
    tensors = [*model.parameters(), *model.buffers(), batch]
    with FakeTensorMode():
        fakes = {id(tensor): on_device(tensor, "cpu", fake=True) for tensor in tensors}
        model, batch = copy.deepcopy((model, batch), fakes)
        steps = 1 if optimizer == "sgd" else 2
        optimizer, tracker = OPTIMIZERS[optimizer](model.parameters()), MemTracker()
        tracker.track_external(model, optimizer, batch)
        with tracker:
            for _ in range(steps):
                tracker.reset_mod_stats()
                loss_of(model, batch, precision).backward()
                optimizer.step()
                optimizer.zero_grad()
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@cache
def tracked(model, precision):
    return tracked_peak(model, torch.empty(shape_of(model)), precision)


# The bytes of the loss itself, which forward leaves too.
LOSS = {"fp32": 4, "bf16": 4, "pure_bf16": 2}

# On CUDA, autocast runs softmax and layer_norm in float32, and keeps more than on a CPU.
WIDER_ON_CUDA = {"test_convnext", "convnext_tiny", "swin_tiny_patch4_window7_224", "mixer_s32_224"}


@pytest.mark.parametrize("name, precision", FAMILIES)
def test_activations_and_peak_are_those_of_a_cpu_and_cudas_alike(models, name, precision):
    model = models[name]
    on_cpu = kept(model, precision)
    estimate = predicted(model, precision, "cpu")
    assert sum(estimate.activations.values()) == on_cpu + LOSS[precision]
    assert estimate.peak == pytest.approx(tracked(model, precision), rel=0.02)
    on_cuda = sum(predicted(model, precision).activations.values())
    if precision == "bf16" and name in WIDER_ON_CUDA:
        assert 1.02 < on_cuda / on_cpu < 1.10
    else:
        assert on_cuda == pytest.approx(on_cpu, rel=0.02)


@pytest.mark.parametrize("precision", ["bf16", "pure_bf16"])
@pytest.mark.parametrize("affine", [True, False])
def test_a_cpu_keeps_statistics_of_norms_in_the_dtype_of_their_weights(precision, affine):
    convolution = nn.Conv2d(3, 64, 1)
    norms = [nn.BatchNorm2d(64, affine=affine), nn.GroupNorm(32, 64, affine=affine)]
    model = nn.Sequential(convolution, *norms, nn.LayerNorm(2, elementwise_affine=affine))
    estimate = predict_memory(lambda: model, (16, 3, 2, 2), precision, "sgd", "cpu")
    images = torch.randn(16, 3, 2, 2)
    if precision == "pure_bf16":
        model.bfloat16()
        images = images.bfloat16()
    assert sum(estimate.activations.values()) == kept_of(model, images, precision) + LOSS[precision]


def mixture(name):
    config = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    if name == "Mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=4, **config))
    config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "head_dim": 16}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**config))


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE"])
def test_a_mixture_of_experts_asks_a_missing_gpu_for_its_capability(name):
    model = mixture(name).train()
    tokens = dict.fromkeys(["input_ids", "labels"], torch.zeros(2, 16, dtype=torch.long))
    before = torch.cuda.get_device_capability
    ops = roofline(lambda: model, lambda: tokens, "bf16", "A100", loss=attrgetter("loss")).ops
    experts = ops[ops.op == "_grouped_mm"]
    rows = 2 * 16 * 2  # two experts per token
    assert experts.query("phase == 'forward'").flops.sum() == 2 * rows * 64 * 96 * 3
    assert experts.query("phase == 'backward'").flops.sum() == 2 * 2 * rows * 64 * 96 * 3
    assert "aten::_grouped_mm" in set(trace_casts(model, tokens["input_ids"]).op)
    assert torch.cuda.get_device_capability is before
    with pytest.raises(ValueError, match="takes whole numbers"):
        predict_memory(lambda: model, (2, 16), "bf16")
    assert torch.cuda.get_device_capability is before


def test_a_decoder_of_transformers_makes_no_mask_for_packed_sequences():
    """With several sequences in a batch it looks at their positions, which fake tensors do not have."""
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).train()
    tokens = dict.fromkeys(["input_ids", "labels"], torch.zeros(2, 64, dtype=torch.long))
    estimate = predict_memory(lambda: model, lambda: tokens, "fp32", "adamw", "cpu", attrgetter("loss"))
    real = kept_for_backward(model, lambda: model(**tokens).loss)
    assert sum(estimate.activations.values()) == sum(real.values()) + LOSS["fp32"]


def test_checkpointing_is_predicted(models):
    plain = models["test_resnet"]
    model = copy.deepcopy(plain)
    model.set_grad_checkpointing()
    for device_type in ("cpu", "cuda"):
        estimate = predicted(model, "fp32", device_type)
        assert sum(estimate.activations.values()) == pytest.approx(kept(model, "fp32"), rel=0.02)
        assert estimate.peak == pytest.approx(tracked(model, "fp32"), rel=0.02)
        assert estimate.peak < predicted(plain, "fp32", device_type).peak


class Double(torch.autograd.Function):
    """An op written in Python: an argument that is not a tensor, one that needs no gradient, an output not used."""

    @staticmethod
    def forward(ctx, factor, constant, x):
        ctx.factor = factor
        return factor * x + constant, x + 1

    @staticmethod
    def backward(ctx, gradient, unused):
        return None, None, ctx.factor * gradient + unused


class Knotty(nn.Module):
    """Broadcasting, a weight used twice, a branch that meets again, and checkpointing."""

    def __init__(self, function_in_python):
        super().__init__()
        self.function_in_python = function_in_python
        self.linear, self.bias = nn.Linear(6, 6), nn.Parameter(torch.randn(6))
        self.constant = torch.ones(6)

    def forward(self, x):
        y = self.linear(x) + self.bias
        y = y * y.sigmoid() + x.mean(1, keepdim=True)
        if self.function_in_python:
            y, _ = Double.apply(2.0, self.constant, y)
        y = y + checkpoint(self.linear, y, use_reentrant=False)
        first, second = y.chunk(2, 1)
        return first * self.bias[:3] - second.exp().sum(1, keepdim=True) + self.linear.weight.sum()


@pytest.mark.parametrize("function_in_python", [False, pytest.param(True, marks=NEWER)])
def test_the_walk_through_the_graph_gives_the_engines_gradients(function_in_python):
    torch.manual_seed(0)
    model, x = Knotty(function_in_python), torch.randn(4, 6)
    model(x).sum().backward()
    expected = [weight.grad for weight in model.parameters()]
    model.zero_grad()
    losses = [model(x).sum()]
    with torch.no_grad():
        _backward(losses)
    torch.testing.assert_close([weight.grad for weight in model.parameters()], expected)
    assert losses == []


def test_everything_but_weights_gradients_and_momentum_is_freed(models):
    model = models["test_efficientnet"]
    last = predict_memory(lambda: model, shape_of(model), "fp16").timeline.iloc[-1]
    assert last["other"] == 0
    assert last["gradients"] == last["parameters"] == last["optimizer state"]
    assert last["activations"] < 100_000, "nothing but what the model itself caches"


def test_the_parts_are_exact():
    def build():
        return nn.Sequential(nn.Flatten(), nn.Linear(48, 10), nn.BatchNorm1d(10), nn.Linear(10, 1, bias=False))

    weights = 4 * (48 * 10 + 10 + 2 * 10 + 10)
    shape = (8, 3, 4, 4)
    estimate = predict_memory(build, shape, "fp32")
    assert (estimate.parameters, estimate.gradients, estimate.optimizer_state) == (weights, weights, weights)
    assert estimate.buffers == 4 * 20 + 8
    # The batch; the input, mean and deviation of batch norm; its output; the logits.
    assert 4 * (8 * 48 + 8 * 10 + 20 + 8 * 10) <= sum(estimate.activations.values()) <= 4 * (8 * 48 + 180 + 4 * 8) + 64
    assert predict_memory(build, shape, "fp32", "sgd").optimizer_state == 0
    for adam in ("adam", "adamw", lambda weights: torch.optim.Adam(weights, fused=True)):
        moments = predict_memory(build, shape, "fp32", adam).optimizer_state
        assert moments == 2 * weights
    pure = predict_memory(build, shape, "pure_bf16")
    assert 2 * pure.parameters == weights
    assert pure.activations["bfloat16"] > 0.8 * sum(pure.activations.values())
    assert (pure.timeline[KINDS] % 512 == 0).all(axis=None), "torch allocates blocks of 512 bytes"


def test_a_prediction_leaves_the_model_as_it_is():
    model = nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    before = copy.deepcopy(model.state_dict())
    predict_memory(lambda: model, (8, 12), "fp16")
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert all(weight.grad is None and weight.device.type == "cpu" for weight in model.parameters())
    assert not torch.is_autocast_enabled("cuda")


class Attributes(nn.Module):
    """A tensor that is no buffer, a weight whose gradient is expanded from one number, attention in 3 dimensions."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(1000)), torch.ones(12)

    def forward(self, x):
        x = x.flatten(2) * self.scale[:1]
        return scaled_dot_product_attention(x, x, x).sum() + self.weight.sum()[None]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_unusual_models_are_predicted(device_type):
    estimate = predict_memory(Attributes, (2, 3, 2, 2), "fp16", device_type=device_type)
    assert estimate.gradients == estimate.parameters == 4000


class Attention(nn.Module):
    """Scaled dot-product attention with a mask, causal, or over groups of heads; 4 heads of 64 x 8."""

    def __init__(self, mask=None, heads=4, **options):
        super().__init__()
        self.mask, self.heads, self.options, self.weight = mask, heads, options, nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = x * self.weight
        mask = None if self.mask is None else torch.ones(64, 64, dtype=self.mask, device=x.device)
        return scaled_dot_product_attention(x, x[:, : self.heads], x[:, : self.heads], mask, **self.options)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "pure_bf16"])
@pytest.mark.parametrize(
    "build",
    [
        Attention,
        lambda: Attention(is_causal=True),
        lambda: Attention(torch.float32),
        lambda: Attention(torch.bool),
        lambda: Attention(heads=2, enable_gqa=True),
    ],
)
def test_attention_keeps_no_square_of_the_sequence(build, precision):
    estimate = predict_memory(build, (2, 4, 64, 8), precision)
    ops = set(estimate.timeline.op)
    flash = precision != "fp32" and build().mask is None
    kind = "flash" if flash else "efficient"
    fused = f"_scaled_dot_product_{kind}_attention"
    if not flash and build().options.get("enable_gqa") and torch.__version__ < "2.15":
        assert fused not in ops and "_softmax_backward_data" in ops, "CUDA has no fused kernel for it there"
    else:
        assert {fused, f"{fused}_backward"} <= ops


def linear():
    return nn.Linear(12, 1)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"build_model": linear()}, TypeError, "must be a function that returns the model, .* not Linear"),
        ({"build_model": lambda: None}, TypeError, "must return a module, not NoneType"),
        ({"inputs": torch.ones(2, 12)}, TypeError, r"must be a shape, as .* not Tensor"),
        ({"inputs": (torch.ones(2, 12),)}, TypeError, r"must be a shape, as .* not tuple"),
        ({"inputs": (2, 13)}, ValueError, "sizes that do not fit together; give it inputs of the shape that it takes"),
        ({"precision": "int8"}, ValueError, "unknown precision 'int8'; it is one of fp32, "),
        ({"optimizer": "lion"}, ValueError, "unknown optimizer 'lion'; it is one of sgd, "),
        ({"optimizer": torch.optim.Adam(linear().parameters())}, TypeError, "not one that is made already"),
        ({"device_type": "mps"}, ValueError, "unknown device type 'mps'"),
    ],
)
def test_what_is_no_input_is_refused_in_one_sentence(given, error, said, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "handlers", [caplog.handler])
    with pytest.raises(error, match=said) as raised:
        predict_memory(**{"build_model": linear, "inputs": (2, 12), "precision": "fp32"} | given)
    assert "\n" not in str(raised.value)
    assert not caplog.records


def test_the_neighbours_of_predict_memory_refuse_the_same():
    with pytest.raises(TypeError, match="a function that returns the model"):
        largest_batch(10**6, linear(), (12,), "fp32")
    with pytest.raises(TypeError, match=r"a number of bytes, .* not '24GB'"):
        largest_batch("24GB", linear, (12,), "fp32")
    with pytest.raises(TypeError, match="must be a shape"):
        roofline(linear, torch.ones(2, 12), "fp32", "A100")


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.head = kind(12, 5, batch_first=True), nn.Linear(5, 1)

    def forward(self, x):
        return self.head(self.layer(x)[0])


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), pytest.param(nn.GRU, 3, marks=NEWER), (nn.RNN, 1)])
@pytest.mark.parametrize("precision", ["fp32", "pure_bf16"])
def test_rnns_are_predicted_without_the_device(kind, gates, precision):
    estimate = predict_memory(lambda: Recurrent(kind), (4, 7, 12), precision)
    width = 2 if precision == "pure_bf16" else 4
    assert estimate.gradients == estimate.parameters == width * (gates * 5 * (12 + 5 + 2) + 5 + 1)
    steps = 7 * 4 * 5 * width  # the hidden state of each step is kept, and the gates
    assert sum(estimate.activations.values()) > steps * (gates + 1)
    assert torch.backends.cudnn.enabled


@torch.library.custom_op("half_the_bits::without_a_fake", mutates_args=())
def without_a_fake(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


class Doing(nn.Module):
    """A linear layer, and what the function does with its output and with the batch."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(12, 1), function

    def forward(self, x):
        return self.function(self.linear(x), x)


class Lookup(nn.Embedding):
    def forward(self, x):
        return super().forward(x.long())


def reentrant(y, x):
    return checkpoint(torch.sin, y, use_reentrant=True)


def ask_the_gpu(y, x):
    return y * torch.cuda.get_device_properties(0).total_memory


ELSEWHERE = torch.ones(12)


@pytest.mark.parametrize(
    ("build", "optimizer", "said"),
    [
        (lambda: Doing(lambda y, x: y * x.sum().item()), "sgd", r"asks for values in .*test_memory.py, line \d+, as"),
        (lambda: Doing(lambda y, x: y[x[:, 0] > 0]), "sgd", "asks for values"),
        (lambda: Doing(lambda y, x: y * x.detach().numpy().size), "sgd", "asks for values"),
        (lambda: nn.Linear(12, 1), torch.optim.Adafactor, "or its optimizer asks for values"),
        (lambda: Doing(lambda y, x: y * ELSEWHERE), "sgd", "make them attributes of a module"),
        (lambda: Lookup(9, 1, sparse=True), "sgd", "sparse=False"),
        pytest.param(lambda: nn.Embedding(9, 1), "sgd", "takes whole numbers.*may be a function", marks=NEWER),
        (lambda: Doing(lambda y, x: without_a_fake(y)), "sgd", "cannot be copied or run without values"),
        (lambda: nn.EmbeddingBag(9, 1), "sgd", "takes whole numbers"),
        pytest.param(lambda: Doing(ask_the_gpu), "sgd", "asks the GPU itself in .*, and there is none", marks=NO_GPU),
        (lambda: Doing(reentrant), "sgd", "use_reentrant=False"),
        (lambda: nn.Linear(12, 1), torch.optim.LBFGS, "take another optimizer"),
        (lambda: nn.LazyLinear(1), "sgd", "call the model once"),
        (lambda: nn.Linear(12, 1).half(), "sgd", "weights of torch.float16, not float32; pure_bf16 casts"),
        (lambda: Doing(lambda y, x: y * torch.autograd.grad(y.sum(), y)[0]), "sgd", "runs backward itself"),
        (lambda: Doing(lambda y, x: y * torch.ones(12)), "sgd", "on another device"),
        (lambda: Doing(threading.Lock()), "sgd", "cannot be copied"),
        pytest.param(lambda: Doing(lambda y, x: Double.apply(2.0, x, y)[0]), "sgd", "this torch is too old", marks=OLD),
        (lambda: nn.Sequential(nn.Linear(12, 1), nn.LazyBatchNorm1d(affine=False)), "sgd", "call the model once"),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_words(build, optimizer, said):
    with pytest.raises(ValueError, match=said):
        predict_memory(build, (2, 12), "fp32", optimizer)


class Checked(nn.Linear):
    """Looks whether its labels are in range, and in three ways whether its numbers are finite."""

    def forward(self, x, labels=None):
        if labels is not None and labels.max() > 1:
            raise ValueError("no such class")
        y = super().forward(x)
        if y.isnan().any() or torch.any(torch.isinf(y)) or not torch.isfinite(y).all():
            y = y.clamp(-1, 1)
        return y


def test_a_model_that_asks_for_values_is_told_where_and_what_to_do():
    line = Checked.forward.__code__.co_firstlineno + 1
    said = rf"asks for values in {re.escape(__file__)}, line {line},.* leave them out of the inputs, and give loss="
    batch = {"x": torch.ones(2, 12), "labels": torch.ones(2)}
    with pytest.raises(ValueError, match=said):
        predict_memory(lambda: Checked(12, 1), lambda: batch, "fp32")


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_model_that_asks_whether_its_numbers_are_finite_is_told_that_they_are(device_type):
    estimate = predict_memory(lambda: Checked(12, 1), (2, 12), "fp16", device_type=device_type)
    assert "clamp" not in set(estimate.timeline.op)
    assert estimate.activations == predict_memory(linear, (2, 12), "fp16", device_type=device_type).activations


@pytest.mark.parametrize("error", [AssertionError, RuntimeError])
def test_a_models_own_error_is_not_reworded(error):
    def fail(y, x):
        raise error("my own")

    with pytest.raises(error, match="my own"):
        predict_memory(lambda: Doing(fail), (2, 12), "fp32")


def test_a_model_that_returns_no_tensor_needs_a_loss():
    build = lambda: nn.GRU(12, 1)
    with pytest.raises(ValueError, match="must return one tensor"):
        predict_memory(build, (2, 12), "fp32", device_type="cpu")
    loss = lambda output: output[0].sum()
    estimate = predict_memory(build, (2, 12), "fp32", device_type="cpu", loss=loss)
    assert estimate.gradients == estimate.parameters


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(ValueError, match="empty parameter list"):
        predict_memory(nn.Flatten, (2, 3, 12), "fp32")


def test_an_lstm_on_a_cpu_is_refused_as_onednn_keeps_a_workspace():
    with pytest.raises(ValueError, match="oneDNN's, which is not predicted; predict for cuda"):
        predict_memory(lambda: nn.LSTM(12, 1), (2, 3, 12), "fp32", device_type="cpu")


def test_a_batch_of_one_that_batch_norm_refuses_does_not_fit():
    build = lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 1000), nn.BatchNorm1d(1000), nn.Linear(1000, 1))
    assert largest_batch(100_000, build, (12,), "fp32") == 0
    assert largest_batch(10_000_000, build, (12,), "fp32") > 1


def test_largest_batch_is_found_where_the_peak_has_a_bend():
    """The weights' moments are the peak of a small batch, the activations that of a large one."""

    def build():
        return nn.Sequential(nn.Flatten(), nn.Linear(48, 4000), nn.Linear(4000, 100), nn.Linear(100, 1))

    batch = largest_batch(20_000_000, build, (3, 4, 4), "fp32", "adam")
    peaks = [predict_memory(build, (size, 3, 4, 4), "fp32", "adam").peak for size in (1, batch, batch + 1)]
    assert peaks[0] < peaks[1] <= 20_000_000 < peaks[2]


class Block(nn.Module):
    """A block of a decoder: causal attention of 6 heads over 2 groups, and a gated layer."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(96), nn.RMSNorm(96)])
        self.query = nn.Linear(96, 96, bias=False)
        self.key = nn.Linear(96, 32, bias=False)
        self.value = nn.Linear(96, 32, bias=False)
        self.out = nn.Linear(96, 96, bias=False)
        self.gate = nn.Linear(96, 256, bias=False)
        self.up = nn.Linear(96, 256, bias=False)
        self.down = nn.Linear(256, 96, bias=False)

    def forward(self, x):
        y = self.norms[0](x)
        made = [layer(y).unflatten(-1, (-1, 16)) for layer in (self.query, self.key, self.value)]
        heads = [each.transpose(1, 2) for each in made]
        y = scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """For 500 tokens, with a tied head. Nobody tuned the prediction for it."""

    def __init__(self, checkpointing):
        super().__init__()
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(500, 96)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(96, 500, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(x)


def next_token_loss(logits):
    targets = torch.zeros(logits.shape[:2], dtype=torch.long, device=logits.device)
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


WEEKLY = [pytest.param(way, marks=pytest.mark.weekly) for way in ("fp32", "pure_bf16")]


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.weekly)])
@pytest.mark.parametrize("precision", ["bf16", *WEEKLY])
def test_decoders_keep_what_is_predicted(precision, checkpointing):
    model = Decoder(checkpointing)
    tokens = torch.randint(500, (5, 64))
    inputs = lambda: tokens
    estimate = predict_memory(lambda: model, inputs, precision, "adamw", "cpu", next_token_loss)
    if precision == "pure_bf16":
        model.bfloat16()
    kept_bytes = kept_of(model, tokens, precision)
    assert sum(estimate.activations.values()) == kept_bytes + LOSS[precision]
    assert estimate.activations["int64"] >= tokens.nbytes, "the tokens too are kept"
    weights = sum(weight.nbytes for weight in model.parameters())
    assert estimate.parameters == estimate.gradients == weights
    assert estimate.peak == pytest.approx(tracked_peak(model, tokens, precision, "adamw"), rel=0.01)


@pytest.mark.parametrize(
    ("precision", "optimizer", "expected"),
    [
        ("fp32", "sgd", 4 + 4),
        ("fp32", "adamw", 4 + 4 + 4 + 4),
        ("bf16", "adamw_foreach", 4 + 4 + 4 + 4),
        ("pure_bf16", "adamw", 2 + 2 + 2 + 2),
        ("bf16", "adamw_8bit", 4 + 4 + 2 * (1 + 4 / 256)),
        ("pure_bf16", "adamw_8bit", 2 + 2 + 2 * (1 + 4 / 256)),
    ],
)
def test_bytes_a_parameter(precision, optimizer, expected):
    def build():
        return nn.Linear(1024, 1024, bias=False)

    estimate = predict_memory(build, (2, 1024), precision, optimizer)
    assert estimate.bytes_per_parameter == pytest.approx(expected, rel=0.01)


class Lora(nn.Module):
    """A frozen layer, and beside it the product of two narrow ones that are trained."""

    def __init__(self, layer, rank):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_has_gradients_and_states_of_what_is_trained_only(dtype):
    def build():
        layers = [Lora(nn.Linear(256, 256, dtype=dtype), 1) for _ in range(2)]
        return nn.Sequential(layers[0], nn.ReLU(), layers[1])

    model = build()
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    estimate = predict_memory(build, (64, 256), "bf16", "adamw", "cpu")
    assert estimate.gradients == 4 * trained and estimate.optimizer_state == 8 * trained
    frozen = sum(weight.numel() for weight in model.parameters()) - trained
    assert estimate.parameters == 4 * trained + dtype.itemsize * frozen
    assert dtype.itemsize < estimate.bytes_per_parameter < dtype.itemsize + 0.2
    batch = torch.randn(64, 256)
    kept_bytes = kept_of(model, batch, "bf16")
    assert sum(estimate.activations.values()) == kept_bytes + LOSS["bf16"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8_bit_states_are_those_of_torchao(dtype):
    from torchao.optim import AdamW8bit

    shapes = [(100, 256), (30, 3), (70, 77), (128, 128), (4096,), (15, 256)]
    weights = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    ours, theirs = OPTIMIZERS["adamw_8bit"](weights), AdamW8bit(weights)
    ours.step()
    with torch.compiler.set_stance("force_eager"):
        theirs.step()
    for weight in weights:
        states = [theirs.state[weight][name] for name in ("exp_avg", "exp_avg_sq")]
        parts = [getattr(state, name) for state in states for name in getattr(state, "tensor_attrs", ["data"])]
        predicted = sum(part.nbytes for parts in ours.state[weight].values() for part in parts)
        assert predicted == sum(part.nbytes for part in parts)


class TwoInputs(nn.Linear):
    def forward(self, tokens, scale):
        return super().forward(nn.functional.one_hot(tokens, 12) * scale)


REAL = torch.zeros(2, dtype=torch.long)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_inputs_are_a_tensor_a_tuple_or_named(device_type):
    def build():
        return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 1))

    for tokens in (lambda: torch.randint(9, (2,)), lambda: REAL, lambda: (REAL,), lambda: {"input": REAL}):
        estimate = predict_memory(build, tokens, "fp32", device_type=device_type)
        assert estimate.activations["int64"] == 16
    for inputs in (lambda: (REAL, torch.ones(1)), lambda: {"scale": torch.ones(1), "tokens": REAL}):
        pure = predict_memory(lambda: TwoInputs(12, 1), inputs, "pure_bf16", device_type=device_type)
        assert "float32" not in pure.activations, "floats are cast as the weights are, tokens are not"


def test_a_constructor_makes_no_memory():
    made = []

    def build():
        made.append(nn.Sequential(nn.Linear(12, 8), nn.LayerNorm(8)).to(torch.bfloat16).float())
        return made[-1]

    assert predict_memory(build, (2, 12), "bf16").gradients == 4 * (12 * 8 + 3 * 8)
    assert {weight.device.type for model in made for weight in model.parameters()} == {"meta"}


def test_a_constructor_that_asks_for_values_runs_for_real():
    def build():
        return nn.Linear(12, int(torch.ones(3).sum().item()) - 2)

    assert predict_memory(build, (2, 12), "fp32").parameters == 4 * 13


@pytest.mark.parametrize("loss", [lambda output: output, lambda output: output.detach().sum()])
def test_a_loss_that_trains_nothing_is_refused(loss):
    with pytest.raises(ValueError, match="must be a scalar that depends on a weight"):
        predict_memory(lambda: nn.Linear(12, 3), (2, 12), "fp32", loss=loss)


@pytest.mark.parametrize("limit", [0, 9, 10, 11, 12, 39, 40, 41, 1000, 12345])
@pytest.mark.parametrize("power", [0.5, 1, 2])
def test_largest_is_the_largest(limit, power):
    found = memory._largest(limit, lambda number: 10 + number**power)
    assert found == 0 or 10 + found**power <= limit
    assert 10 + (found + 1) ** power > limit


def convolution(groups):
    return lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=groups, bias=False), nn.Flatten())


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_flops_of_a_convolution_count_its_groups(groups):
    batch, side = 4, 16
    estimate = roofline(convolution(groups), (batch, 8, side, side), "fp32", "A100")
    forward = 2 * batch * side**2 * 8 * 9 * 8 // groups  # a multiply-add counts 2
    by_phase = estimate.ops.groupby("phase").flops.sum()
    assert by_phase.forward == forward
    assert by_phase.backward == forward, "the weights' gradient; the images need none"


@pytest.mark.parametrize(("groups", "rate"), [(1, 312e12), (2, 312e12), (8, 19.5e12)])
def test_a_depthwise_convolution_has_no_tensor_cores(groups, rate, monkeypatch):
    """Nor has its backward. A bandwidth without end leaves arithmetic as the only limit."""
    monkeypatch.setattr(speed, "GPUS", GPUS.assign(bandwidth=math.inf))
    ops = roofline(convolution(groups), (2, 8, 16, 16), "fp16", "A100").ops
    ops = ops[ops.flops > 0]
    assert list(ops.phase) == ["forward", "backward"]
    assert (ops.depthwise == (groups == 8)).all()
    assert ops.seconds.tolist() == pytest.approx((ops.flops / rate).tolist())


def test_a_training_step_has_three_times_the_flops_of_forward_less_the_images_gradient(models):
    model = models["test_resnet"]
    ops = roofline(lambda: model, shape_of(model), "fp32", "A100").ops
    by_phase = ops.groupby("phase").flops.sum()
    first = ops.query("phase == 'forward' and flops > 0").flops.iloc[0]
    assert by_phase.backward == 2 * by_phase.forward - first


def test_traffic_time_and_bound_by_hand():
    estimate = roofline(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32, bias=False)), (16, 1, 8, 8), "fp32", "V100"
    )
    product = estimate.ops.query("phase == 'forward' and op == 'mm'").iloc[0]
    assert product.bytes == 4 * (16 * 64 + 64 * 32 + 16 * 32)
    assert product.flops == 2 * 16 * 64 * 32
    assert product.intensity == pytest.approx(product.flops / product.bytes)
    assert product.seconds == pytest.approx(max(product.flops / 15.7e12, product.bytes / 900e9))
    assert product.bound == "memory"
    assert estimate.seconds == pytest.approx(estimate.ops.seconds.sum())
    assert estimate.images_per_second == pytest.approx(16 / estimate.seconds)
    momentum = estimate.ops.query("phase == 'optimizer'").bytes.sum()
    assert momentum == 8 * 4 * 64 * 32  # mul_ reads and writes 1 + 1, both add_ 2 + 1 each
    assert not estimate.ops.op.str.contains("view|empty|detach|^t$").any(), "they move nothing"


def test_the_roofline_takes_a_function_that_makes_tokens_an_optimizer_and_a_loss():
    def tokens():
        return torch.randint(50, (6, 16))

    estimate = roofline(lambda: nn.Embedding(50, 8), tokens, "bf16", "A100", "adamw", loss=lambda output: output.sum())
    assert estimate.images_per_second == pytest.approx(6 / estimate.seconds)
    assert estimate.ops.op.str.contains("fused_adamw").any()


def test_a_large_product_is_bound_by_compute_and_16_bits_are_faster():
    def build():
        return nn.Sequential(nn.Flatten(), nn.Linear(4096, 4096, bias=False))

    shape = (4096, 1, 64, 64)
    times = {precision: roofline(build, shape, precision, "A100") for precision in ("fp32", "tf32", "bf16", "fp16")}
    assert {estimate.ops.query("op == 'mm'").bound.unique().tolist()[0] for estimate in times.values()} == {"compute"}
    assert times["fp32"].bound == "compute"
    assert times["fp32"].seconds > times["tf32"].seconds > times["bf16"].seconds
    assert times["bf16"].seconds == times["fp16"].seconds
    assert times["fp32"].bytes == times["tf32"].bytes


# Of each card: cores, boost clock in GHz, memory bus in bits, and its rate in Gbit/s a pin, from the same sources.
CHIPS = {
    "V100": (5120, 1.53, 4096, 1.752),
    "T4": (2560, 1.59, 256, 10),
    "RTX 3090": (10496, 1.695, 384, 19.5),
    "A100": (6912, 1.41, 5120, 3.186),
    "RTX 4090": (16384, 2.52, 384, 21),
    "H100": (16896, 1.98, 5120, 5.2),
    "H200": (16896, 1.98, 6144, 6.25),
}


@pytest.mark.parametrize("gpu", GPUS.index.drop("B200"))  # whose clock and cores are not published
def test_rates_of_the_table_are_those_of_the_chips(gpu):
    """A core adds one product in each clock, two FLOPs; each pin of the bus brings its bits."""
    cores, clock, bus, rate = CHIPS[gpu]
    assert GPUS.fp32[gpu] == pytest.approx(2 * cores * clock / 1000, rel=0.006)
    assert GPUS.bandwidth[gpu] == pytest.approx(bus * rate / 8, rel=0.01)


@pytest.mark.parametrize("gpu", GPUS.index)
def test_rates_are_dense_and_complete(gpu):
    row = GPUS.loc[gpu]
    assert row.fp32 < row.fp16
    assert math.isnan(row.tf32) == math.isnan(row.bf16) == (gpu in ("V100", "T4"))
    if row.tf32 > row.fp32:  # the RTX cards multiply in TF32 as fast as in fp32
        assert row.fp16 == row.bf16 == pytest.approx(2 * row.tf32, rel=0.03)


@pytest.mark.parametrize(
    ("gpu", "precision", "said"),
    [
        ("GTX 1080", "fp32", "unknown GPU 'GTX 1080'"),
        ("V100", "bf16", "the V100 has no arithmetic units for bf16"),
        ("V100", "pure_bf16", "no arithmetic units for pure_bf16"),
        ("A100", "fp8", "unknown precision 'fp8'"),
    ],
)
def test_what_a_gpu_cannot_do_is_refused(gpu, precision, said):
    with pytest.raises(ValueError, match=said):
        roofline(convolution(1), (2, 8, 16, 16), precision, gpu)


def chain(*layers):
    """The ops of a step of a linear layer and `layers` after it; a tensor between them has 64 x 4096 numbers."""
    build = lambda: nn.Sequential(nn.Linear(4096, 4096, bias=False), *layers)
    return roofline(build, (64, 4096), "fp32", "A100").ops


def test_another_gpu_has_other_times_of_the_same_ops():
    ops = chain(nn.ReLU())
    again = on_gpu(ops, "H100", "fp32")
    assert again.drop(columns=["seconds", "bound"]).equals(ops.drop(columns=["seconds", "bound"]))
    there = roofline(lambda: nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.ReLU()), (64, 4096), "fp32", "H100")
    assert again.equals(there.ops)
