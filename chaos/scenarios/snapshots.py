"""Somebody holds an old snapshot: no vacuum removes what dies meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from statistics import median
from typing import Any

from click.testing import CliRunner
from sqlalchemy import text

from chaos.environment import Environment
from chaos.interleavings.logical_workers import LogicalWorker, worker_settings
from chaos.mutations import Patch, mutation
from chaos.plans import AUTO_EXPLAIN, plans_of, prepare_at_once
from chaos.sample_tasks import call, queue
from chaos.scenario import Size, scenario
from chaos.scenarios.limits import KEYS, LimitedJobs, call_in_turn
from pgqueue.cli import main
from pgqueue.repository.admit import QUIET
from pgqueue.repository.health import Health, OldTransaction
from pgqueue.repository.settle import Attempts
from pgqueue.repository.tables import array_of
from pgqueue.views.findings import of_transactions
from pgqueue.worker.claiming.cursors import ClaimCursors

LIMIT = 10
SOME = 12
"""Claims that are compared."""
MOST = 5
"""Times as many pages as at the start, for one claim."""
HOLDER = "monthly_report"
ADMITTERS = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND application_name LIKE '%admitter%'
"""


@mutation
def claims_from_the_head(patch: Patch) -> None:
    """A claim begins at the head of the queue, not behind what this worker has claimed."""
    patch.set(ClaimCursors, "advance", lambda *_args, **_options: None)


@mutation
def doctor_looks_at_writers(patch: Patch) -> None:
    """The doctor names transactions that write, and not those that only keep a snapshot."""
    writers = text(
        "SELECT concat('session ', pid), state, 0, '' FROM pg_stat_activity"
        " WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid()"
        " AND xact_start < clock_timestamp() - :age"
    )

    def old_transactions(self: Any, age: timedelta) -> list[OldTransaction]:
        return [OldTransaction(*row) for row in self._executor.execute(writers, {"age": age})]

    patch.set(Health, "old_transactions", old_transactions)


@mutation
def no_round_reads_all_lanes(patch: Patch) -> None:
    """An admitter reads only the lanes that it knows, from where its last read has begun."""
    from pgqueue.worker.duties.admit import Admitter

    real = Admitter._next_full

    def once(self: Any) -> float:
        return real(self) if not self._begun else float("inf")

    patch.set(Admitter, "_next_full", once)


@mutation
def only_known_places_count(patch: Patch) -> None:
    """An admitter trusts its memory of places, and does not look for those of other workers."""
    from pgqueue.worker.duties.known_lanes import KnownPlaces

    real = KnownPlaces.learn

    def learn(self: Any, keys: Any, places: Any) -> None:
        real(self, keys, places)
        for key in keys:
            self.of_key[key] = (2**62, self.of_key[key][1])

    patch.set(KnownPlaces, "learn", learn)


class Claimer:
    """A worker whose claims tell how many pages they have touched to find their messages.

    What a claim does with them then, to jobs and leases, costs many more, and hides it.
    """

    def __init__(self, environment: Environment) -> None:
        engine = prepare_at_once(worker_settings(environment.url, **AUTO_EXPLAIN))
        self._worker = LogicalWorker(engine)
        self._attempts = Attempts(self._worker.line, self._worker.id)
        self._cursors = ClaimCursors(["default"])
        self.pages: list[int] = []

    def claim(self) -> int:
        """Claim and settle once; how many jobs."""
        pairs = self._cursors.pairs()
        with plans_of(self._worker.line) as plans:
            tasks = array_of([call.name])
            claim = self._attempts.claim(pairs, tasks=tasks, limit=LIMIT, ahead=False)
        self._cursors.advance(pairs, claim, limit=LIMIT)
        if claim.rows:
            self.pages.append(plans.only.pages_to_find("message_queue"))
            self._attempts.settle_succeeded(sorted(claim.rows, key=lambda one: one.job_id))
        return len(claim.rows)

    def close(self) -> None:
        self._worker.close()


