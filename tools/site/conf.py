"""Sphinx's configuration of the site, which `uv run python -m tools.site` builds."""

import json
import math
import re
import shutil
import tomllib
from binascii import a2b_base64
from hashlib import sha256
from html import escape
from pathlib import Path

from docutils import nodes
from sphinx.util.logging import getLogger
from vl_convert import javascript_bundle

from halfbits.formats import FORMATS
from helpers.bitview import SHOWN
from tools.site import errors

HERE = Path(__file__).resolve().parent

project = "Half the Bits"
copyright = "the authors: text and figures CC BY 4.0, code MIT"
extensions = ["myst_nb"]
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "GLOSSARY.md", "data/README.md", "docs/*.md", "errors/*.md"]
include_patterns += ["notebooks/*.ipynb"]
exclude_patterns = [".*", "site"]

nb_execution_mode = "off"
nb_merge_streams = True
myst_heading_anchors = 3

html_theme = "sphinx_book_theme"
html_static_path = [str(HERE / "static")]
html_css_files = ["site.css"]
html_js_files = [(name, {"defer": "defer"}) for name in ("vega.js", "formats.js", "explorer.js")]
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
EXPLORER = "bitview-fixed"  # what stands in a notebook for widgets that need a kernel
CHART = '<div class="chart"><script type="{kind}" data-options="{options}">{spec}</script></div>'
MOVED = tomllib.loads((HERE / "moved.toml").read_text(encoding="utf-8"))
LEAD_ON = """<script>
(() => {{
  const anchor = location.hash.slice(1);
  const place = {places}[anchor];
  if (place && !document.getElementById(anchor)) location.replace(place);
}})();
</script>"""
CONTENTS = """
```{{toctree}}
:hidden:
:caption: {caption}
:glob:

{pages}
```
"""
BESIDE = "errors/index\n[!R]*\ndocs/*\ndata/README"  # without README, which has the contents


def adapt(app, name, source):
    """Add a list for Sphinx's navigation; write links to headings in lower case and without dots, as MyST names them.

    The badge is for the repository's own page: its address is relative to that.
    """
    if name == root_doc:
        contents = [CONTENTS.format(caption=caption, pages=pages) for caption, pages in groups(source[0])]
        source[0] = re.sub(r"^\[!\[CI\].*$", "", source[0], flags=re.MULTILINE) + "".join(contents)
        landing = (HERE / "landing.html").read_text(encoding="utf-8")
        source[0] = source[0].replace("```bash", f"{landing}```bash", 1)
    source[0] = re.sub(r"(\.ipynb#)([\w.-]+)", lambda link: link[1] + link[2].lower().replace(".", ""), source[0])
    source[0] = source[0].replace("../halfbits/errors.toml", "../errors/index.md")
    if VEGA_LITE in source[0] or EXPLORER in source[0]:
        notebook = json.loads(source[0])
        for cell in notebook["cells"]:
            cell["outputs"] = [each for each in cell.get("outputs", []) if each.get("data") != {"text/plain": [""]}]
            for output in cell["outputs"]:
                if VEGA_LITE in output.get("data", {}):
                    output["data"] = {"text/html": chart(output)}
                elif EXPLORER in (page := "".join(output.get("data", {}).get("text/html", ""))):
                    output["data"] = {"text/html": page.replace(EXPLORER, "explorer")}
        source[0] = json.dumps(notebook)


def groups(readme):
    """README's roads and shelves: each heading with a table of notebooks, and what Sphinx lists for it."""
    for section in re.split(r"^##+ ", readme, flags=re.MULTILINE):
        heading = section.partition("\n")[0]
        rows = re.findall(r"^\| \[(\d\d[a-e]? [^\]]+)\]\((notebooks/[^)]+)\.ipynb\)", section, re.MULTILINE)
        if rows:
            yield heading, "\n".join(f"{title} <{place}>" for title, place in rows)
    yield "Beside the notebooks", BESIDE


def lead_on(app, name, template, context, doctree):
    """Lead an address of a heading that has moved to where it stands now."""
    if name in MOVED:
        context["body"] += LEAD_ON.format(places=json.dumps(places_from(name)))


def places_from(name):
    """Where the headings of a page stand now, as links from that page."""
    up = "../" * name.count("/")
    places = {}
    for anchor, place in MOVED[name].items():
        page, _, there = place.partition("#")
        places[anchor] = f"{up}{page}.html" + (f"#{there}" if there else "")
    return places


def write_moved_pages(app, exception):
    """For each page that is gone, one that leads its old address on."""
    gone = [name for name in MOVED if "the-page" in MOVED[name] and not exception]
    for name in gone:
        places = places_from(name)
        link = places["the-page"]
        head = f'<title>Moved</title><meta charset="utf-8"><meta http-equiv="refresh" content="1; url={link}">'
        script = LEAD_ON.format(places=json.dumps(places))
        text = f'<!doctype html>{head}{script}<p>This page has moved <a href="{link}">here</a>.</p>\n'
        (Path(app.outdir) / f"{name}.html").write_text(text, encoding="utf-8")


def chart(output):
    """HTML from which vega.js draws a stored chart, whose links lead somewhere here."""
    spec = output["data"][VEGA_LITE]
    for parameter in spec.get("params", []):
        if parameter["name"] == "site":
            parameter["value"] = True
    spec = json.dumps(spec).replace("</", "<\\/")
    options = escape(json.dumps(output["metadata"].get(VEGA_LITE, {}).get("embed_options", {})))
    return CHART.format(kind=VEGA_LITE, options=options, spec=spec)


def write_scripts(app):
    """What draws charts, so that no page asks another server for it, and the explorer's formats."""
    folder = Path(app.outdir) / "_static"
    folder.mkdir(parents=True, exist_ok=True)
    draw_charts = (HERE / "draw_charts.js").read_text(encoding="utf-8")
    bundle = javascript_bundle(draw_charts, vl_version="5.8")
    (folder / "vega.js").write_text(f"(() => {{{bundle}}})()", encoding="utf-8")
    formats = [facts_of(form) for form in map(FORMATS.get, SHOWN)]
    (folder / "formats.js").write_text(f"const FLOAT_FORMATS = {json.dumps(formats)};", encoding="utf-8")


def facts_of(form):
    """What explorer.js must know of a format."""
    names = ["name", "bits", "exponent_bits", "mantissa_bits", "bias", "max", "smallest_normal", "smallest_subnormal"]
    first_special = int(form.encode(form.max)) + 1
    return {name: getattr(form, name) for name in names} | {
        "first_special": first_special,
        "has_infinity": form.specials == "ieee",
        "past_max": int(form.encode(math.inf)),
        "nan": int(form.encode(math.nan)),
    }


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
    app.connect("builder-inited", write_scripts)
    app.connect("builder-inited", lambda app: errors.write_pages(Path(app.srcdir) / "errors"))
    app.connect("source-read", adapt)
    app.connect("doctree-read", describe_figures)
    app.connect("html-page-context", lead_on)
    app.connect("build-finished", open_at_readme)
    app.connect("build-finished", write_moved_pages)
