"""A part of a worker stands still, and the worker as a whole must not be taken for dead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from threading import Thread

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from chaos.environment import Environment
from chaos.history import END, START
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import (
    AT_ONCE,
    attend,
    call,
    queue,
    until_open,
    wait,
    worker_name,
)
from chaos.scenario import Size, scenario
from pgqueue import JobContext
from pgqueue.database.opening import backend_pid
from pgqueue.worker import liveness


@queue.task(retry=AT_ONCE)
async def block_the_loop(ctx: JobContext, gate: str) -> int:
    """Waits without giving the event loop back, as a call of a blocking library does."""
    return attend(ctx, lambda: until_open(gate))  # the fault


@mutation
def heart_beats_on_the_event_loop(patch: Patch) -> None:
    """A heartbeat goes by the event loop that runs the async handlers."""
    from pgqueue.worker import runtime
    from pgqueue.worker.event_loop import EventLoop
    from pgqueue.worker.heartbeat import Heartbeat

    loops: list[EventLoop] = []

    def event_loop(engine):  # type: ignore[no-untyped-def]
        loops[:] = [apart(engine)]
        return loops[0]

    def step(self, connection):  # type: ignore[no-untyped-def]
        async def beat() -> float:
            return by_thread(self, connection)  # type: ignore[no-any-return]

        return loops[0].wait_for(beat())

    apart = patch.set(runtime, "EventLoop", event_loop)
    by_thread = patch.set(Heartbeat, "step", step)


@mutation
def hearts_of_some_look_for_cancels(patch: Patch) -> None:
    """The heartbeats of some workers also read the table of jobs, for requests to cancel."""
    from pgqueue.repository.workers import Workers

    def beat(self, worker_id, **counts):  # type: ignore[no-untyped-def]
        if worker_name() in ("w1", "w3"):
            self._executor.execute(text("SELECT id FROM pgqueue.jobs LIMIT 1"))
        return alone(self, worker_id, **counts)

    alone = patch.set(Workers, "beat", beat)


@mutation
def time_not_seen_counts(patch: Patch) -> None:
    """A witness that has stood still takes what it sees then for unchanged all the time."""
    patch.set(liveness, "LONGEST_GAP", float("inf"))


LOCKS = tuple(
    (table, mode, behind_reader)
    for mode, behind_reader in (
        ("ACCESS EXCLUSIVE", True),
        ("SHARE", False),
        ("ACCESS EXCLUSIVE", False),
    )
    for table in (
        *("jobs", "workers", "queues", "message_queue", "leases"),
        *("job_attempts", "dead_letters", "schema_version"),
    )
)
"""What a migration, a VACUUM FULL or a CREATE INDEX takes; and waits for, behind a report."""
WORST = (("jobs", "ACCESS EXCLUSIVE", True), ("workers", "SHARE", False))
"""In the short size: what a heartbeat might read, and what it writes."""


DEAD = "were declared dead, and all were well"


@scenario(
    promises="P1 P3 P4",
    full=Size(jobs=20, faults=len(LOCKS), seconds=3),
    long=Size(jobs=20, faults=len(LOCKS), seconds=liveness.SLOW_GRACE.total_seconds()),
    short=Size(jobs=6, faults=len(WORST), seconds=3),
    mutated={
        "hearts_of_some_look_for_cancels": DEAD,
        "heart_beats_on_the_event_loop": DEAD,
        "time_not_seen_counts": DEAD,
    },
)
def standstills(environment: Environment, size: Size) -> None:
    """A blocked event loop, locked tables, frozen workers: none is dead, nothing starts twice.

    One worker is busy, another idle, and jobs are in each state of their lives.
    """
    workers = environment.workers(2, slow_grace=size.seconds)
    workers.until_registered()
    environment.until_started(
        *environment.enqueue(wait, [("go",)] * 5), *environment.enqueue(block_the_loop, [("go",)])
    )
    locks = WORST if size.faults == len(WORST) else LOCKS
    for table, mode, behind_reader in locks:
        jobs = environment.enqueue(call, [(100,)] * size.jobs)
        environment.until(lambda: environment.history(START), what="they run")
        with _locked(environment, table, mode, behind_reader=behind_reader):
            environment.count("locks")
            environment.let_pass(size.seconds + 1.5)
        _nobody_is_dead(environment)
        _are_done(environment, jobs)
    _stand_still_together(environment, size.seconds + 1)
    _nobody_is_dead(environment)
    environment.open("go")
    environment.until_ended()
    starts = Counter(event.job for event in environment.history(START))
    again = [job for job, times in starts.items() if times > 1]
    environment.expect(not again, f"jobs {again} have started more than once")
    workers.stop()
    environment.judge()


def _stand_still_together(environment: Environment, seconds: float) -> None:
    """As on a machine that is suspended: they go on one after the other."""
    first, last = environment.members
    environment.freeze(first)
    environment.let_pass(0.5)  # the last has seen its last heartbeat
    environment.freeze(last)
    environment.let_pass(seconds)
    last.thaw()
    environment.let_pass(0.8)  # it looks at the first, and has observed it for less than the grace
    first.thaw()
    environment.let_pass(1.0)


@contextmanager
def _locked(
    environment: Environment, table: str, mode: str, *, behind_reader: bool
) -> Iterator[None]:
    """While somebody has this lock, or waits for it: behind a reader, or behind a worker."""
    lock = f"LOCK TABLE pgqueue.{table} IN {{}} MODE"
    asks = "SELECT count(*) FROM pg_locks WHERE pid = :pid AND relation = CAST(:table AS regclass)"
    with ExitStack() as resources:
        reader = resources.enter_context(environment.engine.connect())
        if behind_reader:
            reader.execute(text(lock.format("ACCESS SHARE")))
        locker = resources.enter_context(environment.engine.connect())
        locker.execute(text("SET lock_timeout = 0"))
        pid = backend_pid(locker)
        thread = Thread(target=_lock, args=(locker, lock.format(mode)))
        thread.start()
        environment.until(
            lambda: environment.scalar(asks, pid=pid, table=f"pgqueue.{table}"), what="a lock"
        )
        try:
            yield
        finally:
            environment.execute("SELECT pg_terminate_backend(:pid)", pid=pid)
            thread.join()
            locker.invalidate()


def _lock(connection: Connection, statement: str) -> None:
    with suppress(DBAPIError):  # it is ended while it waits
        connection.execute(text(statement))


def _are_done(environment: Environment, jobs: list[int]) -> None:
    def done() -> bool:
        return {event.job for event in environment.history(END)} >= set(jobs)

    environment.until(done, seconds=5, what="other jobs end")


def _nobody_is_dead(environment: Environment) -> None:
    for member in environment.members:
        log = member.log.read_text(errors="replace")
        environment.expect(" is dead: " not in log, f"workers {DEAD}")
