"""Applications with an Alembic history of their own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection


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
