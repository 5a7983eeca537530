"""The site: one page a notebook, links that lead somewhere, figures with a text, a search that finds."""

import json
import math
import re
import subprocess
import sys
from urllib.parse import unquote, urldefrag, urlparse

import numpy as np
import pytest
from bs4 import BeautifulSoup
from playwright.sync_api import expect

from halfbits import errors
from halfbits.formats import FORMATS
from helpers.bitview import SHOWN, BitView
from tests.weekly.browser import BROWSER, move_every_input
from tools.execute import NOTEBOOKS

ROOT = NOTEBOOKS.parent
pytestmark = pytest.mark.weekly


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
    anchors = {path: {tag["id"] for tag in page.find_all(id=True)} for path, page in pages.items()}
    for path, page in pages.items():
        for tag in page.find_all(["a", "img", "link", "script"]):
            link = tag.get("href") or tag.get("src") or ""
            if urlparse(link).scheme in ("http", "https", "mailto", "data"):
                if tag.name != "a":
                    yield path.name, link
                continue
            target, anchor = map(unquote, urldefrag(link))
            target = (path.parent / urlparse(target).path).resolve() if target else path
            if not target.is_file() or (anchor and target in anchors and anchor not in anchors[target]):
                yield path.name, link


def wordless(page):
    """The figures whose text is missing or could stand below any figure."""
    for image in page.find_all("img"):
        alt = image.get("alt") or ""
        if len(alt) < 30 or re.search(r"<Figure|\.png|No description", alt) or alt.count(":") < 1:
            yield alt


def test_every_notebook_is_a_page_and_none_was_run(site, pages):
    names = [path.stem for path in sorted(NOTEBOOKS.glob("*.ipynb"))]
    old = {"06_predict_memory_and_speed"}
    assert names == [path.stem for path in sorted((site / "notebooks").glob("*.html")) if path.stem not in old]
    listed = [link["href"] for link in pages[site / "index.html"].select(".bd-sidebar-primary nav a")]
    assert {f"notebooks/{name}.html" for name in names} == {link for link in listed if link.startswith("notebooks/")}
    captions = pages[site / "index.html"].select(".bd-sidebar-primary .caption-text")
    assert [caption.get_text() for caption in captions[1:4]] == [
        "Understand it",
        "Train an image network faster",
        "Fine-tune a language model",
    ]
    assert {"CHANGELOG.html", "data/README.html", "docs/contributing.html"} <= set(listed)
    assert "183,936 of outputs" in pages[site / "notebooks/03_loss_scaling.html"].get_text()


def test_links_and_anchors_lead_somewhere_and_no_file_comes_from_elsewhere(pages):
    assert not list(broken(pages))


def test_every_figure_has_a_text_of_its_own(pages):
    for path, page in pages.items():
        assert not list(wordless(page)), path.name
        texts = [image["alt"] for image in page.find_all("img")]
        assert len(set(texts)) == len(texts), path.name


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on the PATH")
@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("02_rounding_and_range", 3),
        ("04_autocast_op_tables", 2),
        ("14_troubleshooting_clinic", 1),
    ],
)
def test_charts_move_on_the_site_from_a_file_and_on_a_phone(site, page, name, inputs):
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"file://{site}/notebooks/{name}.html")
    move_every_input(page, inputs)


