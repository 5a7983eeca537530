"""The browser that drives JupyterLab and the site, and what is done on both."""

import shutil

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


def move_every_slider(page):
    """Move each slider of the page to its other end, and wait until what its chart writes has changed."""
    sliders = page.locator(".vega-bind input[type=range]")
    sliders.first.wait_for(timeout=60_000)
    for number in range(sliders.count()):
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
    return sliders.count()
