"""``python -m benchmarks``: a table of rates and ratios.

Ratios are taken in turns within one run, because a shared machine drifts; quote the ratios.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import sqlalchemy as sa

from pgqueue.embedded import EmbeddedPostgres
from pgqueue.models import Job

TURNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--url", help="an empty PostgreSQL database; a private one if left away")
    parser.add_argument("--jobs", type=int, default=50_000, help="jobs to drain (50000)")
    given = parser.parse_args()
    with nullcontext(given.url) if given.url else _embedded() as url:
        os.environ["BENCHMARK_URL"] = url
        for name, figure in _figures(given.jobs):
            print(f"{name:<58} {figure}", flush=True)


@contextmanager
def _embedded() -> Iterator[str]:
    with EmbeddedPostgres(settings={"shared_buffers": "512MB", "max_wal_size": "4GB"}) as server:
        yield server.url


def _figures(jobs: int) -> Iterator[tuple[str, str]]:
    from benchmarks.tasks import queue

    queue.upgrade()
    yield "enqueue one in a Session and commit, bare INSERT = 1", _enqueue_one()
    yield "delay(), one client", _delay()
    yield "enqueue_many in a Session", _enqueue_many(jobs)
    yield "drain no-op jobs, 1 worker process", _drain(jobs, workers=1)
    yield "drain no-op jobs, 2 worker processes", _drain(jobs, workers=2)
    yield "idle worker, from enqueue call to handler", _latency(200)


def _enqueue_one() -> str:
    from benchmarks.tasks import nothing, queue

    jobs = sa.Table("jobs", sa.MetaData(), autoload_with=queue.engine, schema=Job.metadata.schema)
    bare = sa.insert(jobs).values(task="bare", args={"n": 1}).returning(jobs.c.id)
    with queue.session() as session:

        def insert() -> None:
            session.execute(bare).one()
            session.commit()

        def enqueue() -> None:
            nothing.enqueue(session, 1)
            session.commit()

        pairs = [(_rate(insert, 500), _rate(enqueue, 500)) for _ in range(TURNS)]
    ratio = statistics.median(bare / ours for bare, ours in pairs)
    ours = statistics.median(ours for _, ours in pairs)
    return f"x {ratio:.2f} of the time ({ours:,.0f}/s)"


def _delay() -> str:
    from benchmarks.tasks import nothing

    return f"{statistics.median(_rate(lambda: nothing.delay(1), 500) for _ in range(TURNS)):,.0f}/s"


def _enqueue_many(jobs: int) -> str:
    from benchmarks.tasks import nothing, queue

    _empty()
    rows = [(n,) for n in range(jobs)]
    began = time.perf_counter()
    with queue.session() as session, session.begin():
        nothing.enqueue_many(session, rows)
    return f"{jobs / (time.perf_counter() - began):,.0f} jobs/s"


def _drain(jobs: int, *, workers: int) -> str:
    from benchmarks.tasks import queue

    rates = []
    for _ in range(3):
        _enqueue_many(jobs)
        with queue.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(sa.text("ANALYZE"))
            connection.execute(sa.text("CHECKPOINT"))
        processes = [_worker() for _ in range(workers)]
        try:
            rates.append(_until_done(jobs))
        finally:
            _end(processes)
    return f"{statistics.median(rates):,.0f} jobs/s"


def _until_done(jobs: int) -> float:
    """From the first finished job to the last, by the database's clock."""
    from benchmarks.tasks import queue

    spans = sa.select(
        sa.func.count(Job.finished_at),
        sa.func.extract("epoch", sa.func.max(Job.finished_at) - sa.func.min(Job.started_at)),
    )
    with queue.session() as session:
        while True:
            done, seconds = session.execute(spans).one()
            session.rollback()
            if done == jobs:
                return jobs / float(seconds)
            time.sleep(0.05)


def _latency(jobs: int) -> str:
    from benchmarks.tasks import note_start

    _empty()
    path = Path(tempfile.mkdtemp()) / "waits"
    process = _worker()
    try:
        for n in range(jobs + 20):
            note_start.delay(str(path), time.monotonic())
            while not path.exists() or len(path.read_text().splitlines()) <= n:
                time.sleep(0.001)
            time.sleep(0.02)
    finally:
        _end([process])
    waits = sorted(1000 * float(line) for line in path.read_text().splitlines()[20:])
    return f"p50 {waits[len(waits) // 2]:.2f} ms, p99 {waits[int(len(waits) * 0.99)]:.2f} ms"


def _worker() -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "pgqueue", "--app", "benchmarks.tasks:queue", "worker"]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def _end(processes: "list[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(30)


def _empty() -> None:
    from benchmarks.tasks import queue

    with queue.engine.begin() as connection:
        for table in ("jobs", "message_queue", "leases", "job_attempts", "dead_letters"):
            connection.execute(sa.text(f"TRUNCATE {Job.metadata.schema}.{table}"))


def _rate(action: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        action()
    return times / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
