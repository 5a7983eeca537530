"""The command that records a GPU: on a CPU, on one that is pretended, and on a machine with little installed."""

import json
import os
import re
import subprocess
import sys
import time
from functools import partial

import pytest
import torch

from helpers import records
from tools import invented
from tools.record import __main__ as record
from tools.record import decoder, measure
from tools.record.session import Session, Unit, raise_if_stopped


@pytest.fixture
def session(tmp_path, monkeypatch):
    """A session on the CPU, whose records and notes lie in the test's folder."""
    monkeypatch.setenv("HALF_THE_BITS_SAVE_TO", str(tmp_path / "records"))
    monkeypatch.setenv("HALF_THE_BITS_DEVICE", "cpu")
    return partial(Session.begin, 10, tmp_path)


def save_one(session, name):
    session.save("test", name, {"a": 1}, {"number": 1.0})


def three_units(second):
    return [
        Unit("a", "first", partial(save_one, name="first"), 1),
        Unit("b", "second", second, 1),
        Unit("c", "third", partial(save_one, name="third"), 1),
    ]


def arms_of(folder):
    return sorted(json.loads(path.read_text())["what"]["arm"] for path in (folder / "records").glob("*.json"))


def test_interrupted_it_loses_nothing_and_goes_on(session, tmp_path, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(record, "all_units", lambda _: three_units(interrupted))
    lost = record.run(session(), [])
    assert arms_of(tmp_path) == ["first"]
    assert [each.split(":")[0] for each in lost] == ["b", "c"]
    monkeypatch.setattr(record, "all_units", lambda _: three_units(partial(save_one, name="second")))
    assert record.run(session(), []) == []
    assert arms_of(tmp_path) == ["first", "second", "third"], "and the first is not taken twice"


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), RuntimeError("CUDA error")])
def test_a_comparison_that_is_stopped_keeps_its_rounds_and_stops_or_fails_its_part(stop):
    calls = []

    def step():
        calls.append(1)
        if len(calls) > 6:
            raise stop

    times = measure.compare({"a": step}, torch.device("cpu"), images=1, rounds=10, steps=1, drop=1)
    assert len(times) == 3
    with pytest.raises(type(stop)):
        raise_if_stopped(times)


def test_what_fails_costs_nothing_else_and_is_not_tried_again(session, tmp_path, monkeypatch):
    def fails(_):
        raise ImportError("No module named 'torchao'")

    monkeypatch.setattr(record, "all_units", lambda _: three_units(fails))
    (lost,) = record.run(session(), [])
    assert lost == "b: second: NOT RECORDED. ImportError: No module named 'torchao'"
    assert arms_of(tmp_path) == ["first", "third"]
    assert record.run(session(), []) == []
    assert len(record.run(session(), ["b"])) == 1, "it is tried again where it is asked for"


def test_what_does_not_fit_into_the_time_is_named(session, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "all_units", lambda _: three_units(partial(save_one, name="second")))
    short = session()
    short.ends = time.monotonic() - 1
    lost = record.run(short, [])
    assert lost == [f"{unit}: not reached in time" for unit in ("a: first", "b: second", "c: third")]
    assert record.run(session(), []) == [], "the next call takes them"


def test_the_stages_come_in_the_order_of_their_value_and_each_part_has_its_name(session):
    units = record.all_units(session())
    assert sorted(unit.stage for unit in units) == [unit.stage for unit in units]
    assert len({str(unit) for unit in units}) == len(units)
    assert {unit.stage for unit in units} == {*record.STAGES} - {"f"}, "casts are CUDA's"


def test_the_decoder_has_the_size_of_smollm2_and_looks_at_nothing_that_comes_later():
    with torch.device("meta"):
        whole = decoder.Decoder(*decoder.SMOLLM2)
    assert sum(weight.numel() for weight in whole.parameters()) == 134_515_008
    torch.manual_seed(0)
    small = decoder.Decoder(*decoder.SMALL)
    tokens = torch.randint(512, (2, 16))
    changed = tokens.clone()
    changed[:, 9:] = 0
    same = torch.isclose(small(tokens), small(changed)).all(-1)
    assert same[:, :9].all() and not same[:, 9:].all()


def run(folder, *words, **variables):
    """Run the command with its records and notes in `folder`; what it printed."""
    command = [sys.executable, "-m", "tools.record", *words, "--to", str(folder)]
    variables = os.environ | {"TQDM_DISABLE": "1", "HALF_THE_BITS_ROUNDS": "2"} | variables
    if "--pretend" in words:
        for name in ("HALF_THE_BITS_DEVICE", "CUDA_VISIBLE_DEVICES"):
            variables.pop(name, None)
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=record.ROOT)
    assert "Traceback" not in done.stderr, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.weekly
@pytest.mark.parametrize("card", ["T4", "RTX 3090", "H200"])
def test_a_dry_run_takes_all_records_of_a_card_and_a_second_one_has_nothing_left_to_do(card, tmp_path):
    printed = run(tmp_path, "--pretend", card, "--minutes", "60")
    assert "NOT RECORDED" not in printed and "not reached" not in printed
    found = [json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("records/*.json")]
    for each in found:
        records.validate(each)
        assert "(pretended)" in each["device"]["name"]
    taken = {each["what"]["experiment"] for each in found}
    once = {"06 matmul rates", "06 overheads", "07 step", "07 memory", "07 losses", "06 memory", "06 decoder memory"}
    assert taken == once | {"12 decoder step", "08 own ladder", "04 casts"}
    again = run(tmp_path, "--pretend", card)
    (count,) = {line.split()[0] for line in again.splitlines() if "parts are done already" in line}
    assert f"{count} of {count} parts are done already" in again
    assert len([*tmp_path.glob("records/*.json")]) == len(found)


BARE = """
import sys

MISSING = "cv2 sklearn scipy jsonschema IPython matplotlib seaborn torchao transformers nbformat ipykernel".split()

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in MISSING else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


@pytest.mark.weekly
def test_a_machine_with_little_installed_loses_only_the_parts_that_need_more(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BARE)
    variables = {"PYTHONPATH": str(tmp_path), "HALF_THE_BITS_DEVICE": "cpu"}
    variables["HALF_THE_BITS_SAVE_TO"] = str(tmp_path / "records")
    printed = run(tmp_path, **variables)
    lost = [line for line in printed.splitlines() if "NOT RECORDED" in line]
    assert lost and all(line.startswith("e: ") and "No module named 'cv2'" in line for line in lost)
    found = [json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("records/*.json")]
    assert {each["what"]["experiment"] for each in found} >= {
        "06 matmul rates",
        "07 step",
        "06 memory",
        "12 decoder step",
    }
    for each in found:
        records.validate(each)
        assert each["software"]["opencv"] == "not installed"


@pytest.mark.weekly
def test_the_report_has_every_card_that_someone_has_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HALF_THE_BITS_SAVE_TO", str(tmp_path))
    invented.write(tmp_path)
    record.report()
    printed = capsys.readouterr().out
    for card in ("T4", "RTX 3090", "H200", "B200"):
        said = printed.split(f"\nINVENTED {card}\n")[1].split("\nINVENTED")[0]
        assert re.search(r"fp16 \+ GradScaler .* 1\.7\b", said), "invented as 1.7 times as fast"
        assert "predicted (GB)" in said
