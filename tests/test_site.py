"""The site: one page a notebook, links that lead somewhere, figures with a text, a search that finds."""

import json
import re
import shutil
import subprocess
import sys
from urllib.parse import unquote, urldefrag, urlparse

import pytest
from bs4 import BeautifulSoup

from tests.browser import BROWSER, move_every_slider
from tools.execute import NOTEBOOKS

ROOT = NOTEBOOKS.parent


def build(source, output):
    command = [sys.executable, "-m", "tools.site", "--source", source, "--to", output]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "html"
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    paths = [*site.glob("*.html"), *site.glob("[a-z]*/*.html")]
    return {path: BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser") for path in paths}


def broken(pages):
    """The links to files or anchors that are not there, and the files fetched from elsewhere."""
    for path, page in pages.items():
        for tag in page.find_all(["a", "img", "link", "script"]):
            link = tag.get("href") or tag.get("src") or ""
            if urlparse(link).scheme in ("http", "https", "mailto", "data"):
                if tag.name != "a":
                    yield path.name, link
                continue
            target, anchor = map(unquote, urldefrag(link))
            target = (path.parent / urlparse(target).path).resolve() if target else path
            there = pages.get(target)
            if not target.is_file() or (anchor and there and not there.find(id=anchor)):
                yield path.name, link


def wordless(page):
    """The figures whose text is missing or could stand below any figure."""
    for image in page.find_all("img"):
        alt = image.get("alt") or ""
        if len(alt) < 30 or re.search(r"<Figure|\.png|No description", alt) or alt.count(":") < 1:
            yield alt


def test_every_notebook_is_a_page_and_none_was_run(site, pages):
    names = [path.stem for path in sorted(NOTEBOOKS.glob("*.ipynb"))]
    assert names == [path.stem for path in sorted((site / "notebooks").glob("*.html"))]
    listed = [link["href"] for link in pages[site / "index.html"].select(".bd-sidebar-primary nav a")]
    assert [f"notebooks/{name}.html" for name in names] == [link for link in listed if link.startswith("notebooks/")]
    assert {"CHANGELOG.html", "data/README.html", "docs/contributing.html"} <= set(listed)
    assert "183,936 of activations" in pages[site / "notebooks/03_loss_scaling.html"].get_text()


def test_links_and_anchors_lead_somewhere_and_no_file_comes_from_elsewhere(pages):
    assert not list(broken(pages))


def test_every_figure_has_a_text_of_its_own(pages):
    for path, page in pages.items():
        assert not list(wordless(page)), path.name
        texts = [image["alt"] for image in page.find_all("img")]
        assert len(set(texts)) == len(texts), path.name
    texts = [path.read_text(encoding="utf-8") for path in NOTEBOOKS.glob("*.ipynb")]
    stored = sum(
        text.count('"image/png": "') - text.count('"application/vnd.vegalite.v5+json": {\n       "$schema"')
        for text in texts
    )
    assert (
        stored == sum(len(page.find_all("img")) for path, page in pages.items() if path.parent.name == "notebooks") > 30
    )


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on the PATH")
@pytest.mark.parametrize(("name", "sliders"), [("03_loss_scaling", 3), ("06_predict_memory_and_speed", 1)])
def test_sliders_move_on_the_site_from_a_file_and_on_a_phone(site, page, name, sliders):
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"file://{site}/notebooks/{name}.html")
    move_every_slider(page, sliders)
    assert page.evaluate("document.documentElement.scrollWidth") == 390, "the page is wider than the phone"


def test_the_search_index_leads_to_the_notebook(site):
    index = json.loads((site / "searchindex.js").read_text(encoding="utf-8").removeprefix("Search.setIndex(")[:-1])
    found = index["terms"]["gradscal"]  # the index holds stems
    names = [index["docnames"][i] for i in (found if isinstance(found, list) else [found])]
    assert "notebooks/03_loss_scaling" in names


def test_what_is_broken_is_found(site, pages, tmp_path):
    """The negative control: a wrong link, a wrong anchor, a script from elsewhere, a figure without a text."""
    page = BeautifulSoup(
        '<a href="99.html"></a><a href="#none"></a><script src="https://a.b"></script><img>', "html.parser"
    )
    assert len(list(broken({site / "index.html": page}))) == 3
    assert len(list(wordless(page))) == 1

    (tmp_path / "notebooks").mkdir()
    shutil.copy(ROOT / "README.md", tmp_path)
    notebook = json.loads((NOTEBOOKS / "03_loss_scaling.ipynb").read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            output.get("metadata", {}).clear()
    (tmp_path / "notebooks" / "03.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    built = build(tmp_path, tmp_path / "html")
    assert built.returncode == 1
    assert "03.ipynb" in built.stderr and "a figure has no text" in built.stderr
    assert "notebooks/00_start_here.ipynb" in built.stderr
