"""Execute notebooks in the reference environment and store their outputs.

uv run python -m tools.execute             # all of them, in place
uv run python -m tools.execute 07          # those whose names contain a word
uv run python -m tools.execute 07 --try "SEEDS = range(30)" --to copies     # other settings, into another folder
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from tqdm import tqdm

from tools.reference import environment

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


def execute(path, settings=""):
    """Run one notebook, with `settings` appended to its settings cell, and return it with fresh outputs."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if "settings" in cell.metadata.get("tags", []):
            cell.source += f"\n{settings}" if settings else ""
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        resources={"metadata": {"path": path.parent}},
        store_widget_state=False,
        record_timing=False,
    )
    client.execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):  # a widget without its kernel is an error message
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
        if cell.metadata.get("jupyter", {}).get("outputs_hidden"):
            cell.metadata["collapsed"] = True
    # What JupyterLab would write by itself: where it finds it, opening a notebook changes nothing.
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": notebook.metadata.language_info,
    }
    return notebook


def options_of(description):
    """A parser of what the commands that execute notebooks have in common."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of notebook names; none: all notebooks")
    parser.add_argument("--try", dest="settings", default="", help="Python to append to the settings cell")
    parser.add_argument("--to", type=Path, help="write the executed notebooks into this folder")
    return parser


def execute_all(words, settings, folder):
    """Execute the notebooks whose names contain one of `words`, and write each into `folder` where there is one."""
    paths = [path for path in sorted(NOTEBOOKS.glob("*.ipynb")) if not words or any(w in path.name for w in words)]
    if not paths:
        raise SystemExit(f"no notebook in {NOTEBOOKS} has one of {words} in its name")
    for path in tqdm(paths, disable=False):
        began = time.perf_counter()
        notebook = execute(path, settings)
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            nbformat.write(notebook, folder / path.name)
        tqdm.write(f"{path.name}: {time.perf_counter() - began:.0f} s")


def main():
    parser = options_of(__doc__)
    options = parser.parse_args()
    if options.settings and not options.to:
        parser.error("--try needs --to: a notebook is stored with the settings that it shows")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.update(environment(scratch))
        execute_all(options.words, options.settings, options.to or NOTEBOOKS)


if __name__ == "__main__":
    main()
