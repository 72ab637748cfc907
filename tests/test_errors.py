"""What the errors and warnings of pgqueue have in common."""

import ast
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pgqueue import PgQueueDeprecationWarning, errors, public

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text("utf-8")
FRAGMENT = re.compile(r"^\| `([^|]+?)` \|", re.MULTILINE)


def test_every_error_and_warning_is_public_and_has_its_row() -> None:
    ours = {
        name
        for name, found in vars(errors).items()
        if isinstance(found, type) and issubclass(found, errors.PgQueueError | Warning)
    }

    assert ours - set(public.__all__) == set()
    rows = "".join(line for line in _part("By class").splitlines() if line.startswith("| [`"))
    assert [name for name in sorted(ours) if f"(#pgqueue.{name})" not in rows] == []


def test_the_messages_of_the_index_are_those_of_the_code() -> None:
    listed = FRAGMENT.findall(_part("By message").partition("Errors that are not")[0])
    texts = "\n".join(_texts())

    assert len(listed) > 20
    assert [fragment for fragment in listed if fragment not in texts] == []


def _part(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def _texts() -> Iterator[str]:
    """The texts of the package, each as its literals give it."""
    for path in (ROOT / "pgqueue").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                pieces = [each.value for each in node.values if isinstance(each, ast.Constant)]
                yield "\0".join(map(str, pieces))


def test_a_deprecation_warns_at_the_line_of_the_application(tmp_path: Path) -> None:
    program = tmp_path / "shop.py"
    program.write_text(
        "from pgqueue.errors import warn_deprecated\n\n"
        "warn_deprecated('Limit(rate=)', use='Limit(per=)', removed_in='0.3')\n"
    )

    with pytest.warns(PgQueueDeprecationWarning) as told:
        runpy.run_path(str(program))

    [warning] = told
    assert (warning.filename, warning.lineno) == (str(program), 3)
    assert str(warning.message) == (
        "Limit(rate=) is deprecated, and pgqueue 0.3 removes it: use Limit(per=)"
    )


def test_deprecations_can_be_made_errors_by_their_public_name(tmp_path: Path) -> None:
    (tmp_path / "test_shop.py").write_text(
        "from pgqueue.errors import warn_deprecated\n\n"
        "def test_shop():\n    warn_deprecated('a', use='b', removed_in='0.3')\n"
    )
    option = "error::pgqueue.PgQueueDeprecationWarning"

    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", option],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert ended.returncode == 1, ended.stdout
    assert "PgQueueDeprecationWarning: a is deprecated" in ended.stdout
