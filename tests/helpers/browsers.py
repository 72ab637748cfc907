"""A browser for tests of pages; without one, they are skipped."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@contextmanager
def chromium(*arguments: str) -> Iterator["Browser"]:
    """Start Chromium; while it is open, this thread has a running event loop."""
    if CHROMIUM is None:
        pytest.skip("there is no browser: install Debian's package chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        args = ["--no-sandbox", *arguments]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=args)
        yield browser
        browser.close()
