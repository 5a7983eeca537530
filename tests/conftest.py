"""What the helpers' tests share. `uv run pytest --weekly tests` adds those that need not run on every change."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--weekly", action="store_true", help="run also what need not run on every change")
    parser.addoption("--lab", action="store_true", help="run every notebook in a browser too, not only some")
    parser.addoption(
        "--hosted",
        action="append",
        default=[],
        metavar="PYTHON",
        help="run all notebooks where only torch and a kernel are installed, under this Python (a version or a path)",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "weekly: need not run on every change, and runs only with --weekly")


def pytest_runtest_setup(item):
    if item.get_closest_marker("weekly") and not item.config.getoption("--weekly"):
        pytest.skip("runs weekly: uv run pytest --weekly")


@pytest.fixture(autouse=True)
def own_settings(tmp_path, monkeypatch):
    """A test has its own progress, not that of a notebook in the same process, and as many rounds as it asks for."""
    monkeypatch.setenv("HALF_THE_BITS_PROGRESS", str(tmp_path / "progress"))
    monkeypatch.delenv("HALF_THE_BITS_ROUNDS", raising=False)
