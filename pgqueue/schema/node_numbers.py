"""Gives a node its number: where the ids of its jobs and messages begin."""

from sqlalchemy import Connection, text

from pgqueue.errors import SchemaError
from pgqueue.models.base import SCHEMA
from pgqueue.repository.nodes import BITS, HIGHEST_NUMBER, read_number
from pgqueue.schema import citus

_LOWER_GROUP = (
    "on Citus, a crash of the coordinator skips 32 numbers: remove the node, run "
    "setval('pg_catalog.pg_dist_groupid_seq', the highest groupid of pg_dist_node) on the "
    "coordinator, and add the node again"
)


def number_by_citus(connection: Connection) -> None:
    """Give a node of Citus the number of its group; does nothing elsewhere."""
    group = citus.group_of(connection)
    if group is not None:
        set_number(connection, group)


def set_number(connection: Connection, number: int) -> None:
    """Let new ids begin at ``number << 44``, unless they are beyond it; those given stay.

    Waits for transactions that have enqueued, and enqueues wait for the end of this one.
    """
    if number > HIGHEST_NUMBER:
        raise SchemaError(
            f"this node would have the number {number}, and {HIGHEST_NUMBER} is the highest whose "
            f"ids are smaller than 2**53; {_LOWER_GROUP}"
        )
    if read_number(connection) == number:
        return
    first = (number << BITS) + 1
    for table in ("message_queue", "jobs"):  # that of jobs is read: it must be the last
        sequence = f'"{SCHEMA}".{table}_id_seq'
        last = connection.scalar(text(f"SELECT last_value FROM {sequence}"))  # noqa: S608  # see SCHEMA
        assert last is not None  # a sequence has one row
        restart = f"RESTART WITH {first}" if last < first else ""
        connection.execute(text(f"ALTER SEQUENCE {sequence} START WITH {first} {restart}"))
