"""halfbits/errors.toml: each message is found when it is pasted, leads to a heading, and has a fix that is Python.
tests/weekly/test_messages_raised.py raises them."""

import ast
import json
import re

import pytest
import vl_convert

from halfbits import errors, explain
from helpers import explore, messages

MESSAGES = errors.messages()
SYMPTOMS = errors.messages("symptom")


def test_entries_are_complete_and_their_names_are_those_of_pages():
    assert MESSAGES.slug.is_unique
    assert MESSAGES.slug.str.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*").all()
    assert MESSAGES.message.is_unique
    needed = MESSAGES[["message", "kind", "by", "at", "cause", "fix", "case"]]
    assert needed.notna().all(axis=None)
    assert (needed != "").all(axis=None)
    for fix in MESSAGES.fix:
        assert "\n" not in fix
        ast.parse(fix)


def test_what_stops_a_run_comes_before_what_it_only_logs():
    later = [entry.kind == "log" or entry.kind.endswith("Warning") for entry in MESSAGES.itertuples()]
    assert later == sorted(later)


def test_each_message_and_each_of_its_forms_is_found_first():
    for entry in MESSAGES.itertuples():
        for form in [entry.message, *entry.also]:
            pasted = f"[rank0]: Traceback (most recent call last):\n[rank0]: RuntimeError: {form}\n"
            assert explain(pasted).slug.iloc[0] == entry.slug, form


PASTED = {  # as people write in issues; `also` of the entries holds more
    '  File "train.py", line 88\n    scaler.unscale_(optimizer)\nValueError: Attempting to unscale FP16 gradients.': (
        "attempting-to-unscale-fp16-gradients"
    ),
    r'{"error": "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for \'BFloat16\'"}': (
        "amp-unscale-not-implemented-for-bfloat16"
    ),
    "RuntimeError: Input type (torch.cuda.FloatTensor) and weight type (torch.cuda.HalfTensor) should be the same": (
        "input-type-and-bias-type-should-be-the-same"
    ),
    "[2024-03-05 11:02:17,204] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. "
    "Attempted loss scale: 4294967296, reducing to 2147483648": "deepspeed-overflow-skipping-step",
    "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, k, "
    "&falpha, a, CUDA_R_16F, lda, b, CUDA_R_16F, ldb, &fbeta, c, CUDA_R_16F, ldc, CUDA_R_32F, "
    "CUBLAS_GEMM_DFALT_TENSOR_OP)`": "cublas-status-when-calling-cublasgemmex",
    "RuntimeError: Index put requires the source and destination dtypes\nmatch, got BFloat16 for the destination and "
    "Float for the source.": "index-put-requires-the-source-and-destination-dtypes-match",
    "MisconfigurationException: `precision='bf16'` does not use a scaler, found <ShardedGradScaler object at 0x7f>.": (
        "lightning-bf16-mixed-does-not-use-a-scaler"
    ),
    "RuntimeError: Input type (torch.FloatTensor) and weight type (CPUBFloat16Type) should be the same or input should "
    "be a MKLDNN tensor and weight is a dense tensor": "input-type-and-bias-type-should-be-the-same",
    "recorded for this optimizer": "no-inf-checks-were-recorded",
    "    loss = mpu.vocab_parallel_cross_entropy(output.float(), labels)\nRuntimeError: CUDA out of memory. Tried to "
    "allocate 9.33 GiB (GPU 0; 10.76 GiB total capacity)": "cuda-out-of-memory-in-cross-entropy",
    "    hidden = self.norm(hidden)\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 MiB. GPU 0 has "
    "a total capacity of 15.89 GiB": "cuda-out-of-memory",
}


@pytest.mark.parametrize("pasted", PASTED)
def test_what_people_paste_reaches_its_entry(pasted):
    assert explain(pasted).slug.iloc[0] == PASTED[pasted]


def test_a_stranger_s_error_is_not_found():
    assert explain("ZeroDivisionError: division by zero").empty
    assert explain("").empty and explain("dtype").empty


@pytest.mark.parametrize("line", ["loss: nan", "Epoch 3: train_loss=nan", "step 100 loss nan scale 0.0"])
def test_a_line_of_a_log_leads_to_its_symptom(line):
    assert list(explain(line).title) == ["The loss is NaN, or the scale falls."]


