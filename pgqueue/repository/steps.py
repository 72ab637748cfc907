"""The records of the steps of handlers, written under the fence of the attempt."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert as pg_insert

from pgqueue.models import StepKind
from pgqueue.repository.claim import Claimed
from pgqueue.repository.fate import transaction_name
from pgqueue.repository.fence import ONE, is_ours
from pgqueue.repository.row_security import refuse_hidden
from pgqueue.repository.signals import signal_for
from pgqueue.repository.tables import (
    Executor,
    clock,
    job_steps,
    jobs,
    json_parameter,
    leases,
    seconds,
)


class Awaited(NamedTuple):
    """A signal by its name and key; None for a step that waits for none."""

    signal: str | None = None
    key: str | None = None


NO_SIGNAL = Awaited()


class Recorded(NamedTuple):
    """A step that is on record."""

    kind: StepKind
    result: Any
    is_unfinished: bool
    key: str | None
    """Of the signal for which it waits."""
    seconds_left: float
    """Until it is finished."""


@cache
def steps_of_job() -> sa.Executable:
    """The recorded steps of a job."""
    left = sa.cast(sa.extract("epoch", job_steps.c.finished_at - clock()), sa.Float)
    return sa.select(
        job_steps.c.name,
        job_steps.c.kind,
        sa.cast(job_steps.c.result, sa.Text),
        job_steps.c.finished_at.is_(None),
        job_steps.c.key,
        sa.func.coalesce(left, sa.literal_column("0", sa.Float)),
    ).where(job_steps.c.job_id == ONE[0])


@cache
def record_step() -> sa.Executable:
    """Record a step, or how far it is; no row if the lease is not ours any more.

    Shares the lock of the lease, so a rescue, which deletes the lease and waits for nobody, leaves
    it until this transaction ends.
    """
    lease = sa.select(leases.c.target_id, leases.c.attempt).where(is_ours(*ONE))
    held = lease.with_for_update(read=True, key_share=True).cte("held")
    return _record(held)


@cache
def record_step_of_waiting_job() -> sa.Executable:
    """Record a step of a job, which must not have ended; no row otherwise.

    Only a test does this, before the job runs: nothing fences it.
    """
    columns = (jobs.c.id.label("target_id"), jobs.c.attempts.label("attempt"))
    job = sa.select(*columns).where(jobs.c.id == ONE[0], jobs.c.outcome.is_(None))
    return _record(job.cte("job"))


def _record(held: sa.CTE) -> sa.Executable:
    """Record a step of the job in this row, which has the number of its attempt."""
    took, lasts = (
        seconds(sa.cast(sa.bindparam(name, type_=sa.Float), sa.Float)) for name in ("took", "lasts")
    )
    values = {
        "job_id": held.c.target_id,
        "name": sa.cast(sa.bindparam("step", type_=sa.Text), sa.Text),
        "kind": sa.cast(sa.bindparam("of_kind", type_=sa.Text), sa.Text),
        "result": json_parameter("result"),
        "attempt": held.c.attempt,
        "started_at": clock() - took,
        "finished_at": clock() + lasts,  # NULL: it is not finished
        **{
            name: sa.cast(sa.bindparam(f"of_{name}", type_=sa.Text), sa.Text)
            for name in ("signal", "key")
        },
    }
    row = sa.select(*values.values()).select_from(held)
    step = pg_insert(job_steps).from_select(list(values), row)
    changed = ("result", "attempt", "finished_at", "signal", "key")
    new = {name: step.excluded[name] for name in changed}
    step = step.on_conflict_do_update(index_elements=["job_id", "name"], set_=new)
    written = step.returning(job_steps.c.job_id).cte("step")
    return sa.select(transaction_name()).select_from(written)


class JobSteps:
    """The steps of one attempt, behind one Session or Connection."""

    def __init__(self, executor: Executor, worker_id: UUID, claimed: Claimed) -> None:
        self._executor = executor
        self._keys = {
            "job_id": claimed.job_id,
            "of_message_id": claimed.message_id,
            "of_attempt": claimed.attempt,
            "worker_id": worker_id,
        }

    def recorded(self) -> Mapping[str, Recorded]:
        """The steps that are on record, by name.

        Raises:
            RowsHidden: Row security may hide some, which would run again.
        """
        found = self._executor.execute(steps_of_job(), {"job_id": self._keys["job_id"]}).all()
        if not found:
            refuse_hidden(self._executor)
        return {
            name: Recorded(StepKind(kind), None if text is None else json.loads(text), *rest)
            for name, kind, text, *rest in found
        }

    def received(self, awaited: Awaited) -> dict[str, Any] | None:
        """The record of the first signal that the job may receive; None if there is none."""
        values = {"job_id": self._keys["job_id"], **awaited._asdict()}
        found = self._executor.execute(signal_for(), values).one_or_none()
        if found is None:
            return None
        signal_id, payload = found
        return {"signal": signal_id, "payload": None if payload is None else json.loads(payload)}

    def record(
        self,
        name: str,
        kind: StepKind,
        result: Any = None,
        *,
        took: float = 0.0,
        lasts: float | None = 0.0,
        awaited: Awaited = NO_SIGNAL,
    ) -> str | None:
        """Record a step; returns the name of the transaction, None if the lease has passed on.

        Args:
            name: Its key.
            kind: What it is.
            result: What JSON can express.
            took: Seconds since it has begun.
            lasts: Seconds until it is finished; None: it is not, and is recorded again.
            awaited: The signal for which a wait waits.
        """
        values = _values(name, kind, result, took=took, lasts=lasts, awaited=awaited)
        found: str | None = self._executor.execute(record_step(), {**self._keys, **values}).scalar()
        return found


class WaitingJobSteps:
    """The steps of jobs that no worker runs, behind the Session or Connection of a test."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def record(self, job_id: int, name: str, result: Any) -> bool:
        """Record a finished step; false if the job has ended or is gone."""
        values = _values(name, StepKind.STEP, result, took=0.0, lasts=0.0, awaited=NO_SIGNAL)
        found = self._executor.execute(record_step_of_waiting_job(), {"job_id": job_id, **values})
        return found.scalar() is not None


def _values(
    name: str, kind: StepKind, result: Any, *, took: float, lasts: float | None, awaited: Awaited
) -> dict[str, Any]:
    text = None if result is None else json.dumps(result)
    values = {"step": name, "of_kind": kind.value, "result": text, "took": took, "lasts": lasts}
    return values | {"of_signal": awaited.signal, "of_key": awaited.key}
