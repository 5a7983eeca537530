"""Sphinx's configuration of the site, which `uv run python -m tools.site` builds."""

import json
import re
import shutil
from binascii import a2b_base64
from hashlib import sha256
from html import escape
from pathlib import Path

from docutils import nodes
from sphinx.util.logging import getLogger
from vl_convert import javascript_bundle

project = "Half the Bits"
copyright = "the authors: text and figures CC BY 4.0, code MIT"
extensions = ["myst_nb"]
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "GLOSSARY.md", "data/README.md", "docs/*.md", "notebooks/*.ipynb"]
exclude_patterns = [".*", "site"]

nb_execution_mode = "off"
nb_merge_streams = True
myst_heading_anchors = 3

html_theme = "sphinx_book_theme"
html_title = project
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system is
html_copy_source = False
html_use_index = False
html_theme_options = {
    "home_page_in_toc": True,
    "navbar_persistent": [],  # the sidebar has the search field
    "footer_content_items": ["copyright"],
    "use_download_button": False,
    "use_fullscreen_button": False,
}

VEGA_LITE = "application/vnd.vegalite.v5+json"
CHART = '<div class="chart"><script type="{kind}" data-options="{options}">{spec}</script></div>'
DRAW_CHARTS = """
for (const place of document.querySelectorAll("div.chart > script")) {
  vegaEmbed(place.parentElement, JSON.parse(place.text), JSON.parse(place.dataset.options))
}
"""
# The theme paints outputs pale on dark pages; a chart follows the page's colours by itself.
CHART_STYLE = """
html[data-theme=dark] div.cell_output div.output:has(.chart) {background: none; color: inherit}
div.cell_output img {max-width: 100%; height: auto !important}
"""

CONTENTS = """
```{{toctree}}
:hidden:
:glob:

{notebooks}
[!R]*
docs/*
data/README
```
"""


def adapt(app, name, source):
    """Add a list for Sphinx's navigation; write links to headings in lower case, as MyST names them.

    The badge is for the repository's own page: its address is relative to that.
    """
    if name == root_doc:
        numbered = re.findall(r"^\| \[(\d\d [^\]]+)\]\((notebooks/[^)]+)\.ipynb\)", source[0], re.MULTILINE)
        notebooks = "\n".join(f"{title} <{place}>" for title, place in numbered)
        source[0] = re.sub(r"^\[!\[CI\].*$", "", source[0], flags=re.MULTILINE) + CONTENTS.format(notebooks=notebooks)
    source[0] = re.sub(r"\.ipynb#[\w-]+", lambda link: link[0].lower(), source[0])
    if VEGA_LITE in source[0]:
        notebook = json.loads(source[0])
        for output in (output for cell in notebook["cells"] for output in cell.get("outputs", [])):
            if VEGA_LITE in output.get("data", {}):
                output["data"] = {"text/html": chart(output)}
        source[0] = json.dumps(notebook)


def chart(output):
    """HTML from which vega.js draws a stored chart."""
    spec = json.dumps(output["data"][VEGA_LITE]).replace("</", "<\\/")
    options = escape(json.dumps(output["metadata"].get(VEGA_LITE, {}).get("embed_options", {})))
    return CHART.format(kind=VEGA_LITE, options=options, spec=spec)


def write_vega(app):
    """One script with all that draws charts, so that no page asks another server for it."""
    folder = Path(app.outdir) / "_static"
    folder.mkdir(parents=True, exist_ok=True)
    bundle = javascript_bundle(DRAW_CHARTS, vl_version="5.8")
    (folder / "vega.js").write_text(f"(() => {{{bundle}}})()", encoding="utf-8")
    (folder / "charts.css").write_text(CHART_STYLE, encoding="utf-8")
    app.add_js_file("vega.js", loading_method="defer")
    app.add_css_file("charts.css")


def describe_figures(app, page):
    """Give each figure its stored text, which MyST-NB leaves out. A figure's file is named by its hash."""
    path = Path(app.env.doc2path(app.env.docname))
    if path.suffix != ".ipynb":
        return
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    figures = [output for cell in cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]
    texts = {}
    for figure in figures:
        name = sha256(a2b_base64("".join(figure["data"]["image/png"]))).hexdigest()
        texts[name] = figure["metadata"].get("image/png", {}).get("alt", "")
    for image in page.findall(nodes.image):
        image["alt"] = texts[Path(image["uri"]).stem]
        if not image["alt"]:
            getLogger(__name__).warning("a figure has no text: draw it with helpers.plots", location=image)


def open_at_readme(app, error):
    if not error:
        shutil.copy(app.outdir / f"{root_doc}.html", app.outdir / "index.html")


def setup(app):
    app.connect("builder-inited", write_vega)
    app.connect("source-read", adapt)
    app.connect("doctree-read", describe_figures)
    app.connect("build-finished", open_at_readme)
