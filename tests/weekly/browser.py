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

TRACEBACK = """/usr/lib/python3.12/site-packages/torch/backends/cudnn.py:120: UserWarning: a plan failed
  warnings.warn(
train.py:31: FutureWarning: `torch.cuda.amp.autocast(args...)` is deprecated.
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 48, in <module>
[rank1]:     scores = F.bilinear(users, items, weight, bias)
[rank1]: RuntimeError: All tensors must have the same dtype, got input1: c10::BFloat16, input2: float, weight: float"""

MOVE = """input => {
    input.value = input.value === input.max ? input.min : input.max
    input.dispatchEvent(new Event("input"))
}"""


def move_every_input(page, count):
    """Move each slider of the page's charts to its other end, choose another of each list and each row of buttons,
    turn each switch, write into each field; what the chart draws and writes must change."""
    # Also those in the answers of predictions.
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    inputs = page.locator(".vega-bind")
    expect(inputs).to_have_count(count, timeout=60_000)
    for number in range(count):
        one = inputs.nth(number)
        drawn = one.locator("xpath=ancestor::*[contains(@class, 'vega-embed')]").locator("svg.marks")
        before = drawn.inner_html()
        if one.locator("input[type=range]").count():
            one.locator("input[type=range]").evaluate(MOVE)
        elif one.locator("select").count():
            last = one.locator("option").count() - 1
            chosen = one.locator("select").evaluate("list => list.selectedIndex")
            one.locator("select").select_option(index=0 if chosen == last else last)
        elif one.locator("input[type=search]").count():
            one.locator("input[type=search]").fill("nan")
        elif one.locator("input[type=checkbox]").count():
            one.locator("input[type=checkbox]").click()
        else:
            one.locator("input[type=radio]:not(:checked)").last.check()
        for _ in range(50):
            if drawn.inner_html() != before:
                break
            page.wait_for_timeout(100)
        assert drawn.inner_html() != before, f"{one.inner_text()} moves nothing"
    assert not page.errors
