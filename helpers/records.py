"""Measured results as JSON files: one per run, complete in itself, written whole or not at all."""

import hashlib
import json
import os
import re
import tempfile
import textwrap
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from helpers import DATA

RECORDS = (DATA / "records").resolve()
SCHEMA = DATA / "record.schema.json"


class RecordError(ValueError):
    """A record that lacks part of its provenance or has the wrong shape; the message names it."""


def save_folder() -> Path:
    """Where `save` writes: the folder that HALF_THE_BITS_SAVE_TO names, or else `data/records`.

    Where that cannot be written, it is `half-the-bits-records` in the working folder, or else in
    the folder for temporary files.
    """
    if chosen := os.environ.get("HALF_THE_BITS_SAVE_TO"):
        return Path(chosen).expanduser().resolve()
    others = [Path.cwd(), Path(tempfile.gettempdir())]
    folders = [RECORDS, *(place / "half-the-bits-records" for place in others)]
    return next(filter(_is_writable, folders), RECORDS).resolve()


def _is_writable(folder):
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    return os.access(existing, os.W_OK)


@cache
def _say_once(sentence):
    print(sentence)


def new(experiment: str, arm: str, config: dict, results: dict, manifest: dict) -> dict:
    """A record of kind "measured", stamped with this moment; `manifest` is hardware.manifest's."""
    return {
        "schema": 1,
        "kind": "measured",
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "what": {"experiment": experiment, "arm": arm, "config": config},
        **manifest,
        "results": results,
    }


@cache
def _validator():
    from jsonschema import Draft202012Validator

    return Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))


def validate(record: dict) -> None:
    """Raise RecordError, naming every fault, unless `record` follows `data/record.schema.json`.

    A machine that only records may lack jsonschema. Nothing is checked there, but wherever the
    record is read.
    """
    try:
        validator = _validator()
    except ImportError:
        return
    faults = [f"{fault.json_path}: {fault.message}" for fault in validator.iter_errors(record)]
    if faults:
        asked = "This record is refused. Complete it with hardware.manifest(device):"
        raise RecordError("\n  ".join([asked, *faults]))


def save(record: dict) -> Path:
    """Write one record to its own file in `save_folder()` and return the file's path.

    NumPy and torch scalars are stored as numbers. Raises RecordError for incomplete provenance and
    for what is not JSON: a NaN, an infinity, an object.
    """
    try:
        text = json.dumps(record, indent=1, allow_nan=False, default=lambda number: number.item())
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        message = f"This record is not plain JSON: {error}. Store numbers and text only."
        raise RecordError(message) from None
    validate(json.loads(text))
    folder = save_folder()
    if folder != RECORDS and "HALF_THE_BITS_SAVE_TO" not in os.environ:
        _say_once(f"{RECORDS} cannot be written: records go to {folder}.")
    folder.mkdir(parents=True, exist_ok=True)
    what = record["what"]
    words = f"{record['when'][:19]} {what['experiment']} {what['arm']} {record['device']['name']}"
    name = re.sub(r"[^A-Za-z0-9.]+", "-", words)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]  # tells two runs in one second apart
    return write_whole(folder / f"{name}-{digest}.json", text + "\n")


def write_whole(path: Path, text: str) -> Path:
    """Write a text file so that it appears under its name only when it is complete."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        return unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def keep(experiment: str, arm: str, config: dict, results: dict, manifest: dict) -> Path | None:
    """Save a record of these parts (see `new`), and return the file's path.

    Where that fails, this says why and returns None: the measurement can still be looked at.
    """
    try:
        return save(new(experiment, arm, config, results, manifest))
    except (RecordError, OSError) as error:
        print(f"Not saved: {experiment}, {arm}: {error}")
        return None


def load(experiment: str) -> list[dict]:
    """The records of one experiment, of the suite and the reader's own, oldest first.

    Examples
    --------
    >>> [record["what"]["arm"] for record in load("04 cast policies")]
    ['2.11.0', '2.15.0']
    """
    return [record for record in load_all() if record["what"]["experiment"] == experiment]


def load_all() -> list[dict]:
    """All records of the suite and the reader's own, oldest first; a copied file counts once.

    A file that is no valid record is left out, and a printed sentence names it and its fault.
    """
    records = {}
    for path in sorted({*RECORDS.glob("*.json"), *save_folder().glob("*.json")}):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            text = json.dumps(record, allow_nan=False, sort_keys=True)  # json.loads lets NaN pass
            validate(record)
            records[text] = record
        except (OSError, ValueError, RecursionError) as error:
            fault = textwrap.shorten(str(error), 500)
            print(f"Left out: {path} is no valid record: {fault}. Delete or restore it.")
    return sorted(records.values(), key=lambda record: record["when"])
