"""Test runs happen in the reference environment, in which the notebooks' outputs were stored.

`uv run pytest` compares every output on the CPU. `uv run pytest --gpu` runs the same notebooks on this machine's own
device, and only asks that no cell fails. `uv run pytest tests/test_hosted.py --hosted 3.13` runs them
under Python 3.13 in environments that have only torch and a kernel.
"""

import os
import tempfile

import pytest

from tools.reference import environment


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="run notebooks on this machine's device, without comparing")
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


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    # nbval would trace the notebooks' kernels too, and they would take nearly twice as long. The helpers' own tests are
    # what --cov counts.
    config.option.cov_source = None
    config.records = tempfile.TemporaryDirectory(prefix="half-the-bits-")
    if config.getoption("--gpu"):
        config.option.nbval, config.option.nbval_lax = False, True
        config.option.nbval_cell_timeout = 3600
        for name in ("HALF_THE_BITS_SAVE_TO", "HALF_THE_BITS_PROGRESS"):
            os.environ[name] = environment(config.records.name)[name]
    else:
        os.environ.update(environment(config.records.name))


def pytest_unconfigure(config):
    config.records.cleanup()


@pytest.fixture(autouse=True)
def own_progress(tmp_path, monkeypatch):
    """A right answer in a test is not the progress that a notebook, run in the same process, would show."""
    monkeypatch.setenv("HALF_THE_BITS_PROGRESS", str(tmp_path / "progress"))
