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
ANY = r"(struct )?[\w.:<>]{1,40}( int| char)?"  # a dtype of any name
BEFORE = r"\b(struct )?([a-z\d]+[.:]+)*(CUDA|CPU)?"  # in front of a dtype's name, as in torch.cuda.HalfTensor
OTHERS = ("float64", "complex", "whole", "float8")  # than float32 and 16 bits
QUOTE = "\\\\?[\"'`\N{LEFT SINGLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}]?"  # \" in a log's JSON


@cache
def messages(kind: str = "message") -> pd.DataFrame:
    """The entries of one kind, "message" or "symptom", a row an entry. Copy it to change it.

    It has what the file says, a `pattern` for each entry and, of messages, all that is `said`, in small letters. Errors
    stand before warnings and logs. A space of a pattern is any white space, or none: a line that was broken is found
    too. A quotation mark is any, or none: they are lost where a text was rendered. Names of dtypes, and what denies a
    symptom, are filled into the patterns.

    Examples
    --------
    >>> messages().loc[0, "slug"]
    'attempting-to-unscale-fp16-gradients'
    """
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    table = pd.DataFrame(data[kind])
    table["needs"] = table.needs.fillna("")
    if kind == "message":
        itself = table.message.map(re.escape).str.replace("\\ ", " ", regex=False)
        names = table.pop("names").map(lambda forms: forms if isinstance(forms, list) else [])
        table["pattern"] = _with_dtypes(table.pattern.fillna(itself), names, data["dtypes"])
        table["also"] = table.also.map(lambda others: others if isinstance(others, list) else [])
        table["said"] = (table.message + " " + table.also.str.join(" ")).str.lower()
        later = (table.kind == "log") | table.kind.str.endswith("Warning")
        table = table.loc[later.sort_values(kind="stable").index].reset_index(drop=True)
    else:
        what, *words = data["denials"].items()
        for name, text in words:
            text = _unnumbered(f"({text.replace('<what>', what[1])})")
            table["pattern"] = table.pattern.str.replace(f"<{name}>", text, regex=False)
    quotes = table.pattern.str.replace(r"[\"'`]\??", lambda _: QUOTE, regex=True)
    table["pattern"] = quotes.str.replace(" ", r"\s*")
    return table


def _with_dtypes(patterns, names, dtypes):
    """The patterns with the words for dtypes in them. Those with `names` refuse another dtype than float32 beside one
    of 16 bits.
    """
    every = [form for forms in names for form in forms]
    both = [form for form in every if form.count("@") > 1]
    other = "|".join(dtypes[name] for name in OTHERS)
    dtypes = {name: rf"{BEFORE}({text})(?![\w>])" for name, text in (dtypes | {"other": other}).items()}
    words = {f"<{name}>": text for name, text in dtypes.items()}
    words |= {f"<any {name}>": "|".join(_naming(form, dtypes[name]) for form in every) for name in OTHERS}
    words["<fp16 beside bf16>"] = "|".join(_naming_both(form, dtypes) for form in both)
    filled = []
    for pattern, forms in zip(patterns, names):
        for word, text in words.items():
            pattern = pattern.replace(word, _unnumbered(f"({text})"))
        refused = [_naming(form, dtypes["other"]) for form in forms]
        refused += [_naming_both(form, dtypes) for form in forms if form in both]
        filled.append(f"(?={pattern})(?!{_unnumbered('|'.join(refused))})" if refused else pattern)
    return filled


def _naming(form, dtype):
    """A pattern for `form`, a sentence with an @ for each dtype that it names, if one of them is `dtype`."""
    head, _, tail = form.partition("@")
    return f"{head}({dtype}|{ANY}{_naming(tail, dtype)})" if "@" in tail else f"{head}({dtype})"


def _naming_both(form, dtypes):
    """The same, if fp16 and bf16 are among them."""
    head, _, tail = form.partition("@")
    ways = [f"{dtypes[a]}{_naming(tail, dtypes[b])}" for a, b in (("fp16", "bf16"), ("bf16", "fp16"))]
    if tail.count("@") > 1:
        ways.append(f"{ANY}{_naming_both(tail, dtypes)}")
    return f"{head}({'|'.join(ways)})"


def _unnumbered(pattern):
    """With groups that are not counted, so that \\1 of the pattern around it is still its own."""
    return re.sub(r"(?<!\\)\((?!\?)", "(?:", pattern)


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
    if quoted.any() or len(text) > 300:  # a log, where "nan" may stand in any sentence
        return table[quoted]
    asked = symptoms[_held(symptoms, text)]
    return table[quoted] if asked.empty else asked


def _held(table, text):
    return table.pattern.map(lambda pattern: bool(re.search(pattern, text, FLAGS)))
