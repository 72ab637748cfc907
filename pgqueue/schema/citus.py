"""What is different in a database with the extension Citus.

There our tables are plain tables of each node, which Citus neither distributes nor knows.
https://docs.citusdata.com/en/stable/develop/api_metadata.html
"""

from typing import NamedTuple

from sqlalchemy import Connection, text

from pgqueue.models.base import SCHEMA

IS_HERE = "pg_catalog.to_regclass('pg_catalog.pg_dist_node') IS NOT NULL"

_SETTINGS = "ARRAY['citus.enable_ddl_propagation', 'citus.enable_schema_based_sharding']"
_KEPT = "pg_catalog.replace(name, 'citus.', 'pgqueue.citus_')"


def _where_citus_is(action: str) -> str:
    return f"""
        DO $$ BEGIN
            IF {IS_HERE} THEN
                PERFORM {action} FROM pg_catalog.unnest({_SETTINGS}) AS name;
            END IF;
        END $$
    """


KEEP_TABLES_LOCAL = _where_citus_is(
    f"pg_catalog.set_config({_KEPT}, pg_catalog.current_setting(name), true), "
    "pg_catalog.set_config(name, 'off', true)"
)
"""Until the transaction ends, or until :data:`RESTORE`, what is created stays on this node."""
RESTORE = _where_citus_is(f"pg_catalog.set_config(name, pg_catalog.current_setting({_KEPT}), true)")
"""The settings that the transaction had before; the rest of a host's revision has them back."""

_DISTRIBUTED = text(
    f"""
    SELECT relname FROM pg_catalog.pg_dist_partition
    JOIN pg_catalog.pg_class ON pg_class.oid = logicalrelid::oid
    JOIN pg_catalog.pg_namespace ON pg_namespace.oid = relnamespace
    WHERE nspname = '{SCHEMA}' ORDER BY relname
    """  # noqa: S608  # the schema name is checked where it is read
)
_GROUP = text("SELECT groupid FROM pg_catalog.pg_dist_local_group")
_NODES = text(
    """
    SELECT groupid, nodename, nodeport FROM pg_catalog.pg_dist_node
    WHERE noderole = 'primary' AND isactive ORDER BY groupid
    """
)


class CitusNode(NamedTuple):
    group: int
    """0 is the coordinator."""
    host: str
    port: int


def is_here(connection: Connection) -> bool:
    return bool(connection.scalar(text(f"SELECT {IS_HERE}")))


def distributed_tables(connection: Connection) -> tuple[str, ...]:
    """Those of our tables that Citus has made its own; only where Citus is."""
    return tuple(connection.scalars(_DISTRIBUTED))


def group_of(connection: Connection) -> int | None:
    """The group of this node; None without Citus."""
    return connection.scalar(_GROUP) if is_here(connection) else None


def nodes_known(connection: Connection) -> list[CitusNode]:
    """The nodes that this node knows; only where Citus is.

    A coordinator that was not told its own address is missing.
    """
    return [CitusNode(*row) for row in connection.execute(_NODES)]
