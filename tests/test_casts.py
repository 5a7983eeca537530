"""cast_policies against the header that torch ships and against real calls; trace_casts against what it must find."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from halfbits.casts import cast_policies, trace_casts

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
MACROS = {
    "AT_FORALL_LOWER_PRECISION_FP": "lower",
    "AT_FORALL_FP32": "fp32",
    "AT_FORALL_FP32_SET_OPT_DTYPE": "fp32",
    "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE": "fp32",
    "AT_FORALL_PROMOTE": "promote",
}


def policies(device_type):
    table = cast_policies(device_type)
    return {(row.op, row.overload): row.policy for row in table.itertuples()}


def header_policies():
    """{(op, overload): policy} of the lists that CUDA, XPU and others share, as the C++ header spells them."""
    found = {}
    text = HEADER.read_text(encoding="utf-8").replace("\\\n", " ")
    for macro, policy in MACROS.items():
        (body,) = re.findall(rf"#define {macro}\(_\)(.*)", text)
        for entry in re.findall(r"_\(((?:[^()]|\([^()]*\))*)\)", body):
            named = re.search(r'"(\w+)(?:\.(\w+))?"', entry)  # the form of `norm`, with signatures
            name, overload = named.groups() if named else ([*entry.split(","), ""])[:2]
            found[f"aten::{name.strip()}", (overload or "").strip()] = policy
    return found


def test_cuda_policies_are_those_of_the_header():
    ours = {op: policy for op, policy in policies("cuda").items() if op[0].startswith("aten::")}  # torchvision has some
    theirs = header_policies()
    assert len(theirs) > 100
    # These are registered elsewhere: in autocast_mode.cpp and cudnn/AutocastRNN.cpp.
    cuda_only = {op: policy for op, policy in ours.items() if op not in theirs}
    assert {op: policy for op, policy in ours.items() if op in theirs} == theirs
    assert cuda_only.pop(("aten::binary_cross_entropy", "")) == "refused"
    assert set(cuda_only) <= {("aten::_cudnn_rnn", "")} | {
        (f"aten::{name}", "") for name in ("cudnn_convolution", "cudnn_convolution_transpose", "linalg_matrix_sqrth")
    }, cuda_only


def a(*shape):
    return torch.rand(*shape) + 0.1


# Real calls on the CPU: {op: call on the tensors that it makes with f}.
LOWER = {
    "mm": lambda f: torch.mm(f(2, 3), f(3, 4)),
    "matmul": lambda f: torch.matmul(f(5, 2, 3), f(3, 4)),
    "addmm": lambda f: torch.addmm(f(2, 4), f(2, 3), f(3, 4)),
    "linear": lambda f: F.linear(f(2, 3), f(4, 3)),
    "conv2d": lambda f: F.conv2d(f(1, 2, 8, 8), f(3, 2, 3, 3)),
    "conv_transpose2d": lambda f: F.conv_transpose2d(f(1, 2, 8, 8), f(2, 3, 3, 3)),
    "conv_tbc": lambda f: torch.conv_tbc(f(8, 2, 3), f(3, 3, 4), f(4)),
    "prelu": lambda f: F.prelu(f(2, 3) - 0.5, f(3)),
    "scaled_dot_product_attention": lambda f: F.scaled_dot_product_attention(
        f(1, 2, 8, 4), f(1, 2, 8, 4), f(1, 2, 8, 4)
    ),
    "linalg_vecdot": lambda f: torch.linalg.vecdot(f(2, 3), f(2, 3)),
}
FP32 = {
    "mse_loss": lambda f: F.mse_loss(f(3), f(3)),
    "huber_loss": lambda f: F.huber_loss(f(3), f(3)),
    "kl_div": lambda f: F.kl_div(f(3), f(3), reduction="sum"),
    "cross_entropy_loss": lambda f: F.cross_entropy(f(3, 5), torch.tensor([0, 1, 2])),
    "nll_loss": lambda f: F.nll_loss(f(3, 5), torch.tensor([0, 1, 2])),
    "binary_cross_entropy": lambda f: F.binary_cross_entropy(f(3) / 2, f(3) / 2),
    "binary_cross_entropy_with_logits": lambda f: F.binary_cross_entropy_with_logits(f(3), f(3)),
    "triplet_margin_loss": lambda f: F.triplet_margin_loss(f(2, 3), f(2, 3), f(2, 3)),
    "cosine_embedding_loss": lambda f: F.cosine_embedding_loss(f(2, 3), f(2, 3), f(2)),
    "adaptive_avg_pool3d": lambda f: F.adaptive_avg_pool3d(f(1, 2, 4, 4, 4), 2),
    "grid_sampler": lambda f: F.grid_sample(f(1, 2, 4, 4), f(1, 3, 3, 2), align_corners=False),
    "cdist": lambda f: torch.cdist(f(2, 3), f(4, 3)),
    "inverse": lambda f: torch.inverse(f(3, 3)),
    "linalg_svdvals": lambda f: torch.linalg.svdvals(f(3, 3)),
    "linalg_eigh": lambda f: torch.linalg.eigh(f(3, 3))[0],
    "linalg_solve": lambda f: torch.linalg.solve(f(3, 3), f(3)),
    "linalg_matrix_rank": lambda f: torch.linalg.matrix_rank(f(3, 3)).float(),
    "trace": lambda f: torch.trace(f(3, 3)),
    "fft_fft": lambda f: torch.fft.fft(f(8)).real,
    "fft_hfft": lambda f: torch.fft.hfft(torch.complex(f(5).float(), f(5).float())),
    "quantile": lambda f: torch.quantile(f(8), 0.5),
    "pinverse": lambda f: torch.pinverse(f(3, 3)),
}
PROMOTE = {
    "cat": lambda f: torch.cat([f(2), f(2).float()]),
    "stack": lambda f: torch.stack([f(2), f(2).float()]),
    "index_copy": lambda f: torch.index_copy(f(3).float(), 0, torch.tensor([0, 2]), f(2)),
}


def test_cpu_policies_are_what_real_calls_show():
    """From float32, a "lower" op returns bfloat16; from bfloat16, an "fp32" op returns float32."""
    table, calls = policies("cpu"), 0
    for expected, given, returned, group in [
        ("lower", torch.float32, torch.bfloat16, LOWER),
        ("fp32", torch.bfloat16, torch.float32, FP32),
        ("promote", torch.bfloat16, torch.float32, PROMOTE),
    ]:
        for name, call in group.items():
            listed = {policy for (op, _), policy in table.items() if op == f"aten::{name}"}
            if not listed:
                continue  # not registered in this torch
            make = lambda *shape, given=given: a(*shape).to(given)
            with torch.autocast("cpu", torch.bfloat16):
                assert call(make).dtype == returned, name
            assert listed == {expected}, name
            calls += 1
    assert calls >= 26


def test_every_registration_has_its_row_and_none_is_unknown():
    for device_type, key in (
        ("cuda", "AutocastCUDA"),
        ("cpu", "AutocastCPU"),
        ("xpu", "AutocastXPU"),
        ("mps", "AutocastMPS"),
    ):
        table = cast_policies(device_type)
        names = {f"{row.op}.{row.overload}" if row.overload else row.op for row in table.itertuples()}
        assert names == set(torch._C._dispatch_get_registrations_for_dispatch_key(key)) and len(names) == len(table)
        assert list(table.columns) == ["op", "overload", "policy"]
        if device_type in ("cuda", "cpu"):
            assert "unknown" not in set(table.policy)
    for device_type in ("hpu", "xla"):  # the dispatcher knows the device type, and nothing is registered
        assert len(cast_policies(device_type)) == 0


@pytest.mark.weekly
def test_probing_is_silent_and_leaves_autocast_as_it_was():
    script = (
        "import torch, halfbits.casts as a; a.cast_policies('cuda');"
        "assert not torch.is_autocast_enabled('cuda'); assert torch.is_autocast_cache_enabled()"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stderr == ""


def test_unknown_device_type_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="autocast knows no device type 'tpu', only cpu, cuda"):
        cast_policies("tpu")


def casts_of(table):
    return table.casts[table.casts != ""].str.split("; ").explode().value_counts().to_dict()


def test_trace_tells_each_op_s_casts_on_a_missing_device():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.LayerNorm(8))
    table = trace_casts(model, torch.randn(2, 4))
    assert list(table.columns) == ["op", "inputs", "output", "casts", "cast_bytes", "module"]
    assert casts_of(table) == {
        "weight float32 -> float16": 2,
        "activation float32 -> float16": 1,
        "activation float16 -> float32": 1,
    }
    assert table.cast_bytes.sum() == (4 + 2) * (4 * 8 + 8 + 2 * 4) + (2 + 4) * 2 * 8
    by_op = table.set_index("op")
    assert by_op.output["aten::addmm"] == "float16" and by_op.output["aten::relu"] == "float16"
    assert by_op.output["aten::native_layer_norm"].startswith("float32")
    assert by_op.module["aten::relu"] == "Sequential.1"
    assert by_op.casts["aten::addmm"].count("->") == 3 and by_op.casts["aten::t"] == ""
    assert model[0].weight.device.type == "cpu" and model[0].weight.grad is None


def test_trace_is_what_the_cpu_does():
    seen = []
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Softmax(-1), torch.nn.Linear(8, 1))
    for module in model:
        module.register_forward_hook(lambda module, inputs, output: seen.append(str(output.dtype)))
    table = trace_casts(model, torch.randn(2, 4), device_type="cpu", dtype=torch.bfloat16)
    assert seen == ["torch.bfloat16"] * 3  # the CPU's softmax stays in bfloat16
    assert set(table.output[table.op.isin(["aten::addmm", "aten::_softmax"])]) == {"bfloat16"}
    assert trace_casts(model, torch.randn(2, 4)).set_index("op").output["aten::_softmax"] == "float32"  # CUDA's is not


def test_a_weight_is_cast_once_and_a_cast_by_hand_is_an_op():
    layer = torch.nn.Linear(4, 4)
    table = trace_casts(lambda layer, x: layer(layer(x.double().float())), layer, torch.randn(2, 4))
    assert casts_of(table) == {"weight float32 -> float16": 2, "activation float32 -> float16": 1}
    assert list(table.op).count("aten::_to_copy") == 2


def test_trace_leaves_autocast_as_it_was_even_after_an_error():
    with pytest.raises(ValueError, match=r"fn meets sizes that do not fit together in .*test_casts.py, line "):
        trace_casts(lambda x: x @ x, torch.randn(2, 3))
    assert not torch.is_autocast_enabled("cuda")
    layer = torch.nn.Linear(4, 4)
    assert casts_of(trace_casts(layer, torch.randn(2, 4))) == casts_of(trace_casts(layer, torch.randn(2, 4)))


class Counted(TorchDispatchMode):
    """The bytes that casts read and write. In inference mode `to` comes whole, and does not tell whether it copies."""

    cast_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.to, torch.ops.aten._to_copy) and result.dtype != args[0].dtype:
            self.cast_bytes += args[0].nbytes + result.nbytes
        return result


class Ten(torch.nn.Module):
    """One layer, used ten times."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

    def forward(self, x):
        for _ in range(10):
            x = x + self.norm(self.layer(x))
        return x


