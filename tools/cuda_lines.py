"""Which lines behind a CUDA condition have run, of helpers and notebooks.

uv run pytest --pretend "RTX 3090" --lines FOLDER         # or --gpu, on a real card; any number of times
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

ROOT = Path(__file__).resolve().parent.parent
# A condition or a line that says one of these is about CUDA.
SAYS_CUDA = re.compile(
    r"\bCUDA\b|\bCOMPILE\b|\bFP8_UNITS\b|\bgpus\b|\"cuda\"|\"TF32\"|torch\.cuda\.|pynvml\.nvml|on_gpu"
)
WITHOUT = re.compile(r"\bnot\b(?! only)|!= \"cuda\"|== \"cpu\"|\bnot_here\b")


def variables(folder):
    """Environment variables with which a notebook's kernel notes in `folder` what it runs."""
    startup = Path(folder, "ipython/profile_default/startup")
    startup.mkdir(parents=True, exist_ok=True)
    (startup / "trace.py").write_text(f"from tools.cuda_lines import trace\n\ntrace({str(folder)!r})\n")
    paths = [os.environ.get("PYTHONPATH", ""), str(ROOT)]
    return {"IPYTHONDIR": str(startup.parent.parent), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def trace(folder):
    """In a kernel: note the lines that run, after each cell, as nobody lets a kernel end in peace."""
    from IPython import get_ipython

    noted = coverage.Coverage(
        data_file=Path(folder, "lines"), data_suffix=True, include=[f"{ROOT}/helpers/*", "*/ipykernel_*"]
    )
    noted.start()
    get_ipython().events.register("post_run_cell", lambda result: noted.save())


def has_run(folder):
    """The numbers of the lines that ran, by file name; cells by the name that IPython gives them."""
    data = coverage.CoverageData(Path(folder, "all"))
    for path in Path(folder).glob("lines.*"):
        part = coverage.CoverageData(path)
        part.read()
        data.update(part)
    lines = {}
    for file in data.measured_files():
        lines.setdefault(Path(file).name, set()).update(data.lines(file))
    return lines
