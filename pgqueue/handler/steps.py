"""``ctx.step()``: parts of a handler that are recorded, and not run again by later attempts."""

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy import inspect as inspect_state
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only, greenlet_spawn

from pgqueue.batches import NewBatch
from pgqueue.checks import LONGEST_DELAY, check_step_name, checked_signal, quoted
from pgqueue.context import Around
from pgqueue.database.callers import translated_errors
from pgqueue.database.handlers import listeners_to_commit
from pgqueue.database.two_phase import commit_in_two_phases
from pgqueue.database.unit_of_work import write_pending
from pgqueue.errors import (
    ArgumentsError,
    JobsFailed,
    LeaseLost,
    PgQueueError,
    SignalTimeout,
    TaskDefinitionError,
)
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.handler.error_reports import storable_result
from pgqueue.handler.pages import Page, Pages
from pgqueue.handler.transaction import AttemptTransaction, call_listener, is_conflict
from pgqueue.models import Job, JobStatus, StepKind
from pgqueue.outcomes import Cancel, Suspended
from pgqueue.repository.job_state import JobStates
from pgqueue.repository.signals import BATCH_HAS_ENDED
from pgqueue.repository.steps import NO_SIGNAL, Awaited, JobSteps, Recorded
from pgqueue.tasks.injection import Injected, Injection, injection_of

NOTHING_INJECTED = Injection((), {}, is_async=False)
T = TypeVar("T")

LONGEST = LONGEST_DELAY.total_seconds()
REQUEUED = 5.0
"""Seconds after which a handler looks again at a gathered job that was requeued."""

MOST_TRIES = 5
"""How often a transaction that only records a step begins, if it meets a conflict."""

Write = Callable[[JobSteps], str | None]
"""Records a step; returns as :meth:`JobSteps.record` does."""


