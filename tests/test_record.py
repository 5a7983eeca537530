"""The command that records a GPU, on one that is pretended."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import nbformat
import pytest

from helpers import records
from tools import invented, record
from tools.execute import NOTEBOOKS


def test_every_stage_ends_with_a_cell_that_saves_and_leaves_out_only_cells_that_are_there():
    for stage in record.STAGES:
        (path,) = NOTEBOOKS.glob(f"{stage.notebook}_*.ipynb")
        notebook = nbformat.read(path, as_version=4)
        cells, code = stage.cells(notebook), [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert stage.until in cells[-1].source and "keep(" in stage.until
        assert all(any(words in cell.source for cell in code) for words in stage.without), stage
    assert len({stage.name for stage in record.STAGES}) == len(record.STAGES)


def run(folder, *words, card="T4"):
    """Run the command with its records and copies in `folder`; what it printed."""
    command = [sys.executable, "-m", "tools.record", *words, "--pretend", card, "--to", str(folder)]
    variables = os.environ | {"TQDM_DISABLE": "1"}
    for name in ("HALF_THE_BITS_DEVICE", "CUDA_VISIBLE_DEVICES"):
        variables.pop(name, None)
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=record.ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.weekly
def test_a_dry_run_takes_records_of_a_card_and_a_second_one_has_nothing_left_to_do(tmp_path):
    before = {path.name for path in records.RECORDS.iterdir()}
    stages = ["04 casts", "07 step", "08 ladder, from 0"]
    printed = run(tmp_path, *stages)
    assert printed.count(": recorded") == len(stages) and "NOT RECORDED" not in printed
    found = [json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("records/*.json")]
    for each in found:
        records.validate(each)
        assert "(pretended)" in each["device"]["name"]
    taken = {each["what"]["experiment"] for each in found}
    assert taken == {"04 casts", "07 step", "07 memory", "08 own ladder"}
    assert re.search(r"memory: \d+ of \d+ within 5% of the prediction", printed)
    assert "3 of 3 stages are done already" in run(tmp_path, *stages)
    assert before == {path.name for path in records.RECORDS.iterdir()}


@pytest.mark.weekly
def test_the_report_has_every_card_that_someone_has_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HALF_THE_BITS_SAVE_TO", str(tmp_path))
    invented.write(tmp_path)
    record.report()
    printed = capsys.readouterr().out
    for card in ("T4", "RTX 3090", "H200", "B200"):
        said = printed.split(f"\nINVENTED {card}\n")[1].split("\nINVENTED")[0]
        assert re.search(r"fp16 \+ GradScaler .* 1\.70*\b", said) and "within 5% of the prediction" in said


@pytest.mark.parametrize(
    ("source", "said"),
    [
        # as the system does, out of memory
        pytest.param("import os; os.kill(os.getpid(), 9)", "DeadKernelError: ", marks=pytest.mark.weekly),
        ("print('Not saved: 07 step, bf16: the disk is full')", "Not saved: 07 step, bf16: the disk is full"),
        ("1 / 0", "ZeroDivisionError: "),
        ("print('Stopped by RuntimeError: CUDA error: 1 of 20 rounds are complete and kept')", "Stopped by Runtime"),
        ("print('nothing to keep')", "nothing was saved in 8 minutes"),
        ("import os; open(os.environ['HALF_THE_BITS_SAVE_TO'] + '/a.json', 'w')", ""),
    ],
)
def test_a_stage_that_saves_nothing_is_not_done_and_the_next_one_runs(source, said, tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    cells = [nbformat.v4.new_code_cell(source), nbformat.v4.new_code_cell("keep(")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "notebooks" / "99_test.ipynb")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setenv("HALF_THE_BITS_SAVE_TO", str(tmp_path))
    monkeypatch.setattr(record.Stage, "cells", lambda stage, notebook: notebook.cells[:1])
    stage = record.Stage("test", "99", "keep(")
    assert record.run(stage, tmp_path, SimpleNamespace(update=lambda: None)).startswith(said)
    assert (tmp_path / "test.ipynb").exists() == (not said)


def test_an_unknown_stage_is_named():
    with pytest.raises(SystemExit, match="there are 04 casts, 06 memory"):
        record.run_all(["nonsense"], None)
