"""Every solution in a notebook passes its check, and typical wrong answers get a reply that fits them."""

import re

import nbformat
import pytest
import torch

from helpers import check
from tests.execute import NOTEBOOKS

RIGHT = "Right.\n"


def solutions():
    """The code of every solution that a notebook shows, by the name of its exercise."""
    found = {}
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
        blocks = re.findall(r"<summary>Solution</summary>\s*```python\n(.*?)```", text, re.DOTALL)
        mine = {re.search(r"def (\w+)\(", block)[1]: block for block in blocks}
        assert set(re.findall(r"^check\.(\w+)\(", text, re.MULTILINE)) == set(mine), path.name
        found |= mine
    return found


SOLUTIONS = solutions()


@pytest.mark.parametrize("name", SOLUTIONS)
def test_solution_is_right(name, capsys):
    scope = {"torch": torch, "criterion": torch.nn.BCEWithLogitsLoss()}
    exec(SOLUTIONS[name], scope)
    getattr(check, name)(scope[name])
    assert capsys.readouterr().out == RIGHT


@pytest.mark.parametrize("name", SOLUTIONS)
def test_untouched_stub_is_not_yet(name, capsys):
    getattr(check, name)(lambda *_: ...)
    getattr(check, name)(lambda *_: None)
    assert capsys.readouterr().out.count("Not yet") == 2


def wrong_step(fault):
    """A bf16 step with one fault in it."""

    def step(model, optimizer, images, labels):
        if fault != "accumulates":
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=fault != "float32"):
            output = model(images)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(output, labels)
        if fault == "loss outside":
            loss = (output - labels.bfloat16()).square().mean()
        if fault == "other loss":
            loss = (output.float() - labels).square().mean()
        loss.backward()
        if fault != "no step":
            optimizer.step()
        return loss if fault == "graph" else loss.detach()

    return step


@pytest.mark.parametrize(
    "name, answer, reply",
    [
        ("verdict", lambda low, high: "faster", "for [0.6, 0.7] you say 'faster', but the interval lies below 1"),
        ("verdict", lambda low, high: "faster" if high > 1 else "slower", "for [0.96, 1.04] you say 'faster'"),
        ("verdict", lambda low, high: low.faster, "raised AttributeError"),
        ("verdict", 3, "raised TypeError"),
        ("bf16_step", wrong_step("float32"), "output is torch.float32"),
        ("bf16_step", wrong_step("loss outside"), "the loss is torch.bfloat16"),
        ("bf16_step", wrong_step("graph"), "loss.detach()"),
        ("bf16_step", wrong_step("no step"), "did not move"),
        ("bf16_step", wrong_step("accumulates"), "optimizer.zero_grad()"),
        ("bf16_step", wrong_step("other loss"), "not those of a bf16 step"),
        ("bf16_step", lambda model: model, "raised TypeError"),
    ],
)
def test_wrong_answer_gets_a_reply_that_fits(name, answer, reply, capsys):
    getattr(check, name)(answer)
    said = capsys.readouterr().out
    assert said.startswith("Not right yet: ") and reply in said
