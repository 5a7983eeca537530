import copy
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import records
from helpers.hardware import manifest
from tools import invented

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HALF_THE_BITS_SAVE_TO", str(tmp_path))
    return tmp_path


@pytest.fixture
def company(folder):
    """The suite's records, with records of other machines beside them."""
    invented.write(folder)


def of_notebook_08(experiment):
    """The records of an experiment of notebook 08 that were made on the machine which docs/results.md names."""
    return [record for record in records.load(experiment) if record["device"]["name"] == "AMD EPYC"]


def a_record(**results):
    return records.new("test", "bf16", {"batch": 2}, results or {"block_seconds": [0.1, 0.2]}, manifest(CPU))


def test_saved_record_comes_back(folder):
    record = a_record()
    path = records.save(record)
    assert path.parent == folder and json.loads(path.read_text()) == record
    assert record in records.load_all()
    assert [p.suffix for p in folder.iterdir()] == [".json"]


def test_numpy_and_torch_numbers_are_stored_as_numbers(folder):
    path = records.save(a_record(block_seconds=list(torch.tensor([0.5, 0.25]))))
    assert json.loads(path.read_text())["results"]["block_seconds"] == [0.5, 0.25]


def test_two_runs_in_one_second_are_both_kept(folder):
    first, second = a_record(block_seconds=[0.1]), a_record(block_seconds=[0.2])
    second["when"] = first["when"]
    assert records.save(first) != records.save(second)


PARTS = ["when", "what", "device", "software", "precision", "commit", "results"]


@pytest.mark.parametrize("path", [*PARTS, "software torch", "software cudnn"])
def test_record_without_provenance_is_refused(folder, path):
    record = within = a_record()
    *above, part = path.split()
    for name in above:
        within = within[name]
    del within[part]
    with pytest.raises(records.RecordError, match=f"'{part}' is a required property"):
        records.save(record)
    assert not list(folder.iterdir())


def test_gpu_record_needs_its_driver_and_uuid():
    record = a_record()
    record["device"] = {"type": "cuda", "name": "H200", "driver": None}
    with pytest.raises(records.RecordError) as error:
        records.validate(record)
    assert "uuid" in str(error.value) and "driver" in str(error.value)


def test_nan_is_no_result(folder):
    of_two_columns = {("bf16", 1): 1.0}  # as pandas makes it
    for result in (float("nan"), folder, torch.ones(2), of_two_columns):
        with pytest.raises(records.RecordError, match="not plain JSON"):
            records.save(a_record(seconds=result))
    assert not list(folder.iterdir())


def test_what_cannot_be_kept_is_said_and_stops_nothing(folder, capsys):
    facts = manifest(CPU)
    assert records.keep("test", "bf16", {"batch": 2}, {"seconds": 1.0}, facts).is_file()
    assert records.keep("test", "fp32", {"batch": 2}, {"seconds": math.nan}, facts) is None
    assert capsys.readouterr().out.startswith("Not saved: test, fp32: This record is not plain JSON")
    assert [record["what"]["arm"] for record in records.load("test")] == ["bf16"] and not records.load("tes")


@pytest.fixture
def good(folder):
    """A record as JSON, which has one 0.25, and lies in the folder beside what a test writes."""
    return records.save(a_record(block_seconds=[0.25])).read_text()


def is_left_out(path, cause, capsys):
    """Whether only the good record is loaded from the folder, and a printed sentence names the path and the cause."""
    assert len(records.load("test")) == 1
    (said,) = capsys.readouterr().out.splitlines()
    return said.startswith(f"Left out: {path} is no valid record: ") and cause in said


@pytest.mark.parametrize(
    "text, cause",
    [
        ('{"schema": 1,', "Expecting property name"),
        ("[]", "[] is not of type 'object'"),
        (100_000 * "[" + 100_000 * "]", "while decoding a JSON array"),
        (b"\xff", "can't decode byte 0xff"),
    ],
)
def test_a_broken_file_is_named_and_stops_no_other(text, cause, folder, good, capsys):
    path = folder / "broken.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert is_left_out(path, cause, capsys)


@pytest.mark.parametrize("number", ["NaN", "1e999"])
def test_a_number_that_cannot_be_saved_is_not_loaded(number, folder, good, capsys):
    (folder / "other.json").write_text(good.replace("0.25", number))
    assert is_left_out(folder / "other.json", "not JSON compliant", capsys)


def test_a_copied_record_counts_once(folder):
    path, before = records.save(a_record()), len(records.load_all())
    (folder / "copy of it.json").write_text(json.dumps(json.loads(path.read_text()), sort_keys=True))
    assert len(records.load_all()) == before


