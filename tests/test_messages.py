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
    texts = [*MESSAGES.message, *MESSAGES.also.explode().dropna(), *PASTED, *WORDS]
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
