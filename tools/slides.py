"""Write notebooks as slides, each as a page of reveal.js.

uv run python -m tools.slides 03 --to slides             # those whose names contain a word; none: all notebooks
uv run python -m tools.slides 03 --to slides --local     # reveal.js, RequireJS and jQuery from slides/node_modules

A slide begins with a `##` heading, so a text that has one in its middle is cut in two cells there. Where code and
figure do not fit on one slide, the code is left out. Nothing else changes: words, code and outputs stay as they are.
"""

import argparse
import re
from math import ceil
from pathlib import Path

import nbformat
from bs4 import BeautifulSoup
from nbconvert import SlidesExporter
from tqdm import tqdm
from traitlets.config import Config

from tools.execute import NOTEBOOKS

SCREEN, LINE = 27, 24  # lines of text on a slide of 1440 x 810, with some room; pixels a line
WIDE, TALL = 1224, 580  # pixels to which the slides' template enlarges a figure, at most
FIGURE_ONLY = "figure-only"  # the tag of a cell whose code is left out
TAG = re.compile(r"<[^<>]+>")
FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
SHOWN = re.compile(r"^(<details>|<div|\||>|```)", re.MULTILINE)  # more than prose: answers, charts, tables, code
HEADING = re.compile(r"^##? ", re.MULTILINE)


def is_heading(cell):
    return cell.cell_type == "markdown" and HEADING.match(cell.source)


def cut(cell):
    """The cell, in parts that begin at its headings."""
    hidden = FENCED.sub(lambda block: re.sub(".", " ", block[0]), cell.source)
    places = [place.start() for place in HEADING.finditer(hidden) if place.start()]
    if cell.cell_type != "markdown" or not places:
        return [cell]
    texts = [cell.source[start:end].strip() for start, end in zip([0, *places], [*places, None])]
    names = [cell.id, *(f"{cell.id}-{number}" for number in range(2, len(texts) + 1))]
    return [nbformat.from_dict(cell | {"id": name, "source": text}) for name, text in zip(names, texts)]


def height(cell):
    """About how many lines a cell takes on a slide, its outputs included and what is folded left out."""
    if cell.cell_type == "markdown":
        blocks = TAG.sub("", FOLDED.sub("folded", cell.source))
        return sum(ceil(len(line) / 110) * (2 if line.startswith("#") else 1) or 0.6 for line in blocks.splitlines())
    lines = 0 if FIGURE_ONLY in cell.metadata.get("tags", []) else len(cell.source.splitlines()) + 1
    for output in cell.outputs:
        data = output.get("data", {})
        if "image/png" in data:
            size = output.metadata["image/png"]
            lines += min(size["height"] * WIDE / size["width"], TALL) / LINE
        elif "text/html" in data:
            lines += 1.5 * len(BeautifulSoup(data["text/html"], "html.parser").find_all("tr")) + 1
        else:
            lines += len((output.get("text") or data.get("text/plain", "")).splitlines())
    return lines


def slide_types(cells):
    """A slide a heading, a case or a question on a slide of its own, what follows one click later while there is room.

    Prose that is long, or finds no room below what it explains, is for the speaker.
    """
    used, set_up = 0, next(cell for cell in cells if cell.cell_type == "code")
    for cell in cells:
        tall = height(cell)
        prose = cell.cell_type == "markdown" and not SHOWN.search(cell.source)
        folded = cell.metadata.get("jupyter", {}).get("source_hidden")
        if cell is set_up or (folded and not cell.outputs):
            kind = "skip"
        elif is_heading(cell):
            kind = "slide"
        elif cell.cell_type == "markdown" and re.search(r"\A### |\*\*Predict\.\*\*|^> ### ", cell.source, re.MULTILINE):
            kind = "subslide"
        elif prose and (tall > 8 or used + tall > SCREEN):
            kind = "notes"
        else:
            kind = "fragment" if used + tall <= SCREEN else "subslide"
        if kind not in ("skip", "notes"):
            used = tall + (used if kind == "fragment" else 0)
        yield kind


def mark(notebook):
    notebook.cells = [part for cell in notebook.cells for part in cut(cell)]
    for cell in notebook.cells:
        tags = set(cell.metadata.pop("tags", [])) - {FIGURE_ONLY}
        has_figure = any("image/png" in output.get("data", {}) for output in cell.get("outputs", []))
        if has_figure and height(cell) > SCREEN:
            tags.add(FIGURE_ONLY)
        if tags:
            cell.metadata["tags"] = sorted(tags)
    for cell, kind in zip(notebook.cells, slide_types(notebook.cells)):
        cell.metadata["slideshow"] = {"slide_type": kind}
    return notebook


def deck(notebook, local=False):
    """The notebook as slides, an HTML text; `local`: its scripts come from a folder beside it."""
    settings = {
        "reveal_width": "1440",
        "reveal_height": "810",
        "reveal_scroll": True,
        "reveal_transition": "none",
    }
    if local:
        settings["reveal_url_prefix"] = "node_modules/reveal.js"
        settings["require_js_url"] = "node_modules/requirejs/require.js"
        settings["jquery_url"] = "node_modules/jquery/dist/jquery.min.js"
    left_out = {"enabled": True, "remove_input_tags": {FIGURE_ONLY}}
    exporter = SlidesExporter(
        template_name="slides",
        extra_template_basedirs=[str(Path(__file__).resolve().parent / "jupyter")],
        config=Config(SlidesExporter=settings, TagRemovePreprocessor=left_out),
    )
    html, _ = exporter.from_notebook_node(mark(notebook))
    return html


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of notebook names; none: all notebooks")
    parser.add_argument("--to", type=Path, default=Path("slides"), help="the folder to write into")
    parser.add_argument("--local", action="store_true", help="take the scripts from node_modules in that folder")
    options = parser.parse_args()
    paths = [
        path
        for path in sorted(NOTEBOOKS.glob("*.ipynb"))
        if not options.words or any(word in path.name for word in options.words)
    ]
    if not paths:
        parser.error(f"no notebook in {NOTEBOOKS} has one of {options.words} in its name")
    options.to.mkdir(parents=True, exist_ok=True)
    for path in tqdm(paths):
        html = deck(nbformat.read(path, as_version=4), options.local)
        (options.to / f"{path.stem}.slides.html").write_text(html, encoding="utf-8")


if __name__ == "__main__":
    main()
