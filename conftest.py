"""Test runs happen in the reference environment, in which the notebooks' outputs were stored.

`uv run pytest` runs every cell on the CPU, and compares what does not depend on time or machine; `--all` adds the slow
tests. `uv run pytest --gpu` runs the same notebooks on this machine's own device, and only asks that no cell fails.
`uv run pytest tests/test_hosted.py --hosted 3.13` runs them under Python 3.13 in environments that have only torch and
a kernel.
"""

import gc
import os
import tempfile
from pathlib import Path

import pytest

from tests import pretend_cuda
from tests.start import sitecustomize
from tools import cuda_lines
from tools.reference import environment


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="run notebooks on this machine's device, without comparing")
    parser.addoption("--pretend", metavar="CARD", help="as --gpu, on a GPU that is pretended (tests/pretend_cuda.py)")
    parser.addoption("--lines", metavar="FOLDER", help="note which lines the notebooks run (tools/cuda_lines.py)")
    parser.addoption("--all", action="store_true", help="run the slow tests too")
    parser.addoption("--lab", action="store_true", help="run every notebook in a browser too, not only some")
    parser.addoption(
        "--hosted",
        action="append",
        default=[],
        metavar="PYTHON",
        help="run all notebooks where only torch and a kernel are installed, under this Python (a version or a path)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    if config.getoption("--gpu"):  # one notebook at a time: there is one device, and its memory
        config.option.numprocesses, config.option.dist = 0, "no"
    config.option.gpu |= bool(config.option.pretend)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    # nbval would trace the notebooks' kernels too, and they would take nearly twice as long. The helpers' own tests are
    # what --cov counts.
    config.option.cov_source = None
    config.records = tempfile.TemporaryDirectory(prefix="half-the-bits-")
    if config.getoption("--gpu"):
        config.option.nbval, config.option.nbval_lax = False, True
        config.option.nbval_cell_timeout = 3600
        for name in ("HALF_THE_BITS_SAVE_TO", "HALF_THE_BITS_PROGRESS", "TQDM_DISABLE"):
            os.environ[name] = environment(config.records.name)[name]
        if config.option.pretend:
            os.environ.update(pretend_cuda.environment(config.option.pretend, config.records.name))
            os.environ.update(HALF_THE_BITS_ROUNDS="2", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
            pretend_cuda.start()
    else:
        os.environ.update(environment(config.records.name))
        paths = [str(Path(sitecustomize.__file__).parent), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        os.environ["HALF_THE_BITS_ROUNDS"] = "2"  # times are not compared
    if config.option.lines:
        lines = Path(config.option.lines).resolve()
        config.noted = cuda_lines.note(lines)
        os.environ.update(cuda_lines.variables(lines))
    config.addinivalue_line("markers", "slow: takes long, and runs only with --all")


def pytest_unconfigure(config):
    gc.unfreeze()  # else compiled packages report as leaks what is left at the end
    if hasattr(config, "noted"):
        config.noted.save()
    config.records.cleanup()


def pytest_collection_finish():
    gc.freeze()  # a watch goes through all objects: let those be what tests make, not the half million of imports


def pytest_collection_modifyitems(config, items):
    if not config.option.pretend:
        return
    capability, _ = pretend_cuda.CARDS[config.option.pretend]
    for item in items:
        source = item.cell.source if hasattr(item, "cell") else ""
        for words, compiles_from, reason in pretend_cuda.CANNOT:
            if words in source and capability >= compiles_from:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def pytest_runtest_setup(item):
    if item.get_closest_marker("slow") and not item.config.getoption("--all"):
        pytest.skip("takes long: uv run pytest --all")


@pytest.fixture(autouse=True)
def own_settings(tmp_path, monkeypatch):
    """A test has its own progress, not that of a notebook in the same process, and as many rounds as it asks for."""
    monkeypatch.setenv("HALF_THE_BITS_PROGRESS", str(tmp_path / "progress"))
    monkeypatch.delenv("HALF_THE_BITS_ROUNDS", raising=False)
