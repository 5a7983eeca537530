"""What must hold of every notebook before its outputs are worth comparing. nbval itself compares them."""

import os
import re
import subprocess
import sys
import time

import cv2
import nbformat
import numpy as np
import pytest

from halfbits import errors
from helpers.dataset import DATA, _read_image, load_table
from tools import invented
from tools.execute import NOTEBOOKS, execute
from tools.reference import environment

ROOT = NOTEBOOKS.parent
PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
IGNORED = {"nbval-ignore-output", "nbval-skip"}


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def prose(notebook):
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def text_outputs(cell):
    for output in cell.outputs:
        yield from (output.get("text", ""), output.get("data", {}).get("text/plain", ""))


def is_compared(cell):
    """Whether nbval has text to compare: an ignored cell, a picture alone and no output at all prove nothing."""
    said = any(text.strip() and not text.startswith("<Figure") for text in text_outputs(cell))
    return said and not IGNORED & set(cell.metadata.get("tags", []))


def test_every_cell_has_run_once_in_order_without_error(notebook):
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    counts = [cell.execution_count for cell in cells]
    assert counts == list(range(1, len(cells) + 1)), "run `uv run python -m tools.execute` with the notebook's number"
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]


def test_most_cells_are_compared(notebook):
    cells = code_cells(notebook)
    ignored = sum(bool(IGNORED & set(cell.metadata.get("tags", []))) for cell in cells)
    assert ignored <= 0.30 * len(cells)
    assert sum(map(is_compared, cells)) >= 0.60 * len(cells)


def test_nothing_of_the_author_s_machine_is_stored(path, notebook):
    assert nbformat.writes(notebook) + "\n" == path.read_text(encoding="utf-8"), "not as tools.execute stores it"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"
    outputs = "\n".join(text for cell in code_cells(notebook) for text in text_outputs(cell))
    assert not re.search(r"(?<![\w.])/(root|home|tmp|var|work|mnt|Users)/", outputs)
    assert not [o for cell in code_cells(notebook) for o in cell.outputs if o.get("name") == "stderr"]


def test_set_up_cell_is_the_same_everywhere(notebook):
    """Except that some ask for the pretrained networks too."""
    source = code_cells(notebook)[0].source
    if any(re.search(r"^from helpers import .*\bnetworks\b", cell.source, re.M) for cell in code_cells(notebook)):
        assert source.count(".prepare(networks=True)") == 1
        source = source.replace("networks=True", "")
    first = code_cells(nbformat.read(PATHS[0], as_version=4))[0].source
    assert source == first.replace("networks=True", "")
    assert code_cells(notebook)[0].metadata.jupyter.source_hidden


def test_every_case_of_the_clinic_can_be_found_and_has_a_fix():
    desk = prose(nbformat.read(NOTEBOOKS / "14_troubleshooting_clinic.ipynb", as_version=4))
    (charts,) = re.findall(r"^## From symptom to case$.*?(?=^## )", desk, re.M | re.S)
    asked = set(re.findall(r"(14[a-e]\w+)\.ipynb#([^)]+)\)", charts))
    pasted = {tuple(case.replace(" ", "-").split("#")) for case in errors.messages().case if re.match("14[a-e]", case)}
    named = set()
    for path in NOTEBOOKS.glob("14[a-e]_*.ipynb"):
        drawer = nbformat.read(path, as_version=4)
        level = "###" if path.stem.startswith("14e") else "##"
        cases = set(re.findall(rf"^{level} (?!What the cases|Exercise)(.+)$", prose(drawer), re.M))
        named |= {(path.stem, case.replace(" ", "-")) for case in cases}
        fixes = [cell for cell in code_cells(drawer) if re.match("# (The fix|The proof|What to do)", cell.source)]
        assert len(fixes) >= len(cases), path.stem
    assert asked <= named <= asked | pasted, "a question or a message leads to each"
    assert f"one of {len(named)} cases" in desk


def test_readme_and_the_road_map_list_every_notebook():
    road = prose(nbformat.read(NOTEBOOKS / "00_start_here.ipynb", as_version=4))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in PATHS:
        assert f"]({path.name})" in road or path.stem.startswith("00"), path.name
        minutes = re.search(r"\*\*(\d+) minutes", nbformat.read(path, as_version=4).cells[0].source)[1]
        (row,) = [line for line in readme.splitlines() if line.startswith(f"| [{path.stem.partition('_')[0]} ")]
        assert f"](notebooks/{path.name}) | {minutes} |" in row, row


def test_a_road_takes_at_most_two_and_a_half_hours():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for road in ("Understand it", "Train an image network faster", "Fine-tune a language model"):
        section = readme.partition(f"### {road}\n")[2].partition("\n#")[0]
        minutes = [int(number) for number in re.findall(r"\.ipynb\) \| (\d+) \|", section)]
        assert len(minutes) == 3, road
        assert sum(minutes) <= 150, road


def a_cell(source, outputs):
    return nbformat.v4.new_code_cell(source, execution_count=1, outputs=outputs)


