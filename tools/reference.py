"""The environment in which stored outputs are made and compared: a CPU, two threads, no progress bars."""

import os
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def environment(save_to):
    """Environment variables of the reference run; its records and progress go to the folder `save_to`.

    pyproject.toml has those that are the same in every run, for conftest.py reads them there too.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    variables = dict(project["tool"]["half-the-bits"]["reference-environment"])
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Side by side each has one thread: two busy teams of threads on the same cores wait for each other.
        variables["OMP_NUM_THREADS"] = "1"
        variables["MKL_NUM_THREADS"] = "1"
    variables["HALF_THE_BITS_SAVE_TO"] = str(save_to)
    variables["HALF_THE_BITS_PROGRESS"] = str(Path(save_to) / "progress")
    return variables
