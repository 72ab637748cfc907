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
    call_async,
    pay,
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
def heart_beats_by_the_claims(patch: Patch) -> None:
    """The heartbeats of some workers ask the table of messages first, as a claim does."""
    from pgqueue.repository.workers import Workers

    def beat(self, worker_id):  # type: ignore[no-untyped-def]
        if worker_name() == "w1":
            self._executor.execute(text("SELECT id FROM pgqueue.message_queue LIMIT 1"))
        return alone(self, worker_id)

    alone = patch.set(Workers, "beat", beat)


@mutation
def heart_beats_on_the_event_loop(patch: Patch) -> None:
    """A heartbeat goes by the event loop that runs the async handlers."""
    from pgqueue.worker import supervisor
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

    apart = patch.set(supervisor, "EventLoop", event_loop)
    by_thread = patch.set(Heartbeat, "step", step)


@mutation
def hearts_of_some_look_for_cancels(patch: Patch) -> None:
    """The heartbeats of some workers also read the table of jobs, for requests to cancel."""
    from pgqueue.repository.workers import Workers

    def beat(self, worker_id):  # type: ignore[no-untyped-def]
        if worker_name() in ("w1", "w3"):
            self._executor.execute(text("SELECT id FROM pgqueue.jobs LIMIT 1"))
        return alone(self, worker_id)

    alone = patch.set(Workers, "beat", beat)


@mutation
def time_not_seen_counts(patch: Patch) -> None:
    """A witness that has stood still takes what it sees then for unchanged all the time."""
    patch.set(liveness, "LONGEST_STEP", float("inf"))


@scenario(
    promises="P1 P4",
    research="T16",
    full=Size(jobs=2000, workers=3, seconds=5),
    long=Size(jobs=2000, workers=3, seconds=60),
    short=Size(jobs=100, workers=1, seconds=2),
    mutated={"heart_beats_by_the_claims": "were declared dead, and all were well"},
)
def claims_wedged(environment: Environment, size: Size) -> None:
    """Nobody can claim for longer than the grace: nobody is taken for dead, and all goes on."""
    workers = environment.workers(2 * size.workers, slow_grace=size.seconds)
    workers.until_registered()
    with environment.engine.connect() as connection:
        connection.execute(text("LOCK TABLE pgqueue.message_queue IN ACCESS EXCLUSIVE MODE"))
        environment.count("wedges")
        environment.let_pass(size.seconds + 1.5)
        connection.rollback()
    _nobody_is_dead(environment)
    for task in (call, call_async, pay):
        environment.enqueue(task, [(1,)] * (size.jobs // 3))
    environment.finish(workers)
    environment.check()


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


@scenario(
    promises="P1 P4",
    research="T16",
    full=Size(jobs=20, faults=len(LOCKS), seconds=2),
    long=Size(jobs=20, faults=len(LOCKS), seconds=liveness.SLOW_GRACE.total_seconds()),
    short=Size(jobs=6, faults=len(WORST), seconds=1.5),
    mutated={"hearts_of_some_look_for_cancels": "were declared dead, and all were well"},
)
def tables_locked(environment: Environment, size: Size) -> None:
    """Each of our tables is locked for longer than the grace: nobody dies, nothing starts twice.

    One worker is busy, another idle, and jobs are in each state of their lives.
    """
    workers = environment.workers(2, slow_grace=size.seconds)
    workers.until_registered()
    environment.until_started(*environment.enqueue(wait, [("go",)] * 6))
    locks = WORST if size.faults == len(WORST) else LOCKS
    for table, mode, behind_reader in locks:
        jobs = environment.enqueue(call, [(100,)] * size.jobs)
        environment.until(lambda: environment.history(START), what="they run")
        with _locked(environment, table, mode, behind_reader=behind_reader):
            environment.count("locks")
            environment.let_pass(size.seconds + 1.5)
        _nobody_is_dead(environment)
        _are_done(environment, jobs)
    environment.open("go")
    environment.until_ended()
    starts = Counter(event.job for event in environment.history(START))
    again = [job for job, times in starts.items() if times > 1]
    environment.expect(not again, f"jobs {again} have started more than once")
    workers.stop()
    environment.check()


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


@scenario(
    promises="P1 P4",
    research="T4",
    full=Size(workers=3, faults=4, seconds=3),
    short=Size(workers=2, faults=1, seconds=2),
    mutated={"time_not_seen_counts": "were declared dead, and all were well"},
)
def frozen_together(environment: Environment, size: Size) -> None:
    """A machine stands still for longer than the grace, with all its workers: none is dead.

    They come back one after the other, and each has a moment for its beat.
    """
    workers = environment.workers(2 * size.workers, slow_grace=size.seconds)
    workers.until_registered()
    environment.let_pass(1.0)  # each has seen each other
    for _ in range(size.faults):
        for member in environment.members:
            environment.freeze(member)
        environment.let_pass(size.seconds + 1)
        for member in environment.members:
            member.thaw()
            environment.let_pass(0.1)
        environment.let_pass(1.0)
        _nobody_is_dead(environment)
    jobs = environment.enqueue(call, [(1,)] * 10)
    _are_done(environment, jobs)
    workers.stop()
    environment.check()


@scenario(
    promises="P1 P3 P4",
    research="T17",
    full=Size(workers=2, faults=4, seconds=3),
    long=Size(workers=2, faults=10, seconds=10),
    short=Size(workers=1, faults=1, seconds=2),
    mutated={"heart_beats_on_the_event_loop": "were declared dead, and all were well"},
)
def event_loop_blocked(environment: Environment, size: Size) -> None:
    """A handler blocks the event loop for long: its worker is not taken for dead.

    Which of the workers is left to chance.
    """
    workers = environment.workers(2 * size.workers, slow_grace=size.seconds)
    workers.until_registered()
    for number in range(size.faults):
        environment.until_started(*environment.enqueue(block_the_loop, [(f"round{number}",)]))
        environment.count("wedges")
        environment.let_pass(size.seconds + 1.5)
        _nobody_is_dead(environment)
        _are_done(environment, environment.enqueue(call, [(1,)] * 10))
        environment.open(f"round{number}")
        environment.until_ended()
    workers.stop()
    environment.check()


def _are_done(environment: Environment, jobs: list[int]) -> None:
    def done() -> bool:
        return {event.job for event in environment.history(END)} >= set(jobs)

    environment.until(done, seconds=5, what="other jobs end")


def _nobody_is_dead(environment: Environment) -> None:
    for member in environment.members:
        log = member.log.read_text(errors="replace")
        environment.expect(" is dead: " not in log, "workers were declared dead, and all were well")