AMP = "_amp_foreach_non_finite_check_and_unscale_cpu"
FAST_PATH = "torch.backends.mha.set_fastpath_enabled(False)"
ANSWERED = [  # a message, words that are in what is answered, and words that are not
    (f"\"{AMP}\" not implemented for 'BFloat16'", "weights are bf16", "complex"),
    (f"{AMP} not implemented for BFloat16", "weights are bf16", "complex"),  # as it is where quotes are lost
    (f"\"{AMP}\" not implemented for 'ComplexFloat'", "weight is complex", "bf16, so are"),
    (f"{AMP} not implemented for ComplexDouble", "weight is complex", "weights are bf16"),
    (f"\"{AMP}\" not implemented for 'Float8_e5m2'", "A gradient is FP8", "weights are bf16"),
    (f"\"{AMP}\" not implemented for 'Double'", "the dtype that the message names", "bf16"),
    ("expected scalar type Double but found Float", "is float64", ".half()"),
    ("expected scalar type Float but found Double", "is float64", "made under autocast"),
    ("expected scalar type Float but found Half", "made under autocast", "float64"),
    ("expected scalar type Float but found BFloat16", FAST_PATH, "float64"),
    ("mat1 and mat2 must have the same dtype, but got Float and BFloat16", FAST_PATH, "float64"),
    ("mat1 and mat2 must have the same dtype, but got Double and Half", "is float64", "made under autocast"),
    ("mat1 and mat2 must have the same dtype, but got Long and Float", "whole numbers", "made under autocast"),
    ("expected scalar type BFloat16 but found Half", "One tensor is fp16 and the other bf16", "a float32 tensor"),
    ("expected m1 and m2 to have the same dtype, but got: c10::complex<float> != float", "is complex", "adapter"),
    ("expected m1 and m2 to have the same dtype, but got:\nc10::Float8_e4m3fn != float", "is FP8", "adapter"),
    ("Input type (double) and bias type (struct c10::Half) should be the same", "is float64", "made half"),
    ("Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same", "CPU", "made half"),
    ("RNN input dtype (torch.float64) does not match weight dtype (torch.float32).", "is float64", "autocast region"),
    (
        "Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: long int and  "
        "query.dtype: float instead.",
        "mask.bool()",
        "mask.to(q.dtype)",
    ),
    ("Found dtype Long but expected Float", "whole numbers", "outside autocast"),
    ("result type ComplexFloat can't be cast to the desired output type Float", "is complex", "whole numbers"),
    ("\"sum_cpu\" not implemented for 'ComplexHalf'", "complex numbers", "16-bit kernel"),
    ("\"mse_cpu\" not implemented for 'Long'", "whole numbers", "written into"),
    ("\"gcd_cpu\" not implemented for 'Float'", "no kernel for float32", "FP8"),
    ("\"cdist\" not implemented for 'Half'", "no 16-bit kernel", "no kernel for float32"),
    ("value cannot be converted to type c10::BFloat16 without overflow", "does not fit in bf16", "65504"),
    ("value cannot be converted to type c10::Half without overflow", "65504", "bf16"),
    ("Type fp16 is not supported on your device.", "train in bf16", "older than Ampere"),
    ("Trying to convert Float8_e5m2 to the MPS backend", "has no FP8", "older macOS"),
    ("Trying to convert ComplexDouble to the MPS backend", "complex64", "older macOS"),
    ("bf16 mixed precision requires PyTorch >= 1.10 and a supported device.", "has no bf16", "also on a CPU"),
    ("bf16 mixed precision with MPS device requires a Pytorch >= 2.6.0", "torch is too old", "also on a CPU"),
    ("Unexpected input data type. Actual: (tensor(double)) , expected: (tensor(float))", "float32", "'float16'"),
    ("type fp8e4b8 not supported in this architecture.", "MI300", "before Ada"),
    ("Expected counts to have type Half but got Float", "SyncBatchNorm", "float64"),
    ("Unexpected floating ScalarType in at::autocast::prioritize", "fp16 in a bf16 region", "float64"),
    ("Seen floating point types of different precisions in %add, but mixed precision is", "XLA", "DeepSpeed"),
    ("Query/Key/Value should either all have the same dtype", "q.to(v.dtype)", "scaled_dot_product"),
    ("Model data type and gradient accumulation data type must be equal to use ZeRO", "0.10.1", "Apex"),
    ("Model data type and gradient accumulation data type must be equal to use Amp", "Without ZeRO", "0.10.1"),
    ("    assert all_groups_norm > 0.\nAssertionError", "exactly 0", "overflow"),
    ("Inference tensors cannot be saved for backward. To work around", "torch.no_grad", "meta"),
    ("Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty()", "no numbers", "to_empty"),
    ("Tensor on device cuda:0 is not on the expected device meta!", "no numbers", "to_empty"),
    ("MPS device does not support bmm for non-float inputs", "whole numbers", "older macOS"),
    ("MPS device does not support linear for non-float inputs", "whole numbers", "older macOS"),
    ("Attempted to use an uninitialized parameter in <method 'numel' of 'torch._C'>", "lazy layer", "meta"),
    ("cuda_runtime.cpp:118 in function operator(): CUDA Error: invalid argument", "driver", "no kernel"),
    ("in function cast_transpose: CUDA Error: no kernel image is available", "NVTE_CUDA_ARCHS", "driver refused"),
    ("Required aspect fp64 is not supported on the device", "GradScaler", "fp16, try"),
    ("Required aspect fp16 is not supported on the device", "no arithmetic in fp16", "float64"),
    ("no vectorized ISA", "vector instructions", "GPU"),
    ("Cannot convert ScalarType Float8_e4m3fn to hipDataType.", "float8_e4m3fnuz", "hipBLAS on AMD"),
    ("Cannot convert ScalarType Long to hipDataType.", "hipBLAS on AMD", "float8_e4m3fnuz"),
    ("You must pass a model and an optimizer together to `accelerate.prepare()`", "one call", "torchao"),
    ("`transformer_engine` was not found on your system.", "torchao", "one call"),
]