def test_one_changed_number_and_two_changed_names_make_the_test_command_fail(tmp_path):
    """The negative control, under the project's own settings: did they compare nothing, what is wrong would pass."""
    number = "print('4,008,829 parameters')"
    right, wrong = (
        nbformat.v4.new_output("stream", name="stdout", text=f"4,008,{end} parameters\n") for end in (829, 828)
    )
    draw = "import pandas as pd\nfrom helpers import plots\nplots.bars(pd.Series({'fp16': 1.0, 'bf16': 2.0}), '', '')"
    swapped = draw.replace("fp16", "FP").replace("bf16", "fp16").replace("FP", "bf16")
    figure = nbformat.v4.new_output("display_data", {"text/plain": "<Figure>\nfp16 1; bf16 2"})
    cells = [a_cell(number, [right]), a_cell(number, [wrong])]
    cells += [a_cell(draw, [figure]), a_cell(swapped, [figure])]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "control.ipynb")

    command = [sys.executable, "-m", "pytest", "-n", "0", "-c", ROOT / "pyproject.toml", tmp_path / "control.ipynb"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=variables)
    assert result.returncode == 1 and "2 failed, 2 passed" in result.stdout, result.stdout
    assert re.findall(r"^FAILED .*::Cell (\d)", result.stdout, re.MULTILINE) == ["1", "3"]


@pytest.mark.weekly
def test_another_kind_of_cpu_says_the_same_in_notebook_03(tmp_path, monkeypatch):
    """Without vector instructions and 16-bit units torch rounds otherwise, as other kinds of CPU do."""
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    notebook = nbformat.read(NOTEBOOKS / "03_loss_scaling.ipynb", as_version=4)
    last = next(i for i, cell in enumerate(notebook.cells) if "the window: k from" in cell.source)
    stored = {cell.id: "".join(text_outputs(cell)) for cell in code_cells(notebook)[: last + 1] if is_compared(cell)}
    notebook.cells = notebook.cells[: last + 1]
    nbformat.write(notebook, tmp_path / "start.ipynb")
    for cell in code_cells(execute(tmp_path / "start.ipynb")):
        if is_compared(cell):
            assert "".join(text_outputs(cell)) == stored[cell.id], cell.source


# The experiment under other settings than the stored ones.

OWN_PHOTOGRAPHS = """
import cv2, numpy as np
from pathlib import Path
folder = Path({folder!r})
rng = np.random.default_rng(0)
for i in range(80):
    size = (20 + i, 120 - i) if i % 3 else (64, 48)
    picture = rng.integers(0, 128, (*size, 3), np.uint8) + np.uint8(100 * (i % 2))
    cv2.imwrite(str(folder / f"{{i}}.{{'png' if i % 4 else 'jpg'}}"), picture[:, :, 0] if i % 5 == 0 else picture)
rows = [f"{{i}}.{{'png' if i % 4 else 'jpg'}},.,{{i % 2}}" for i in range(80)]
(folder / "mine.csv").write_text("image,path,label\\n" + "\\n".join(rows))
TRAIN_CSV, TEST_CSV, SMALL = folder / "mine.csv", None, ("test_efficientnet", (40, 24))
EPOCHS, ROUNDS, SEEDS = 4, 2, range(2)
"""


@pytest.mark.weekly
def test_the_experiment_trains_on_own_photographs(tmp_path, monkeypatch):
    """Of other sizes and kinds, beside what others have measured."""
    for variable, value in environment(tmp_path / "records").items():
        monkeypatch.setenv(variable, value)
    invented.write(tmp_path / "records")
    settings = OWN_PHOTOGRAPHS.format(folder=str(tmp_path))
    notebook = execute(NOTEBOOKS / "07_fp32_vs_amp_experiment.ipynb", settings)
    printed = "\n".join(text for cell in code_cells(notebook) for text in text_outputs(cell))
    assert "64 images to learn from, 16 to be tested on" in printed
    assert "seed 1: trained in 2 ways" in printed
    assert "FP32 got" in printed


def test_what_notebook_07_gives_away_works_where_a_reader_copies_it(capsys, monkeypatch):
    """Its last block, alone; and its interval holds what it should, by a clock that no load of the machine disturbs."""
    cells = code_cells(nbformat.read(NOTEBOOKS / "07_fp32_vs_amp_experiment.ipynb", as_version=4))
    (block,) = [cell.source for cell in cells if "def times_as_long" in cell.source]
    assert "helpers" not in block
    names = {}
    exec(block, names)
    assert "eight times the batch takes" in capsys.readouterr().out
    now, random = [0.0], np.random.default_rng(0)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def passes(seconds):
        now[0] += seconds * random.normal(1, 0.1)

    long, low, high = names["times_as_long"](lambda: passes(3), lambda: passes(1))
    assert 2.7 < low < 3 < high < 3.3 and low <= long <= high
    (source,) = [cell.source for cell in cells if "def compare" in cell.source]
    exec(source, names)
    random = np.random.default_rng(1)
    held = 0
    for _ in range(40):
        new, old = random.normal(10, 1, (2, 30))
        _, low, high = names["compare"](new, old)
        held += low <= 1 <= high
    assert 33 <= held <= 39  # of 40 intervals, 38 should contain the truth


def test_the_cache_of_notebook_08_works_where_a_reader_copies_it(tmp_path):
    """Alone: with no import but the cell's own."""
    cells = code_cells(nbformat.read(NOTEBOOKS / "08_faster_training.ipynb", as_version=4))
    (source,) = [cell.source for cell in cells if "class CachedImages" in cell.source]
    assert "helpers" not in source
    names = {}
    exec(source, names)
    digits = load_table(DATA / "digits" / "train.csv").head(5)
    names["write_cache"](tmp_path / "five.npy", digits.file, (20, 10))
    images, labels = names["CachedImages"](tmp_path / "five.npy", digits.label.to_numpy()).__getitems__([4, 0])
    there = [cv2.resize(_read_image(digits.file[row]), (20, 10), interpolation=cv2.INTER_AREA) for row in (4, 0)]
    assert np.array_equal(images.numpy(), there) and list(labels) == list(digits.label[[4, 0]])
