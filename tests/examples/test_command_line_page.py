"""The page on the command line: its commands run, in its order, as a reader would type them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT, programs_of

pytestmark = pytest.mark.journey

PAGE = ROOT / "docs" / "how-to" / "command-line.md"
SHELL = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(600)
def test_the_commands_of_the_page_run_one_after_the_other(
    tmp_path: Path, empty_database_url: str
) -> None:
    [application] = programs_of(PAGE)
    (tmp_path / "shop.py").write_text(application.blocks[0][1], "utf-8")
    script = "".join(SHELL.findall(PAGE.read_text("utf-8")))
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

    ended = subprocess.run(
        ["sh", "-e", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": programs, "DATABASE_URL": empty_database_url},
        capture_output=True,
        text=True,
        timeout=550,
    )

    assert ended.returncode == 0, ended.stderr
    assert not [line for line in ended.stderr.splitlines() if line.startswith("Error:")]
    assert "1 failed, 2 succeeded\n" in ended.stdout
    assert "ConnectionError: the bank does not answer" in ended.stdout
    assert "2: requeued\n2: cancelled\n1 requeued\n1 cancelled\n" in ended.stdout
