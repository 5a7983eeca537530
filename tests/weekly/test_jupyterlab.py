"""A person's path through real JupyterLab: it opens on notebook 00, and Run All works."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import expect

from tests.weekly.browser import BROWSER, TRACEBACK, move_every_input

ROOT = Path(__file__).resolve().parents[2]
NO_BROWSER = "no Chromium or Chrome on the PATH to drive JupyterLab with"
pytestmark = [pytest.mark.weekly, pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address, with its token, of JupyterLab started in a copy of the repository, and the copy."""
    copy = tmp_path_factory.mktemp("lab") / "half-the-bits"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    for path in (copy / "notebooks").glob("*.ipynb"):  # forget the stored outputs: what is there afterwards is new
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, path)
    environment = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--ServerApp.port=0"]
    log = copy.parent / "log"
    with log.open("w") as file:
        server = subprocess.Popen(command, cwd=copy, env=environment, stderr=file)
    runtime = Path(subprocess.check_output([sys.executable, "-m", "jupyter", "--runtime-dir"], text=True).strip())
    facts = runtime / f"jpserver-{server.pid}.json"
    deadline = time.monotonic() + 60
    while not (facts.is_file() and facts.read_text().endswith("}")):
        if server.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"JupyterLab did not start:\n{log.read_text()}")
        time.sleep(0.2)
    facts = json.loads(facts.read_text())
    yield f"http://127.0.0.1:{facts['port']}", facts["token"], copy
    server.terminate()
    server.wait(30)


def run_all(page, path, limit):
    """Press Run All in the open notebook and save it, again and again, until every cell in the file has run.

    Fails on an error in a cell or on the page, or after `limit` seconds.
    """
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)
    page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell").first.click()
    began = time.monotonic()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Run All Cells$")).click()
    while time.monotonic() - began < limit:
        page.keyboard.press("Control+s")
        page.wait_for_timeout(1000)
        try:
            notebook = nbformat.read(path, as_version=4)
        except nbformat.reader.NotJSONError:
            continue  # read while it was being written
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        failed = [output for cell in cells for output in cell.outputs if output.output_type == "error"]
        assert not failed, failed
        assert not page.errors
        if all(cell.execution_count for cell in cells):
            assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
            return
    pytest.fail(f"{path.name}: {sum(not cell.execution_count for cell in cells)} cells had not run after {limit} s")


def open_and_run(lab, page, name, limit=240):
    """Open one notebook in JupyterLab and run all of it."""
    address, token, copy = lab
    page.goto(f"{address}/lab/tree/notebooks/{name}?reset&token={token}")
    page.wait_for_selector(".jp-NotebookPanel", timeout=60_000)
    run_all(page, copy / "notebooks" / name, limit)


def test_lab_opens_on_the_first_notebook_and_runs_it(lab, page):
    address, token, copy = lab
    page.goto(f"{address}/?reset&token={token}")
    page.wait_for_selector(".jp-NotebookPanel", timeout=60_000)
    assert page.locator(".jp-mod-current .lm-TabBar-tabLabel").first.text_content() == "00_start_here.ipynb"
    run_all(page, copy / "notebooks" / "00_start_here.ipynb", limit=240)


