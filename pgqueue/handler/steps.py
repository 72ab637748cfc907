"""``ctx.step()``: parts of a handler that are recorded, and not run again by later attempts."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only, greenlet_spawn

from pgqueue.checks import LONGEST_DELAY, TASK_NAME
from pgqueue.context import Around
from pgqueue.database.callers import translated_errors
from pgqueue.database.handlers import listeners_to_commit
from pgqueue.database.two_phase import commit_in_two_phases
from pgqueue.database.unit_of_work import write_pending
from pgqueue.errors import ArgumentsError, LeaseLost, PgQueueError, TaskDefinitionError
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.handler.error_reports import storable_result
from pgqueue.handler.transaction import AttemptTransaction, call_listener
from pgqueue.outcomes import Asleep
from pgqueue.repository.steps import JobSteps
from pgqueue.tasks.injection import Injected, Injection, injection_of

NOTHING_INJECTED = Injection((), {}, is_async=False)


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
        *,
        skips_sleeps: bool,
    ) -> None:
        """``around``: what a framework puts around the Session of a step."""
        self._attempt = attempt
        self._new_transaction = new_transaction
        self._around = around
        self._skips_sleeps = skips_sleeps
        self._used: set[str] = set()
        self._known: Mapping[str, Any] | None = None

    @property
    def _where(self) -> str:
        return f"job {self._attempt.claimed.job_id} {self._attempt.task.name}"

    def run(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._refuse(is_async=False)
        injection = _injection_of(function, name)
        with self._step(name) as known:
            if name in known:
                return known[name]
            return self._run(
                name, injection, lambda context: injection.call(function, context, *args, **kwargs)
            )

    async def run_async(
        self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        self._refuse(is_async=True)
        injection = _injection_of(function, name)

        def call(context: Any) -> Any:
            returned = injection.call(function, context, *args, **kwargs)
            return await_only(returned) if inspect.isawaitable(returned) else returned

        def step() -> Any:
            with self._step(name) as known:
                return known[name] if name in known else self._run(name, injection, call)

        return await greenlet_spawn(step)

    def sleep(self, name: str, span: timedelta) -> None:
        self._refuse(is_async=False)
        self._sleep(name, span)

    async def sleep_async(self, name: str, span: timedelta) -> None:
        self._refuse(is_async=True)
        await greenlet_spawn(self._sleep, name, span)

    def _sleep(self, name: str, span: timedelta) -> None:
        if not isinstance(span, timedelta) or not timedelta(0) <= span <= LONGEST_DELAY:
            raise ArgumentsError(
                f"{self._where}: ctx.sleep takes a timedelta from zero to {LONGEST_DELAY.days} "
                f"days, not {span!r}"
            )
        seconds = span.total_seconds()
        with self._step(name) as known:
            if name in known and self._skips_sleeps:
                return
            transaction = self._new_transaction(self._attempt)
            with transaction.begun() as connection, translated_errors():
                rows = self._rows(connection)
                if name in known:
                    if (left := rows.seconds_until(known[name])) <= 0:
                        return
                else:
                    left = seconds
                    self._commit(transaction, connection, lambda: rows.record_sleep(name, seconds))
        raise Asleep(left)

    def _run(self, name: str, injection: Injection, call: Callable[[Any], Any]) -> Any:
        if not injection.wants_session:
            result = self._storable(name, call(self._attempt.context()))
            transaction = self._new_transaction(self._attempt)
            with transaction.begun() as connection, translated_errors():
                rows = self._rows(connection)
                self._commit(transaction, connection, lambda: rows.record(name, result))
            return result
        transaction = self._new_transaction(self._attempt)
        with transaction.begun() as connection:
            with transaction.session(connection) as session:
                own: Session = getattr(session, "sync_session", session)
                is_plain = Injected.SESSION in injection.parameters
                context = self._attempt.context(own if is_plain else session)
                with self._around(context):
                    result = self._storable(name, call(context))
                    write_pending(own)
            with translated_errors():
                rows = self._rows(connection)
                self._commit(transaction, connection, lambda: rows.record(name, result))
            for listener in listeners_to_commit(own):
                with self._around(context):
                    call_listener(listener, self._attempt.claimed.job_id, own)
        return result

    def _commit(
        self,
        transaction: AttemptTransaction,
        connection: Connection,
        record: Callable[[], str | None],
    ) -> None:
        """Record the step and commit.  From the record on, the lease is locked."""
        transaction.end_handler(connection)
        commit_in_two_phases(connection)
        transaction.transaction_name = record()
        if transaction.transaction_name is None or self._attempt.is_lost:
            raise self._lease_lost()
        transaction.commit_writes(connection)

    @contextmanager
    def _step(self, name: str) -> Iterator[Mapping[str, Any]]:
        """What is on record while a step runs, which no other step or ``ctx.finish()`` may meet."""
        if not isinstance(name, str) or not TASK_NAME.fullmatch(name.replace(" ", "_")):
            raise PgQueueError(
                f"{self._where}: the name of a step is {name!r}; give a text of 1 to 200 characters"
            )
        if self._attempt.is_lost:
            raise self._lease_lost()
        if self._attempt.is_settled:
            raise PgQueueError(f"{self._where}: step {name!r} comes after the end of the job")
        if name in self._used:
            raise PgQueueError(
                f"{self._where}: step {name!r} comes twice in one attempt; give each a name of its "
                "own, in a loop for example f'page {number}'"
            )
        with self._attempt.block(f"step {name!r}"):
            if self._known is None:
                transaction = self._new_transaction(self._attempt)
                with transaction.begun() as connection, translated_errors():
                    self._known = self._rows(connection).recorded()
            self._used.add(name)
            try:
                yield self._known
            except Asleep:
                raise
            except BaseException:
                self._used.discard(name)  # the handler may try again
                raise

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

    def _refuse(self, *, is_async: bool) -> None:
        if self._attempt.task.is_async is not is_async:
            raise PgQueueError(
                f"{self._where}: an async handler awaits ctx.step_async and ctx.sleep_async, and a "
                "plain one calls ctx.step and ctx.sleep"
            )


def _injection_of(function: Callable[..., Any], name: str) -> Injection:
    """Which leading parameters of a function are filled in: none, if it does not say its types."""
    try:
        return injection_of(function, task_name=f"step {name}")
    except (TypeError, ValueError, TaskDefinitionError):
        return NOTHING_INJECTED
