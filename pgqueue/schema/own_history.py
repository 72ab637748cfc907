"""The stand-alone way: pgqueue's revisions in their own history."""

from sqlalchemy import Engine

from pgqueue.database.opening import connect_idle
from pgqueue.schema.citus import group_of, set_number
from pgqueue.schema.on_all_nodes import create_on_all_nodes
from pgqueue.schema.state import SCHEMA_VERSION, read_state, verify, wait_for_other_upgrades


def upgrade_database(engine: Engine) -> None:
    """Create or upgrade the tables; safe to call from several processes at once."""
    # READ COMMITTED: a process that waited for the lock must see what the previous one has done.
    with (
        connect_idle(engine).execution_options(isolation_level="READ COMMITTED") as connection,
        connection.begin(),
    ):
        wait_for_other_upgrades(connection)
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