def test_every_message_has_a_page_that_is_named_after_it_and_listed(site, pages):
    listed = {link["href"] for link in pages[site / "errors" / "index.html"].select("article a.internal")}
    for entry in errors.messages().itertuples():
        page = pages[site / "errors" / f"{entry.slug}.html"]
        assert (
            " ".join(entry.message.split()) in " ".join(page.title.get_text().split()) and entry.fix in page.get_text()
        )
        links = {link["href"] for link in page.select("article a.internal")}
        assert {"index.html", "../notebooks/14_troubleshooting_clinic.html#paste-the-message"} < links
        assert f"{entry.slug}.html" in listed
    clinic = pages[site / "notebooks" / "14_troubleshooting_clinic.html"]
    assert clinic.select('section#paste-the-message a[href="../errors/index.html"]')


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on the PATH")
def test_a_message_pasted_on_a_phone_leads_to_its_case_and_another_to_its_page(site, page):
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"file://{site}/notebooks/14_troubleshooting_clinic.html#paste-the-message")
    field = page.get_by_role("searchbox", name="message")
    field.fill("Traceback (most recent call last): RuntimeError: expected scalar type BFloat16 but found Half")
    expect(page.get_by_text("with torch.autocast(x.device.type, torch.bfloat16): y = op(x, w)")).to_be_visible()
    page.get_by_text("notebook 14a, mat1 and mat2 must have the same dtype").click()
    page.wait_for_url("**/14a_stops_with_an_error.html#mat1-and-mat2-must-have-the-same-dtype")
    page.goto(f"file://{site}/notebooks/14_troubleshooting_clinic.html#paste-the-message")
    field.fill("ValueError: Attempting to unscale FP16 gradients. expected scalar type Float but found Half")
    page.get_by_text("also: expected scalar type Float but found Half").click()
    page.wait_for_url("**/errors/expected-scalar-type-float-but-found-half.html")
    page.get_by_role("link", name="Paste another message").click()
    page.wait_for_url("**/14_troubleshooting_clinic.html#paste-the-message")
    field.fill("something else")
    expect(page.get_by_text("Not known here.")).to_be_visible()
    page.locator("svg").get_by_text("My step is not faster").click()
    page.wait_for_url("**/14_troubleshooting_clinic.html#my-step-is-not-faster")
    assert not page.errors


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on the PATH")
def test_the_old_address_of_a_heading_leads_to_the_new_one(site, page):
    page.goto(f"file://{site}/notebooks/09_distributed_amp.html#appendix-the-older-class-dataparallel")
    page.wait_for_url("**/15_old_code_translated.html#nndataparallel")
    page.goto(f"file://{site}/notebooks/06_predict_memory_and_speed.html#speed-flops-and-bytes")
    page.wait_for_url("**/19_speed.html#two-reasons-fewer-bytes-and-faster-arithmetic")
    page.goto(f"file://{site}/notebooks/06_predict_memory_and_speed.html")
    page.wait_for_url("**/06_memory.html")
    assert not page.errors


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on the PATH")
def test_no_page_is_wider_than_a_phone_or_logs_an_error(pages, page):
    page.set_viewport_size({"width": 390, "height": 844})
    errors = sorted(
        (path for path in pages if path.parent.name == "errors"), key=lambda path: len(pages[path].get_text())
    )
    for path in pages.keys() - errors[:-5]:  # the longest five of them
        page.goto(f"file://{path}")
        assert page.evaluate("document.documentElement.scrollWidth") == 390, path.name
        assert not page.errors, path.name


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on the PATH")
@pytest.mark.parametrize("name", SHOWN)
def test_explorer_on_the_site_computes_as_halfbits_formats(site, page, name):
    """All codes up to 16 bits, 10,000 of the longer formats; 10,000 values and all ties between them."""
    form, rng = FORMATS[name], np.random.default_rng(0)
    codes = np.arange(2**form.bits) if form.bits <= 16 else rng.integers(0, 2**form.bits, 10_000)
    values = form.decode(codes)
    between = values[np.isfinite(values)][:10_000]
    between = np.concatenate(
        [between + form.spacing(between) / 2, rng.normal(0, 10.0 ** rng.integers(-45, 39, 10_000))]
    )
    between = np.concatenate([between, [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, form.max, 1e300]])
    page.goto(f"file://{site}/index.html")
    ask = "([name, codes]) => codes.map(code => [FLOATS[name].decode(code), FLOATS[name].kind(code)])"
    answers = page.evaluate(ask, [name, codes.tolist()])
    decoded = np.array([answer[0] for answer in answers], float)
    assert np.array_equal(decoded, values, equal_nan=True)
    assert [answer[1] for answer in answers] == form.kind(codes).tolist()
    encoded = page.evaluate(
        "([name, values]) => values.map(value => FLOATS[name].encode(value))", [name, between.tolist()]
    )
    assert encoded == form.encode(between).tolist()
    some = codes[:: len(codes) // 200 + 1].tolist()
    ask = "([name, codes]) => codes.map(code => [FLOATS[name].neighbours(code), FLOATS[name].formula(code)])"
    views = [BitView(code, name) for code in some]
    assert page.evaluate(ask, [name, some]) == [[list(view.neighbours()), view.formula] for view in views]
    assert not page.errors


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on the PATH")
def test_explorer_on_the_site_answers_to_links_keys_and_typing_on_a_phone(site, page):
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"file://{site}/notebooks/01_fp16_bit_layout.html#value=-6.25&format=bf16")
    number, format = page.get_by_label("number"), page.get_by_label("format")
    shown = lambda text: expect(page.locator(".explorer .value")).to_have_text(text)
    shown("-6.25")
    page.get_by_label(re.compile("^bit 15, sign")).click()
    shown("6.25")
    assert page.url.endswith("#value=6.25&format=bf16")
    page.keyboard.press("ArrowRight")  # the highest exponent bit
    page.keyboard.press("Space")
    shown("1.8367099231598242e-38")
    page.keyboard.press("ArrowUp")
    shown("1.8458934727756234e-38")
    for typed, answer in {"2^-24": "5.960464477539063e-8", "1/3": "0.333984375", "0x7f80": "inf", "-0": "-0"}.items():
        number.fill(typed)
        number.press("Enter")
        shown(answer)
    number.fill("2049")
    number.press("Enter")
    format.select_option("fp16")
    shown("2048")
    expect(page.get_by_text("2049 rounded by -1")).to_be_visible()
    for wrong, problem in {"a tenth": "is not a number", "0x10000": "from 0 to 0xffff"}.items():
        number.fill(wrong)
        number.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text(problem)
        shown("2048")
    again = page.url
    page.goto("about:blank")
    page.goto(again)
    shown("2048")
    assert format.input_value() == "fp16" and number.input_value() == "2049"
    assert not page.errors


def test_the_search_index_leads_to_the_notebook(site):
    index = json.loads((site / "searchindex.js").read_text(encoding="utf-8").removeprefix("Search.setIndex(")[:-1])
    found = index["terms"]["gradscal"]  # the index holds stems
    names = [index["docnames"][i] for i in (found if isinstance(found, list) else [found])]
    assert "notebooks/03_loss_scaling" in names


def test_what_is_broken_is_found(site):
    """The negative control: a wrong link, a wrong anchor, a script from elsewhere, a figure without a text."""
    page = BeautifulSoup(
        '<a href="99.html"></a><a href="#none"></a><script src="https://a.b"></script><img>', "html.parser"
    )
    assert len(list(broken({site / "index.html": page}))) == 3
    assert len(list(wordless(page))) == 1
