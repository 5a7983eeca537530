"""Options of pytest's for a GPU that is pretended, and for noting which lines run there.

uv run python -m pytest -p tests.weekly.pretend --pretend "RTX 3090" --lines FOLDER notebooks

It runs notebooks and tests as --gpu does, on a card of tests/weekly/pretend_cuda.py. `uv run python -m tools.cuda_lines
FOLDER` then lists the statements for CUDA that have not run.
"""

import os
from pathlib import Path

import pytest

from tests.weekly import pretend_cuda
from tools import cuda_lines


def pytest_addoption(parser):
    parser.addoption("--pretend", metavar="CARD", help="as --gpu, on a GPU that is pretended")
    parser.addoption("--lines", metavar="FOLDER", help="note which lines the notebooks run")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    config.option.gpu |= bool(config.option.pretend)


def pytest_configure(config):
    if config.option.pretend:
        os.environ.update(pretend_cuda.environment(config.option.pretend, config.records.name))
        os.environ.update(HALF_THE_BITS_ROUNDS="2", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        pretend_cuda.start()
    if config.option.lines:
        lines = Path(config.option.lines).resolve()
        config.noted = cuda_lines.note(lines)
        os.environ.update(cuda_lines.variables(lines))


def pytest_unconfigure(config):
    if hasattr(config, "noted"):
        config.noted.save()
