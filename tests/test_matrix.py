"""The matrix tries the very versions that pyproject.toml promises."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
OURS = ("embedded", "flask", "json", "metrics", "pydantic", "rich", "tracing")
YOURS = ("asyncpg", "flask-")
"""What an application may bring beside pgqueue, whose least versions the documents name."""
PIN = re.compile(r'"([\w-]+)(?:\[\w+\])?==([\d.]+)"')


def promised() -> dict[str, str]:
    """The least version of each requirement, as it is written."""
    extras = PROJECT["optional-dependencies"]
    lines = list(PROJECT["dependencies"])
    lines += [line for extra in OURS for line in extras[extra]]
    lines += [line for line in extras["dev"] if line.startswith(YOURS)]
    found = map(Requirement, lines)
    return {
        each.name: next(s.version for s in each.specifier if s.operator == ">=") for each in found
    }


def test_the_oldest_that_is_tried_is_the_oldest_that_is_promised() -> None:
    pins = PIN.findall((ROOT / "noxfile.py").read_text("utf-8"))

    for name, version in promised().items():
        tried = [Version(pinned) for pinned_name, pinned in pins if pinned_name == name]
        assert min(tried) == Version(version), name
