"""Every example runs, and is listed; what the page about them shows is what they say."""

import os
import re
import subprocess
import sys

import pytest
from documents import ROOT, excerpts_of

from examples.__main__ import HAND_WRITTEN

pytestmark = pytest.mark.journey

NOWHERE = "postgresql+psycopg://nobody@localhost:1/none"
PAGE = ROOT / "docs" / "how-to" / "from-a-hand-written-queue.md"


def run(*arguments: str, database_url: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "DATABASE_URL": database_url},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_example_leaves_the_database_of_the_environment_alone() -> None:
    assert "-- two_tables/with_pgqueue.py" in run("examples", "two_tables", database_url=NOWHERE)


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_an_example_runs_by_hand_and_with_pgqueue(name: str, empty_database_url: str) -> None:
    shown = run("examples", name, "--url", empty_database_url, database_url=NOWHERE)
    moved = run(f"examples.{name}.move", database_url=empty_database_url)

    assert re.findall(r"^-- (\S+)$", shown, re.M) == [
        f"{name}/by_hand.py",
        f"{name}/with_pgqueue.py",
    ]
    assert moved.startswith("moved ")


def test_all_examples_are_listed() -> None:
    folders = {page.parent.name for page in (ROOT / "examples").glob("*/*.py")}
    listed = re.findall(r"^\| \[`(\w+)`\]\(\1\)", (ROOT / "examples/README.md").read_text(), re.M)

    assert set(listed) == folders
    assert set(HAND_WRITTEN) <= folders


def test_every_statement_and_program_on_the_page_stands_in_an_example() -> None:
    blocks = re.findall(r"^```(?:sql|python)$", PAGE.read_text("utf-8"), re.M)
    shown = excerpts_of(PAGE)

    assert len(shown) == len(blocks)
    assert {path for path, _ in shown} >= {
        f"examples/{name}/{module}.py"
        for name in HAND_WRITTEN
        for module in ("by_hand", "with_pgqueue")
    }
