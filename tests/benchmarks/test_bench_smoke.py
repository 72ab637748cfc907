"""The benchmarks run: each in its tiniest size, on a server of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_every_case_measures_what_it_says() -> None:
    command = [sys.executable, "-m", "benchmarks"]
    known = subprocess.run([*command, "list"], cwd=ROOT, capture_output=True, text=True, check=True)
    ended = subprocess.run([*command, "--smoke"], cwd=ROOT, capture_output=True, text=True)

    names = [line for line in known.stdout.splitlines() if not line.startswith(" ")]
    told = [line.split()[0] for line in ended.stdout.splitlines() if not line.startswith(" ")]
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [name for name in names if name not in told] == []
    assert "spoiled" not in ended.stdout
