"""Every term of the glossary has its four parts, its place, and a notebook whose prose uses it."""

import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "GLOSSARY.md").read_text(encoding="utf-8")
TABLES = re.findall(r"^\| term \| 中文 \| meaning \| notebook \|\n\|(?:---\|){4}\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
ROWS = [[line.strip("|").split(" | ") for line in table.splitlines()] for table in TABLES]
TERMS = [[row[0].strip(" `") for row in rows] for rows in ROWS]


def prose(notebook):
    cells = nbformat.read(ROOT / notebook, as_version=4).cells
    return re.sub(r"[*`]", "", "\n".join(cell.source for cell in cells if cell.cell_type == "markdown"))


def test_every_heading_has_one_table():
    assert len(TABLES) == TEXT.count("\n## ") and 60 <= sum(map(len, ROWS)) <= 120


def test_terms_are_unique_and_sorted_under_their_heading():
    every = [term.lower() for terms in TERMS for term in terms]
    assert len(set(every)) == len(every)
    for terms in TERMS:
        assert terms == sorted(terms, key=str.lower)


@pytest.mark.parametrize("row", [row for rows in ROWS for row in rows], ids=lambda row: row[0].strip(" `"))
def test_every_row_is_complete_and_its_notebook_uses_the_term(row):
    term, chinese, meaning, link = (part.strip(" `") for part in row)
    assert term and chinese and re.fullmatch(r"[^.].*\.", meaning)
    number, notebook = re.fullmatch(r"\[(\d\d)\]\((notebooks/\1_\w+\.ipynb)\)", link).groups()
    assert re.search(rf"\b{re.escape(term)}(e?s)?\b", prose(notebook), re.IGNORECASE), f"not in notebook {number}"
