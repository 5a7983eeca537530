"""A field to paste a message into, for a page without a kernel. The messages are those of `halfbits.errors`."""

import re
import textwrap

import altair as alt
import pandas as pd

from halfbits.errors import messages
from helpers.explore import show
from helpers.plots import COLORS, NEUTRAL

ASK = "Paste the last line of an error or a warning, or all of the traceback."
NO_MESSAGE = "No message? Say what you see: nan, overflow, memory, slow, worse."
TRY = "Try a few words of the line that names the error. Or ask by symptom, or look at the run with audit and watch:"
WAYS = ["My loss is NaN", "My loss scale falls or grows", "My run learns worse, or not at all"]  # the clinic's
WAYS += ["My step is not faster", "My memory did not drop", "Two instruments: audit and watch"]
ARROW = "\N{RIGHTWARDS ARROW}"
WIDTH, LINE, HEIGHT = 520, 17, 15 * 17  # pixels; so wide are charts on a phone


def anchor(heading):
    """A heading's anchor, as GitHub and the site name it.

    Examples
    --------
    >>> anchor("Does it hold?")
    'does-it-hold'
    """
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def paste_box(message=""):
    """A text field that needs no kernel, and holds a message: of the first that `explain` would find the cause, the
    fix, and links to its case, its page and those of two more. If there is none, a symptom's words are looked for, or
    links lead on.
    """
    symptoms = messages("symptom")
    before = symptoms.pattern.str.startswith("^")
    tables = [symptoms[before], messages().rename(columns={"message": "title"}), symptoms[~before]]
    texts = [{"pattern": r"^\s*$", "title": ASK, "cause": NO_MESSAGE}]
    texts += [text for table in tables for text in table.to_dict("records")]
    rows = [*map(_laid_out, texts), _laid_out({"pattern": "", "title": "Not known here.", "cause": TRY})]
    for place, way in enumerate(WAYS, 1):
        link = f"14_troubleshooting_clinic.html#{anchor(way.partition(':')[0])}"
        rows.append({"pattern": "", "way": place, "says": f"{ARROW} {way}", "case link": link})
    field = alt.binding(input="search", name="message ", placeholder="RuntimeError: ")
    text = alt.param("text", value=message, bind=field)
    some_words = "length(trim(text)) > 7 && indexof(datum.said, lower(trim(text))) >= 0"
    found = alt.Chart(pd.DataFrame(rows).reset_index(names="order"))
    found = found.transform_filter(f"test(regexp(datum.pattern, 'i'), text) || {some_words}")
    found = found.transform_window(place="row_number()", sort=[alt.SortField("order")])
    site = alt.param("site", value=False)  # true on the site alone, where links lead somewhere
    linked = {"color": alt.condition("site", alt.value(COLORS["fp32"]), alt.value(NEUTRAL))}
    href = {p: {"href": alt.condition("site", f"{p} link:N", alt.value(""))} | linked for p in ("case", "page")}
    looks = {"title": {"fontWeight": "bold"}, "cause": {}, "fix": {"font": "monospace", "fontSize": 12}, "case": {}}
    layers = []
    for part, look in (looks | {"page": {}}).items():
        lines = found.transform_filter(f"datum.place == 1 && datum.{part}{' && site' if part == 'page' else ''}")
        lines = lines.mark_text(**{"x": 0, "fontSize": 13, "lineHeight": LINE} | look)
        top = alt.Y(f"{part} top:Q", axis=None, scale=alt.Scale(domain=[0, HEIGHT], reverse=True))
        layers.append(lines.encode(y=top, text=f"{part}:N", **href.get(part, {})))
    also = found.transform_filter("datum.place > 1 && datum.place < 4 && datum.page")
    also = also.transform_calculate(top=f"{HEIGHT} - {LINE} * (4 - datum.place)", says="'also: ' + datum.title[0]")
    layers.append(also.mark_text(x=0, fontSize=13).encode(alt.Y("top:Q"), text="says:N", **href["page"]))
    ways = found.transform_filter("datum.way && datum.place == datum.way + 1")  # if what is before them is the first
    ways = ways.transform_calculate(top=f"{LINE} * (3 + datum.way)")
    layers.append(ways.mark_text(x=0, fontSize=13).encode(alt.Y("top:Q"), text="says:N", **href["case"]))
    chart = alt.layer(*layers).add_params(text, site).properties(width=WIDTH, height=HEIGHT)
    show(chart, f"A field for a message: its cause, its fix and its case appear. {ASK} {NO_MESSAGE}")


def _laid_out(texts):
    """The texts of an entry, broken into lines, with the pixels from the top to each; where its case and page are."""
    row, top = {"pattern": texts["pattern"], "said": texts.get("said", "")}, 0
    if "case" in texts:
        notebook, heading = texts["case"].split("#")
        texts = texts | {"case": f"{ARROW} notebook {notebook.partition('_')[0]}, {heading}"}
        row["case link"] = f"{notebook}.html#{anchor(heading)}"
    if "slug" in texts:
        texts = texts | {"page": f"{ARROW} the page of this message, with its source and other wordings"}
        row["page link"] = f"../errors/{texts['slug']}.html"
    for part, width in {"title": 66, "cause": 78, "fix": 70, "case": 78, "page": 78}.items():
        if part in texts:
            lines = textwrap.wrap(texts[part], width, max_lines=2 if part == "title" else None, placeholder=" ...")
            lines = _code(texts["needs"], width) + _code(texts["fix"], width) if part == "fix" else lines
            row |= {part: lines, f"{part} top": top}
            top += LINE * len(lines) + 4
    return row


def _code(text, width):
    """Lines of Python that can be copied: the comment first, then statements, broken only within brackets."""
    text, _, comment = text.partition("  # ")
    if not text.startswith(("with ", "if ", "for ")):
        text = text.replace("; ", "\n")
    depth, kept = 0, ""
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        kept += "\0" if sign == " " and not depth else sign
    wrap = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False).wrap
    lines = textwrap.wrap(comment, width, initial_indent="# ", subsequent_indent="# ")
    return lines + [line.replace("\0", " ") for statement in kept.splitlines() for line in wrap(statement)]
