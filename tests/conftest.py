import pytest
from playwright.sync_api import sync_playwright

from tests.browser import BROWSER, FLAGS


@pytest.fixture
def page():
    """A page of a real browser; `page.errors` is what went wrong on it."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        page.errors = []
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
        yield page
        browser.close()
