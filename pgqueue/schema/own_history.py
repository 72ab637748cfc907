"""The stand-alone way: pgqueue's revisions in their own history."""

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, insert

from pgqueue import redaction
from pgqueue.database.opening import connect_idle
from pgqueue.errors import SchemaError
from pgqueue.models.base import SCHEMA
from pgqueue.models.schema_version import SchemaVersion
from pgqueue.schema.citus import group_of, set_number
from pgqueue.schema.comparison import differences
from pgqueue.schema.on_all_nodes import create_on_all_nodes
from pgqueue.schema.state import (
    SCHEMA_VERSION,
    SchemaState,
    read_state,
    verify,
    wait_for_other_upgrades,
)

logger = redaction.logger(__name__)


def upgrade_database(engine: Engine) -> None:
    """Create or upgrade the tables; safe to call from several processes at once.

    Args:
        engine: An engine on the database.

    Raises:
        SchemaTooNew: The tables are newer than this code knows.
        SchemaError: The tables cannot be upgraded; the message says why.
    """
    # READ COMMITTED: a process that waited for the lock must see what the previous one has done.
    with (
        connect_idle(engine).execution_options(isolation_level="READ COMMITTED") as connection,
        connection.begin(),
    ):
        wait_for_other_upgrades(connection)
        found = read_state(connection)
        if found.version is None and "schema_version" in found.tables:
            _write_lost_version(connection, found)
            found = read_state(connection)
        if found.version is None or found.version < SCHEMA_VERSION:
            if damage := found.damage():
                raise damage
            if found.version is not None and found.revision is None:
                raise found.too_old()  # the tables are in the application's own history
            from alembic import command
            from alembic.config import Config

            config = Config()
            config.set_main_option("script_location", "pgqueue:migrations")
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
        verify(connection)
        set_number(connection, group_of(connection))
    create_on_all_nodes(engine)


def _write_lost_version(connection: Connection, found: SchemaState) -> None:
    """Write the version again that a dump or a TRUNCATE has left out.

    Only if the tables are those of this version, compared as Alembic compares them with models.
    """
    if found_others := differences(connection):
        raise SchemaError(
            f"{SCHEMA}.schema_version has lost its row, and the tables are not those of version "
            f"{SCHEMA_VERSION}: {found_others[0]}. Insert the row again, with the version that the "
            "tables have as its version and its oldest_code, and run this again."
        )
    row = {"version": SCHEMA_VERSION, "oldest_code": SCHEMA_VERSION}
    connection.execute(insert(SchemaVersion).values(row))
    if "alembic_version" in found.tables and found.revision is None:
        # The same dump has left it out.  A history of the application has its own elsewhere.
        table = sa.table("alembic_version", sa.column("version_num"), schema=SCHEMA)
        connection.execute(insert(table).values(version_num=f"pgqueue_{SCHEMA_VERSION:04}"))
    logger.warning(
        "%s.schema_version had lost its row; the tables are those of version %d, so it says that",
        SCHEMA,
        SCHEMA_VERSION,
    )
