"""Runs jobs in this thread and in the transaction of one connection, which a test rolls back.

Claims, runs and settles with the statements of a worker.
"""

import uuid
from collections.abc import Callable, Sequence

from sqlalchemy import Connection

from pgqueue.database.handlers import joining_sessions
from pgqueue.job_queue import PgQueue
from pgqueue.middleware import layers_of
from pgqueue.repository.claim import NOTHING, ClaimCursor, Claimed, Upcoming
from pgqueue.repository.due_times import DueTimes
from pgqueue.repository.settle import Attempts
from pgqueue.repository.workers import Paused, Workers
from pgqueue.rules.served_queues import served_queues
from pgqueue.tasks.by_name import give_keys
from pgqueue.tasks.pauses import open_tasks, under_all_names
from pgqueue.worker.claiming.cursors import ClaimCursors
from pgqueue.worker.duties.admission_rounds import AdmissionRounds, rules_of
from pgqueue.worker.inline_attempt import InlineAttempt
from pgqueue.worker.looks import Looker
from pgqueue.worker.until_empty import run_ahead


class InlineWorker:
    """A worker without threads and connections of its own.

    ``queues``: the names and patterns to serve.
    """

    def __init__(
        self, queue: PgQueue, connection: Connection, queues: Sequence[str] = ("*",)
    ) -> None:
        self.worker_id = uuid.uuid4()
        self.attempts = Attempts(connection, self.worker_id)
        self._tasks = queue.tasks
        self._sessions = joining_sessions(queue.sessions, queue.engine)
        self._retention = queue.retention
        self._layers = layers_of(queue.around_jobs(), queue.middlewares)
        self._around_finish = queue.around_finish()
        self._application = queue.application
        self._resources = queue.provided
        self._connection = connection
        self._queues = queues
        self._due_times = DueTimes(connection)
        self._looker = Looker(notify=False)
        limits = queue.limited.limits
        self._has_limits = bool(limits)
        # Without the lock: what a test admits is rolled back, and tests must not wait for each
        # other.  No limit is declared for the same reason.
        self._rounds = AdmissionRounds(
            self._served,
            self._paused,
            self._open_tasks,
            notify=False,
            most_ready=1,
            own=rules_of(limits),
            is_only_admitter=True,
        )

    def run_until_empty(
        self, on_end: Callable[[InlineAttempt], object], *, ahead: float = 0.0, raise_errors: bool
    ) -> None:
        """Run what is due or becomes due within ``ahead`` seconds, with the jobs it enqueues."""

        def drain() -> None:
            while (claimed := self._next()) is not None:
                attempt = self.attempt(claimed)
                attempt.run()
                on_end(attempt)
                if raise_errors:
                    attempt.raise_error()

        def upcoming() -> Upcoming:
            pairs = self._pairs()
            return self.attempts.upcoming(pairs, tasks=self._open_tasks()) if pairs else NOTHING

        run_ahead(self._due_times, drain, upcoming, ahead=ahead)

    def _next(self) -> Claimed | None:
        """Claim the first job that is due; if there is none, admit jobs, then look at batches, and
        claim again."""
        claimed = self.claim(self._pairs())
        while claimed is None and (
            self.admit()
            or self._looker.sweep(self._connection, begin=self._connection.begin_nested)
        ):
            claimed = self.claim(self._pairs())
        return claimed

    def admit(self) -> bool:
        """Admit jobs that wait for room in their limits, or for the limits themselves; returns
        whether there were any."""
        has_keys = give_keys(self._connection, self._tasks, notify=False)
        if not self._has_limits:
            return has_keys
        self._rounds.begin()
        admitted = 0
        while not (step := self._rounds.step(self._connection)).is_last:
            admitted += step.admitted
        return has_keys or admitted + step.admitted > 0

    def claim(self, pairs: Sequence[ClaimCursor]) -> Claimed | None:
        """Claim the first job that is due; messages without a job are dropped."""
        while True:
            claim = self.attempts.claim(pairs, tasks=self._open_tasks(), limit=1, registered=False)
            if claim.rows:
                return claim.rows[0]
            if not claim.taken:
                return None

    def attempt(self, claimed: Claimed) -> InlineAttempt:
        """The attempt of a claimed job, whose handler has not started yet."""
        return InlineAttempt(
            self._connection,
            claimed,
            self._tasks[claimed.task],
            worker_id=self.worker_id,
            resources=self._resources,
            sessions=self._sessions,
            layers=self._layers,
            around_finish=self._around_finish,
            application=self._application,
            is_kept=not self._retention.deletes_at_once(claimed.task, claimed.queue),
        )

    def _pairs(self) -> list[ClaimCursor]:
        return ClaimCursors(self._served()).pairs(paused=self._paused().queues, from_start=True)

    def _served(self) -> Sequence[str]:
        return served_queues(self._queues, self.attempts.queues_with_messages)

    def _open_tasks(self) -> str:
        return open_tasks(self._tasks, self._paused())

    def _paused(self) -> Paused:
        paused = Workers(self._connection).paused()
        return under_all_names(self._tasks, paused)
