"""Copies of this checkout, and programs that run on one of them alone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from hosts import CHECKOUT

from pgqueue.schema import SCHEMA_VERSION

SHIPPED = ("pyproject.toml", "README.md", "LICENSE", "alembic.ini", "alembic", "pgqueue")
HELPERS = Path(__file__).parent

NOW = SCHEMA_VERSION
NEXT = NOW + 1

NEXT_REVISION = f"""
import sqlalchemy as sa
from alembic import op

from pgqueue.models.base import SCHEMA

revision, down_revision = "pgqueue_{NEXT:04}", "pgqueue_{NOW:04}"


def upgrade():
    op.add_column("queues", sa.Column("note", sa.Text), schema=SCHEMA)
    op.execute(f"UPDATE {{SCHEMA}}.schema_version SET version = {NEXT}")


def downgrade():
    op.drop_column("queues", "note", schema=SCHEMA)
    op.execute(f"UPDATE {{SCHEMA}}.schema_version SET version = {NOW}")
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
    (directory / "alembic" / "versions" / f"{NEXT:04}_note_on_queues.py").write_text(NEXT_REVISION)
    state = directory / "pgqueue" / "schema" / "state.py"
    before = state.read_text()
    assert f"SCHEMA_VERSION = {NOW}\n" in before
    state.write_text(before.replace(f"SCHEMA_VERSION = {NOW}\n", f"SCHEMA_VERSION = {NEXT}\n"))
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
