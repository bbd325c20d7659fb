"""A real Chromium, and pages of it that must not complain."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.page.environment import chromium
from tests.support.servers import ServerMissing

try:
    from playwright.sync_api import Browser, Page, expect, sync_playwright
except ModuleNotFoundError:
    pytest.skip("Playwright is not installed: make page", allow_module_level=True)

DEADLINE_S = 180.0
OpenPage = Callable[..., Page]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    try:
        program = chromium()
    except ServerMissing as missing:
        pytest.skip(f"NO CHROMIUM: {missing}")
    expect.set_options(timeout=DEADLINE_S * 1000)
    with sync_playwright() as playwright:
        environment: Any = program.environment
        started = playwright.chromium.launch(
            executable_path=program.path, args=["--no-sandbox"], env=environment
        )
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """A page at a URL. What it says to the console is an error of the test, but for what is `expected`."""
    said: list[str] = []
    with contextlib.ExitStack() as stack:

        def opened(url: str, expected: str = "", **context: Any) -> Page:
            made = browser.new_context(**{"viewport": {"width": 1400, "height": 1000}, **context})
            stack.callback(made.close)
            page = made.new_page()
            page.set_default_timeout(DEADLINE_S * 1000)

            def hear(text: str) -> None:
                if not expected or expected not in text:
                    said.append(text)

            page.on("console", lambda message: hear(message.text))
            page.on("pageerror", lambda error: hear(str(error)))
            page.goto(url)
            return page

        yield opened
    assert said == []
