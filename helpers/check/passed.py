"""Which exercises this reader has passed, and when: a small JSON file, progress.json at the top of the suite."""

import datetime
import json
import os
from pathlib import Path

import pandas as pd


def place():
    """Where the file is. The environment variable HALF_THE_BITS_PROGRESS overrules it."""
    return Path(os.environ.get("HALF_THE_BITS_PROGRESS") or Path(__file__).resolve().parents[2] / "progress.json")


def passed():
    """The day of the first right answer, as "2026-11-21", by the name of the exercise; empty where there is no file."""
    try:
        return json.loads(place().read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def note(name):
    """Note a right answer. Returns the names of all right ones.

    Where the file cannot be read or written, one sentence says so, and nothing is lost.
    """
    days = {}
    try:
        days = passed()
        if name not in days:
            days[name] = datetime.date.today().isoformat()
            place().write_text(json.dumps(days, indent=1) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"(Not noted in {place().name}: {error}. HALF_THE_BITS_PROGRESS can name another file.)")
    return {*days, name}


def table(exercises):
    """A DataFrame, one row a notebook: how many of its exercises are passed, and which are still to do.

    `exercises` maps each notebook's topic to the names of its exercises.
    """
    try:
        days = passed()
    except (OSError, ValueError) as error:
        print(f"{place().name} cannot be read: {error}. To begin anew, delete it.")
        days = {}
    rows = {}
    for topic, names in exercises.items():
        to_do = [name for name in names if name not in days]
        rows[topic] = {"passed": f"{len(names) - len(to_do)} of {len(names)}", "still to do": ", ".join(to_do)}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("notebook")