@scenario(
    promises="P6",
    full=Size(jobs=20_000, workers=2),
    long=Size(jobs=120_000, workers=2),
    short=Size(jobs=3000, workers=1),
    mutated={
        "claims_from_the_head": "pages were touched by a claim",
        "doctor_looks_at_writers": "doctor does not name",
    },
    alone=True,
)
def held_snapshot(environment: Environment, size: Size) -> None:
    """A transaction keeps its snapshot while jobs flow: claims stay cheap, and doctor names it."""
    claimer = Claimer(environment)
    _flow(environment, claimer, SOME * LIMIT)
    before = median(claimer.pages[-SOME:])
    with _snapshot(environment) as pid:
        workers = environment.workers(size.workers, slow_grace=600)  # the claimer does not beat
        for _ in range(size.jobs // 1000):
            _flow(environment, claimer, 1000)
        workers.stop()
        _flow(environment, claimer, SOME * LIMIT)
        after = median(claimer.pages[-SOME:])
        _doctor_names(environment, pid)
    claimer.close()
    words = f"{after} pages were touched by a claim, {before} before the snapshot was taken"
    environment.expect(after <= MOST * before, words)
    environment.judge()


@scenario(
    promises="P6 P13",
    full=Size(jobs=10_000, workers=4, faults=30),
    short=Size(jobs=200, workers=3, faults=3),
    mutated={
        "no_round_reads_all_lanes": "all jobs end",
        "only_known_places_count": "ran at once",
    },
    alone=True,
)
def limits_under_a_held_snapshot(environment: Environment, size: Size) -> None:
    """A transaction keeps its snapshot while workers with limits are killed: each limit holds, and
    a job that is committed late is admitted."""
    with _snapshot(environment):
        limited = LimitedJobs(environment, size.faults)
        environment.enqueue(call, [()] * size.jobs)
        workers = environment.workers(size.workers, concurrency=4, poll_interval=0.1)
        left = environment.unfinished()
        for number in range(size.faults):
            environment.until_left(left - (number + 1) * left // (size.faults + 2))
            workers.kill_one()
        more = 2 * _commit_late(environment, size.workers)
        environment.finish(workers)
    limited.judge()
    environment.judge(succeeded=size.jobs + limited.succeeded() + more)


def _commit_late(environment: Environment, workers: int) -> int:
    """Commit jobs that every worker has passed over, behind as many others; how many."""
    environment.until_ended()
    environment.until(
        lambda: environment.scalar(ADMITTERS) == workers, what="the last workers admit jobs"
    )
    jobs = [(key,) for key in KEYS]
    with queue.session() as late:
        call_in_turn.options(max_attempts=1000).enqueue_many(late, jobs)
        environment.let_pass(2 * QUIET)
        environment.enqueue(call_in_turn.options(max_attempts=1000), jobs)
        environment.until_ended()
        late.commit()
    environment.count("late commits", len(jobs))
    return len(jobs)


def _flow(environment: Environment, claimer: Claimer, count: int) -> None:
    """Enqueue, and claim until nothing is left."""
    environment.enqueue(call, [()] * count)
    environment.until(
        lambda: not claimer.claim() and not environment.unfinished(), what="all jobs end"
    )


@contextmanager
def _snapshot(environment: Environment) -> Iterator[int]:
    with environment.engine.connect() as connection:
        connection.execution_options(isolation_level="REPEATABLE READ")
        connection.execute(text(f"SET application_name = {HOLDER}"))
        connection.execute(text("SELECT count(*) FROM pgqueue.jobs"))
        environment.count("snapshots held")
        yield connection.scalar(text("SELECT pg_backend_pid()"))


def _doctor_names(environment: Environment, pid: int) -> None:
    """What is younger than five minutes it leaves alone otherwise."""
    patch = Patch()
    at_once = {"older_than": timedelta(0)}
    patch.set(of_transactions, "__kwdefaults__", at_once)
    try:
        said = (
            CliRunner()
            .invoke(main, ["--url", environment.url, "doctor"], terminal_width=200)
            .output
        )
    finally:
        patch.undo()
    named = f"session {pid} of" in said and HOLDER in said
    environment.expect(named, f"doctor does not name session {pid} ({HOLDER}): {said}")
