"""Measured results as JSON files: one file a run, complete in itself, written whole or not at all."""

import hashlib
import json
import os
import re
import tempfile
import textwrap
import uuid
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from helpers import DATA

RECORDS = (DATA / "records").resolve()
SCHEMA = DATA / "record.schema.json"


class RecordError(ValueError):
    """A record that lacks part of its provenance or has the wrong shape. The message names the part."""


def save_folder():
    """Where `save` writes: what the environment variable HALF_THE_BITS_SAVE_TO names, or else `data/records`; where
    that cannot be written, `half-the-bits-records` in the working folder or in the folder for temporary files."""
    if chosen := os.environ.get("HALF_THE_BITS_SAVE_TO"):
        return Path(chosen).expanduser().resolve()
    others = [place / "half-the-bits-records" for place in (Path.cwd(), Path(tempfile.gettempdir()))]
    return next((folder.resolve() for folder in (RECORDS, *others) if _is_writable(folder)), RECORDS)


def _is_writable(folder):
    return os.access(next(place for place in (folder, *folder.parents) if place.exists()), os.W_OK)


@cache
def _say(folder):
    print(f"{RECORDS} cannot be written: records go to {folder}.")


def new(experiment, arm, config, results, manifest):
    """A record of kind "measured", stamped with this moment, from `hardware.manifest`'s facts. Not saved yet."""
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


def validate(record):
    """Raise RecordError, naming every fault, unless `record` follows `data/record.schema.json`.

    A machine that only records may lack jsonschema. Then nothing is checked here, but wherever the record is read.
    """
    try:
        validator = _validator()
    except ImportError:
        return
    faults = [f"{fault.json_path}: {fault.message}" for fault in validator.iter_errors(record)]
    if faults:
        asked = "This record is refused. Complete it with hardware.manifest(device):"
        raise RecordError("\n  ".join([asked, *faults]))


def save(record):
    """Write one record to its own file in `save_folder()` and return the file's path.

    The file appears under its name only when it is complete: a writer killed half-way leaves no broken record.
    NumPy and torch scalars are stored as numbers. Raises RecordError for incomplete provenance and for what is not
    JSON: a NaN, an infinity, an object.
    """
    try:
        text = json.dumps(record, indent=1, allow_nan=False, default=lambda number: number.item()) + "\n"
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise RecordError(f"This record is not plain JSON: {error}. Store numbers and text only.") from None
    validate(json.loads(text))
    to = save_folder()
    if to != RECORDS and "HALF_THE_BITS_SAVE_TO" not in os.environ:
        _say(to)
    to.mkdir(parents=True, exist_ok=True)
    words = [record["when"][:19], record["what"]["experiment"], record["what"]["arm"], record["device"]["name"]]
    name = re.sub(r"[^A-Za-z0-9.]+", "-", " ".join(words))
    path = to / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"
    unfinished = path.with_suffix(f".{uuid.uuid4().hex[:8]}.tmp")  # another process may be writing the same record
    try:
        with unfinished.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def keep(experiment, arm, config, results, manifest):
    """Save a record of these parts (see `new`). Where that fails, say why and go on: a measurement that cannot be saved
    is still there to be looked at. Returns the file's path, or None.

    Examples
    --------
    >>> keep("mine", "bf16", {"batch": 32}, {"seconds": 0.1}, hardware.manifest(device))  # doctest: +SKIP
    """
    try:
        return save(new(experiment, arm, config, results, manifest))
    except (RecordError, OSError) as error:
        print(f"Not saved: {experiment}, {arm}: {error}")
        return None


def load(experiment):
    """The records of one experiment, of the suite and the reader's own, oldest first.

    Examples
    --------
    >>> [record["what"]["arm"] for record in load("04 cast policies")]
    ['2.11.0', '2.15.0']
    """
    return [record for record in load_all() if record["what"]["experiment"] == experiment]


def load_all():
    """All records of the suite and the reader's own, oldest first, as a list of dicts.

    A record whose file was copied is there once. A file that is no valid record is left out; a printed sentence names
    it and what is wrong with it.
    """
    records, left_out = {}, []
    for path in sorted({path for folder in (RECORDS, save_folder()) for path in folder.glob("*.json")}):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            # Read, NaN, Infinity and 1e999 pass, which are not JSON; sorted, a copy has the same text.
            text = json.dumps(record, allow_nan=False, sort_keys=True)
            validate(record)
            records[text] = record
        except (OSError, ValueError, RecursionError) as error:
            left_out.append(textwrap.shorten(f"{path} is no valid record: {error}", 500))
    if left_out:
        print(f"Records left out: {len(left_out)}. Delete or mend each, or restore it from Git:", *left_out, sep="\n  ")
    return sorted(records.values(), key=lambda record: record["when"])