@pytest.mark.parametrize(("message", "words", "others"), ANSWERED)
def test_what_is_answered_is_true_of_the_dtype_that_a_message_names(message, words, others):
    found = explain(message)
    answer = " ".join([*found.cause, *found.fix])
    assert words in answer, answer
    assert others not in answer, answer


def test_each_message_that_names_two_dtypes_is_answered_for_each_other_dtype():
    """Whatever two dtypes it names, only one entry answers, and it is that of the other dtype."""
    answers = {"Double": "a-float64", "ComplexFloat": "a-complex", "Long": "whole-", "Float8_e4m3fn": "an-fp8"}
    frames = [
        "mat1 and mat2 must have the same dtype, but got {} and {}",
        "addmv input tensors must have the same dtype, but got Float, {}, and {}",
        "Input dtypes must be the same, got: input {}, batch1: {}, batch2: float",
        "prelu: Type promoting not supported. Got {} and {}",
        "Index put requires the source and destination dtypes match, got {} for the destination and {} for the source.",
        "index_add_(): self ({}) and source ({}) must have the same scalar type",
        "linalg.solve: Expected A and B to have the same dtype, but found A of type {} and B of type {} instead",
        "expected scalar type {} but found {}",
        "Expected out tensor to have dtype {}, but got {} instead",
        "FSDP expects uniform original parameter dtype but got {{{}, {}}}",
    ]
    for frame in frames:
        for dtype, slug in answers.items():
            assert [each.startswith(slug) for each in explain(frame.format("Float", dtype)).slug] == [True], frame
        assert list(explain(frame.format("Half", "BFloat16")).slug) == ["fp16-meets-bf16"], frame
        (only,) = explain(frame.format("Float", "Half")).slug
        assert not only.startswith((*answers.values(), "fp16-meets")), frame


DENIED = ["no nan found", "no overflow", "0 NaN values", "No NaNs or infs in the gradients", "nan count = 0", "not nan"]
DENIED += ["overflow: False", "no underflow", "without any nan", "NaN not found", "no spikes", "没有nan", "未发现溢出"]


@pytest.mark.parametrize("line", DENIED)
def test_a_line_that_denies_is_not_answered_as_if_it_said_so(line):
    assert explain(line).empty


