"""Which exercises this reader has passed, and when: a small JSON file, progress.json at the top of the suite."""

import datetime
import json
import os
import time
from pathlib import Path

import pandas as pd

TROUBLE = OSError, ValueError, RecursionError  # of a file that is out of reach, no JSON, or nested without end


def place():
    """Where the file is. The environment variable HALF_THE_BITS_PROGRESS overrules it."""
    return Path(os.environ.get("HALF_THE_BITS_PROGRESS") or Path(__file__).resolve().parents[2] / "progress.json")


def passed():
    """The day of the first right answer, as "2026-11-21", by the name of the exercise; empty where there is no file."""
    try:
        days = json.loads(place().read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(days, dict):
        raise ValueError("it holds no days by the names of exercises")
    return days


def note(name):
    """Note a right answer. Returns the names of all right ones.

    Where the file cannot be read or written, one sentence says so, and nothing is lost.
    """
    days = {}
    try:
        days = passed()
        if name not in days:
            days = _write(name)
    except TROUBLE as error:
        print(f"(Not noted in {place().name}: {error}. HALF_THE_BITS_PROGRESS can name another file.)")
    return {*days, name}


def _write(name):
    """Add a name to the file, which a new one replaces, whole. Others wait as long as the new one lies beside it."""
    file = place().resolve()
    new = file.with_name(f"{file.name}.new")
    writing = _made(new)
    try:
        with writing:
            days = {name: datetime.date.today().isoformat()} | passed()
            writing.write(json.dumps(days, indent=1) + "\n")
        new.replace(file)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    return days


def _made(path):
    """A file, made here and opened. Where another process has made it, wait until it is gone; after 5 s that process
    was killed."""
    for _ in range(500):
        try:
            return path.open("x", encoding="utf-8")
        except FileExistsError:
            time.sleep(0.01)
    return path.open("w", encoding="utf-8")


def table(exercises):
    """A DataFrame, one row a notebook: how many of its exercises are passed, and which are still to do.

    `exercises` maps each notebook's topic to the names of its exercises.
    """
    try:
        days = passed()
    except TROUBLE as error:
        print(f"{place().name} cannot be read: {error}. To begin anew, delete it.")
        days = {}
    rows = {}
    for topic, names in exercises.items():
        to_do = [name for name in names if name not in days]
        rows[topic] = {"passed": f"{len(names) - len(to_do)} of {len(names)}", "still to do": ", ".join(to_do)}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("notebook")
