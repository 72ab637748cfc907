"""Programs in Node, which need its package pg."""

import os
import shutil
import subprocess
from pathlib import Path

from sqlalchemy import URL


def can_run_node(folder: Path) -> bool:
    """Prepare a folder for programs in Node; False if this machine lacks Node or its package pg."""
    if shutil.which("node") is None:
        return False
    # An import finds packages beside the file only, and not in NODE_PATH.
    find = ["node", "-p", "require('path').resolve(require.resolve('pg/package.json'), '../..')"]
    found = subprocess.run(find, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        return False
    (folder / "node_modules").symlink_to(found.stdout.strip())
    return True


def run_node(program: Path, url: URL) -> None:
    """Run a program in its folder; raises an error with what it has written if it fails."""
    database = url.set(drivername="postgresql").render_as_string(hide_password=False)
    done = subprocess.run(
        ["node", program.name],
        cwd=program.parent,
        env={**os.environ, "DATABASE_URL": database},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