@pytest.mark.parametrize("line", ["no nan in fp32, but nan in fp16", "not learning, nan", "nan: 0.5", "loss=nan, 0"])
def test_a_denial_of_something_else_hides_nothing(line):
    assert explain(line).title.iloc[0] == "The loss is NaN, or the scale falls."


@pytest.fixture(scope="module")
def box():
    """The paste box's chart, which holds a message."""
    shown = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explore, "display", lambda data, **_: shown.append(data))
        messages.paste_box("Attempting to unscale FP16 gradients.")
    return shown[0][explore.VEGA_LITE]


def drawn(spec):
    svg = vl_convert.vegalite_to_svg(spec, vl_version="5.8")
    return " ".join(re.findall(r"<t(?:ext|span)[^>]*>([^<]+)<", svg))


def test_the_box_holds_the_message_that_it_is_given(box):
    assert "its gradient is fp16" in drawn(box)


def test_a_browser_s_expressions_find_what_python_s_find():
    """All texts against all patterns, by Vega."""
    texts = [*MESSAGES.message, *MESSAGES.also.explode().dropna(), *PASTED, *WORDS, *DENIED]
    patterns = [*MESSAGES.pattern, *SYMPTOMS.pattern]
    data = [{"text": text, "at": i, "pattern": pattern} for i, text in enumerate(texts) for pattern in patterns]
    hit = "test(regexp(datum.pattern, 'i'), datum.text) ? 1 : 0"
    count = {"aggregate": [{"op": "sum", "field": "hit", "as": "hits"}], "groupby": ["at"]}
    encoding = {"y": {"field": "at", "type": "ordinal"}, "text": {"field": "hits", "type": "quantitative"}}
    transform = [{"calculate": hit, "as": "hit"}, count]
    spec = {"data": {"values": data}, "transform": transform, "mark": "text", "encoding": encoding | {"y": None}}
    counted = [int(word) for word in drawn(spec).split() if word.isdigit()]
    by_python = [sum(bool(re.search(pattern, text, errors.FLAGS)) for pattern in patterns) for text in texts]
    assert counted == by_python


WORDS = {  # without a message
    "underflow": "Underflow: a number below",
    "inf": "Overflow: a number past 65,504",
    "nan": "The loss is NaN, or the scale falls. Ask first",
    "slow": "It is not faster. Ask first",
    "no memory is saved": "The memory did not drop. Ask first",
    "loss scale": "The loss scale: fp16 needs one",
    "dtype mismatch": "It stops with an error. Paste",
    "报错": "It stops with an error. Paste",
    "梯度溢出": "Overflow: a number past 65,504",
    "下溢": "Underflow: a number below",
    "显存不足": "The memory did not drop. Ask first",
    "损失为nan": "The loss is NaN, or the scale falls. Ask first",
    "训练没有加速": "It is not faster. Ask first",
    "不收敛": "It learns worse than in FP32, or not at all. Ask first",
}


@pytest.mark.parametrize(
    ("pasted", "answer"),
    [
        *WORDS.items(),
        ("", messages.ASK),
        (next(iter(PASTED)), "notebook 14a, Attempting to unscale FP16 gradients"),
        ("out of memory", "CUDA out of memory."),
        ("ZeroDivisionError", "Not known here. Try a few words"),
        ("ZeroDivisionError", "audit and watch"),
        ("报错如下: RuntimeError: mat1 and mat2 must have the same dtype", "16-bit tensor, often made under autocast"),
    ],
)
def test_the_box_answers(box, pasted, answer):
    spec = json.loads(json.dumps(box))
    spec["params"][0]["value"] = pasted
    assert answer in drawn(spec)


def test_an_entry_s_parts_stand_below_each_other_within_the_box_and_its_fix_can_be_copied(box):
    (rows,) = box["datasets"].values()
    for row in rows:
        parts = [part for part in ("title", "cause", "fix", "case", "page") if row.get(part)]
        ends = [row[f"{part} top"] + messages.LINE * len(row[part]) for part in parts]
        for end, lower in zip(ends, parts[1:]):
            assert row[f"{lower} top"] >= end, row
        assert max(ends, default=0) <= box["height"] - 2 * messages.LINE, row
        ast.parse("\n".join(row.get("fix") or []))
    assert {*MESSAGES.cause} <= {" ".join(row["cause"]) for row in rows if row.get("cause")}, "nothing is cut"
