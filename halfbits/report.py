"""What an instrument found: a `Finding` is one thing, a `Report` all of them, the verdict first."""

import functools
from typing import NamedTuple

import pandas as pd


class Finding(NamedTuple):
    """`severity`: "certain" was observed, with its mechanism, or follows from what is there; "likely" does harm in most
    runs; "note" is a fact. `case`: a heading of the clinic, "" where it has none."""

    what: str
    where: str
    severity: str
    cost: str
    case: str

    def __str__(self):
        where = f" ({self.where})" if self.where else ""
        case = f"Case: {self.case}." if self.case else ""
        return " ".join(filter(None, [f"{self.severity}: {self.what}{where}.", self.cost, case]))


def certain(what, where="", cost="", case="", severity="certain"):
    """A Finding. `where` may be a list of names."""
    where = where if isinstance(where, str) else some(where)
    return Finding(what, where, severity, cost, case)


likely = functools.partial(certain, severity="likely")
note = functools.partial(certain, severity="note")


class Report:
    """Findings, worst first. Printed: `verdict`, what was looked at, and the others; `findings` is a DataFrame.

    `looked_at` says in what, where nothing was found; `seen` has more of it. Where `stopped` says that looking ended
    early, "nothing wrong" is not said.
    """

    def __init__(self, findings, looked_at="", seen="", stopped=""):
        order = ["certain", "likely", "note"]
        rows = sorted(dict.fromkeys(findings), key=lambda finding: order.index(finding.severity))
        bad = bool(rows) and rows[0].severity != "note"
        self.findings = pd.DataFrame(rows, columns=list(Finding._fields))
        if bad:
            self.verdict = f"Verdict, {rows[0]}"
        elif stopped:
            self.verdict = f"Verdict: none. {stopped}"
        else:
            self.verdict = f"Verdict: nothing wrong was found{looked_at}."
        more = [seen, stopped if bad else "", *map(str, rows[bad:])]
        self.lines = [self.verdict, *filter(None, more)]

    def __repr__(self):
        return "\n".join(self.lines)


def some(names, most=4):
    names = [name or "the model" for name in names]
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
