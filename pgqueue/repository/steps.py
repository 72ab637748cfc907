"""The records of the steps of handlers, written under the fence of the attempt."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from pgqueue.repository.claim import Claimed
from pgqueue.repository.fate import transaction_name
from pgqueue.repository.fence import ONE, is_ours
from pgqueue.repository.tables import (
    Executor,
    clock,
    job_steps,
    json_parameter,
    leases,
    pg,
)


@cache
def steps_of_job() -> sa.Executable:
    """The names and results of the recorded steps of a job."""
    text = sa.cast(job_steps.c.result, sa.Text)
    return sa.select(job_steps.c.name, text).where(job_steps.c.job_id == ONE[0])


@cache
def record_step(*, sleeps: bool) -> sa.Executable:
    """Record a step; no row if the lease is not ours any more.  ``sleeps``: its result is the time
    so many seconds from now.

    Shares the lock of the lease, so a rescue, which deletes the lease and waits for nobody, leaves
    it until this transaction ends.
    """
    lease = sa.select(leases.c.target_id, leases.c.attempt).where(is_ours(*ONE))
    held = lease.with_for_update(read=True, key_share=True).cte("held")
    result: Any = json_parameter("result")
    if sleeps:
        seconds = sa.cast(sa.bindparam("seconds", type_=sa.Float), sa.Float)
        result = pg.to_jsonb(sa.cast(sa.extract("epoch", clock()), sa.Float) + seconds)
    name = sa.cast(sa.bindparam("step", type_=sa.Text), sa.Text)
    row = sa.select(held.c.target_id, name, result, held.c.attempt)
    step = sa.insert(job_steps).from_select(["job_id", "name", "result", "attempt"], row)
    written = step.returning(job_steps.c.job_id).cte("step")
    return sa.select(transaction_name()).select_from(written)


@cache
def seconds_until() -> sa.Executable:
    """How far away a time is, in seconds since 1970, by the clock of the server."""
    moment = sa.cast(sa.bindparam("moment", type_=sa.Float), sa.Float)
    return sa.select(moment - sa.cast(sa.extract("epoch", clock()), sa.Float))


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

    def recorded(self) -> Mapping[str, Any]:
        """The results of the steps that are on record, by name."""
        found = self._executor.execute(steps_of_job(), {"job_id": self._keys["job_id"]})
        return {name: None if text is None else json.loads(text) for name, text in found}

    def record(self, name: str, result: Any) -> str | None:
        """Record a step; returns the name of the transaction, None if the lease has passed on."""
        text = None if result is None else json.dumps(result)
        return self._record(record_step(sleeps=False), name, result=text)

    def record_sleep(self, name: str, seconds: float) -> str | None:
        """Record until when the job sleeps; returns as :meth:`record` does."""
        return self._record(record_step(sleeps=True), name, seconds=seconds)

    def seconds_until(self, moment: float) -> float:
        found: float = self._executor.execute(seconds_until(), {"moment": moment}).scalar_one()
        return found

    def _record(self, statement: Any, name: str, **values: Any) -> str | None:
        given = {**self._keys, "step": name, **values}
        found: str | None = self._executor.execute(statement, given).scalar()
        return found
