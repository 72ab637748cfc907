"""The reference names every public name, and the site has every page."""

import subprocess

import pytest
from documents import ROOT

import pgqueue
from pgqueue import tables

PAGES = ROOT / "docs" / "reference"


def test_every_public_name_is_explained() -> None:
    directives = "".join(page.read_text("utf-8") for page in PAGES.glob("*.md")).splitlines()

    only_there = set(tables.__all__) - set(pgqueue.__all__)
    names = [*pgqueue.__all__, *(f"tables.{name}" for name in sorted(only_there))]
    assert [name for name in names if f"::: pgqueue.{name}" not in directives] == []


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    navigation = (ROOT / "zensical.toml").read_text("utf-8")
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]

    assert [page for page in pages if f'"{page}"' not in navigation] == []


@pytest.mark.journey
def test_the_site_builds_without_warnings_and_all_its_links_have_targets() -> None:
    pytest.importorskip("zensical")

    built = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert built.returncode == 0, built.stdout + built.stderr
