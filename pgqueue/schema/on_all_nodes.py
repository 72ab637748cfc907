"""What the coordinator of Citus creates on all nodes, beside the tables of each node.

The table by which transactions commit in two phases, and the functions by which Citus runs an
enqueue on the node to which a key hashes.  They run with the rights of their caller, and hold the
statement of an enqueue: no caller gives SQL.
"""

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from pgqueue.database.opening import connect_idle
from pgqueue.repository.enqueue import enqueue_job, holders_of_unique_keys
from pgqueue.repository.messages import Start
from pgqueue.repository.nodes import CITUS_SCHEMA, KEY_TYPES, TABLE, TABLE_EXISTS
from pgqueue.repository.tables import SEARCH_PATH
from pgqueue.schema import citus
from pgqueue.schema.state import wait_for_other_upgrades

_STARTS_AT = """coalesce((given ->> 'run_at')::timestamptz,
    clock_timestamp() + make_interval(secs => (given ->> 'delay')::double precision))"""


def create_on_all_nodes(engine: sa.Engine) -> None:
    """Create the table and the functions, or replace the functions.

    Does nothing elsewhere than on a coordinator, nor while the cluster has no other nodes.
    """
    with (
        connect_idle(engine).execution_options(isolation_level="READ COMMITTED") as connection,
        connection.begin(),
    ):
        wait_for_other_upgrades(connection)
        if citus.group_of(connection) != 0 or not _has_other_nodes(connection):
            return
        schema = f'"{CITUS_SCHEMA}"'
        # CREATE SCHEMA IF NOT EXISTS wants the right to create schemas even where there is one.
        if connection.scalar(sa.text(f"SELECT to_regnamespace('{schema}') IS NULL")):
            connection.exec_driver_sql(f"CREATE SCHEMA {schema}")
        connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA {schema} TO PUBLIC")
        # The check refuses every row, so that all roles may have the right to insert.  Without the
        # primary key, Citus could not move the shard when its node is drained.
        how = "'nothing', shard_count => 1, colocate_with => 'none'"
        _create_table(connection, TABLE, "nothing int PRIMARY KEY CHECK (false)", how, "INSERT")
        for key_type in KEY_TYPES.values():
            table = _table(key_type)
            _create_table(connection, table, f"key {key_type} PRIMARY KEY", "'key'", "SELECT")
            _create_function(connection, key_type)


def lacks_parts_of_citus(connection: sa.Connection) -> bool:
    """Whether a node of Citus lacks something that this version creates on all nodes."""
    if citus.group_of(connection) is None or not _has_other_nodes(connection):
        return False
    body = sa.text("SELECT prosrc FROM pg_catalog.pg_proc WHERE oid = pg_catalog.to_regproc(:name)")
    return not connection.scalar(TABLE_EXISTS) or any(
        connection.scalar(body, {"name": _function(key_type)}) != _body(key_type)
        for key_type in KEY_TYPES.values()
    )


def _has_other_nodes(connection: sa.Connection) -> bool:
    return any(node.group for node in citus.nodes_known(connection))


def _create_table(connection: sa.Connection, name: str, columns: str, how: str, right: str) -> None:
    if not connection.scalar(sa.text(f"SELECT to_regclass('{name}') IS NOT NULL")):
        connection.exec_driver_sql(
            f"CREATE TABLE {name} ({columns}); SELECT create_distributed_table('{name}', {how}); "
            f"GRANT {right} ON {name} TO PUBLIC"
        )


def _create_function(connection: sa.Connection, key_type: str) -> None:
    table, function = _table(key_type), _function(key_type)
    connection.exec_driver_sql(
        f"""
        CREATE OR REPLACE FUNCTION {function}(node_key {key_type}, given jsonb)
        RETURNS TABLE (id bigint, run_at numeric, created_at numeric, is_new boolean)
        LANGUAGE plpgsql SET search_path = {SEARCH_PATH} AS $pgqueue${_body(key_type)}$pgqueue$;
        SELECT create_distributed_function(
            '{function}({key_type}, jsonb)', 'node_key',
            colocate_with => '{table}', force_delegation => true
        );
        -- The default privileges of the owner may have none for PUBLIC.
        GRANT EXECUTE ON FUNCTION {function} TO PUBLIC
        """
    )


def _function(key_type: str) -> str:
    return f'"{CITUS_SCHEMA}".enqueue_{key_type}'


def _table(key_type: str) -> str:
    return f'"{CITUS_SCHEMA}".keys_{key_type}'


def _body(key_type: str) -> str:
    return f"""
        #variable_conflict use_column
        BEGIN
            -- Citus runs the function where it is called if it cannot delegate the call.
            IF NOT starts_with(current_setting('application_name'), 'citus_internal')
                AND NOT EXISTS (
                    SELECT FROM pg_dist_placement JOIN pg_dist_local_group USING (groupid)
                    WHERE shardid =
                        get_shard_id_for_distribution_column('{_table(key_type)}', node_key)
                )
            THEN
                RAISE 'Citus has not delegated this enqueue to the node of its key';
            END IF;
            IF given ->> 'limit_keys' IS NULL THEN
                RETURN QUERY {_enqueue(limited=False)};
            ELSE
                RETURN QUERY {_enqueue(limited=True)};
            END IF;
            IF NOT FOUND THEN
                RETURN QUERY {_holder()};
            END IF;
        END """


def _enqueue(*, limited: bool) -> str:
    # Without a key, the conflict and the labels cost nothing.
    return _with_values_of_job(
        enqueue_job(
            start=Start.AT, unique=True, notify=False, labelled=True, limited=limited, across=True
        )
    )


def _holder() -> str:
    found = [_with_values_of_job(holders_of_unique_keys(across=across)) for across in (False, True)]
    return f"SELECT id, NULL::numeric, NULL::numeric, false FROM ({' UNION '.join(found)}) AS held"  # noqa: S608  # our own statements


def _with_values_of_job(statement: Any) -> str:
    """The text of a statement, with the fields of a JSON document as its parameters."""
    dialect: Any = PGDialect_psycopg
    compiled = statement.compile(dialect=dialect(), compile_kwargs={"render_postcompile": True})
    values = {
        name: f"(given ->> '{name}')" if value is None else repr(value)
        for name, value in compiled.params.items()
    }
    keys = "jsonb_build_array(given ->> 'unique_key')"
    return str(compiled.string % {**values, "run_at": _STARTS_AT, "keys": keys})
