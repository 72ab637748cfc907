"""Enqueues jobs of several tasks, each with options of its own, in one statement."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from pgqueue.checks import quoted
from pgqueue.database.autocommit import refuse_autocommit
from pgqueue.database.callers import caller, joined, may_notify, translated_errors
from pgqueue.database.collecting import Collecting, collecting_of
from pgqueue.database.flush import is_new_job, is_quiet, raises_if_taken
from pgqueue.database.uncommitted import note_enqueued
from pgqueue.errors import ArgumentsError, DuplicateJob
from pgqueue.models import Job
from pgqueue.repository.enqueue import Enqueues, Mixed, MixedRow, Placed
from pgqueue.repository.messages import StartsAt
from pgqueue.tasks.binding import CHUNK
from pgqueue.tasks.duplicates import Enqueued, check_holder

WHERE = "enqueue_all"


def enqueue_all(session: Any, jobs: Iterable[Job]) -> list[int]:
    """Enqueue new jobs, as ``task.job(...)`` returns them; returns their ids in the same order."""
    target = caller(session, WHERE)
    jobs = list(jobs)
    for index, job in enumerate(jobs):
        if not is_new_job(job):
            raise ArgumentsError(
                f"{WHERE}: job {index} is {quoted(job)}; give new jobs, as task.job(...) returns "
                "them, which are in no session"
            )
    connection = joined(target, WHERE)
    refuse_autocommit(connection, WHERE)
    collecting = collecting_of(target) or Collecting({})
    rows = [_row(job, collecting.meta) for job in jobs]
    how = Mixed(
        limited=any("limit_keys" in row.values for row in rows),
        notify=not collecting.after and may_notify(connection) and not all(map(is_quiet, jobs)),
        after=collecting.after,
    )
    order: Sequence[int] = range(len(rows))
    may_raise = False
    if any(row.unique_key is not None for row in rows):
        _check_keys(jobs)
        may_raise = any(map(raises_if_taken, jobs))
        # Keys in ascending order: two callers in opposite orders would deadlock.
        order = sorted(order, key=lambda index: (rows[index].unique_key or "", rows[index].queue))
    found: dict[int, Placed] = {}
    with translated_errors(), connection.begin_nested() if may_raise else nullcontext():
        enqueues = Enqueues(connection)
        for start in range(0, len(order), CHUNK):
            part = order[start : start + CHUNK]
            placed = enqueues.enqueue_mixed_chunk([rows[index] for index in part], how)
            found.update(zip(part, placed, strict=True))
        for index, each in found.items():
            if each.is_held:
                _check_holder(jobs[index], each.id)
    ids = [found[index].id for index in range(len(rows))]
    task = rows[0].task if rows else ""
    note_enqueued(target, task, ids, may_be_lost=any(each.is_new for each in found.values()))
    return ids


def _row(job: Job, meta: Mapping[str, Any]) -> MixedRow:
    values = vars(job)
    stored = {name: values[name] for name in ALWAYS}
    for name in SOMETIMES:
        if (value := values.get(name)) is not None:
            stored[name] = value
    if meta:
        stored["meta"] = {**stored.get("meta", {}), **meta}
    if (starts := values.get("run_at")) is not None:
        given = starts if isinstance(starts, StartsAt) else StartsAt(starts)
        if given.run_at is not None:
            stored["run_at"] = given.run_at.isoformat()
        if given.delay is not None:
            stored["delay"] = f"{given.delay.total_seconds():.6f} s"
    return MixedRow(stored["task"], stored["queue"], stored.get("unique_key"), stored)


ALWAYS = ("task", "queue", "args", "priority", "max_attempts")
SOMETIMES = ("meta", "tags", "unique_key", "limit_keys")


def _check_keys(jobs: Sequence[Job]) -> None:
    """Raise DuplicateJob if two jobs of one call have the same unique key and one of them raises
    then."""
    seen: dict[tuple[str, str], int] = {}
    for index, job in enumerate(jobs):
        if job.unique_key is None:
            continue
        first = seen.setdefault((job.queue, job.unique_key), index)
        if first != index and (raises_if_taken(job) or raises_if_taken(jobs[first])):
            raise DuplicateJob(
                f"{WHERE}: jobs {first} and {index} have the same unique key {job.unique_key!r}, "
                "so no job was enqueued; drop one of them, or use on_duplicate='return'"
            )


def _check_holder(job: Job, holder_id: int) -> None:
    conflict = "raise" if raises_if_taken(job) else "return"
    check_holder(Enqueued(job.task, job.queue, conflict), holder_id, job.unique_key)
