"""Runs Procrastinate's acceptance tests over pgqueue, from a checkout of Procrastinate.

The tests are copied to a temporary folder, unchanged; nothing of Procrastinate is imported.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import make_url

from pgqueue.embedded import EmbeddedPostgres

HERE = Path(__file__).parent
FILES = ("test_async.py", "test_nominal.py", "test_sync.py")
SETTINGS = """[pytest]
addopts = -p procrastinate.acceptance -p no:xdist -ra
anyio_mode = auto
timeout = 120
"""


def main(checkout: str, options: Sequence[str]) -> int:
    """Run the tests; returns the exit code."""
    if not checkout:
        print(
            "No checkout of Procrastinate is named, so its acceptance tests are skipped: "
            "make procrastinate CHECKOUT=/path/to/procrastinate"
        )
        return 0
    tests = Path(checkout) / "tests" / "acceptance"
    if not tests.is_dir():
        print(f"{checkout} has no folder tests/acceptance: is it a checkout of Procrastinate?")
        return 2
    with tempfile.TemporaryDirectory() as folder, EmbeddedPostgres(durable=False) as server:
        prepare(tests, Path(folder))
        files = [f"tests/acceptance/{file}" for file in FILES]
        command = [sys.executable, "-m", "pytest", *options, *files]
        own = environment(Path(folder), server.url)
        return subprocess.run(command, cwd=folder, env=own, check=False).returncode


def prepare(tests: Path, folder: Path) -> None:
    """Copy the tests, and write the settings of pytest and the command ``procrastinate``."""
    shutil.copytree(tests, folder / "tests" / "acceptance")
    (folder / "tests" / "__init__.py").touch()
    (folder / "pytest.ini").write_text(SETTINGS, "utf-8")
    program = folder / "bin" / "procrastinate"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport sys\nfrom procrastinate.cli import main\nsys.exit(main())\n"
    )
    program.chmod(0o755)


def environment(folder: Path, url: str) -> dict[str, str]:
    """The environment of the tests and of the processes that they start."""
    server = make_url(url)
    own = {
        "PGHOST": server.query.get("host") or server.host,
        "PGPORT": server.port,
        "PGUSER": server.username,
        "PGPASSWORD": server.password,
    }
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("PG")},
        **{name: str(value) for name, value in own.items() if value},
        "PATH": os.pathsep.join([str(folder / "bin"), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(folder), str(HERE.parent), str(HERE.parents[1])]),
    }


if __name__ == "__main__":
    checkout, *options = sys.argv[1:] or [""]
    sys.exit(main(checkout, options))
