"""Jobs with unique keys: who holds a key, and enqueues that may change the holder."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from pgqueue.repository.enqueues import KeyHolder, NewJob, Placed, Row
from pgqueue.statements import enqueueing, unique_keys
from pgqueue.statements.operations import NEW
from pgqueue.unique import Unique

Executor = Session | Connection


def holders(executor: Executor, queue: str, keys: Iterable[str]) -> dict[str, KeyHolder]:
    """Return the unfinished jobs of a queue that hold these keys."""
    parameters = {"queue": queue, "keys": json.dumps(list(keys))}
    rows = executor.execute(enqueueing.holders_of_unique_keys(), parameters)
    return {key: KeyHolder(id, is_readable) for id, key, is_readable in rows}


def enqueue_or_change(executor: Executor, new: NewJob, rows: Sequence[Row]) -> list[Placed]:
    """Insert jobs, or change the waiting jobs that hold their keys; in one transaction.

    The keys are ascending, each at most once.  A key whose job has started is given back and taken
    again if a job gives it back at its start; otherwise the job is returned unchanged.
    """
    unique = new.unique or Unique()
    placed = _at_bound(executor, new, unique, rows)
    left = [row for row in rows if row.unique_key not in placed]
    without_key = _insert_or_lock(executor, new, left, placed)
    taken = _missing(left, placed)
    if taken:
        placed |= _changed(executor, new, unique, taken)
        started = _missing(taken, placed)
        if started and unique.until == "started":
            freed = _freed(executor, new, started)
            # We hold the rows of the jobs that had these keys, so no other caller can take them.
            _insert_or_lock(
                executor, new, [row for row in started if row.unique_key in freed], placed
            )
        if unchanged := [str(row.unique_key) for row in _missing(taken, placed)]:
            found = holders(executor, new.queue, unchanged)
            placed |= {key: Placed(holder.id, is_new=False) for key, holder in found.items()}
    fresh = iter(without_key)
    return [next(fresh) if key is None else placed[key] for _, key, _ in rows]


def _missing(rows: Sequence[Row], placed: dict[str, Placed]) -> list[Row]:
    return [row for row in rows if row.unique_key is not None and row.unique_key not in placed]


def _at_bound(
    executor: Executor, new: NewJob, unique: Unique, rows: Sequence[Row]
) -> dict[str, Placed]:
    """The waiting jobs that cannot be postponed further.

    Looked up before anything is locked: a worker may claim them, however many callers come.
    """
    if unique.at_most is None or unique.on_conflict != "postpone":
        return {}
    parameters = {**_common(new, rows), "at_most": unique.at_most}
    found = executor.execute(unique_keys.holders_at_bound(), parameters)
    return {key: Placed(id, is_new=False, is_changed=True) for id, key in found}


def _insert_or_lock(
    executor: Executor, new: NewJob, rows: Sequence[Row], placed: dict[str, Placed]
) -> list[Placed]:
    """Insert the jobs whose keys are free, and note them; returns those without a key, in order.

    Waits for other transactions that have one of the keys, and locks the holders of the others.
    """
    if not rows:
        return []
    statement = enqueueing.enqueue_or_lock_jobs(
        start=new.start, notify=new.notify, labelled=new.is_labelled
    )
    written = executor.execute(statement, {**new.parameters(), **_documents(rows)}).all()
    placed |= {key: Placed(id, is_new=True) for id, key, *_ in written if key is not None}
    ids = sorted(id for id, key, *_ in written if key is None)
    return [Placed(id, is_new=True) for id in ids]


def _changed(
    executor: Executor, new: NewJob, unique: Unique, rows: Sequence[Row]
) -> dict[str, Placed]:
    statement = unique_keys.change_holders(
        start=new.start,
        replace=unique.on_conflict == "replace",
        bounded=unique.at_most is not None,
        notify=new.notify,
        labelled=new.is_labelled,
    )
    bound = {} if unique.at_most is None else {"at_most": unique.at_most}
    named = {f"{NEW}{name}": value for name, value in new.parameters().items()}
    parameters = {**named, **_documents(rows), **bound}
    changed = executor.execute(statement, parameters)
    return {key: Placed(id, is_new=False, is_changed=True) for id, key, _ in changed}


def _freed(executor: Executor, new: NewJob, rows: Sequence[Row]) -> set[str]:
    return set(executor.execute(unique_keys.free_keys(), _common(new, rows)).scalars())


def _common(new: NewJob, rows: Sequence[Row]) -> dict[str, Any]:
    names = {f"{NEW}task": new.task, f"{NEW}queue": new.queue}
    return {**names, **_documents(rows)}


def _documents(rows: Sequence[Row]) -> dict[str, str]:
    return {"documents": json.dumps([row._asdict() for row in rows])}
