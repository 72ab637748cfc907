"""``ctx.step()``: parts of a handler that are recorded, and not run again by later attempts."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only, greenlet_spawn

from pgqueue.context import Around
from pgqueue.database.handlers import listeners_to_commit
from pgqueue.database.unit_of_work import write_pending
from pgqueue.errors import LeaseLost, PgQueueError
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.handler.error_reports import storable_result
from pgqueue.handler.transaction import AttemptTransaction, call_listener
from pgqueue.outcomes import Asleep
from pgqueue.repository.steps import JobSteps
from pgqueue.tasks.injection import Injection, injection_of


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
        self._where = f"job {attempt.claimed.job_id} {attempt.task.name}"
        self._used: set[str] = set()
        self._using = Lock()
        self._known: Mapping[str, Any] | None = None

    def recorded(self) -> Mapping[str, Any]:
        if self._known is None:
            with self._new_transaction(self._attempt).begun() as connection:
                self._known = self._rows(connection).recorded()
        return self._known

    def run(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._refuse(is_async=False)
        self._use(name)
        known = self.recorded()
        if name in known:
            return known[name]
        injection = self._injection(name, function)
        return self._run(
            name, injection, lambda context: injection.call(function, context, *args, **kwargs)
        )

    async def run_async(
        self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        self._refuse(is_async=True)
        self._use(name)
        known = await greenlet_spawn(self.recorded)
        if name in known:
            return known[name]
        injection = self._injection(name, function)

        def call(context: Any) -> Any:
            returned = injection.call(function, context, *args, **kwargs)
            return await_only(returned) if injection.is_async else returned

        return await greenlet_spawn(self._run, name, injection, call)

    def sleep(self, name: str, seconds: float) -> None:
        self._refuse(is_async=False)
        self._sleep(name, seconds)

    async def sleep_async(self, name: str, seconds: float) -> None:
        self._refuse(is_async=True)
        await greenlet_spawn(self._sleep, name, seconds)

    def _sleep(self, name: str, seconds: float) -> None:
        self._use(name)
        until = self.recorded().get(name)
        if until is not None and self._skips_sleeps:
            return
        with self._recording(name) as (transaction, connection):
            rows = self._rows(connection)
            if until is not None:
                if (left := rows.seconds_until(until)) <= 0:
                    return
            else:
                self._check(rows.record_sleep(name, left := seconds))
                transaction.commit_writes(connection)
        raise Asleep(left)

    def _run(self, name: str, injection: Injection, call: Callable[[Any], Any]) -> Any:
        if not injection.wants_session:
            result = self._storable(name, call(self._attempt.context()))
            with self._recording(name) as (transaction, connection):
                self._check(self._rows(connection).record(name, result))
                transaction.commit_writes(connection)
            return result
        with self._recording(name) as (transaction, connection):
            with transaction.session(connection) as session:
                context = self._attempt.context(session)
                with self._around(context):
                    result = self._storable(name, call(context))
                    own: Session = getattr(session, "sync_session", session)
                    write_pending(own)
            transaction.end_handler(connection)
            self._check(self._rows(connection).record(name, result))
            transaction.commit_writes(connection)
            for listener in listeners_to_commit(own):
                with self._around(context):
                    call_listener(listener, self._attempt.claimed.job_id, own)
        return result

    def _injection(self, name: str, function: Callable[..., Any]) -> Injection:
        """Which leading parameters of the function are filled in."""
        try:
            return injection_of(function, task_name=f"{self._attempt.task.name}, step {name}")
        except ValueError:  # a function written in C says nothing of its parameters
            return Injection((), {}, is_async=False)

    @contextmanager
    def _recording(self, name: str) -> Iterator[tuple[AttemptTransaction, Connection]]:
        transaction = self._new_transaction(self._attempt)
        try:
            with transaction.begun() as connection:
                yield transaction, connection
        except IntegrityError as error:
            if "job_steps_pkey" not in str(error.orig):
                raise
            raise PgQueueError(
                f"{self._where}: step {name!r} is on record already: another thread of the handler "
                "has run it; give each step a name of its own"
            ) from error

    def _rows(self, connection: Connection) -> JobSteps:
        return JobSteps(connection, self._attempt.worker_id, self._attempt.claimed)

    def _check(self, is_recorded: bool) -> None:
        if not is_recorded or self._attempt.is_lost:
            raise LeaseLost(
                f"{self._where}: this attempt has lost its job, which another worker may run now, "
                "so the step was not recorded; end the handler"
            )

    def _storable(self, name: str, value: Any) -> Any:
        try:
            return storable_result(value)
        except PgQueueError as error:
            raise type(error)(f"{self._where}: step {name!r}: {error}") from error

    def _use(self, name: str) -> None:
        with self._using:
            if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
                raise PgQueueError(
                    f"{self._where}: the name of a step is {name!r}; give a text of at most "
                    f"{LONGEST_NAME} characters"
                )
            if name in self._used:
                raise PgQueueError(
                    f"{self._where}: step {name!r} comes twice in one attempt; give each a name of "
                    "its own, in a loop for example f'page {number}'"
                )
            self._used.add(name)

    def _refuse(self, *, is_async: bool) -> None:
        if self._attempt.task.is_async is not is_async:
            right = "step_async and sleep_async" if not is_async else "step and sleep"
            raise PgQueueError(
                f"{self._where}: an async handler awaits ctx.step_async and ctx.sleep_async, and a "
                f"plain one calls ctx.step and ctx.sleep; call ctx.{right}"
            )


LONGEST_NAME = 200
