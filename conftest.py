"""All tests run in the reference environment, in which the notebooks' outputs were stored: see pyproject.toml.

`uv run pytest` runs the quick tests, and every cell of every notebook on the CPU; it compares what does not depend on
time or machine. `uv run pytest --gpu` runs the notebooks on this machine's own device, and only asks that no cell
fails.
"""

import gc
import os
import tempfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REFERENCE = PROJECT["tool"]["half-the-bits"]["reference-environment"]


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="run notebooks on this machine's device, without comparing")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    if config.getoption("--gpu"):  # one notebook at a time: there is one device, and its memory
        config.option.numprocesses = 0
        config.option.dist = "no"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    # nbval would trace the notebooks' kernels too, and they would take nearly twice as long. The helpers' own tests are
    # what --cov counts.
    config.option.cov_source = None
    config.records = tempfile.TemporaryDirectory(prefix="half-the-bits-")
    os.environ["TQDM_DISABLE"] = "1"
    os.environ["HALF_THE_BITS_SAVE_TO"] = config.records.name
    os.environ["HALF_THE_BITS_PROGRESS"] = str(Path(config.records.name, "progress"))
    if config.getoption("--gpu"):
        config.option.nbval = False
        config.option.nbval_lax = True
        config.option.nbval_cell_timeout = 3600
        return
    os.environ.update(REFERENCE)
    os.environ["HALF_THE_BITS_ROUNDS"] = "2"  # times are not compared
    # Inductor would compile and load small programs first, to ask what the compiler can, and PyTorch's headers once for
    # all that follows: half the time of the few functions that notebooks compile.
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
    os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Two busy teams of threads on the same cores would wait for each other.
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["MKL_NUM_THREADS"] = "1"
    # Imports make half a million objects that stay, and Python's garbage collector goes through them again and again:
    # a sixth of an import's time. sitecustomize.py there makes it look less often, in every process that starts.
    paths = [str(ROOT / "tests" / "start"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def pytest_collection_finish():
    gc.freeze()  # a watch goes through all objects: let those be what tests make, not the half million of imports


def pytest_unconfigure(config):
    gc.unfreeze()  # else compiled packages report as leaks what is left at the end
    config.records.cleanup()
