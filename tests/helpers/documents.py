"""The Python in our documents, as programs that can be run.

A fenced block starts a program.  A comment directly above it may say otherwise:
``<!-- continues -->`` adds the block to the program before it, and ``<!-- not run: reason -->``
leaves it out.  ``<!-- from: path -->`` says that the block, of any language, is a piece of that
file; it is run there.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REMARK = re.compile(r"<!-- (continues|(?:not run|from|file|adds to): .+) -->\n+\Z")
EXCERPT = re.compile(r"^<!-- from: (\S+) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Program:
    """Blocks that share a namespace, at the line numbers they have in their document."""

    document: Path
    line: int
    blocks: list[tuple[int, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"

    @property
    def source(self) -> str:
        """The blocks, with empty lines between them: a traceback names lines of the document."""
        text = ""
        for line, code in self.blocks:
            text += "\n" * (line - 1 - text.count("\n")) + code
        return text


def documents() -> list[Path]:
    pages = [page for page in ROOT.glob("*.md") if page.name != "CHANGELOG.md"]
    return sorted([*pages, *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def excerpts_of(document: Path) -> list[tuple[str, str]]:
    """The pieces of files that a document shows: the path, and the piece."""
    return [(piece[1], piece[2]) for piece in EXCERPT.finditer(document.read_text("utf-8"))]


def programs_of(document: Path) -> Iterator[Program]:
    """The programs of one document, in its order."""
    text = document.read_text("utf-8")
    program: Program | None = None
    for block in FENCE.finditer(text):
        line = text.count("\n", 0, block.start(1)) + 1
        remark = REMARK.search(text[: block.start()])
        if remark is not None and remark[1] != "continues":
            continue
        if remark is None or program is None:
            if program is not None:
                yield program
            program = Program(document, line)
        program.blocks.append((line, block[1]))
    if program is not None:
        yield program


def run(source: str, *, name: str, directory: Path, database_url: str) -> str:
    """Run a program as a file of its own, as a reader would; returns what it printed."""
    path = directory / f"{name}.py"
    path.write_text(source, "utf-8")
    done = subprocess.run(
        [sys.executable, path],
        cwd=directory,
        env={**os.environ, "DATABASE_URL": database_url},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, f"{name} failed:\n{done.stderr}"
    return done.stdout
