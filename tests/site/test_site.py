"""The site of the documentation in a browser, on a phone in dark and on a desk in light."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from browsers import chromium

if TYPE_CHECKING:
    from playwright.sync_api import ViewportSize

pytestmark = pytest.mark.journey

ROOT = Path(__file__).parents[2]
AXE = (ROOT / "tests/dashboard/axe/axe.min.js").read_text()
PAGES = ("", "explanation/comparison/", "how-to/an-approval/")
PHONE: "ViewportSize" = {"width": 390, "height": 844}
DESK: "ViewportSize" = {"width": 1280, "height": 900}
READERS: "list[tuple[ViewportSize, Literal['light', 'dark']]]" = [(PHONE, "dark"), (DESK, "light")]
WIDER = "document.documentElement.scrollWidth > innerWidth"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    zensical = Path(sys.executable).with_name("zensical")
    subprocess.run([zensical, "build", "--strict"], cwd=ROOT, check=True, capture_output=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=ROOT / "build/site"))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_everybody_can_read_a_page(address: str) -> None:
    found = []
    with chromium() as browser:
        for size, theme in READERS:
            page = browser.new_page(viewport=size, color_scheme=theme)
            for path in PAGES:
                page.goto(address + path)
                page.evaluate(AXE)
                barriers = page.evaluate("axe.run().then(found => found.violations)")
                found += [(path, theme, each["id"]) for each in barriers]
                if page.evaluate(WIDER):
                    found.append((path, theme, f"wider than {size['width']} pixels"))
    assert found == []
