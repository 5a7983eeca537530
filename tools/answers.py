"""The instructor's key, every exercise and question with its answer: `uv run python -m tools.answers > answers.md`."""

import re

import nbformat

from tools.execute import NOTEBOOKS
from tools.slides import cut, is_heading

FOLDED = re.compile(r"<details><summary>(.*?)</summary>\s*(.*?)\s*</details>", re.DOTALL)


def key(notebook):
    """The sections with exercises and questions as Markdown, their hints, solutions and answers unfolded."""
    title, *_ = notebook.cells[0].source.splitlines()
    texts, asked = [title], False
    for part in (part for cell in notebook.cells for part in cut(cell)):
        if is_heading(part):
            asked = re.match(r"## (Exercise|Check yourself)", part.source)
        if asked:
            text = part.source if part.cell_type == "markdown" else f"```python\n{part.source}\n```"
            texts.append(FOLDED.sub(r"**\1.**\n\n\2", text))
    return "\n\n".join(texts)


if __name__ == "__main__":
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        print(key(nbformat.read(path, as_version=4)), end="\n\n")
