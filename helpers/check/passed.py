"""Which exercises this reader has passed, and when: progress.json, at the top of the suite."""

import datetime
import json
import os
from pathlib import Path

import pandas as pd

from helpers.records import write_whole

UNUSABLE = OSError, ValueError, RecursionError  # out of reach, no JSON, or nested without end


def place() -> Path:
    """Where the file is. The environment variable HALF_THE_BITS_PROGRESS overrules it."""
    chosen = os.environ.get("HALF_THE_BITS_PROGRESS")
    return Path(chosen or Path(__file__).resolve().parents[2] / "progress.json")


def passed() -> dict[str, str]:
    """The day of the first right answer, as "2026-11-21", by exercise; empty without a file."""
    try:
        days = json.loads(place().read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(days, dict):
        raise ValueError("it holds no days by the names of exercises")
    return days


def note(name: str) -> set[str]:
    """Note a right answer. Returns the names of all right ones.

    Where the file cannot be read or written, one sentence says so, and nothing is lost.
    """
    days = {}
    try:
        days = passed()
        if name not in days:
            days[name] = datetime.date.today().isoformat()
            write_whole(place().resolve(), json.dumps(days, indent=1) + "\n")
    except UNUSABLE as error:
        file = place().name
        print(f"(Not noted in {file}: {error}. HALF_THE_BITS_PROGRESS can name another file.)")
    return {*days, name}


def table(exercises: dict[str, list[str]]) -> pd.DataFrame:
    """One row per notebook: how many of its exercises are passed, and which are still to do.

    `exercises` maps each notebook's topic to the names of its exercises.
    """
    try:
        days = passed()
    except UNUSABLE as error:
        print(f"{place().name} cannot be read: {error}. To begin anew, delete it.")
        days = {}
    rows = {}
    for topic, names in exercises.items():
        to_do = [name for name in names if name not in days]
        rows[topic] = {
            "passed": f"{len(names) - len(to_do)} of {len(names)}",
            "still to do": ", ".join(to_do),
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("notebook")