class AttemptSteps:
    """The steps of one attempt.

    Each is recorded in a transaction of its own, under the fence of the attempt.  A step whose
    function takes a Session writes in the same transaction.
    """

    def __init__(
        self,
        attempt: RunningAttempt,
        new_transaction: Callable[[RunningAttempt], AttemptTransaction],
        around: Around,
        application: str,
    ) -> None:
        """``around``: what a framework puts around the Session of a step."""
        self._attempt = attempt
        self._new_transaction = new_transaction
        self._around = around
        self._application = application
        self._used: set[str] = set()
        self._known: Mapping[str, Recorded] | None = None
        self._read_at = 0.0

    @property
    def _where(self) -> str:
        return f"job {self._attempt.claimed.job_id} {self._attempt.task.name}"

    def run(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return self._run(_Call(function, args, kwargs), name)

    async def run_async(
        self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        call = _Call(function, args, kwargs, is_async=True)
        return await greenlet_spawn(self._run, call, name)

    def each(
        self, name: str, query: Any, function: Callable[..., Any], /, *args: Any, **options: Any
    ) -> int:
        return self._each(_Call(function, args, {}), name, query, **options)

    async def each_async(
        self, name: str, query: Any, function: Callable[..., Any], /, *args: Any, **options: Any
    ) -> int:
        call = _Call(function, args, {}, is_async=True)
        return int(await greenlet_spawn(partial(self._each, call, name, query, **options)))

    def sleep(self, name: str, span: timedelta) -> None:
        self._sleep(name, span, is_async=False)

    async def sleep_async(self, name: str, span: timedelta) -> None:
        await greenlet_spawn(partial(self._sleep, name, span, is_async=True))

    def wait_for(
        self, signal: str, key: Any, *, timeout: timedelta | None, name: str | None
    ) -> Any:
        return self._wait(signal, key, timeout, name, is_async=False)

    async def wait_for_async(
        self, signal: str, key: Any, *, timeout: timedelta | None, name: str | None
    ) -> Any:
        return await greenlet_spawn(partial(self._wait, signal, key, timeout, name, is_async=True))

    def gather(self, name: str, jobs: Iterable[Job]) -> list[Any]:
        return self._gather(name, jobs, is_async=False)

    async def gather_async(self, name: str, jobs: Iterable[Job]) -> list[Any]:
        return await greenlet_spawn(partial(self._gather, name, jobs, is_async=True))

    def _run(self, call: "_Call", name: str) -> Any:
        with self._step(name, StepKind.STEP, is_async=call.is_async) as known:
            if known is not None:
                return known.result
            began = time.monotonic()

            def write(rows: JobSteps) -> str | None:
                return rows.record(name, StepKind.STEP, result, took=time.monotonic() - began)

            if call.injection.wants_session:
                with self._session(write) as context:
                    result = self._storable(name, call(context))
            else:
                result = self._storable(name, call(self._attempt.context()))
                self._record(write)
            return result

    def _each(self, call: "_Call", name: str, query: Any, *, key: Any, size: int) -> int:
        where = f"{self._where}: ctx.each({name!r}, ...)"
        pages = Pages(query, key, size, where=where)
        if not call.injection.wants_session:
            raise ArgumentsError(
                f"{where}: the function takes a Session first, because what it writes is committed "
                "with the key of the last row"
            )
        with self._step(name, StepKind.EACH, is_async=call.is_async) as known:
            done: dict[str, Any] = {"rows": 0} if known is None else dict(known.result)
            if known is not None and not known.is_unfinished:
                return int(done["rows"])
            page = Page((), None, is_last=False)
            began = time.monotonic()

            def write(rows: JobSteps) -> str | None:
                lasts = 0.0 if page.is_last else None
                took = time.monotonic() - began
                return rows.record(name, StepKind.EACH, done, took=took, lasts=lasts)

            while not page.is_last:
                with self._session(write) as context:
                    page = pages.read(_sync(context.session), done.get("after"))
                    if page.rows:
                        call(context, page.rows)
                        done = {"rows": done["rows"] + len(page.rows), "after": page.last_key}
                if not page.is_last:
                    self._hand_on(name)
            return int(done["rows"])

    def _hand_on(self, name: str) -> None:
        """End the attempt before a new step or the next page of one, if it should."""
        if self._attempt.is_lost:
            raise self._lease_lost()
        if self._attempt.is_cancelled():
            raise Cancel(f"cancelled before step {name!r}, or between two pages of it")
        if self._attempt.is_stopping():
            raise Suspended(0.0)

    def _sleep(self, name: str, span: timedelta, *, is_async: bool) -> None:
        self._check_span("ctx.sleep", span)
        with self._step(name, StepKind.SLEEP, is_async=is_async) as known:
            left = self._left(known, span)
            if known is None:
                self._record(lambda rows: rows.record(name, StepKind.SLEEP, lasts=left))
            if left > 0 or known is None:
                raise Suspended(left)

    def _wait(
        self, signal: str, key: Any, timeout: timedelta | None, name: str | None, *, is_async: bool
    ) -> Any:
        if timeout is not None:
            self._check_span("ctx.wait_for", timeout)
        awaited = Awaited(*checked_signal(f"{self._where}: ctx.wait_for", signal, key))
        name = f"wait for {signal} {awaited.key}".strip() if name is None else name

        def record(result: Any, lasts: float | None = 0.0) -> None:
            self._record(
                lambda rows: rows.record(name, StepKind.WAIT, result, lasts=lasts, awaited=awaited)
            )

        with self._step(name, StepKind.WAIT, is_async=is_async) as known:
            received = None if known is None else known.result
            if received is None:
                left = LONGEST if timeout is None else self._left(known, timeout)
                record(None, None if timeout is None else left)
                # A signal that is committed from now on finds the wait: it wakes the job.
                received = self._read(lambda connection: self._rows(connection).received(awaited))
                if received is None and left > 0:
                    raise Suspended(left)
                received = received or {}
                record(received)
            if not received:
                raise SignalTimeout(
                    f"{self._where}: the signal {signal!r} with the key {awaited.key!r} has not "
                    f"come in time for {name!r}"
                )
            return received["payload"]

    def _gather(self, name: str, jobs: Iterable[Job], *, is_async: bool) -> list[Any]:
        def record(number: int, end: Awaited = NO_SIGNAL) -> None:
            result = {"jobs": number}
            self._record(lambda rows: rows.record(name, StepKind.GATHER, result, awaited=end))

        with self._step(name, StepKind.GATHER, is_async=is_async) as known:
            if known is None:
                if new := self._checked_jobs(jobs):
                    self._enqueue(name, new)
                    raise Suspended(LONGEST)
                record(0)
                return []
            if known.key is None:  # there were none
                return []
            batch_id = int(known.key)
            batch = self._read(lambda connection: JobStates(connection).of_batch(batch_id))
            if any(job.status is None for job in batch.jobs):
                # After its end, it has an unfinished job again only by a requeue.
                raise Suspended(REQUEUED if batch.has_ended else LONGEST)
            failed = [job for job in batch.jobs if job.status is not JobStatus.SUCCEEDED]
            # Before its end, a failed job may be requeued, and the end must wake this job then.
            if known.is_unfinished and (batch.has_ended or not failed):
                record(len(batch.jobs), Awaited(BATCH_HAS_ENDED, known.key))
            if failed:
                raise JobsFailed(
                    f"{self._where}: {len(failed)} of {len(batch.jobs)} jobs of {name!r} have not "
                    f"succeeded; first {failed[0]}",
                    batch.jobs,
                )
            return [job.result for job in batch.jobs]

    def _checked_jobs(self, jobs: Iterable[Job]) -> list[Job]:
        jobs = list(jobs)
        for job in jobs:
            if not isinstance(job, Job) or not inspect_state(job).transient:
                raise ArgumentsError(
                    f"{self._where}: ctx.gather is given {quoted(job)}; give new jobs, as "
                    "task.job(...) returns them, which are in no session"
                )
        if len({id(job) for job in jobs}) < len(jobs):
            raise ArgumentsError(
                f"{self._where}: ctx.gather is given a job twice, which would have one result; "
                "give a new job for each, as task.job(...) returns it"
            )
        return jobs

    def _enqueue(self, name: str, jobs: list[Job]) -> None:
        """Enqueue the jobs as a batch.  The wait for its end is committed with it, so the batch
        cannot end before."""
        began = time.monotonic()

        def write(rows: JobSteps) -> str | None:
            awaited = Awaited(BATCH_HAS_ENDED, str(batch.id))
            took = time.monotonic() - began
            return rows.record(name, StepKind.GATHER, took=took, lasts=None, awaited=awaited)

        with self._session(write) as context:
            session = _sync(context.session)
            batch = NewBatch(session, name, meta=None, callbacks={}, application=self._application)
            with batch:
                session.add_all(jobs)

    def _check_span(self, what: str, span: Any) -> None:
        if not isinstance(span, timedelta) or not timedelta(0) <= span <= LONGEST_DELAY:
            raise ArgumentsError(
                f"{self._where}: {what} takes a timedelta from zero to {LONGEST_DELAY.days} days, "
                f"not {span!r}"
            )

    def _left(self, known: Recorded | None, span: timedelta) -> float:
        """Seconds until a step ends that lasts for a span from its first time."""
        if known is None or known.is_unfinished:
            return span.total_seconds()
        return max(known.seconds_left - (time.monotonic() - self._read_at), 0.0)

    @contextmanager
    def _session(self, write: Write) -> Iterator[Any]:
        """A Session, in a context, whose writes are committed with the record of the step."""
        transaction = self._new_transaction(self._attempt)
        with transaction.begun() as connection:
            with transaction.session(connection) as session:
                context = self._attempt.context(session)
                with self._around(context):
                    yield context
                    write_pending(_sync(session))
            with translated_errors():
                self._commit(transaction, connection, write)
            for listener in listeners_to_commit(_sync(session)):
                with self._around(context):
                    call_listener(listener, self._attempt.claimed.job_id, _sync(session))

    def _record(self, write: Write) -> None:
        """Record a step and nothing else."""
        for tries in range(1, MOST_TRIES + 1):
            transaction = self._new_transaction(self._attempt)
            try:
                with transaction.begun() as connection, translated_errors():
                    self._commit(transaction, connection, write)
                return
            except DBAPIError as error:
                if tries == MOST_TRIES or not is_conflict(error):
                    raise

    def _commit(
        self, transaction: AttemptTransaction, connection: Connection, write: Write
    ) -> None:
        """Record the step and commit.  From the record on, the lease is locked."""
        transaction.end_handler(connection)
        commit_in_two_phases(connection)
        transaction.transaction_name = write(self._rows(connection))
        if transaction.transaction_name is None or self._attempt.is_lost:
            raise self._lease_lost()
        with self._attempt.committing():
            transaction.commit_writes(connection)

    @contextmanager
    def _step(self, name: str, kind: StepKind, *, is_async: bool) -> Iterator[Recorded | None]:
        """What is on record of a step, while it runs: no other step, nor ``ctx.finish()``, may
        meet it."""
        if self._attempt.task.is_async is not is_async:
            raise PgQueueError(
                f"{self._where}: an async handler awaits ctx.{kind}_async, and a plain one calls "
                f"ctx.{kind}"
            )
        by = " by name=" if kind is StepKind.WAIT else ""
        check_step_name(self._where, name, by)
        if self._attempt.is_lost:
            raise self._lease_lost()
        if self._attempt.is_settled:
            raise PgQueueError(f"{self._where}: step {name!r} comes after the end of the job")
        if name in self._used:
            raise PgQueueError(
                f"{self._where}: step {name!r} comes twice in one attempt; give each a name of its "
                f"own{by}, in a loop for example f'page {{number}}'"
            )
        with self._attempt.block(f"step {name!r}"):
            known = self._recorded().get(name)
            if known is not None and known.kind is not kind:
                raise PgQueueError(
                    f"{self._where}: {name!r} is on record as a {known.kind}, and this is a "
                    f"{kind}; give it another name{by}"
                )
            if known is None:
                self._hand_on(name)
            self._used.add(name)
            try:
                yield known
            except Exception:
                self._used.discard(name)  # the handler may try again
                self._known = None
                raise

    def _recorded(self) -> Mapping[str, Recorded]:
        if self._known is None:
            self._known = self._read(lambda connection: self._rows(connection).recorded())
            self._read_at = time.monotonic()
        return self._known

    def _read(self, read: Callable[[Connection], T]) -> T:
        transaction = self._new_transaction(self._attempt)
        with transaction.begun() as connection, translated_errors():
            return read(connection)

    def _rows(self, connection: Connection) -> JobSteps:
        return JobSteps(connection, self._attempt.worker_id, self._attempt.claimed)

    def _lease_lost(self) -> LeaseLost:
        return LeaseLost(
            f"{self._where}: this attempt has lost its job, which another worker may run now, so "
            "the step was not recorded; end the handler"
        )

    def _storable(self, name: str, value: Any) -> Any:
        try:
            return storable_result(value)
        except PgQueueError as error:
            raise type(error)(f"{self._where}: step {name!r}: {error}") from error


class _Call:
    """The function of a step, and what it is called with besides a Session and a JobContext."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        is_async: bool = False,
    ) -> None:
        """``is_async``: whether it is called in a greenlet, and may return an awaitable."""
        self.is_async = is_async
        self.injection = _injection_of(function)
        self._function = function
        self._args = args
        self._kwargs = kwargs

    def __call__(self, context: Any, *first: Any) -> Any:
        if Injected.SESSION in self.injection.parameters:
            context = replace(context, session=_sync(context.session))
        arguments = (*first, *self._args)
        returned = self.injection.call(self._function, context, *arguments, **self._kwargs)
        is_awaited = self.is_async and inspect.isawaitable(returned)
        return await_only(returned) if is_awaited else returned


def _sync(session: Any) -> Session:
    """The Session itself, of an AsyncSession too."""
    found: Session = getattr(session, "sync_session", session)
    return found


def _injection_of(function: Callable[..., Any]) -> Injection:
    """Which leading parameters of a function are filled in: none, if it does not say its types."""
    try:
        return injection_of(function, task_name=f"the step {function!r}")
    except (TypeError, ValueError, TaskDefinitionError):
        return NOTHING_INJECTED