class TenInferred(Ten):
    @torch.inference_mode()
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("kind", [Ten, TenInferred])
def test_casts_in_inference_mode_are_those_of_a_real_run(kind, mode):
    """Autocast caches no weights there."""
    model, x = kind(), torch.rand(4, 8)
    with mode(), Counted() as counted, torch.autocast("cpu", torch.bfloat16):
        model(x)
    with mode():
        table = trace_casts(model, x, device_type="cpu", dtype="bf16")
        on_cuda = trace_casts(model, x, dtype="bf16", fake=True)
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
    assert table.cast_bytes.sum() == counted.cast_bytes
    weights = 20 if kind is TenInferred or mode is torch.inference_mode else 2
    for each in (table, on_cuda):
        assert casts_of(each)["weight float32 -> bfloat16"] == weights
        assert list(each.op).count("aten::addmm") == 10
    assert torch.is_autocast_cache_enabled()


class Nosy(TorchDispatchMode):
    """Looks at every number."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            assert not result.isnan().any().item()
        return result


@pytest.mark.parametrize("around", [Nosy, FakeTensorMode])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_other_modes_see_nothing_of_a_trace(around, device_type):
    model, x = torch.nn.Linear(4, 4), torch.rand(2, 4)
    alone = trace_casts(model, x, device_type=device_type)
    with around():
        assert trace_casts(model, x, device_type=device_type).equals(alone)


@pytest.mark.parametrize("name", ["Bert", "GPT2", "Llama"])
def test_models_of_hugging_face_are_traced_as_they_are(name):
    import transformers

    config = getattr(transformers, f"{name}Config")(num_hidden_layers=2, hidden_size=48, num_attention_heads=4)
    trace = trace_casts(getattr(transformers, f"{name}Model")(config), torch.zeros(2, 16, dtype=torch.long))
    assert trace.casts.str.contains("activation float32 -> float16").any()
    assert "float16" in trace.output.values


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_rnn_without_the_device_runs_without_cudnn():
    table = trace_casts(torch.nn.LSTM(8, 8), torch.randn(3, 2, 8))
    assert "weight float32 -> float16" in casts_of(table)


def test_attention_without_the_device_is_the_kernel_of_cuda():
    """Among 16-bit numbers, with what autocast casts in front; without a choice torch would take apart what it does."""
    table = trace_casts(lambda q: F.scaled_dot_product_attention(q, q, q), torch.randn(1, 2, 8, 4), fake=True)
    (row,) = table.itertuples()
    assert row.op == "aten::_scaled_dot_product_flash_attention" and row.output.startswith("float16, ")
    assert casts_of(table) == {"activation float32 -> float16": 3}


def test_a_mask_of_attention_is_cast_and_reaches_the_kernel_that_takes_one():
    mask = torch.zeros(8, 8)
    table = trace_casts(lambda q, mask: F.scaled_dot_product_attention(q, q, q, mask), torch.randn(1, 2, 8, 4), mask)
    assert "aten::_scaled_dot_product_efficient_attention" in set(table.op)
    assert table[table.op.str.contains("efficient")].output.iloc[0].startswith("float16")
    assert casts_of(table) == {"activation float32 -> float16": 4}


def test_casts_asked_for_are_ops_of_their_own():
    for cast in (lambda x: x.long(), lambda x: x.half(), lambda x: x.to(torch.float16), lambda x: x.bool()):
        table = trace_casts(cast, torch.ones(2))
        assert casts_of(table) == {} and list(table.op) == ["aten::_to_copy"]
    soft = trace_casts(lambda x: F.softmax(x, -1, dtype=torch.float64), torch.ones(2))
    assert casts_of(soft) == {}


def test_short_module_names_are_found():
    class M(torch.nn.Sequential):
        pass

    assert set(trace_casts(M(torch.nn.Linear(2, 2)), torch.ones(1, 2)).module) == {"M.0"}


def test_what_cannot_be_traced_is_refused_in_words():
    layer = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="pass every module and tensor as an argument"):
        trace_casts(lambda x: layer(x), torch.ones(1, 2))
    elsewhere = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match="pass every module and tensor as an argument"):
        trace_casts(lambda x: elsewhere(x), torch.ones(1, 2), device_type="cpu", dtype=torch.bfloat16)
    for dtype in (torch.int8, torch.float32, "fp8"):
        with pytest.raises(ValueError, match=f"casts to torch.float16 or torch.bfloat16, not to {dtype}"):
            trace_casts(layer, torch.ones(1, 2), dtype=dtype)

    class Gate(torch.nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    line = Gate.forward.__code__.co_firstlineno + 1
    said = rf'asks for values in .*test_casts.py, line {line}, as .*an if.* device_type="cpu" traces it on real'
    with pytest.raises(ValueError, match=f"^Gate {said}"):
        trace_casts(Gate(), torch.ones(1, 2), fake=True)
    with pytest.raises(ValueError, match=f"^fn {said}"):
        trace_casts(lambda gate, x: gate(x), Gate(), torch.ones(1, 2), fake=True)
    assert "aten::sum" in set(trace_casts(Gate(), torch.ones(1, 2), device_type="cpu").op)
    with pytest.raises(TypeError, match="fn must be a module or a function, not Tensor"):
        trace_casts(torch.ones(1, 2), layer)
    with pytest.raises(ValueError, match="autocast knows no device type 'gpu', only cpu, cuda"):
        trace_casts(layer, torch.ones(1, 2), device_type="gpu")
    for device_type, fake in [("cuda", True), ("cpu", False)]:
        with pytest.raises(ValueError, match=r"^fn runs backward itself"):
            backward = lambda layer, x: layer(x).sum().backward()
            trace_casts(backward, layer, torch.ones(1, 2), device_type=device_type, dtype=torch.bfloat16, fake=fake)
    missing = next(name for name in ("mps", "xpu") if not torch.get_device_module(name).is_available())
    with pytest.raises(ValueError, match=f"there is no {missing} device here"):
        trace_casts(layer, torch.ones(1, 2), device_type=missing)


def test_a_method_and_a_plain_tensor_of_a_module_are_found():
    layer = torch.nn.Linear(2, 2)
    layer.plain = torch.ones(2)
    assert len(trace_casts(layer.forward, torch.ones(1, 2), fake=True)) == 2
    plain = lambda layer, x: layer(x) * layer.plain
    assert trace_casts(plain, layer, torch.ones(1, 2), fake=True).op.iloc[-1] == "aten::mul.Tensor"


@pytest.mark.parametrize(
    "said",
    [
        "Expected all tensors to be on the same device, but got mat1 is on cuda:0, different from other tensors on cpu",
        "Input type (torch.cuda.HalfTensor) and weight type (torch.FloatTensor) should be the same",
    ],
)
def test_what_a_gpu_says_of_a_tensor_elsewhere_is_put_in_words(said):
    def fails(x):
        raise RuntimeError(said)

    with pytest.raises(ValueError, match="pass every module and tensor as an argument"):
        trace_casts(fails, torch.ones(1, 2))


def test_tables_do_not_depend_on_where_they_are_asked_for():
    expected = policies("cuda")
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            assert policies("cuda") == expected
        assert torch.get_autocast_dtype("cuda") == torch.bfloat16
    finally:
        torch.set_autocast_dtype("cuda", torch.float16)
    with ThreadPoolExecutor(4) as pool:
        assert all(table == expected for table in pool.map(policies, ["cuda"] * 4))
