"""A browser, for the site and for JupyterLab."""

import pytest
from playwright.sync_api import sync_playwright

from tests.weekly.browser import BROWSER, FLAGS


@pytest.fixture(scope="session")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A page of a real browser, with storage of its own; `page.errors` is what went wrong on it."""
    with browser.new_context(viewport={"width": 1300, "height": 1000}) as context:
        page = context.new_page()
        page.errors = []
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
        yield page
