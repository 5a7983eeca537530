"""The exercises: references, solutions and stubs, and every mistake recognised by its own hint."""

import re
import sys

import nbformat
import pytest
import torch

from helpers import check
from helpers.check.exercise import Case, exercise
from tools.execute import NOTEBOOKS

EXERCISES = [each for some in check.EXERCISES.values() for each in some]
MISTAKES = [
    pytest.param(each, hint, mistake, id=f"{each.__name__}: {hint}")
    for each in EXERCISES
    for hint, mistake in each.mistakes.items()
]


def solutions():
    """The code of every solution that a notebook shows, by the topic of the notebook and the name of the exercise."""
    found = {}
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
        blocks = re.findall(r"<summary>Solution</summary>\s*```python\n(.*?)```", text, re.DOTALL)
        mine = {re.search(r"def (\w+)\(", block)[1]: block for block in blocks}
        assert set(re.findall(r"^check\.(\w+)\(\w", text, re.MULTILINE)) == set(mine), path.name
        if mine:
            found[path.stem.partition("_")[2].replace("_", " ")] = mine
    return found


SOLUTIONS = solutions()


def said(each, answer, capsys):
    each(answer)
    return capsys.readouterr().out


def test_every_exercise_of_a_notebook_is_listed_under_its_topic():
    listed = {topic: {each.__name__ for each in some} for topic, some in check.EXERCISES.items()}
    assert listed == {topic: set(mine) for topic, mine in SOLUTIONS.items()}
    assert list(listed) == list(SOLUTIONS), "in the order of the notebooks"
    modules = {topic: {each.__module__.split(".")[-1] for each in some} for topic, some in check.EXERCISES.items()}
    assert modules == {topic: {topic.replace(" ", "_")} for topic in listed}


@pytest.mark.parametrize("each", EXERCISES, ids=lambda each: each.__name__)
def test_reference_solution_and_stub(each, capsys):
    scope = {"torch": torch, "criterion": torch.nn.BCEWithLogitsLoss()}
    exec(next(mine[each.__name__] for mine in SOLUTIONS.values() if each.__name__ in mine), scope)
    assert said(each, each.reference, capsys).startswith("Right. 1 of ")
    assert said(each, scope[each.__name__], capsys).startswith("Right. 1 of ")
    assert said(each, lambda *_: None, capsys) == said(each, lambda *_: ..., capsys)
    assert said(each, lambda *_: None, capsys).startswith("Not yet: your function returns None.")


@pytest.mark.parametrize(("each", "hint", "mistake"), MISTAKES)
def test_mistake_is_recognised_by_its_own_hint(each, hint, mistake, capsys):
    words = said(each, mistake, capsys)
    assert words.startswith("Not right yet: ") and hint in words.splitlines()[0]


@pytest.mark.parametrize(
    ("share", "hint"),
    [
        (lambda images, parts: 1, "multiply it by the part's share of the batch."),
        (lambda images, parts: 1 / len(parts), "The parts differ in size: the larger the part,"),
    ],
)
def test_a_reader_s_own_program_with_a_known_mistake_gets_its_hint(share, hint, capsys):
    def step(model, optimizer, scaler, parts, device_type, dtype):
        optimizer.zero_grad()
        for images, labels in parts:
            with torch.autocast(device_type, dtype):
                loss = torch.nn.functional.binary_cross_entropy_with_logits(model(images), labels)
            scaler.scale(loss * share(images, parts)).backward()
        scaler.step(optimizer)
        scaler.update()
        return True

    assert hint in said(check.accumulated_step, step, capsys).splitlines()[0]


@pytest.mark.parametrize(("each", "most"), [(check.rms_norm, 4), (check.rms, 2)])
def test_a_result_may_be_off_by_so_many_spacings_and_no_more(each, most):
    right, spacing = torch.ones((), dtype=torch.float16), 2.0**-10
    assert each.same(right + most * spacing, right) and each.same(right - most * spacing, right)
    assert not each.same(right + (most + 1) * spacing, right) and not each.same(right - (most + 1) * spacing, right)


@pytest.mark.parametrize(("exponent", "fits"), [(-128, False), (-127, True), (127, True), (128, False)])
def test_an_exponent_that_no_scale_holds_is_named(exponent, fits, capsys):
    words = said(check.block_exponent, lambda amax, name: exponent, capsys)
    assert (f"you give {exponent}. E8M0 holds -127 to 127." not in words) == fits


@pytest.mark.parametrize(
    ("each", "mistake", "told"),
    [
        (check.mean_loss, "Each read waits", "the number of losses read before the last step is 5; it should be 0."),
        (check.mean_loss, "Keep loss.detach()", "the number of older graphs kept alive is 4; it should be 0."),
        (check.mean_loss, "Join the losses", "the number of tensors read after the loop is 6; it should be 1."),
        (check.bf16_step, "Call the model under", "layer's output is torch.float32; it should be torch.bfloat16."),
    ],
)
def test_what_an_answer_did_is_told(each, mistake, told, capsys):
    (answer,) = (answer for hint, answer in each.mistakes.items() if hint.startswith(mistake))
    assert told in said(each, answer, capsys)


@pytest.mark.parametrize("scale", [3.0, 0.0, -2.0])
def test_a_scale_that_is_no_power_of_two_is_named(scale, capsys):
    assert f"you give {scale:g}. That is no power of two." in said(check.largest_scale, lambda _: scale, capsys)


def test_an_interval_that_ends_at_1_decides_nothing():
    assert {check.verdict.reference(*ends) for ends in ((0.9, 1.0), (1.0, 1.1))} == {"undecided"}


