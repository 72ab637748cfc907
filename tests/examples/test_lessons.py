"""Whoever does what a lesson says sees what it says."""

import shutil
from pathlib import Path

import pytest
from documents import ROOT
from lessons import Reader, is_said, steps_of

pytestmark = pytest.mark.journey

EXAMPLE = ROOT / "examples" / "shop"
TUTORIAL = ROOT / "docs" / "tutorial" / "flask-service.md"
FASTAPI_EXAMPLE = ROOT / "examples" / "fastapi_service"
FASTAPI_TUTORIAL = ROOT / "docs" / "tutorial" / "fastapi-service.md"


@pytest.mark.timeout(600)
def test_the_tutorial_builds_the_example_and_all_it_shows_is_so(server_directory: Path) -> None:
    with Reader(server_directory) as reader:
        for step in steps_of(TUTORIAL):
            reader.do(step)

        assert len(reader.terminals) == 3
        assert all(terminal.is_running for terminal in reader.terminals)
    built = (server_directory / "shop.py").read_text("utf-8")
    assert built == (EXAMPLE / "shop.py").read_text("utf-8")


@pytest.mark.timeout(600)
def test_the_tutorial_of_fastapi_builds_its_example(server_directory: Path) -> None:
    with Reader(server_directory) as reader:
        for step in steps_of(FASTAPI_TUTORIAL):
            reader.do(step)

        assert all(terminal.is_running for terminal in reader.terminals)
    for path in FASTAPI_EXAMPLE.iterdir():
        if path.is_file():
            assert (server_directory / path.name).read_text("utf-8") == path.read_text("utf-8")


@pytest.mark.timeout(600)
def test_the_readme_of_the_example_runs_it(server_directory: Path) -> None:
    shutil.copytree(EXAMPLE, server_directory, dirs_exist_ok=True)

    with Reader(server_directory) as reader:
        for step in steps_of(EXAMPLE / "README.md"):
            reader.do(step)

        assert all(terminal.is_running for terminal in reader.terminals)


def test_output_is_compared_line_by_line_and_in_order() -> None:
    said = "one\ntwo 22 two\nthree\n"

    assert is_said([], said)
    assert is_said(["one", "two ... two", "three"], said)
    assert not is_said(["two ... two", "one"], said)
    assert not is_said(["tw"], said)
    assert not is_said(["one", "one"], said)
