"""Waits in the caller for the end of jobs: ``queue.wait()``.

One thread and one connection serve all waits of a process for jobs of one database.  A wait is
announced to the workers, and the worker that ends the job tells of it
(:mod:`pgqueue.repository.watches`).  The thread also reads the jobs by itself: soon after a wait
has begun, because the job may end before its worker has heard of the wait, and then once a second.
"""

import asyncio
import heapq
import math
import os
import time
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from threading import Lock, Thread
from weakref import WeakKeyDictionary, ref

import psycopg
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from pgqueue import redaction
from pgqueue.database.callers import translated_errors
from pgqueue.database.notifications import Listener
from pgqueue.database.opening import ConnectFailed, own_connection, worker_engine_for_now
from pgqueue.database.settings import WAITING
from pgqueue.errors import JobNotFound, PgQueueError
from pgqueue.repository.job_state import JobState, JobStates
from pgqueue.repository.watches import ENDS, Watches, ids_in

logger = redaction.logger(__name__)

FIRST_READ = 0.05
LONGEST_INTERVAL = 1.0
"""Seconds between two reads of a job: the first interval, which doubles, up to the longest."""
ANNOUNCE_EVERY = 30.0
"""Seconds after which all waits are announced again: to new workers, and to old ones, which forget
them."""
KEEP_FOR = 10.0
"""Seconds without a wait after which the connection is closed."""
LONGEST_PAUSE = 2.0
"""Seconds between two tries to connect, after many failures."""


class Waits:
    """The waits of this process for jobs of one database."""

    def __init__(self, engine: Engine, *, notify: bool) -> None:
        self._engine = ref(engine)
        self.notify = notify
        self._changes = Lock()
        """Held to change what follows."""
        self._waiting: dict[int, list[Future[JobState]]] = {}
        self._new: list[int] = []
        """The jobs of new waits, which are to be announced and read."""
        self._listener: Listener | None = None
        """That of the thread; None if there is no thread."""

    def wait(self, job_id: int, seconds: float) -> JobState | None:
        """Wait until a job has ended; None if the time is over.  Raises JobNotFound."""
        with self._future(job_id) as future:
            try:
                return future.result(timeout=seconds)
            except TimeoutError:
                return None

    async def wait_async(self, job_id: int, seconds: float) -> JobState | None:
        """The same for a coroutine."""
        with self._future(job_id) as future:
            done, _ = await asyncio.wait([asyncio.wrap_future(future)], timeout=seconds)
            return done.pop().result() if done else None

    @contextmanager
    def _future(self, job_id: int) -> Iterator[Future[JobState]]:
        """A future for the end of a job, in this block."""
        future: Future[JobState] = Future()
        with self._changes:
            self._waiting.setdefault(job_id, []).append(future)
            self._new.append(job_id)
            if self._listener is None:
                self._listener = Listener(enabled=self.notify, channel=ENDS)
                given = (self._engine(), self._listener)
                Thread(target=self._work, args=given, name="pgqueue-waits", daemon=True).start()
            self._listener.poke()
        try:
            yield future
        finally:
            with self._changes:
                futures = self._waiting.get(job_id, [])
                if future in futures:
                    futures.remove(future)
                if not futures:
                    self._waiting.pop(job_id, None)

    def _work(self, given: Engine, listener: Listener) -> None:
        """The thread: ends when nobody has waited for a while."""
        failures = 0
        with closing(listener), worker_engine_for_now(given) as engine:
            while self._is_wanted():
                try:
                    with own_connection(engine, WAITING, purpose="waits") as connection:
                        failures = self._serve(connection, listener)
                except (SQLAlchemyError, psycopg.Error, OSError, ConnectFailed) as error:
                    if not failures:
                        logger.warning("waits for jobs: %s; connecting again", error)
                    failures += 1
                    with self._changes:
                        self._new = list(self._waiting)
                    time.sleep(min(FIRST_READ * 2**failures, LONGEST_PAUSE))

    def _serve(self, connection: Connection, listener: Listener) -> int:
        """Raises an error of the connection; others, which would come again, in all waits."""
        try:
            with translated_errors():
                _Round(self, connection, listener).serve()
        except (DBAPIError, PgQueueError) as error:
            if isinstance(error, DBAPIError) and error.connection_invalidated:
                raise
            for job_id in self.all():
                self.end(job_id, error)
        return 0

    def _is_wanted(self) -> bool:
        with self._changes:
            if not self._waiting:
                self._listener = None
            return self._listener is not None

    def take_new(self) -> list[int]:
        with self._changes:
            new, self._new = self._new, []
            return new

    def all(self) -> list[int]:
        with self._changes:
            return list(self._waiting)

    def those_waited_for(self, job_ids: Collection[int]) -> set[int]:
        with self._changes:
            return {job_id for job_id in job_ids if job_id in self._waiting}

    def end(self, job_id: int, result: JobState | Exception) -> None:
        """Let those go on that wait for a job."""
        with self._changes:
            futures = self._waiting.pop(job_id, [])
        for future in futures:
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)


