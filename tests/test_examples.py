"""The examples in docstrings are true."""

import doctest
import importlib

import pytest

from helpers.check import exercise
from tools.execute import NOTEBOOKS

FILES = [path for package in ("halfbits", "helpers") for path in sorted(NOTEBOOKS.parent.glob(f"{package}/[a-z]*.py"))]
MODULES = [*(f"{path.parent.name}.{path.stem}" for path in FILES), "tools.record.measure"]
WITH_EXAMPLES = {f"halfbits.{name}" for name in ("bisecting", "casts", "errors", "formats", "memory", "speed")}
WITH_EXAMPLES |= {"tools.record.measure"}
WITH_EXAMPLES |= {f"helpers.{name}" for name in ("bitview", "dataset", "measure", "records")}


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name):
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0
    assert results.attempted or name not in WITH_EXAMPLES


def test_the_example_of_an_exercise_is_true():
    assert doctest.testmod(exercise).failed == 0
