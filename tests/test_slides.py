"""The notebooks as slides, and the instructor's key: both come from the notebooks as they are."""

import re

import nbformat
import pytest
from bs4 import BeautifulSoup

from tools import answers, slides
from tools.execute import NOTEBOOKS

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))


def read(path):
    return nbformat.read(path, as_version=4)


def test_a_heading_begins_a_cell():
    text = "So it is.\n\n## Next\n\n```python\n## no heading\n```\n\n## Last\n\nEnd."
    cell = nbformat.v4.new_markdown_cell(text, id="a", metadata={"tags": ["x"]})
    parts = slides.cut(cell)
    assert [part.source.splitlines()[0] for part in parts] == ["So it is.", "## Next", "## Last"]
    assert "\n\n".join(part.source for part in parts) == text
    assert [part.id for part in parts] == ["a", "a-2", "a-3"]


@pytest.mark.weekly
def test_a_deck_has_every_heading_and_figure_and_no_set_up_cell():
    path = NOTEBOOKS / "03_loss_scaling.ipynb"
    page = BeautifulSoup(slides.deck(read(path)), "html.parser")
    kinds = [cell.metadata.slideshow.slide_type for cell in slides.mark(read(path)).cells]
    assert len(page.select(".slides > section")) == kinds.count("slide")
    assert len(page.select(".slides > section > section")) == kinds.count("slide") + kinds.count("subslide")
    assert "Where did the gradients go?" in page.get_text()
    assert "Put halfbits/, helpers/, data/ beside this notebook" not in page.get_text()
    assert re.search(r"width: 1440,\s*height: 810,", str(page))
    figures = page.select(".slides img.figure")
    assert len(figures) >= 5 and all(len(figure["alt"]) > 30 for figure in figures)


def unsolved(key):
    """The exercises whose stub stands in the key without a hint and a solution."""
    asked = set(re.findall(r"^check\.(\w+)\(\w", key, re.MULTILINE))
    solved = re.findall(r"\*\*Hint\.\*\*(?:(?!\*\*Hint).)*?\*\*Solution\.\*\*\s*```python\n(.*?)```", key, re.DOTALL)
    return asked - {name for code in solved for name in re.findall(r"^def (\w+)", code, re.MULTILINE)}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_key_has_every_exercise_and_question_with_its_answer(path):
    notebook = read(path)
    text, key = "\n\n".join(cell.source for cell in notebook.cells), answers.key(notebook)
    assert re.findall(r"^check\.\w+\(\w.*", text, re.MULTILINE) == re.findall(r"^check\.\w+\(\w.*", key, re.MULTILINE)
    assert not unsolved(key)
    assert key.count("**Answer.**") == text.count("<summary>Answer</summary>")
    assert "**Answer.**" in key or re.match("14[a-e]", path.stem), "two questions, but for the clinic's drawers"
    assert "<details>" not in key and "Where to read more" not in key


def test_a_missing_solution_is_noticed():
    notebook = read(NOTEBOOKS / "03_loss_scaling.ipynb")
    for cell in notebook.cells:
        cell.source = cell.source.replace("def largest_scale(gradients):\n    largest", "largest")
    assert unsolved(answers.key(notebook)) == {"largest_scale"}
