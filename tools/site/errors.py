"""A page for each message of halfbits/errors.toml, as Markdown for Sphinx, and one that lists them."""

import json
import re
import shutil

from halfbits.errors import messages
from helpers.messages import anchor

PAGE = """---
orphan: true
myst:
  html_meta:
    description: {description}
---

# {title}

**{kind}**, raised by {by}: {at}.

{cause}

```python
{needs}{fix}
```

Shown and mended in notebook {number}: [{heading}](../notebooks/{notebook}.ipynb#{anchor}).
{also}
[Paste another message](../notebooks/14_troubleshooting_clinic.ipynb#paste-the-message), or see [all](index.md).
"""
INDEX = """# Messages, and what they mean

Errors, warnings and lines of logs in mixed precision, each with its cause and its fix. To find one by its text,
[paste it](../notebooks/14_troubleshooting_clinic.ipynb#paste-the-message).

{lists}
"""


def write_pages(folder):
    """Write all pages anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    table = messages()
    for entry in table.itertuples():
        (folder / f"{entry.slug}.md").write_text(page(entry), encoding="utf-8")
    lists = []
    for library, entries in table.groupby(table.by.str.split(r"[\s,]").str[0], sort=False):
        links = [f"- [{_code(entry.message)}]({entry.slug}.md)" for entry in entries.itertuples()]
        lists += [f"## {library}", "\n".join(links)]
    (folder / "index.md").write_text(INDEX.format(lists="\n\n".join(lists)), encoding="utf-8")


def page(entry):
    """The page of one row of `messages()`."""
    notebook, heading = entry.case.split("#")
    return PAGE.format(
        description=json.dumps(f"{entry.message} {entry.cause}"),
        title=_code(entry.message),
        kind=entry.kind if entry.kind != "log" else "A line of the log",
        by=_plain(entry.by),
        at=_code(entry.at),
        cause=_plain(entry.cause),
        needs=f"{entry.needs}\n" if entry.needs else "",
        fix=entry.fix,
        number=notebook.partition("_")[0],
        heading=_plain(heading),
        notebook=notebook,
        anchor=anchor(heading),
        also="\nAlso written:\n\n" + "".join(f"- {_code(form)}\n" for form in entry.also) if entry.also else "",
    )


def _code(text):
    """`text` as Markdown's code, with a fence longer than those in it."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def _plain(text):
    """`text` with nothing that Markdown would take for markup."""
    return re.sub(r"([\\`*_<>\[\]{}$#])", r"\\\1", text)
