"""Delegated enqueues: Citus runs the enqueue on the node to which a key hashes.

Each type of key has a function, because Citus hashes each type in its own way.
``pgqueue.schema.delegation`` creates the functions.
"""

import json
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from pgqueue.repository.enqueue import Enqueued, Executor, NewJob
from pgqueue.repository.fast_path import fetch
from pgqueue.repository.reading import Moment
from pgqueue.repository.tables import json_parameter, wake_up_call
from pgqueue.repository.two_phase import CITUS_SCHEMA

NodeKey = int | str | UUID
KEYS: dict[type, sa.types.TypeEngine[Any]] = {int: sa.BIGINT(), str: sa.TEXT(), UUID: sa.UUID()}
"""The types of keys, and those of PostgreSQL by which Citus hashes them."""


def name_of(key_type: type) -> str:
    """The type of a key in the names of its function and table."""
    return KEYS[key_type].compile().lower()


def _enqueue_on_node(key_type: type) -> sa.Executable:
    """Nothing but a call is delegated: no CTE, no condition."""
    call = getattr(getattr(sa.func, CITUS_SCHEMA), f"enqueue_{name_of(key_type)}")
    key = sa.cast(sa.bindparam("key", type_=KEYS[key_type]), KEYS[key_type])
    times = (sa.column("run_at", Moment()), sa.column("created_at", Moment()))
    columns = (sa.column("id", sa.BigInteger), *times, sa.column("is_new", sa.Boolean))
    made = call(key, json_parameter("job")).table_valued(*columns).render_derived(name="made")
    return sa.select(*made.c)


_ENQUEUE_ON_NODE = {key_type: _enqueue_on_node(key_type) for key_type in KEYS}
_WAKE_UP = sa.select(wake_up_call())


def enqueue_on_node(
    executor: Executor,
    key: NodeKey,
    new: NewJob,
    text: str,
    *,
    unique_key: str | None,
    limit_keys: str | None,
) -> Enqueued | int | None:
    """Insert a job on the node of a key; returns the values that its database chose, or the id of
    the job that holds the unique key; None if that has ended meanwhile.

    Notifies here, where workers of all nodes listen: a transaction that has sent a notification
    there could not be prepared.
    """
    keys = {"unique_key": unique_key, "limit_keys": limit_keys}
    job = json.dumps({**new.parameters(), **keys, "args": text}, default=_plain)
    rows = fetch(executor, _ENQUEUE_ON_NODE[type(key)], {"key": key, "job": job})
    if not rows:
        return None
    [(id, run_at, created_at, is_new)] = rows
    if not is_new:
        return int(id)
    if new.notify:
        fetch(executor, _WAKE_UP, {})
    return Enqueued(id, run_at, created_at)


def _plain(value: datetime | timedelta) -> str | float:
    return value.isoformat() if isinstance(value, datetime) else value.total_seconds()
