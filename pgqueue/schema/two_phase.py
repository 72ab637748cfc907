"""What the coordinator of Citus creates on all nodes, beside the tables of each node."""

from sqlalchemy import Connection, Engine, text

from pgqueue.repository.two_phase import CITUS_SCHEMA, TABLE, TABLE_EXISTS
from pgqueue.schema import citus
from pgqueue.schema.delegation import create_enqueue_functions, has_enqueue_functions
from pgqueue.schema.state import wait_for_other_upgrades

# The check refuses every row, so that all roles may have the right to insert.  Without the primary
# key, Citus could not move the shard when its node is drained.
_TABLE = text(
    f"""
    CREATE SCHEMA IF NOT EXISTS "{CITUS_SCHEMA}";
    CREATE TABLE {TABLE} (nothing int PRIMARY KEY CHECK (false));
    SELECT create_distributed_table('{TABLE}', 'nothing', shard_count => 1,
                                    colocate_with => 'none');
    GRANT USAGE ON SCHEMA "{CITUS_SCHEMA}" TO PUBLIC;
    GRANT INSERT ON {TABLE} TO PUBLIC;
    """
)


def create_on_all_nodes(engine: Engine) -> None:
    """On the coordinator of Citus, create the table by which transactions commit in two phases,
    and the functions of delegated enqueues.

    Does nothing elsewhere, nor while the cluster has no other nodes.
    """
    with (
        engine.connect().execution_options(isolation_level="READ COMMITTED") as connection,
        connection.begin(),
    ):
        wait_for_other_upgrades(connection)
        if citus.group_of(connection) != 0:
            return
        if not any(node.group for node in citus.nodes_known(connection)):
            return
        if not connection.scalar(TABLE_EXISTS):
            connection.execute(_TABLE)
        create_enqueue_functions(connection)


def is_on_this_node(connection: Connection) -> bool:
    """Whether this node has the table and the functions, as this version creates them."""
    return bool(connection.scalar(TABLE_EXISTS)) and has_enqueue_functions(connection)