def test_a_linked_folder_of_records_is_read_once_and_written_without_a_word(tmp_path, monkeypatch, capsys):
    data = tmp_path / "suite" / "data"
    shutil.copytree(records.DATA, tmp_path / "elsewhere" / "data", ignore=shutil.ignore_patterns("*.jpg"))
    data.parent.mkdir()
    data.symlink_to(tmp_path / "elsewhere" / "data")
    shutil.copytree(records.DATA.parent / "helpers", data.parent / "helpers")
    code = "from helpers import records; print(len(records.load_all()), records.save_folder())"
    variables = {name: value for name, value in os.environ.items() if name != "HALF_THE_BITS_SAVE_TO"}
    said = subprocess.run([sys.executable, "-c", code], cwd=data.parent, env=variables, capture_output=True, text=True)
    count = len([*records.RECORDS.glob("*.json")])
    assert said.stdout == f"{count} {tmp_path / 'elsewhere' / 'data' / 'records'}\n", said.stderr


def test_records_come_oldest_first_whatever_their_files_are_called(folder):
    for name, year in ("c", 2021), ("a", 2022), ("b", 2020):
        record = a_record() | {"when": f"{year}-01-01T00:00:00+00:00"}
        records.save(record).rename(folder / f"{name}.json")
    assert [record["when"][:4] for record in records.load("test")] == ["2020", "2021", "2022"]


def test_published_figures_are_labelled_as_such(company):
    published = [r for r in records.load_all() if r["kind"] == "published"]
    assert len(published) >= 6 and all(r["unknown"] and r["source"] for r in published)
    claimed = copy.deepcopy(published[0]) | {"kind": "measured"}
    with pytest.raises(records.RecordError):
        records.validate(claimed)


def test_invented_records_are_marked_and_not_in_the_suite(folder):
    assert not list(records.RECORDS.glob("*INVENTED*"))
    assert not [r for r in records.load_all() if "INVENTED" in r["device"]["name"]]
    assert invented.write(folder) == len(list(folder.iterdir())) > 10
    assert all("INVENTED" in json.loads(path.read_text())["device"]["name"] for path in folder.iterdir())
    speed = {}
    for record in records.load_all():
        if record["what"]["experiment"] == "07 step" and record["device"]["name"] == "INVENTED H200":
            speed[record["what"]["arm"]] = 1 / statistics.median(record["results"]["block_seconds"])
    assert speed["bf16"] == pytest.approx(invented.FASTER * speed["FP32"])


def test_a_full_disk_leaves_nothing_half_written(folder, monkeypatch):
    def full(unfinished, path):
        assert not list(folder.glob("*.json")), "a record has its name only when it is complete"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        records.save(a_record())
    assert not list(folder.iterdir())


def test_images_a_second_in_the_results_are_those_on_record(company):
    (record,) = of_notebook_08("08 data path")
    assert record["device"]["type"] == "cpu" and record["device"]["threads"] == 2
    files = record["results"]["images_per_step"]
    speed = {arm: files / statistics.median(blocks) for arm, blocks in record["results"]["blocks"].items()}
    best = {}
    for start in ("JPEG to float32", "JPEG, batched", "decoded cache, w", "decoded cache, same memory"):
        best[start] = max(rate for arm, rate in speed.items() if arm.startswith(start))
    assert best["decoded cache, same memory"] > 10 * best["JPEG to float32"]
    results = (Path(__file__).resolve().parent.parent / "docs" / "results.md").read_text(encoding="utf-8")
    assert f"{best['JPEG to float32']:,.0f} images/s by the blog post's loader at its best" in results
    assert f"{best['JPEG, batched']:,.0f} with bytes and whole batches" in results
    assert f"{best['decoded cache, w']:,.0f} from a cache" in results
    assert f"{best['decoded cache, same memory']:,.0f} if each batch is also written into the same memory" in results


def test_the_recorded_ladder_s_rungs_add_up_to_the_whole(company):
    ladder = of_notebook_08("08 ladder")
    assert len({(r["commit"], r["device"]["name"], r["what"]["config"]["workers"]) for r in ladder}) == 1, "one run"
    gains = {}
    for record in ladder:
        above, below = record["what"]["arm"].split(" against ")
        medians = {arm: statistics.median(blocks) for arm, blocks in record["results"]["blocks"].items()}
        gains[below, above] = math.log(medians[below] / medians[above])
    bottom, top = "the post's loop", "no .item()"
    whole, rung, rungs = gains.pop((bottom, top)), bottom, []
    while rung != top:
        rung, gain = next((above, gain) for (below, above), gain in gains.items() if below == rung)
        rungs.append(gain)
    assert len(rungs) == len(gains)
    assert sum(rungs) == pytest.approx(whole, rel=0.10)