@pytest.mark.parametrize(
    ("calls", "reply"), [(25, "Right. "), (26, "Not right yet: you call peak 26 times to find 7.")]
)
def test_a_search_may_ask_so_many_times_and_no_more(calls, reply, capsys):
    def answer(peak, memory):
        asked = []
        batch = check.batch_that_fits.reference(lambda batch: asked.append(batch) or peak(batch), memory)
        for _ in range(calls - len(asked)):
            peak(1)
        return batch

    assert said(check.batch_that_fits, answer, capsys).startswith(reply)


@pytest.mark.parametrize(
    ("batches", "last"),
    [([2**power for power in range(99)], "call 18 asks for batch 131072"), ([1] * 9999, "call 5001 asks for batch 1")],
)
def test_a_search_that_does_not_end_is_ended(batches, last, capsys):
    words = said(check.batch_that_fits, lambda peak, memory: max(map(peak, batches)), capsys)
    assert f"the search does not end: {last}" in words


# What every exercise replies, whatever is asked.


@exercise(
    cases=[Case((2.0,)), Case((-3.0,), "The root is that of the square of x.")],
    mistakes={"Multiply it by itself, not by 2.": lambda x: 2 * x},
)
def square(x):
    """The square of a number."""
    return x * x


def late(x):
    return x * x if x > 0 else None


@pytest.mark.parametrize(
    ("answer", "reply"),
    [
        (lambda x: abs(x) * x, "for -3.0 your result is -9.0; it should be 9.0. The root is that of the square of x."),
        (lambda x: 2 * x, "for -3.0 your result is -6.0; it should be 9.0. Multiply it by itself, not by 2."),
        (lambda x: "4", "for 2.0 your result is 4; it should be 4.0."),
        (lambda: 4, "called with 2.0, your code raised TypeError"),
        (lambda x: sys.exit(), "called with 2.0, your code raised SystemExit"),
        (3, "called with 2.0, your code raised TypeError: 'int' object is not callable"),
        (late, "called with -3.0, your function returns None."),
        (lambda x: [4.0], "for 2.0 your result is [4.0]; it should be 4.0."),
        (lambda x: torch.ones(2), "your function returns something unexpected (RuntimeError"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(answer, reply, capsys):
    words = said(square, answer, capsys)
    assert words.startswith(f"Not right yet: {reply}") and words.count("\n") == 1


def test_the_line_that_failed_is_named(capsys):
    def answer(x):
        half = x / 2
        return half.square

    assert said(square, answer, capsys).endswith("no attribute 'square', in the line `return half.square`\n")


def test_a_reply_is_a_box_with_a_mark_in_a_notebook(monkeypatch):
    shown = []
    monkeypatch.setattr(check.exercise, "display", lambda box, *views: shown.append(box))
    for answer in (lambda x: x * x, lambda x: x < 0, lambda x: None):
        square(answer)
    marks = [re.search("<b[^>]*>(.)</b> (.*)</div>", box._repr_html_()).groups() for box in shown]
    assert [mark for mark, _ in marks] == ["\N{CHECK MARK}", "\N{MULTIPLICATION X}", "\N{WHITE CIRCLE}"]
    assert marks[0][1] == "Right. 1 of 1 in this notebook." and "&lt;" not in marks[0][1]


def observed(results):
    """An exercise whose only case has these results, the right one first."""
    return exercise(cases=[()], observe=lambda answer: results[answer()])(lambda: "right")


@pytest.mark.parametrize(
    ("right", "wrong", "reply"),
    [
        (float("nan"), 1.0, "your result is 1.0; it should be nan."),
        (-0.0, 0.0, "your result is 0.0; it should be -0.0."),
        (1 / 3, 0.25, "your result is 0.25; it should be 0.333333."),
        ((1, "two"), (1, "three"), "your result is (1, three); it should be (1, two)."),
        ((1, 2), 1, "your result is int, 1; it should be 2 values."),
        ({"a": 1, "the second": 2}, {"a": 1, "the second": 3}, "the second is 3; it should be 2."),
        (torch.zeros(2), torch.zeros(3), "your result is torch.float32 of shape (3,); it should be torch.float32 of"),
        (torch.zeros(2), torch.zeros(2).half(), "your result is torch.float16 of shape (2,); it should be"),
        (torch.zeros(2), torch.ones(2), "your result is [1.0, 1.0]; it should be [0.0, 0.0]."),
        (torch.zeros(9), torch.ones(9) / 4, "your result is off by up to 0.25."),
        ([1] * 9, [2] * 9, "your result is [2, 2, 2, 2, 2, 2, 2, 2, ...]; it should be [1,"),
    ],
)
def test_what_differs_is_shown(right, wrong, reply, capsys):
    each = observed({"right": right, "wrong": wrong})
    assert said(each, lambda: "right", capsys).startswith("Right. ")
    words = said(each, lambda: "wrong", capsys)
    assert words.startswith(f"Not right yet: {reply}") and words.count("\n") == 1


def test_a_hint_must_fit_all_cases_so_far(capsys):
    """A mistake that would have been found in an earlier case is not the reader's."""
    assert "Multiply" not in said(square, lambda x: 4.0 if x == 2 else 2 * x + 1, capsys)


def test_pictures_stand_below_a_wrong_answer(capsys):
    words = said(check.decode_fp16, lambda code: 1.0, capsys)
    assert words.splitlines()[1].startswith("fp16       0 | 01111 | 1000000000   1.5")


def test_patient_d_fits_a_second_case(capsys):
    def answer(patient):
        second = "Clipping fails with a fused optimizer"
        return second if patient == "D" else check.case_of.reference(patient)

    assert said(check.case_of, answer, capsys).startswith("Right. ")
