"""A database as one of several nodes: its number, and what is different with the extension Citus.

There our tables are plain tables of each node, which Citus neither distributes nor knows.
https://docs.citusdata.com/en/stable/develop/api_metadata.html
"""

from collections.abc import Sequence

from sqlalchemy import Connection, Row, text

from pgqueue.errors import SchemaError
from pgqueue.models.base import SCHEMA
from pgqueue.repository.nodes import BITS, HIGHEST_NUMBER, read_number

SETTINGS = ("citus.enable_ddl_propagation", "citus.enable_schema_based_sharding")
"""Off while our tables are created, so that they stay on this node.  Without Citus, PostgreSQL lets
everybody set them, and they have no effect.
https://www.postgresql.org/docs/current/runtime-config-custom.html
"""

_IS_HERE = text("SELECT pg_catalog.to_regclass('pg_catalog.pg_dist_node') IS NOT NULL")
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
    SELECT groupid AS "group", nodename AS host, nodeport AS port FROM pg_catalog.pg_dist_node
    WHERE noderole = 'primary' ORDER BY groupid
    """
)


def group_of(connection: Connection) -> int | None:
    """The group of this node; None without Citus."""
    return connection.scalar(_GROUP) if connection.scalar(_IS_HERE) else None


def distributed_tables(connection: Connection) -> Sequence[str]:
    """Our tables that Citus manages: distributed, reference and local ones of Citus."""
    return connection.scalars(_DISTRIBUTED).all() if connection.scalar(_IS_HERE) else ()


def nodes_known(connection: Connection) -> Sequence[Row[tuple[int, str, int]]]:
    """The ``group``, ``host`` and ``port`` of the nodes that this node knows; only where Citus is.

    The coordinator has group 0.  One that was not told its own address is missing.
    """
    return connection.execute(_NODES).all()


def set_number(connection: Connection, number: int | None) -> None:
    """Let new ids begin at ``number << 44``, unless they are beyond it; those given stay.

    Waits for transactions that have enqueued, and enqueues wait for the end of this one.  Does
    nothing for None, the group of a node without Citus.
    """
    if number is None or read_number(connection) == number:
        return
    if number > HIGHEST_NUMBER:
        raise SchemaError(
            f"this node would have the number {number}, and {HIGHEST_NUMBER} is the highest whose "
            "ids are smaller than 2**53; on Citus, a crash of the coordinator skips 32 numbers: "
            "remove the node, run setval('pg_catalog.pg_dist_groupid_seq', the highest groupid of "
            "pg_dist_node) on the coordinator, and add the node again"
        )
    first = (number << BITS) + 1
    for table in ("message_queue", "jobs"):  # that of jobs is read: it must be the last
        sequence = f'"{SCHEMA}".{table}_id_seq'
        last = connection.execute(text(f"SELECT last_value FROM {sequence}")).scalar_one()  # noqa: S608  # see SCHEMA
        restart = f"RESTART WITH {first}" if last < first else ""
        connection.execute(text(f"ALTER SEQUENCE {sequence} START WITH {first} {restart}"))
