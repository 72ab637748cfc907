"""A worker's operations on attempts: claim and settle."""

import json
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, assert_never
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from pgqueue.checks import LONGEST_DELAY
from pgqueue.connections.fast_path import fetch
from pgqueue.outcomes import (
    AttemptEnd,
    Cancelled,
    ErrorReport,
    Exhausted,
    Expired,
    Failed,
    Interrupted,
    Outcome,
    Released,
    Retried,
    Snoozed,
    Succeeded,
    Unreadable,
)
from pgqueue.repository.rows import (
    Ages,
    Claim,
    ClaimCursor,
    Claimed,
    Settled,
    Upcoming,
)
from pgqueue.statements import claiming, fencing, settling, starting, unique_keys
from pgqueue.statements.tables import CRASHED, INTERRUPTED


class Attempts:
    """The attempts of one worker, behind one Session or Connection."""

    def __init__(self, executor: Session | Connection, worker_id: UUID) -> None:
        self._executor = executor
        self._worker_id = worker_id

    def claim(
        self,
        pairs: Iterable[ClaimCursor],
        *,
        tasks: str,
        limit: int,
        ahead: bool = False,
        suspects: bool = True,
        meta: bool = False,
        registered: bool = True,
    ) -> Claim:
        """Claim due jobs, in the order in which they start.

        ``registered``: claim nothing for a worker that was declared dead.
        """
        parameters = {
            "pairs": _documents(pairs),
            "tasks": tasks,
            "limit": limit,
            "worker_id": self._worker_id,
        }
        statement = claiming.claim(ahead=ahead, suspects=suspects, meta=meta, registered=registered)
        rows = fetch(self._executor, statement, parameters)
        read_at, quiet_until, taken, passed = rows[0][:4]
        if rows[0][4] is None:
            return Claim([], taken, read_at, quiet_until, passed or ())
        # DELETE ... RETURNING guarantees no order, whatever the order of the probes.
        new = partial(tuple.__new__, Claimed)  # a call of the class takes twice as long
        found: list[Claimed] = sorted([new(row[4:]) for row in rows])
        return Claim(found, taken, read_at, quiet_until, passed or ())

    def upcoming(self, pairs: Iterable[ClaimCursor], *, tasks: str) -> Upcoming:
        """Whether a message is due, and in how many seconds the next one will be."""
        parameters = {"pairs": _documents(pairs), "tasks": tasks}
        is_due, seconds = self._executor.execute(claiming.upcoming(), parameters).one()
        return Upcoming(is_due, None if seconds is None else float(seconds))

    def ages(self, pairs: Iterable[ClaimCursor], *, tasks: str, age_after: timedelta) -> Ages:
        """Since when the first due job of each pair has waited."""
        parameters = {
            "pairs": _documents(pairs),
            "tasks": tasks,
            "period": age_after.total_seconds(),
        }
        rows = fetch(self._executor, claiming.ages(), parameters)
        oldest = {(queue, priority): run_at for queue, priority, run_at, _ in rows}
        return Ages(oldest, rows[0][3] if rows else ())

    def is_cancelled(self, claimed: Claimed) -> bool | None:
        """Whether the job of an attempt was asked to cancel; None if its lease is lost."""
        rows = fetch(self._executor, fencing.is_cancelled(), self._names_of(claimed))
        return bool(rows[0][0]) if rows else None

    def has_expired(self, claimed: Claimed, expires_in: timedelta) -> bool:
        """Whether a job has waited too long to start; ``expires_in``: the task's limit."""
        parameters = {"job_id": claimed.job_id, "expires_in": expires_in.total_seconds()}
        rows = fetch(self._executor, starting.has_expired(), parameters)
        return bool(rows and rows[0][0])

    def free_key(self, claimed: Claimed, *, in_own_transaction: bool) -> bool:
        """Give back the unique key of a job that starts; False if it must not start any more.

        ``in_own_transaction``: the statement commits itself, and waits for a second at most.
        """
        statement = unique_keys.free_key_of_attempt(in_own_transaction=in_own_transaction)
        return bool(fetch(self._executor, statement, self._names_of(claimed)))

    def settle(self, settlements: Sequence[tuple[Claimed, Outcome]]) -> list[Settled]:
        """Write outcomes; returns the attempts that were still this worker's."""
        verdicts = [_verdict(claimed, outcome) for claimed, outcome in settlements]
        verdicts.sort(key=lambda verdict: verdict["target_id"])
        parameters = {"verdicts": json.dumps(verdicts), "worker_id": self._worker_id}
        rows = fetch(self._executor, settling.settle(), parameters)
        return [Settled(row[0], row[1]) for row in rows]

    def settle_succeeded(self, successes: Sequence[Claimed]) -> list[Settled] | None:
        """Write successes that have no result to store.

        None means that all of them were this worker's and have succeeded.
        """
        [(ours, cancelled, settled)] = fetch(
            self._executor,
            settling.settle_succeeded(),
            {
                **_successes(successes),
                "expected": len(successes),
                "worker_id": self._worker_id,
            },
        )
        if ours == len(successes) and cancelled is None:
            return None
        ids = json.loads(settled) if settled else [claimed.job_id for claimed in successes]
        ended = set(json.loads(cancelled or "[]"))
        return [
            Settled(job_id, "cancelled" if job_id in ended else "succeeded")
            for job_id in (ids if ours else [])
        ]

    def delete_succeeded(self, successes: Sequence[Claimed]) -> list[int]:
        """Delete jobs that have succeeded and are not kept; returns their ids.

        The other jobs stay as they are, to be settled.
        """
        parameters = {**_successes(successes), "worker_id": self._worker_id}
        rows = fetch(self._executor, settling.delete_succeeded(), parameters)
        return [row[0] for row in rows]

    def delete_one_success(self, claimed: Claimed) -> bool:
        """The same in the transaction of its handler; False if the job must be settled instead.

        In a savepoint: a row of the application that refers to the job may refuse it, and a
        deferred foreign key must not fail the COMMIT instead.
        """
        try:
            with self._executor.begin_nested():
                is_deleted = self.delete_succeeded([claimed]) != []
                if is_deleted:
                    self._executor.execute(settling.check_constraints())
                return is_deleted
        except IntegrityError:
            return False

    def free_among(self, claimed: Sequence[Claimed]) -> set[int]:
        """Return the jobs among these whose rows no other transaction has locked."""
        ids = {"target_ids": _array([one.job_id for one in claimed])}
        return {row[0] for row in fetch(self._executor, settling.free_jobs(), ids)}

    def settle_one_success(self, claimed: Claimed) -> list[Settled]:
        """End one successful attempt in its handler's transaction; empty if it is not ours."""
        rows = fetch(self._executor, settling.settle_one_success(), self._names_of(claimed))
        return [Settled(row[0], row[1]) for row in rows]

    def _names_of(self, claimed: Claimed) -> dict[str, Any]:
        """The values by which an attempt's lease is found, if it is still this worker's."""
        return {
            "job_id": claimed.job_id,
            "of_message_id": claimed.message_id,
            "of_attempt": claimed.attempt,
            "worker_id": self._worker_id,
        }


