"""What a message of mixed precision means: its cause, a fix, and the case of the clinic in which it is repaired.

The messages stand in errors.toml, beside this file.
"""

import re
import tomllib
from functools import cache
from pathlib import Path

import pandas as pd

DATA = Path(__file__).with_name("errors.toml")
FLAGS = re.IGNORECASE | re.ASCII  # as a browser's expressions understand \b
QUOTE = "\\\\?[\"'`\N{LEFT SINGLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}]?"  # \" in a log's JSON


@cache
def messages(kind: str = "message") -> pd.DataFrame:
    """The entries of one kind, "message" or "symptom", a row an entry. Copy it to change it.

    It has what the file says, a `pattern` for each entry and, of messages, all that is `said`, in small letters. Errors
    stand before warnings and logs. A space of a pattern is any white space, or none: a line that was broken is found
    too. A quotation mark is any, or none: they are lost where a text was rendered.

    Examples
    --------
    >>> messages().loc[0, "slug"]
    'attempting-to-unscale-fp16-gradients'
    """
    table = pd.DataFrame(tomllib.loads(DATA.read_text(encoding="utf-8"))[kind])
    table["needs"] = table.needs.fillna("")
    if kind == "message":
        itself = table.message.map(re.escape).str.replace("\\ ", " ", regex=False)
        table["pattern"] = table.pattern.fillna(itself)
        table["also"] = table.also.map(lambda others: others if isinstance(others, list) else [])
        table["said"] = (table.message + " " + table.also.str.join(" ")).str.lower()
        later = (table.kind == "log") | table.kind.str.endswith("Warning")
        table = table.loc[later.sort_values(kind="stable").index].reset_index(drop=True)
    quotes = table.pattern.str.replace(r"[\"'`]\??", lambda _: QUOTE, regex=True)
    table["pattern"] = quotes.str.replace(" ", r"\s*")
    return table


def explain(text: str) -> pd.DataFrame:
    """The messages that `text` holds, as rows of `messages()`, what is special before what is general; else those that
    hold `text`.

    text: the last line of a traceback, or all of it, or a log. Some words of a message are enough if they have eight
        letters. Where no message is held, and the text is short, the symptoms whose words are, as of "loss=nan". No
        rows: it is not known.

    Each row has `message` (or, of a symptom, `title`), `cause`, `fix` (one line of Python), `needs` (what it imports,
    beside torch) and `case` (notebook#heading).

    Examples
    --------
    >>> explain("E   ValueError: Attempting to unscale FP16 gradients.").case.item()
    '14a_stops_with_an_error#Attempting to unscale FP16 gradients'
    """
    table = messages()
    symptoms = messages("symptom")[:-1]  # the last asks for a message
    held = _held(table, text)
    words = text.strip().lower()
    quoted = table.said.str.contains(words, regex=False) & (len(words) > 7)
    if held.any():
        return table[held]
    asked = symptoms[_held(symptoms, text)]
    is_log = len(text) > 300  # where "nan" may stand in any sentence
    return table[quoted] if quoted.any() or is_log or asked.empty else asked


def _held(table, text):
    return table.pattern.map(lambda pattern: bool(re.search(pattern, text, FLAGS)))