class _Round:
    """What the thread does on one connection."""

    def __init__(self, waits: Waits, connection: Connection, listener: Listener) -> None:
        self._waits = waits
        self._connection = connection
        self._listener = listener
        self._watches = Watches(connection)
        self._seen: set[int] = set()
        """The jobs that were read and had not ended."""
        self._reads: list[tuple[float, float, int]] = []
        """When each job is read next, and the interval before it: a heap."""

    def serve(self) -> None:
        """Serve the waits until there have been none for a while."""
        self._listener.share(self._connection)
        used_at, seconds = time.monotonic(), 0.0
        announce_at = used_at + ANNOUNCE_EVERY
        while True:
            heard = {id for payload in self._listener.wait(seconds) for id in ids_in(payload)}
            new, now = self._waits.take_new(), time.monotonic()
            announced = new
            if now >= announce_at:
                announced = self._waits.all()
                self._seen &= set(announced)
                announce_at = now + ANNOUNCE_EVERY
            if announced and self._waits.notify:
                self._watches.announce(set(announced))
            # The announcement is committed: a job that ends after this read is told of.
            self._read(self._waits.those_waited_for({*heard, *self._due(new, now)}))
            if self._reads:
                used_at = now
                seconds = max(self._reads[0][0] - time.monotonic(), 0.0)
            else:
                seconds = KEEP_FOR
            if now - used_at >= KEEP_FOR:
                return

    def _due(self, new: Collection[int], now: float) -> list[int]:
        """The jobs to read now, new ones among them; plans the next read of each."""
        due = [(now, FIRST_READ, job_id) for job_id in new]
        while self._reads and self._reads[0][0] <= now:
            due.append(heapq.heappop(self._reads))
        job_ids = [job_id for _, _, job_id in due]
        waited_for = self._waits.those_waited_for(job_ids)
        for _, interval, job_id in due:
            if job_id in waited_for:
                # On a grid, so that one statement reads many.
                at = (math.floor(now / interval) + 1) * interval
                heapq.heappush(self._reads, (at, min(2 * interval, LONGEST_INTERVAL), job_id))
        return job_ids

    def _read(self, job_ids: Collection[int]) -> None:
        if not job_ids:
            return
        ended = set(self._watches.ended_among(job_ids))
        self._seen.update(set(job_ids) - ended)
        for job_id in ended:
            result = self._result(job_id)
            if result is not None:
                self._waits.end(job_id, result)
                self._seen.discard(job_id)

    def _result(self, job_id: int) -> JobState | PgQueueError | None:
        """The state of a job that has ended, or why it cannot be read; None after a requeue."""
        try:
            state = JobStates(self._connection).of(job_id)
        except JobNotFound as error:
            if job_id in self._seen:
                return JobNotFound(
                    f"job {job_id} was deleted while somebody waited for it, and its result with "
                    "it; let its task keep its jobs longer: keep=timedelta(...)"
                )
            return error
        except PgQueueError as error:
            return error
        return state if state.has_ended else None


_of_engines: "WeakKeyDictionary[Engine, Waits]" = WeakKeyDictionary()


def waits_on(engine: Engine, *, notify: bool) -> Waits:
    """The waits of this process for jobs in the database of an engine."""
    found = _of_engines.get(engine)
    if found is None:
        found = _of_engines.setdefault(engine, Waits(engine, notify=notify))
    return found


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_of_engines.clear)  # a thread is not copied
