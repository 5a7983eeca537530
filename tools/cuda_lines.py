"""Which statements behind a CUDA condition have run, of halfbits, helpers and notebooks.

uv run python -m pytest -p tests.weekly.pretend --pretend "RTX 3090" --lines FOLDER notebooks    # any number of times
uv run python -m tools.cuda_lines FOLDER --at-least 95
"""

import argparse
import ast
import os
import re
from pathlib import Path

import coverage
import nbformat
from ipykernel.compiler import get_file_name
from IPython import get_ipython
from IPython.core.inputtransformer2 import TransformerManager

ROOT = Path(__file__).resolve().parent.parent
# A condition that says one of these is about CUDA; so is a statement that calls torch.cuda or NVML.
CONDITION = re.compile(
    r"\b(CUDA|COMPILE|FP8_UNITS|gpus|decoder\.type|device\.type|device_type|capability|hip)\b|'TF32'|native\["
)
CALL = re.compile(r"\b(torch\.cuda|pynvml\.nvml)")
WITHOUT = re.compile(r"\bnot (CUDA|gpus|COMPILE)\b|!= 'cuda'|== 'cpu'|== 'mps'")
# Why a statement has not run on a pretended GPU, by words in it.
WORKS = "torch.compile is pretended, and always works"
REASONS = {"said": WORKS, "torch.compile does not work": WORKS, "COMPILE = False": WORKS}
REASONS["raise"] = "an error that these lines do not know goes on"
REASONS["not measured"] = "no network of these runs out of memory at a batch of 1"


def variables(folder):
    """Environment variables with which a notebook's kernel notes in `folder` what it runs."""
    startup = Path(folder, "ipython/profile_default/startup")
    startup.mkdir(parents=True, exist_ok=True)
    (startup / "trace.py").write_text(f"from tools.cuda_lines import trace\n\ntrace({str(folder)!r})\n")
    paths = [os.environ.get("PYTHONPATH", ""), str(ROOT)]
    return {"IPYTHONDIR": str(startup.parent.parent), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def note(folder):
    """Begin to note in `folder` which lines of packages and cells this process runs; `save()` what it returns."""
    include = [f"{ROOT}/halfbits/*", f"{ROOT}/helpers/*", "*/ipykernel_*/*"]
    noted = coverage.Coverage(data_file=Path(folder, "lines"), data_suffix=True, include=include)
    noted.set_option("run:disable_warnings", ["no-data-collected"])
    noted.start()
    return noted


def trace(folder):
    """The same in a kernel, saved after each cell, as nobody lets a kernel end in peace."""
    noted = note(folder)
    get_ipython().events.register("post_run_cell", lambda result: noted.save())


def lines_run(folder):
    """The numbers of the lines that ran, by the name of the file; cells have the names that IPython gives them."""
    lines = {}
    for path in Path(folder).glob("lines.*"):
        data = coverage.CoverageData(path)
        data.read()
        for file in data.measured_files():
            lines.setdefault(Path(file).name, set()).update(data.lines(file))
    return lines


def sources():
    """All code of halfbits, helpers and notebooks: rows of (where, the file's name in a run, source)."""
    for path in [*sorted(ROOT.glob("halfbits/*.py")), *sorted(ROOT.glob("helpers/*.py"))]:
        yield str(path.relative_to(ROOT)), path.name, path.read_text(encoding="utf-8")
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        for number, cell in enumerate(nbformat.read(path, as_version=4).cells):
            if cell.cell_type == "code" and not cell.source.startswith("%%"):
                code = TransformerManager().transform_cell(cell.source)
                yield f"{path.name}, cell {number}", Path(get_file_name(cell.source)).name, code


def about_cuda(block, inside=False):
    """The statements of a block, and of the blocks in it, that run only with CUDA or ask for it."""
    for statement in block:
        compound = hasattr(statement, "body")
        if inside or (not compound and CALL.search(ast.unparse(statement))):
            yield statement
        condition = ast.unparse(statement.test) if isinstance(statement, ast.If) else ""
        asks, without = CONDITION.search(condition), WITHOUT.search(condition)
        yield from about_cuda(getattr(statement, "body", []), inside or (asks and not without))
        yield from about_cuda(getattr(statement, "orelse", []), inside or (asks and without))
        for handler in getattr(statement, "handlers", []):
            yield from about_cuda(handler.body, inside)
        yield from about_cuda(getattr(statement, "finalbody", []), inside)
        if asks and without and isinstance(statement.body[-1], ast.Return | ast.Raise | ast.Continue):
            inside = True  # the rest of the block is what the guard lets through


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--at-least", type=float, default=0, help="percent; fewer is an error")
    options = parser.parse_args()
    run, have, missed = lines_run(options.folder), 0, []
    for where, name, source in sources():
        for statement in about_cuda(ast.parse(source).body):
            lines = range(
                statement.lineno, (statement.body[0].lineno if hasattr(statement, "body") else statement.end_lineno + 1)
            )
            if run.get(name, set()).intersection(lines):
                have += 1
            else:
                missed.append((where, source.splitlines()[statement.lineno - 1].strip()))
    share = 100 * have / (have + len(missed))
    print(
        f"Statements behind a CUDA condition that have run: {have} of {have + len(missed)} ({share:.1f}%). The others:"
    )
    for where, line in missed:
        because = next((reason for words, reason in REASONS.items() if words in line), "NO REASON IS GIVEN")
        print(f"  {where}: {line[:80]}\n      {because}")
    if share < options.at_least:
        raise SystemExit(f"{share:.1f}% is less than {options.at_least}%")


if __name__ == "__main__":
    main()
