"""What the errors and warnings of pgqueue have in common."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from pgqueue import PgQueueDeprecationWarning


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
