"""The browser that drives JupyterLab and the site, and what is done on both."""

import shutil

from playwright.sync_api import expect

BROWSER = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome", "chrome"])), None)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

MOVE = """input => {
    input.value = input.value === input.max ? input.min : input.max
    input.dispatchEvent(new Event("input"))
}"""


def move_every_input(page, count):
    """Move each slider of the page's charts to its other end, choose another of each list and each row of buttons; what
    the chart draws and writes must change."""
    inputs = page.locator(".vega-bind")
    expect(inputs).to_have_count(count, timeout=60_000)
    for number in range(count):
        one = inputs.nth(number)
        drawn = one.locator("xpath=ancestor::*[contains(@class, 'vega-embed')]").locator("svg.marks")
        before = drawn.inner_html()
        if one.locator("input[type=range]").count():
            one.locator("input[type=range]").evaluate(MOVE)
        elif one.locator("select").count():
            one.locator("select").select_option(index=one.locator("option").count() - 1)
        else:
            one.locator("input[type=radio]:not(:checked)").last.check()
        for _ in range(50):
            if drawn.inner_html() != before:
                break
            page.wait_for_timeout(100)
        assert drawn.inner_html() != before, f"{one.inner_text()} moves nothing"
    assert not page.errors
