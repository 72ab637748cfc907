"""Every page in a browser: it fits, breaks no policy, runs no text of a job, and all can use it.

Without a browser, these tests are skipped.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from broken_shop import Shop as BrokenShop
from browsers import chromium
from dashboard_shop import filled_shop
from dashboard_site import Site, served
from sqlalchemy import Engine, create_engine

from pgqueue import JobStatus
from pgqueue.dashboard.pages import ROUTES, actions
from pgqueue.testing.databases import fresh_database

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.journey

AXE = (Path(__file__).parent / "axe" / "axe.min.js").read_text()
PUBLIC_NAME = "ops.example"
SCREENSHOTS = os.environ.get("PGQUEUE_SCREENSHOTS")
"""A folder for pictures of all pages."""
NO_TLS = "The Cross-Origin-Opener-Policy header has been ignored, because the URL's origin was"
"""What Chromium says of a page over plain HTTP."""
WITNESS = """
    window.faults = [];
    addEventListener("securitypolicyviolation", e =>
        window.faults.push(`policy: ${e.violatedDirective} ${e.blockedURI} ${e.sample}`));
    addEventListener("error", e => window.faults.push(`error: ${e.message}`), true);
"""


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with chromium(f"--host-resolver-rules=MAP {PUBLIC_NAME} 127.0.0.1") as browser:
        yield browser


@pytest.fixture(scope="module")
def site(browser: "Browser", server_url: str, template_url: str) -> Iterator[Site]:
    with fresh_database(server_url, template_url=template_url) as url:
        engine = create_engine(url)
        with filled_shop(engine) as queue, served(queue) as site:
            yield site
        engine.dispose()


@contextmanager
def opened(browser: "Browser", **options: Any) -> Iterator["Page"]:
    """A page in a context of its own; it has written no error at the end."""
    context = browser.new_context(reduced_motion="reduce", **options)
    errors: list[str] = []
    page = context.new_page()
    page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: errors.append(f"a dialog: {dialog.message}"))
    page.add_init_script(WITNESS)
    try:
        yield page
        assert [line for line in errors if not line.startswith(NO_TLS)] == []
    finally:
        context.close()


def test_links_lead_to_every_page(site: Site) -> None:
    pages = {route.endpoint for route in ROUTES if route.method == "GET"}
    assert pages - site.pages.keys() == set()


@pytest.mark.parametrize(
    ("width", "theme"),
    [
        (1280, "light"),
        (1280, "dark"),
        (1024, "light"),
        (768, "dark"),
        (390, "light"),
        (390, "dark"),
    ],
)
def test_a_page_fits_and_text_of_jobs_does_nothing(
    browser: "Browser", site: Site, width: int, theme: Any
) -> None:
    faults: list[tuple[object, ...]] = []
    size = {"width": width, "height": 900 if width > 700 else 844}
    with opened(browser, viewport=size, color_scheme=theme) as page:
        for address in site.addresses:
            response = page.goto(site.root + address)
            assert response is not None
            if response.status != 200:
                faults.append((address, response.status))
            if (wide := page.evaluate("document.documentElement.scrollWidth")) > width:
                faults.append((address, f"{wide} pixels wide", page.evaluate(WIDEST, width)))
            faults += [(address, fault) for fault in page.evaluate(HIDDEN)]
            if width == PHONE:
                faults += [(address, fault) for fault in page.evaluate(SMALL)]
            faults += [(address, fault) for fault in page.evaluate("window.faults")]
            if page.evaluate("'hacked' in window"):
                faults.append((address, "a script of a job's text has run"))
            if SCREENSHOTS:
                _picture(page, address, f"{theme}-{width}")
    assert faults == []


WIDEST = """width => [...document.querySelectorAll("main *")]
    .filter(e => e.getBoundingClientRect().right > width && e.offsetParent)
    .slice(0, 3).map(e => e.outerHTML.slice(0, 120))"""


HIDDEN = """() => {
    const faults = [...document.querySelectorAll(".table")]
        .filter(e => e.scrollWidth > e.clientWidth)
        .map(e => `columns are out of sight: ${e.querySelector("caption").textContent}`);
    for (const button of document.querySelectorAll(".code > .copy:not([hidden])")) {
        const box = button.getBoundingClientRect();
        const text = document.createRange();
        text.selectNodeContents(button.parentElement.querySelector("pre, .frames"));
        const lies = [...text.getClientRects()].some(line => line.width && line.right > box.left
            && line.left < box.right && line.bottom > box.top && line.top < box.bottom);
        if (lies && box.width) faults.push(`Copy lies on ${text.toString().slice(0, 40)}`);
    }
    return faults;
}"""
"""What is covered, or can be seen only by scrolling sideways."""

PHONE = 390
SMALL = """() => [...document.querySelectorAll("main .list :is(a, input), main a.square")]
    .map(e => [e, e.getBoundingClientRect()])
    .filter(([e, box]) => box.width && Math.min(box.width, box.height) < 23.9)
    .map(([e, box]) => `${box.width} x ${box.height}: ${e.outerHTML.slice(0, 80)}`)"""
"""What is too small for a finger."""


def _picture(page: "Page", address: str, kind: str) -> None:
    height = page.evaluate("document.documentElement.scrollHeight")
    before = page.viewport_size
    assert before is not None
    page.set_viewport_size(
        {"width": before["width"], "height": min(max(height, before["height"]), 2400)}
    )
    name = re.sub(r"[^a-zA-Z0-9]+", "-", address).strip("-")[:60] or "overview"
    page.screenshot(path=Path(str(SCREENSHOTS)) / f"{name}-{kind}.png")
    page.set_viewport_size(before)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_page_has_no_serious_barrier(browser: "Browser", site: Site, theme: Any) -> None:
    barriers = []
    with opened(browser, color_scheme=theme) as page:
        for address in (some[0] for some in site.pages.values() if some):
            page.goto(site.root + address)
            page.evaluate(AXE)  # by the debugger: the policy of the page does not hold for it
            found = page.evaluate("axe.run().then(found => found.violations)")
            barriers += [
                (address, each["id"], [node["html"][:160] for node in each["nodes"][:2]])
                for each in found
                if each["impact"] in ("serious", "critical")
            ]
    assert barriers == []


def test_a_page_needs_no_script(browser: "Browser", site: Site) -> None:
    with opened(browser, java_script_enabled=False) as page:
        for address in site.addresses:
            page.goto(site.root + address)
            assert page.locator("h1").inner_text(), address
        page.goto(f"{site.root}/you")
        page.get_by_role("button", name="Change the colours").click()
        assert page.locator("html").get_attribute("data-theme") == "light"
        assert page.url == f"{site.root}/you"


def test_a_form_over_plain_http_is_of_this_site(browser: "Browser", site: Site) -> None:
    with opened(browser) as page:
        page.goto(f"{site.root.replace('127.0.0.1', PUBLIC_NAME)}/you")
        page.get_by_role("button", name="Change the colours").click()
        assert page.locator("html").get_attribute("data-theme") == "light"


def test_an_action_on_many_jobs_goes_on_by_itself(
    browser: "Browser", engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "LONGEST_WORK", 0)  # one portion in each request
    shop = BrokenShop(engine)
    shop.fail(250)
    with served(shop.queue) as site, opened(browser) as page:
        page.goto(f"{site.root}/actions/preview?action=requeue&q=status:failed")
        page.get_by_role("button", name="Requeue 250 jobs").click()
        page.locator("#action .s-succeeded").wait_for(timeout=60_000)
        assert "250 jobs requeued" in page.locator("#action").inner_text()
    assert set(shop.statuses().values()) == {JobStatus.PENDING}


def test_keys_lead_through_the_pages(browser: "Browser", site: Site) -> None:
    with opened(browser) as page:
        page.goto(f"{site.root}/you")
        page.keyboard.press("?")
        assert page.get_by_role("dialog").is_visible()
        page.keyboard.press("Escape")
        for entry in page.locator(".side a").all():
            key, label = entry.get_attribute("data-key"), entry.inner_text()
            page.keyboard.press("g")
            with page.expect_navigation():
                page.keyboard.press(str(key))
            assert page.locator(".side [aria-current]").inner_text() == label


def test_a_refresh_keeps_what_is_open_and_where_the_reader_is(
    browser: "Browser", site: Site
) -> None:
    with opened(browser) as page:
        page.goto(f"{site.root}/")
        page.locator("main .chart summary").first.click()
        page.keyboard.press("j")
        row = page.locator("table.list tbody tr").first.element_handle()
        with page.expect_event("requestfinished", lambda sent: "hx-request" in sent.headers):
            pass
        page.wait_for_function("document.querySelector('#freshness').textContent === 'now'")

        assert page.locator("main .chart details").first.get_attribute("open") is not None
        assert page.evaluate("row => row === document.activeElement", row)


def test_the_hint_of_a_time_has_it_in_the_zone_of_the_viewer(
    site: Site, browser: "Browser"
) -> None:
    with opened(browser, timezone_id="Asia/Tokyo", locale="en-GB") as page:
        page.goto(f"{site.root}/failures")
        hint = page.locator("time[data-age]").first.get_attribute("title") or ""

    utc, _, here = hint.partition(" UTC, here ")
    assert here
    assert utc[:16] not in here
