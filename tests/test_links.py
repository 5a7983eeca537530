"""Every link and every anchor leads somewhere: in notebooks, docs, README, GLOSSARY and the messages."""

import re
import tomllib
from functools import cache
from pathlib import Path

import nbformat
import pytest

from halfbits.errors import messages
from helpers.messages import anchor as anchor_of
from tools.execute import NOTEBOOKS

ROOT = NOTEBOOKS.parent
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("data/*.md"), *NOTEBOOKS.glob("*.ipynb")]
LINK = re.compile(r"\]\((?!https?:|mailto:|\.\./\.\./actions)([^)#\s]*)(?:#([^)\s]+))?\)")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


@cache
def text(path):
    """The Markdown of a document or of a notebook, without its code."""
    if path.suffix != ".ipynb":
        return FENCED.sub("", path.read_text(encoding="utf-8"))
    cells = nbformat.read(path, as_version=4).cells
    return FENCED.sub("", "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown"))


def headings(path):
    return re.findall(r"^#+ (.+)$", text(path), re.MULTILINE)


def anchors(path):
    """The anchors of a document's headings, as GitHub and the site write them, and as JupyterLab does."""
    found = set(map(anchor_of, headings(path)))
    if path.suffix == ".ipynb":
        found |= {heading.replace(" ", "-") for heading in headings(path)}
    return found


@pytest.mark.parametrize("path", sorted(DOCUMENTS), ids=lambda path: path.name)
def test_links_and_anchors_lead_somewhere(path):
    for target, anchor in LINK.findall(text(path)):
        there = (path.parent / target).resolve() if target else path
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), f"{target}#{anchor}"


def test_every_message_and_symptom_leads_to_a_heading():
    for case in [*messages().case, *messages("symptom").case]:
        notebook, heading = case.split("#")
        assert heading in headings(NOTEBOOKS / f"{notebook}.ipynb"), case


def test_every_heading_that_has_moved_is_where_the_site_leads():
    moved = tomllib.loads((ROOT / "tools" / "site" / "moved.toml").read_text(encoding="utf-8"))
    for page, places in moved.items():
        assert bool(list(ROOT.glob(f"{page}.*"))) != ("the-page" in places), page
        for place in places.values():
            there, _, anchor = place.partition("#")
            (path,) = ROOT.glob(f"{there}.*")
            assert not anchor or anchor in map(anchor_of, headings(path)), place


def test_what_is_broken_is_found(tmp_path):
    (tmp_path / "b.md").write_text("# What is there?\n", encoding="utf-8")
    links = "[a](b.md#what-is-there) [b](c.md) [c](b.md#what)"
    (tmp_path / "a.md").write_text(links, encoding="utf-8")
    assert LINK.findall(text(Path(tmp_path / "a.md"))) == [("b.md", "what-is-there"), ("c.md", ""), ("b.md", "what")]
    assert anchors(tmp_path / "b.md") == {"what-is-there"}
