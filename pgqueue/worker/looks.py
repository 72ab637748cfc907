"""Looks at what waits for jobs that have just ended, and for signals, beside the settler, and tells
other processes of the ends for which they wait.

It has a thread and a connection of its own, so that no settle waits for it.
:mod:`pgqueue.repository.blocked` says why it begins after the commit of a settle.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from pgqueue import redaction
from pgqueue.database.settings import LOOKING
from pgqueue.repository.batches import Batches
from pgqueue.repository.blocked import BlockedNodes, Look
from pgqueue.repository.many import ManyJobs
from pgqueue.repository.messages import FoundJob
from pgqueue.repository.signals import PORTION, Signals
from pgqueue.repository.watches import Watches
from pgqueue.worker.loop import NEVER, Loop
from pgqueue.worker.rows import RowGuard, may_be_of_row
from pgqueue.worker.runtime import WorkerRuntime

Begin = Callable[[], AbstractContextManager[object]]
"""Begins a transaction."""

AFTER_NOTHING = 0.005
"""Seconds between a look that has released nothing and the next one: while thousands of jobs of a
batch end, most looks find nothing."""

logger = redaction.logger(__name__)


class Looks(Loop):
    """The thread.  It sleeps, without a connection, until jobs of batches or workflows end."""

    def __init__(self, runtime: WorkerRuntime, *, notify: bool) -> None:
        super().__init__(runtime.engine, LOOKING, runtime.outage, name="looks", first_in=NEVER)
        self._looker = Looker(notify=notify)
        self._work_may_be_there = runtime.work_may_be_there
        self._ended: deque[int] = deque()
        self._idle_until = 0.0
        self._is_signalled = False
        self._watched: deque[int] = deque()
        runtime.signalled.connect(self.signalled)

    def signalled(self, _: bool = False) -> None:
        """Deliver signals.  Any thread may call it."""
        self._is_signalled = True
        self.wake()

    def ended(self, node_ids: Iterable[int]) -> None:
        """Look at these nodes, and at what watches them: batches whose jobs have ended, and what a
        sweep has found.  Any thread may call it."""
        self._ended.extend(node_ids)
        self.wake(self._idle_until - time.monotonic())

    def watched_ended(self, job_ids: Iterable[int]) -> None:
        """Tell the processes that wait for these jobs.  Any thread may call it."""
        self._watched.extend(job_ids)
        self.wake()

    def step(self, connection: Connection) -> float:
        """If the database fails, the sweep finds what is left, and who waits for a job polls."""
        self._tell(connection)
        if self._is_signalled:
            self._is_signalled = False
            self._looker.deliver(connection, is_over=self.stopping.is_set)
        self._look(connection, is_over=self.stopping.is_set)
        return NEVER

    def end(self) -> None:
        """Look at what the last settle has ended."""
        if self._watched:
            self.reconnecting.run(self._tell)
        if self._ended:
            self.reconnecting.run(partial(self._look, is_over=lambda: False))

    def _tell(self, connection: Connection) -> None:
        job_ids = {self._watched.popleft() for _ in range(len(self._watched))}
        if job_ids:
            with connection.begin():
                Watches(connection).tell_ended(job_ids)

    def _look(self, connection: Connection, *, is_over: Callable[[], bool]) -> None:
        node_ids = [self._ended.popleft() for _ in range(len(self._ended))]
        if self._looker.look(connection, node_ids, is_over=is_over):
            self._work_may_be_there()
        else:
            self._idle_until = time.monotonic() + AFTER_NOTHING


class Looker:
    """Looks at batches and jobs, and delivers signals.

    A batch that cannot be ended stays open, a job that cannot be released stays blocked, and
    neither stops any other.
    """

    def __init__(self, *, notify: bool) -> None:
        self._notify = notify
        self._guard = RowGuard()

    def look(
        self,
        connection: Connection,
        node_ids: Iterable[int],
        *,
        is_over: Callable[[], bool] = lambda: False,
        begin: Begin | None = None,
    ) -> int:
        """Look until nothing watches one of these nodes any more; returns how many jobs were
        released, or woken by the end of a batch.

        ``begin`` begins a transaction; in a test, a savepoint in the transaction of the test.
        """
        begin = begin or connection.begin
        nodes, batches, released = BlockedNodes(connection), Batches(connection), 0
        watched, has_ended = list(node_ids), False
        while watched and not is_over():
            given, watched = watched, []
            batch_ids: set[int] = set()
            # What is watched from now on may have ended before the watch was committed: look again.
            for look in self._looks_at_jobs(nodes, given, begin):
                watched += [*look.watches, *look.ended]
                batch_ids.update(look.batch_ids)
                released += look.released
                if is_over():
                    break
            for batch_id in sorted(batch_ids):
                if is_over() or self._guard.rests(-batch_id):
                    continue
                words = f"batch {batch_id} cannot be ended, and stays open"
                with self._guard.row(-batch_id, words):
                    with begin():
                        look = batches.look(batch_id)
                    watched += [*look.watches, *look.ended]
                    if look.ended:
                        logger.info("batch %d has ended", batch_id)
                        has_ended = True
        if has_ended:
            released += self.deliver(connection, is_over=is_over, begin=begin)
        return released

    def _looks_at_jobs(
        self, nodes: BlockedNodes, node_ids: list[int], begin: Begin
    ) -> Iterator[Look]:
        """Look at the jobs that watch one of these nodes, in portions; if the database refuses to
        change one, at each alone."""
        look, key = partial(nodes.look, node_ids, notify=self._notify), f"jobs after {node_ids[0]}"
        while not self._guard.rests(key):
            done: Look | None = None
            with self._guard.row(key, "some of the jobs that may start cannot be changed"), begin():
                done = look()
            if done is None:
                break
            yield done
            if not done.is_full:
                return
        with begin():
            batch_ids = nodes.over(node_ids).batch_ids
            job_ids = nodes.jobs_to_look_at(node_ids)
        yield Look(batch_ids=batch_ids)
        for job_id in job_ids:
            if not self._guard.rests(job_id):
                done = None
                with self._guard.row(job_id, f"job {job_id} cannot be released"), begin():
                    done = look(job_id=job_id)
                if done is not None:
                    yield done

    def deliver(
        self,
        connection: Connection,
        *,
        is_over: Callable[[], bool] = lambda: False,
        begin: Begin | None = None,
    ) -> int:
        """Wake the jobs that sleep for signals; returns how many."""
        begin = begin or connection.begin
        signals, woken, after = Signals(connection), 0, 0
        while not is_over():
            with begin():
                signal_ids = signals.undelivered(after)
            if not signal_ids:
                break
            after, last = signal_ids[-1], 0
            while not is_over():
                with begin():
                    found = signals.sleepers(signal_ids, after=last)
                is_last = len(found) < PORTION
                woken += self._wake(connection, found, signal_ids if is_last else (), begin)
                if is_last:
                    break
                last = found[-1].id
        return woken

    def _wake(
        self,
        connection: Connection,
        found: Sequence[FoundJob],
        signal_ids: Collection[int],
        begin: Begin,
    ) -> int:
        """Make these jobs due, as far as they sleep, and mark these signals delivered for which no
        job is left; returns how many jobs are due now.

        If the database refuses to change a job, each is changed alone.  It keeps its signal
        undelivered, for the next time, as a job does that another transaction has locked.
        """
        many, signals = ManyJobs(connection), Signals(connection)
        found = [job for job in found if not self._guard.rests(job.id)]
        try:
            with begin():
                woken = len(many.run_now(found, notify=self._notify))
                signals.mark_delivered(signal_ids)
                return woken
        except DBAPIError as error:
            if not may_be_of_row(error):
                raise
        woken = 0
        for job in found:
            words = f"job {job.id} cannot be woken by its signal"
            with self._guard.row(job.id, words), begin():
                woken += len(many.run_now([job], notify=self._notify))
        with begin():
            signals.mark_delivered(signal_ids)
        return woken

    def sweep(
        self,
        connection: Connection,
        *,
        is_over: Callable[[], bool] = lambda: False,
        begin: Begin | None = None,
    ) -> int:
        """Look at all nodes whose watch is over, and deliver signals."""
        done, swept_to = self.deliver(connection, is_over=is_over, begin=begin), None
        while True:
            with (begin or connection.begin)():
                over, swept_to = BlockedNodes(connection).swept(swept_to)
            done += self.look(connection, over, is_over=is_over, begin=begin)
            if swept_to is None or is_over():
                return done
