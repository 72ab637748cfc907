"""Copies of this checkout, and programs that run on one of them alone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from hosts import CHECKOUT

SHIPPED = ("pyproject.toml", "README.md", "LICENSE", "alembic.ini", "alembic", "pgqueue")
HELPERS = Path(__file__).parent

NEXT_REVISION = """
import sqlalchemy as sa
from alembic import op

from pgqueue.models.base import SCHEMA

revision, down_revision = "pgqueue_0003", "pgqueue_0002"


def upgrade():
    op.add_column("queues", sa.Column("note", sa.Text), schema=SCHEMA)
    op.execute(f"UPDATE {SCHEMA}.schema_version SET version = 3")


def downgrade():
    op.drop_column("queues", "note", schema=SCHEMA)
    op.execute(f"UPDATE {SCHEMA}.schema_version SET version = 2")
"""


def copy_of_checkout(directory: Path) -> Path:
    """What a clone would hold, the link to the migrations included."""
    directory.mkdir()
    ignored = shutil.ignore_patterns("__pycache__")
    for name in SHIPPED:
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, directory / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, directory / name)
    return directory


def checkout_of_next_version(directory: Path) -> Path:
    """This code as it will be when there is one revision more."""
    copy_of_checkout(directory)
    (directory / "alembic" / "versions" / "0003_note_on_queues.py").write_text(NEXT_REVISION)
    state = directory / "pgqueue" / "schema" / "state.py"
    before = state.read_text()
    assert "SCHEMA_VERSION = 2\n" in before
    state.write_text(before.replace("SCHEMA_VERSION = 2\n", "SCHEMA_VERSION = 3\n"))
    return directory


def run_program(
    program: str, *arguments: str, python: str = sys.executable, path: Path | None = None
) -> str:
    """The output of a program that finds pgqueue on the path alone, and must succeed."""
    paths = os.pathsep.join(map(str, filter(None, (path, HELPERS))))
    run = subprocess.run(
        [python, "-c", program, *arguments],
        cwd="/",
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout
