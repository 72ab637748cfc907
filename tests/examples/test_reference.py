"""The reference is what the docstrings say, for every public name."""

import subprocess
import sys

from documents import ROOT

import pgqueue

SCRIPT = ROOT / "docs" / "write_reference.py"
PAGES = ROOT / "docs" / "reference"


def test_the_pages_are_those_the_docstrings_give() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_public_name_is_explained() -> None:
    text = "".join(page.read_text("utf-8") for page in PAGES.glob("*.md"))

    assert [name for name in pgqueue.__all__ if f"\n## `{name}`\n" not in text] == []
