"""Applications with an Alembic history of their own: one call deep, and as whole projects."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection

import pgqueue

CHECKOUT = Path(pgqueue.__file__).parents[1]

ORDERS_WITH_JOBS = """
class Order(Base):
    __tablename__ = "orders"
    id = mapped_column(Integer, primary_key=True)
    job_id = mapped_column(ForeignKey(Job.id), index=True)
"""

# A convention that would rename every constraint of ours, and what autogenerate is told.
COMMON = """
import os
from sqlalchemy import ForeignKey, Integer, MetaData
from sqlalchemy.orm import DeclarativeBase, mapped_column
import pgqueue.schema
from pgqueue.models import Job

names = {"pk": "PK_%(table_name)s", "ix": "IX_%(column_0_label)s", "fk": "FK_%(table_name)s",
         "ck": "CK_%(table_name)s_%(constraint_name)s", "uq": "UQ_%(table_name)s"}
every_schema = {"include_schemas": True, "include_name": pgqueue.schema.include_name}
options = every_schema if os.environ.get("EVERY_SCHEMA") else {}
"""
WITH_ALEMBIC = """
class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=names)
"""
WITH_FLASK = """
from flask import Flask
from flask_migrate import Migrate
from flask_sqlalchemy import SQLAlchemy

app = Flask(__name__)
app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["DATABASE_URL"]
db = SQLAlchemy(app, metadata=MetaData(naming_convention=names))
Migrate(app, db, **options)
Base = db.Model
"""


@contextmanager
def host_revision(connection: Connection) -> Iterator[None]:
    """As inside the upgrade() of a host's revision: `op` works on its connection."""
    with Operations.context(MigrationContext.configure(connection)):
        yield


@contextmanager
def offline_revision(script: TextIO) -> Iterator[None]:
    """As inside the upgrade() of a host's revision under --sql: `op` writes a script."""
    options = {"as_sql": True, "output_buffer": script, "literal_binds": True}
    context = MigrationContext.configure(dialect_name="postgresql", opts=options)
    with Operations.context(context):
        yield


@dataclass(frozen=True)
class Host:
    """A small application on disk; its commands run as its authors would run them."""

    directory: Path
    url: str
    command: tuple[str, ...]
    head: str
    """What its models begin with."""

    @property
    def migrations(self) -> Path:
        return self.directory / "migrations"

    def write_models(self, models: str) -> None:
        (self.directory / "shop.py").write_text(COMMON + self.head + models)

    def autogenerate(self, message: str) -> None:
        subcommand = {"alembic": ["revision", "--autogenerate"], "flask": ["migrate"]}
        self.run(*subcommand[self.command[0]], "-m", message)

    def run(self, *arguments: str, **environment: str) -> str:
        """The output of one command, which must succeed."""
        run = self.try_run(*arguments, **environment)
        assert run.returncode == 0, run.stderr
        return run.stdout

    def try_run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        paths = {"PYTHONPATH": str(CHECKOUT), "DATABASE_URL": self.url, "FLASK_APP": "shop"}
        return subprocess.run(
            [sys.executable, "-m", *self.command, *arguments],
            cwd=self.directory,
            env=os.environ | paths | environment,
            capture_output=True,
            text=True,
        )


def alembic_host(directory: Path, url: str) -> Host:
    """What `alembic init` writes, with the two changes its manual asks for."""
    directory.mkdir()
    config = Config(directory / "alembic.ini")
    command.init(config, str(directory / "migrations"))
    _replace(
        directory / "alembic.ini", "driver://user:pass@localhost/dbname", url.replace("%", "%%")
    )
    env = directory / "migrations" / "env.py"
    _replace(env, "target_metadata = None", "import shop\ntarget_metadata = shop.Base.metadata")
    online = "connection=connection, target_metadata=target_metadata"
    _replace(env, online, f"{online}, **shop.options")
    return Host(directory, url, ("alembic",), WITH_ALEMBIC)


def flask_host(directory: Path, url: str) -> Host:
    """What `flask db init` writes, unchanged."""
    directory.mkdir()
    host = Host(directory, url, ("flask", "db"), WITH_FLASK)
    host.write_models("")
    host.run("init")
    return host


def _replace(path: Path, old: str, new: str) -> None:
    before = path.read_text()
    assert old in before
    path.write_text(before.replace(old, new))
