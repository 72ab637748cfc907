"""Databases of one server as the nodes of a queue, and a stand-in for the catalog of Citus."""

from collections.abc import Sequence

from sqlalchemy import Engine, text

from pgqueue import PgQueue
from pgqueue.nodes import Node
from pgqueue.repository.nodes import CITUS_SCHEMA, TABLE, read_number

DOWN = "postgresql://app:hunter2@127.0.0.1:9/down"
"""A node that is down: nothing listens on its port."""


STUBS = (
    "create_distributed_table(text, text)",
    "create_distributed_table(text, text, shard_count int, colocate_with text)",
    "create_distributed_function(text, text, colocate_with text, force_delegation bool)",
)


def numbered(urls: Sequence[str]) -> PgQueue:
    """A queue on the first of these databases, which get the numbers 1, 2 and so on."""
    queue = PgQueue(urls[0], nodes=urls)
    for node in queue.nodes:
        with queue.bound_to(node.url):
            queue.upgrade()
    return queue


def number_of(node: Node) -> int | None:
    with node.engine().connect() as connection:
        return read_number(connection)


def put_citus(engine: Engine, group: int, *nodes: tuple[int, str, int]) -> None:
    """Put what is used of Citus into a database: its group, the nodes that it knows, and functions
    that distribute nothing."""
    database = engine.url.database
    with engine.begin() as connection:
        for statement in (
            "SET LOCAL allow_system_table_mods = on",
            "CREATE TABLE pg_catalog.pg_dist_node (groupid int, nodename text, nodeport int, "
            "noderole text DEFAULT 'primary', isactive boolean DEFAULT true)",
            f"CREATE TABLE pg_catalog.pg_dist_local_group AS SELECT {group} AS groupid",
            "CREATE TABLE pg_catalog.pg_dist_partition (logicalrelid regclass)",
            "GRANT SELECT ON pg_dist_node, pg_dist_local_group, pg_dist_partition TO PUBLIC",
            *(f"CREATE FUNCTION {stub} RETURNS void LANGUAGE sql AS ''" for stub in STUBS),
            f"ALTER DATABASE {database} SET citus.enable_ddl_propagation = on",
            f"ALTER DATABASE {database} SET citus.enable_schema_based_sharding = on",
        ):
            connection.execute(text(statement))
        for node in nodes:
            connection.execute(text("INSERT INTO pg_dist_node VALUES ({}, '{}', {})".format(*node)))
    engine.dispose()  # new connections have the settings


def put_two_phase_table(engine: Engine) -> None:
    """Create the table by which Citus commits in two phases, as a plain one."""
    with engine.begin() as connection:
        connection.execute(text(f'CREATE SCHEMA "{CITUS_SCHEMA}"'))
        connection.execute(text(f"CREATE TABLE {TABLE} (nothing int CHECK (false))"))
