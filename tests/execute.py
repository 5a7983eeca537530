"""Execute notebooks in the reference environment and store their outputs.

uv run python tests/execute.py             # all of them, in place
uv run python tests/execute.py 07          # those whose names contain a word
uv run python tests/execute.py 07 --try "SEEDS = range(30)"     # other settings; the file stays as it is
uv run python tests/execute.py 07 --here   # on this machine's own device; the file stays as it is, records are saved
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from tqdm import tqdm

from tests.reference import environment

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
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of notebook names; none: all notebooks")
    parser.add_argument("--try", dest="settings", default="", help="Python to append to the settings cell")
    parser.add_argument("--here", action="store_true", help="use this machine's device and save records")
    parser.add_argument("--to", type=Path, help="write the executed notebooks into this folder instead of in place")
    options = parser.parse_args()

    paths = [
        p for p in sorted(NOTEBOOKS.glob("*.ipynb")) if not options.words or any(w in p.name for w in options.words)
    ]
    if not paths:
        parser.error(f"no notebook in {NOTEBOOKS} has one of {options.words} in its name")
    with tempfile.TemporaryDirectory() as scratch:
        if not options.here:
            os.environ.update(environment(scratch))
        for path in tqdm(paths, disable=False):
            began = time.perf_counter()
            notebook = execute(path, options.settings)
            if options.to:
                options.to.mkdir(parents=True, exist_ok=True)
                nbformat.write(notebook, options.to / path.name)
            elif not (options.settings or options.here):
                nbformat.write(notebook, path)
            tqdm.write(f"{path.name}: {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
