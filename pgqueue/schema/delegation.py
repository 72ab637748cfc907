"""The functions by which Citus runs an enqueue on the node to which a key hashes.

They run with the rights of their caller, and hold the statement of an enqueue: no caller gives SQL.
"""

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from pgqueue.repository.delegation import KEYS, name_of
from pgqueue.repository.enqueue import enqueue_job
from pgqueue.repository.messages import Start
from pgqueue.repository.tables import SEARCH_PATH, is_key_across_queues, jobs, text_parameter
from pgqueue.repository.two_phase import CITUS_SCHEMA

_STARTS_AT = """coalesce((given ->> 'run_at')::timestamptz,
    clock_timestamp() + make_interval(secs => (given ->> 'delay')::double precision))"""


def _with_values_of_job(statement: Any) -> str:
    """The text of a statement, with the fields of a JSON document as its parameters."""
    dialect: Any = PGDialect_psycopg
    compiled = statement.compile(dialect=dialect(), compile_kwargs={"render_postcompile": True})
    values = {
        name: f"(given ->> '{name}')" if value is None else repr(value)
        for name, value in compiled.params.items()
    }
    return str(compiled.string % {**values, "run_at": _STARTS_AT})


def _enqueue(*, limited: bool) -> str:
    # Without a key, the conflict and the labels cost nothing.
    return _with_values_of_job(
        enqueue_job(
            start=Start.AT, unique=True, notify=False, labelled=True, limited=limited, across=True
        )
    )


def _holder() -> str:
    times = (sa.cast(sa.null(), sa.Numeric), sa.cast(sa.null(), sa.Numeric))
    held = sa.select(jobs.c.id, *times, sa.false()).where(
        jobs.c.held_unique_key == text_parameter("unique_key"),
        jobs.c.held_unique_key.is_not(None),
    )
    in_queue = held.where(jobs.c.queue == text_parameter("queue"))
    return _with_values_of_job(in_queue.union(held.where(is_key_across_queues())))


def _function(key_type: type) -> str:
    return f'"{CITUS_SCHEMA}".enqueue_{name_of(key_type)}'


def _table(key_type: type) -> str:
    return f'"{CITUS_SCHEMA}".keys_{name_of(key_type)}'


def _body(key_type: type) -> str:
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


def _statements(key_type: type) -> tuple[str, str, str]:
    """What creates the function of a type of keys, its table, and what distributes it."""
    sql_type, table, function = name_of(key_type), _table(key_type), _function(key_type)
    create = f"""
        CREATE OR REPLACE FUNCTION {function}(node_key {sql_type}, given jsonb)
        RETURNS TABLE (id bigint, run_at numeric, created_at numeric, is_new boolean)
        LANGUAGE plpgsql SET search_path = {SEARCH_PATH} AS $pgqueue${_body(key_type)}$pgqueue$
    """
    create_table = f"""
        CREATE TABLE {table} (key {sql_type} PRIMARY KEY);
        SELECT create_distributed_table('{table}', 'key');
        GRANT SELECT ON {table} TO PUBLIC
    """
    distribute = f"""
        SELECT create_distributed_function(
            '{function}({sql_type}, jsonb)', 'node_key',
            colocate_with => '{table}', force_delegation => true
        )
    """
    return create, create_table, distribute


def create_enqueue_functions(connection: sa.Connection) -> None:
    """On the coordinator of Citus, create the functions on all nodes, or replace them."""
    for key_type in KEYS:
        create, create_table, distribute = _statements(key_type)
        exists = f"SELECT to_regclass('{_table(key_type)}') IS NOT NULL"
        connection.exec_driver_sql(create)
        if not connection.scalar(sa.text(exists)):
            connection.execute(sa.text(create_table))
        connection.execute(sa.text(distribute))


def has_enqueue_functions(connection: sa.Connection) -> bool:
    """Whether the functions are on this node, as this version creates them."""
    body = sa.text("SELECT prosrc FROM pg_catalog.pg_proc WHERE oid = pg_catalog.to_regproc(:name)")
    return all(
        connection.scalar(body, {"name": _function(key_type)}) == _body(key_type)
        for key_type in KEYS
    )
