"""The examples in the helpers' docstrings are true."""

import doctest
import importlib

import pytest

from helpers.check import exercise
from tools.execute import NOTEBOOKS

MODULES = [path.stem for path in sorted(NOTEBOOKS.parent.glob("helpers/[a-z]*.py"))]
WITH_EXAMPLES = {"autocast", "bitview", "dataset", "diagnose", "footprint", "formats", "measure", "records"}


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name):
    results = doctest.testmod(importlib.import_module(f"helpers.{name}"), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0
    assert results.attempted or name not in WITH_EXAMPLES


def test_the_example_of_an_exercise_is_true():
    assert doctest.testmod(exercise).failed == 0