def test_explorer_answers_to_clicks_keys_and_typing(lab, page):
    open_and_run(lab, page, "01_fp16_bit_layout.ipynb")

    number = page.get_by_role("textbox", name="number", exact=True)
    format = page.get_by_role("combobox", name="format", exact=True)
    bit = lambda place: page.locator(f'button[title^="bit {place},"]')
    shown = lambda value: expect(page.locator(".bitview-value")).to_have_text(value)
    shown("-6.25")
    assert format.input_value() == "fp16"
    assert page.locator(".bitview-fixed").is_hidden()

    bit(15).click()  # the sign
    shown("6.25")
    bit(0).click()
    shown("6.25390625")
    page.get_by_role("button", name="next above").click()
    shown("6.2578125")

    bit(14).focus()  # by keyboard alone: the highest exponent bit, and with Tab the next
    page.keyboard.press("Enter")
    shown("9.548664093017578e-05")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    shown("0.024444580078125")

    number.fill("2049")
    number.press("Enter")
    shown("2048.0")
    expect(page.get_by_text("2049.0 rounded by -1").first).to_be_visible()
    for name, value in [("bf16", "2048.0"), ("fp32", "2049.0"), ("fp8_e4m3fn", "nan"), ("fp16", "2048.0")]:
        format.select_option(name)
        shown(value)
    number.fill("2^-25")
    number.press("Enter")
    shown("0.0")
    number.fill("a tenth")
    number.press("Enter")
    expect(page.get_by_text("'a tenth' is not a number")).to_be_visible()
    number.fill("0x7bff")
    number.press("Enter")
    shown("65504.0")

    assert not page.errors


def test_search_box_of_the_op_tables_answers(lab, page):
    open_and_run(lab, page, "04_autocast_op_tables.ipynb")
    page.get_by_role("textbox", name="op contains", exact=True).fill("log_softmax")
    expect(page.locator(".jupyter-widgets table tbody th")).to_have_text(["log_softmax.int"])
    assert not page.errors


def test_every_stored_chart_moves_without_a_kernel(lab, page):
    address, token, copy = lab
    notebooks = [nbformat.read(path, as_version=4) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    stored = notebooks[0]
    stored.cells = [cell for notebook in notebooks for cell in notebook.cells if "vnd.vegalite" in str(cell)]
    for cell in stored.cells:  # the answers of predictions are folded
        cell.metadata = {}
    stored.metadata.language_info.version = platform.python_version()
    nbformat.write(stored, copy / "notebooks" / "stored.ipynb")
    page.set_viewport_size({"width": 1300, "height": 20_000})  # all cells are drawn
    page.goto(f"{address}/lab/tree/notebooks/stored.ipynb?reset&token={token}")
    expect(page.get_by_text("scale 2^0: lost 100.0%, overflowed 0.0%")).to_be_visible(timeout=60_000)
    expect(page.locator(".jp-mod-dirty")).to_have_count(0)  # opening it changes nothing
    move_every_input(page, 7)
    expect(page.get_by_text(re.compile(r"^scale 2.45: lost 0.0%, overflowed"))).to_be_visible()


def test_the_paste_box_answers_without_a_kernel(lab, page):
    address, token, copy = lab
    clinic = nbformat.read(ROOT / "notebooks" / "14_troubleshooting_clinic.ipynb", as_version=4)
    clinic.cells = [cell for cell in clinic.cells if "messages.paste_box(" in cell.source]
    clinic.metadata.language_info.version = platform.python_version()
    nbformat.write(clinic, copy / "notebooks" / "pasted.ipynb")
    page.goto(f"{address}/lab/tree/notebooks/pasted.ipynb?reset&token={token}")
    field = page.get_by_role("searchbox", name="message")
    field.fill(TRACEBACK, timeout=60_000)
    expect(page.get_by_text("y = bilinear(left.to(bilinear.weight.dtype)")).to_be_visible()
    expect(page.get_by_text("notebook 14a, mat1 and mat2 must have the same dtype")).to_be_visible()
    field.fill("something else")
    expect(page.get_by_text("My step is not faster")).to_be_visible()
    for word, answer in {"下溢": "Underflow: a number below", "loss scale": "The loss scale: fp16 needs one"}.items():
        field.fill(word)
        expect(page.get_by_text(answer)).to_be_visible()
    assert not page.errors


REST = ["02", "03", *(f"{number:02}" for number in range(5, 18)), "14a", "14b", "14c", "14d", "14e", "19"]


@pytest.mark.parametrize("number", REST)
def test_every_other_notebook_opens_and_runs(lab, page, number, request):
    if not request.config.getoption("--lab"):
        pytest.skip("takes minutes: uv run pytest --lab")
    (path,) = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
    open_and_run(lab, page, path.name, limit=400)
