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


def move_every_slider(page, count):
    """Move each of the page's sliders to its other end; what its chart draws and writes must change."""
    sliders = page.locator(".vega-bind input[type=range]")
    expect(sliders).to_have_count(count, timeout=60_000)
    for number in range(count):
        slider = sliders.nth(number)
        written = slider.locator("xpath=ancestor::*[contains(@class, 'vega-embed')]").locator("svg.marks")
        before = written.inner_html()
        slider.evaluate(MOVE)
        for _ in range(50):
            if written.inner_html() != before:
                break
            page.wait_for_timeout(100)
        assert written.inner_html() != before, f"slider {number} moves nothing"
    assert not page.errors
