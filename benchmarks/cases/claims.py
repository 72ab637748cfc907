"""How long a claim takes, whatever stands in the table."""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from sqlalchemy import Connection, Engine, create_engine, text

from benchmarks.arena import Arena
from benchmarks.case import Bench, Finding, Size, case
from benchmarks.systems import PGQUEUE
from pgqueue.database.opening import own_connection
from pgqueue.database.settings import CLAIMING
from pgqueue.repository.claim import Claim
from pgqueue.repository.settle import Attempts
from pgqueue.repository.tables import array_of
from pgqueue.worker.claiming.cursors import ClaimCursors

TASKS = array_of(["nothing"])
BATCH = 100
REPEATS = 15
PROBES = 30
LEAST = 10_000
TODAY, TOMORROW = 0.0, 86_400.0

# A job and its message for each number, as the enqueue statement leaves them.
WAITING = """
    WITH job AS (
        INSERT INTO pgqueue.jobs (queue, task, args, priority, run_at, max_attempts)
        SELECT 'default', 'nothing', jsonb_build_object('number', number), 5,
            clock_timestamp() + :delay * interval '1 second', 10
        FROM generate_series(1, :jobs) AS number
        RETURNING id, run_at
    )
    INSERT INTO pgqueue.message_queue (queue, priority, run_at, target_id, task)
    SELECT 'default', 5, run_at, id, 'nothing' FROM job
"""
WORKER = """
    INSERT INTO pgqueue.workers (id, hostname, pid, backend_pid, queues, slots)
    VALUES (:id, 'benchmark', 1, pg_backend_pid(), '["default"]', 1)
"""


def add_waiting(arena: Arena, jobs: int, *, delay: float) -> None:
    """Insert jobs of the task ``nothing`` that are due after so many seconds."""
    with _engine(arena) as engine, engine.begin() as connection:
        connection.execute(text(WAITING), {"jobs": jobs, "delay": delay})


@case(
    smoke=Size(rows=20_000, turns=2),
    usual=Size(rows=1_000_000, turns=5),
    full=Size(rows=5_000_000, turns=5),
)
def claim_time(bench: Bench, size: Size) -> Finding:
    """One claim of 100 from a backlog of 10,000, from the largest backlog, and with as many jobs
    that are scheduled for later."""
    backlogs = {
        f"{LEAST:,} waiting": ((LEAST, TODAY),),
        f"{size.rows:,} waiting": ((size.rows, TODAY),),
        f"{LEAST:,} waiting, {size.rows:,} of tomorrow": ((size.rows, TOMORROW), (LEAST, TODAY)),
    }
    finding = Finding()
    with ExitStack() as resources:
        claims = []
        for backlog in backlogs.values():
            arena = resources.enter_context(bench.arena(PGQUEUE))
            for jobs, delay in backlog:
                add_waiting(arena, jobs, delay=delay)
            claims.append(resources.enter_context(_claims(arena)))
        arena.sql("CHECKPOINT")
        turns = [_medians(claims) for _ in range(size.turns)]
    small, *others = (
        finding.add(name, [turn[index] for turn in turns], "ms")
        for index, name in enumerate(backlogs)
    )
    for other in others:
        finding.ratio(other, small, at_most=1.2)
    finding.remarks.append(
        f"Each backlog has its own database. Claims alternate between the three; a figure is the"
        f" median of {REPEATS} claims, each by a new worker without a cursor, before any vacuum."
    )
    return finding


@case(
    smoke=Size(rows=5_000),
    usual=Size(rows=300_000),
    full=Size(rows=300_000),
)
def idle_probe(bench: Bench, size: Size) -> Finding:
    """A claim that finds nothing, while a snapshot keeps vacuum from removing dead entries."""
    finding = Finding()
    with bench.arena(PGQUEUE) as arena, _engine(arena) as engine, engine.connect() as holder:
        holder.execution_options(isolation_level="REPEATABLE READ")
        holder.execute(text("SELECT 1"))
        add_waiting(arena, size.rows, delay=0)
        with _claims(arena) as claim:
            cursors = ClaimCursors(["default"])
            _drain(claim, cursors)
            probes = [_timed(lambda: _look(claim, cursors)) for _ in range(PROBES)]
            sweeps = []
            for _ in range(5):
                cursors.rewind()
                sweeps.append(_timed(lambda: _look(claim, cursors)))
        holder.rollback()
    probe = finding.add("behind the frontier", probes, "ms")
    finding.add("a sweep from the head, at most a fiftieth of the time", sweeps, "ms")
    finding.bound(probe, at_most=1.0)
    return finding


def _medians(claims: Sequence[Callable[..., Claim]]) -> list[float]:
    """Milliseconds of a claim by each, taken in turns."""
    times: list[list[float]] = [[] for _ in claims]
    for _ in range(REPEATS):
        for claim, taken in zip(claims, times, strict=True):
            taken.append(_timed(lambda claim=claim: _look(claim, ClaimCursors(["default"]))))  # type: ignore[misc]
    return [statistics.median(taken) for taken in times]


def _look(claim: Callable[..., Claim], cursors: ClaimCursors) -> int:
    pairs = cursors.pairs()
    found = claim(pairs, limit=BATCH)
    cursors.advance(pairs, found, limit=BATCH)
    return found.taken


def _drain(claim: Callable[..., Claim], cursors: ClaimCursors) -> None:
    taken = 1
    while taken:
        pairs = cursors.pairs()
        found = claim(pairs, limit=1000)
        cursors.advance(pairs, found, limit=1000)
        taken = found.taken


def _timed(action: Callable[[], object]) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - began)


@contextmanager
def _claims(arena: Arena) -> Iterator[Callable[..., Claim]]:
    """Claims on a connection that is set as a worker's."""
    with _engine(arena) as engine, own_connection(engine, CLAIMING) as connection:
        yield _claim_of(connection)


def _claim_of(connection: Connection) -> Callable[..., Claim]:
    worker = uuid.uuid4()
    connection.execute(text(WORKER), {"id": worker})
    attempts = Attempts(connection, worker)

    def claim(pairs: object, *, limit: int) -> Claim:
        return attempts.claim(pairs, tasks=TASKS, limit=limit)  # type: ignore[arg-type]

    return claim


@contextmanager
def _engine(arena: Arena) -> Iterator[Engine]:
    engine = create_engine(arena.url.replace("postgresql://", "postgresql+psycopg://"))
    try:
        yield engine
    finally:
        engine.dispose()
