"""The files beside the pages: vendored ones unchanged, templates without inline code."""

import json
import re
from hashlib import sha256
from importlib.resources import files

import pytest

DASHBOARD = files("pgqueue.dashboard")
TEMPLATES = [file.name for file in (DASHBOARD / "templates").iterdir()]
INLINE = re.compile(
    r"""\|\s*safe\b|Markup|innerHTML|hx-on|js:|\bstyle=|<style|<script(?! src=)|\bon\w+="""
)


def test_the_vendored_script_is_that_of_its_package() -> None:
    vendor = DASHBOARD / "static" / "vendor"
    htmx = json.loads((vendor / "vendored.json").read_text())["htmx.min.js"]
    assert sha256((vendor / "htmx.min.js").read_bytes()).hexdigest() == htmx["sha256"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_has_no_script_or_style_inline_and_escapes_all(name: str) -> None:
    assert INLINE.findall((DASHBOARD / "templates" / name).read_text()) == []


def test_the_script_writes_no_markup() -> None:
    script = (DASHBOARD / "static" / "dashboard.js").read_text()
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|Function\(", script
    )
