"""What our documents say is true: their programs run, and what they point at is there."""

import re
from pathlib import Path
from textwrap import indent

import pytest
from documents import ROOT, Program, documents, excerpts_of, programs_of, run
from mypy import api

from pgqueue.cli import main
from pgqueue.schema.state import SCHEMA_VERSION

PROGRAMS = [program for document in documents() for program in programs_of(document)]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
FILE = re.compile(r"`((?:tests|docs|pgqueue|benchmarks|alembic|examples)/[\w./-]*\w)`")
COMMAND = re.compile(r"\bpgqueue(?: --(?:app|url) \S+)* ([a-z][a-z-]*)\b")
TARGET = re.compile(r"^make ([a-z]+)", re.MULTILINE)


@pytest.mark.journey
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_the_python_in_our_documents_runs(
    program: Program, tmp_path: Path, database_url: str
) -> None:
    # Never the name alone: a page may be called as a library is that its programs import.
    name = f"page_{program.document.stem.replace('-', '_').lower()}"

    run(program.source, name=name, directory=tmp_path, database_url=database_url)


@pytest.mark.journey
def test_type_checkers_accept_the_python_in_our_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, program in enumerate(PROGRAMS):
        name = re.sub(r"\W", "_", program.name)
        (tmp_path / f"program_{number}_{name}.py").write_text(program.source, "utf-8")
    monkeypatch.chdir(ROOT)

    flags = ["--config-file=", "--strict", "--follow-imports=silent"]
    answer, trouble, _ = api.run([*flags, "--cache-dir=.mypy_cache/documents", str(tmp_path)])

    assert not trouble
    assert [line for line in answer.splitlines() if ": error:" in line] == []


@pytest.mark.parametrize("document", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_excerpts_in_our_documents_are_what_the_files_say(document: Path) -> None:
    lines_of = {path: (ROOT / path).read_text("utf-8") for path, _ in excerpts_of(document)}

    changed = [
        f"{path} does not hold:\n{piece}"
        for path, piece in excerpts_of(document)
        if not any(indent(piece, " " * depth) in lines_of[path] for depth in (0, 4, 8))
    ]

    assert changed == []


@pytest.mark.parametrize("document", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_what_our_documents_point_at_exists(document: Path) -> None:
    text = document.read_text("utf-8")
    links = [link for link in LINK.findall(text) if "://" not in link]

    targets = [document.parent / link for link in links] + [
        ROOT / path for path in FILE.findall(text)
    ]
    missing = [str(target) for target in targets if not target.exists()]

    assert missing == []


@pytest.mark.parametrize("document", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_in_our_documents_exist(document: Path) -> None:
    shell = re.findall(
        r"^```(?:console|shell)\n(.*?)^```$", document.read_text("utf-8"), re.M | re.S
    )

    commands = {name for text in shell for name in COMMAND.findall(text)}
    targets = {name for text in shell for name in TARGET.findall(text)}

    assert commands <= set(main.commands)
    assert targets <= set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))


def test_the_revisions_in_our_documents_reach_the_current_version() -> None:
    page = (ROOT / "docs" / "how-to" / "migrations.md").read_text("utf-8")

    named = re.findall(r"(?:upgrade\(to|, base)=(\d+)", page)

    assert set(named) == {str(SCHEMA_VERSION), "0"}
