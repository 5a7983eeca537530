"""A right answer is noted once; a file that cannot be read or written costs a sentence, never an answer."""

import json
from pathlib import Path

import pytest

from helpers import check
from helpers.check import passed


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("HALF_THE_BITS_PROGRESS", str(tmp_path / "progress.json"))
    return tmp_path / "progress.json"


def say(low, high):
    return "faster" if low > 1 else "slower" if high < 1 else "undecided"


def test_right_answers_are_in_the_table_and_wrong_ones_are_not(file):
    assert list(check.progress().loc["fp32 vs amp experiment"]) == ["0 of 2", "verdict, bf16_step"]
    check.verdict(lambda low, high: "faster")
    assert not file.exists()
    check.verdict(say)
    assert list(check.progress().loc["fp32 vs amp experiment"]) == ["1 of 2", "bf16_step"]


def test_the_first_day_stays(file):
    file.write_text('{"verdict": "2026-01-02", "an old exercise": "2026-01-01"}')
    check.verdict(say)
    passed.note("limits")
    days = json.loads(file.read_text())
    assert days["verdict"] == "2026-01-02" and set(days) == {"verdict", "an old exercise", "limits"}


@pytest.mark.parametrize("text", ["{", "[]", 100_000 * "["])
def test_a_file_of_another_form_is_named_and_kept(text, file, capsys):
    file.write_text(text)
    check.verdict(say)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("(Not noted in progress.json: ")
    assert said[1] == "Right. 1 of 2 in this notebook."
    assert check.progress().passed.str.startswith("0 of").all()
    assert "progress.json cannot be read" in capsys.readouterr().out
    assert file.read_text() == text
    assert list(file.parent.iterdir()) == [file]


def test_a_full_disk_erases_nothing(file, capsys):
    resource = pytest.importorskip("resource")
    passed.note("limits")
    before = file.read_text()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        assert passed.note("rms") == {"limits", "rms"}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "(Not noted in progress.json: [Errno 27] File too large" in capsys.readouterr().out
    assert file.read_text() == before
    assert list(file.parent.iterdir()) == [file]


def test_unwritable_place_costs_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HALF_THE_BITS_PROGRESS", str(tmp_path / "no such folder" / "progress.json"))
    check.verdict(say)
    said = capsys.readouterr().out.splitlines()
    assert "No such file" in said[0] and said[1] == "Right. 1 of 2 in this notebook." and len(said) == 2


def test_it_lies_beside_the_helpers(monkeypatch):
    monkeypatch.delenv("HALF_THE_BITS_PROGRESS")
    assert passed.place() == Path(check.__file__).parents[2] / "progress.json"