def _successes(successes: Sequence[Claimed]) -> dict[str, str]:
    return {
        "target_ids": _array([claimed.job_id for claimed in successes]),
        "message_ids": _array([claimed.message_id for claimed in successes]),
        "attempts": _array([claimed.attempt for claimed in successes]),
    }


def _array(numbers: list[int]) -> str:
    return f"{{{str(numbers)[1:-1]}}}"


def _documents(pairs: Iterable[ClaimCursor]) -> str:
    return json.dumps([pair._asdict() for pair in pairs])


def _verdict(claimed: Claimed, outcome: Outcome) -> dict[str, Any]:
    """Return one attempt and its outcome, as the row that the settle statement reads."""
    return {
        "target_id": claimed.job_id,
        "message_id": claimed.message_id,
        "attempt": claimed.attempt,
        "burned": 1,
        "crashed": 0,
        "snoozed": 0,
        **_fields_of(outcome),
    }


def _fields_of(outcome: Outcome) -> dict[str, Any]:
    match outcome:
        case Succeeded(result):
            return {"ending": "succeeded", "result": result}
        case Retried(delay, error, end, limit):
            crashed = int(end is AttemptEnd.CRASHED)
            times = {"delay": _seconds(delay), "give_up_after": _seconds(limit)}
            return {**times, "crashed": crashed, **_error(error, end)}
        case Failed(error, end):
            return {"ending": "failed", **_error(error, end)}
        case Cancelled(reason):
            return {"ending": "cancelled", "end": AttemptEnd.CANCELLED, "error": reason or None}
        case Interrupted(most):
            report = ErrorReport("Interrupted", INTERRUPTED, "")
            return {
                "burned": 0,
                "max_interruptions": most,
                **_error(report, AttemptEnd.INTERRUPTED),
            }
        case Unreadable(error, longest):
            failed = {"ending": "failed", **_error(error, AttemptEnd.FAILED)}
            return {**failed, "max_unreadable": _seconds(longest)}
        case Snoozed() | Released() | Exhausted() | Expired():
            return {"burned": 0, **_fields_without_attempt(outcome)}
    assert_never(outcome)


def _fields_without_attempt(outcome: Snoozed | Released | Exhausted | Expired) -> dict[str, Any]:
    """The same for an outcome that uses up no attempt, and of which no record is kept."""
    match outcome:
        case Snoozed(delay):
            return {"snoozed": 1, "delay": _seconds(delay)}
        case Released():
            return {}
        case Exhausted():
            return {"ending": "failed", "error": CRASHED}
        case Expired(reason):
            return {"ending": "cancelled", "error": reason}
    assert_never(outcome)


def _seconds(delay: timedelta | None) -> float | None:
    """Limit a delay to the range of a timestamp: one that overflows would fail the whole batch."""
    if delay is None:
        return None
    return min(max(delay, timedelta(0)), LONGEST_DELAY).total_seconds()


def _error(error: ErrorReport, end: AttemptEnd) -> dict[str, Any]:
    return {
        "end": end,
        "error_type": error.type,
        "error": error.message,
        "traceback": error.traceback,
    }
