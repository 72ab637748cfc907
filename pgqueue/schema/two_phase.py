"""The table by which transactions of ours commit in two phases on Citus."""

from sqlalchemy import Engine, text

from pgqueue.repository.two_phase import CITUS_SCHEMA, TABLE, TABLE_EXISTS
from pgqueue.schema import citus
from pgqueue.schema.state import wait_for_other_upgrades

# The check refuses every row, so that all roles may have the right to insert.
_TABLE = text(
    f"""
    CREATE SCHEMA IF NOT EXISTS "{CITUS_SCHEMA}";
    CREATE TABLE {TABLE} (nothing int CHECK (false));
    SELECT create_distributed_table('{TABLE}', 'nothing', shard_count => 1,
                                    colocate_with => 'none');
    GRANT USAGE ON SCHEMA "{CITUS_SCHEMA}" TO PUBLIC;
    GRANT INSERT ON {TABLE} TO PUBLIC;
    """
)


def create_two_phase_table(engine: Engine) -> None:
    """On the coordinator of Citus, create the table on all nodes; does nothing elsewhere, nor
    while the cluster has no other nodes."""
    with (
        engine.connect().execution_options(isolation_level="READ COMMITTED") as connection,
        connection.begin(),
    ):
        wait_for_other_upgrades(connection)
        if citus.group_of(connection) != 0 or connection.scalar(TABLE_EXISTS):
            return
        if any(node.group for node in citus.nodes_known(connection)):
            connection.execute(_TABLE)
