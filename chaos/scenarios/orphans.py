"""Thousands of jobs whose worker has died at once."""

from __future__ import annotations

import time

from sqlalchemy import text

from chaos.broken import Broken
from chaos.environment import Environment
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import call
from chaos.scenario import Server, Size, scenario
from pgqueue.database.opening import own_connection
from pgqueue.database.settings import CLAIMING
from pgqueue.repository.claim import ClaimCursor
from pgqueue.repository.settle import Attempts
from pgqueue.repository.tables import array_of
from pgqueue.repository.workers import Workers

WITHIN = 30.0
MOST_IN_A_STATEMENT = 1000
SLOW = "duration: "
RECORDED = "SELECT count(*) FROM pgqueue.job_attempts WHERE outcome = 'crashed'"

COUNT_EACH_STATEMENT = """
    CREATE TABLE public.rescued (jobs bigint);
    CREATE FUNCTION count_rescued() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN INSERT INTO public.rescued SELECT count(*) FROM new; RETURN NULL; END $$;
    CREATE TRIGGER count_rescued AFTER INSERT ON pgqueue.job_attempts
    REFERENCING NEW TABLE AS new FOR EACH STATEMENT EXECUTE FUNCTION count_rescued()
"""
"""How many jobs each statement rescues, because how long it takes depends on the machine."""


@mutation
def rescue_without_its_limit(patch: Patch) -> None:
    """One statement rescues all there is."""
    from pgqueue.repository import rescue

    patch.set(rescue, "RESCUE_BATCH", 1_000_000)


@mutation
def rescue_writes_two_messages(patch: Patch) -> None:
    """Every rescued job gets its next message twice."""
    again = text(
        "INSERT INTO pgqueue.message_queue (queue, priority, run_at, target_id, task, attempt)"
        " SELECT queue, priority, run_at, id, task, attempts FROM pgqueue.jobs"
        " WHERE id = ANY(:jobs)"
    )
    real = Workers.rescue

    def twice(self):  # type: ignore[no-untyped-def]
        rescued = real(self)
        if rescued:
            self._executor.execute(again, {"jobs": [each.job_id for each in rescued]})
        return rescued

    patch.set(Workers, "rescue", twice)


@scenario(
    promises="P1 P4",
    full=Size(jobs=20_000, workers=4),
    short=Size(jobs=1500, workers=2),
    mutated={
        "rescue_without_its_limit": "a statement has rescued",
        "rescue_writes_two_messages": "at most one message|beside a lease",
    },
    server=Server.OWN,
    settings={"log_min_duration_statement": "1000", "log_lock_waits": "on"},
)
def thousands_of_orphans(environment: Environment, size: Size) -> None:
    """A worker dies with thousands of leases: each job goes on once, in seconds, in small steps."""
    jobs = environment.enqueue(call, [()] * size.jobs)
    _claim_all_and_die(environment, size.jobs)
    environment.execute(COUNT_EACH_STATEMENT)
    with environment.queue.session() as session:
        environment.queue.pause(session, "default")  # the rescue alone, before its jobs run
        session.commit()
    workers = environment.workers(size.workers, concurrency=4)
    workers.until_registered()
    began = time.monotonic()
    environment.until(
        lambda: environment.scalar(RECORDED) >= size.jobs,
        seconds=WITHIN,
        what="all orphans are rescued",
    )
    environment.count("orphans rescued", len(jobs))
    environment.count("milliseconds for them", int(1000 * (time.monotonic() - began)))
    largest = environment.scalar("SELECT max(jobs) FROM rescued")
    environment.expect(largest <= MOST_IN_A_STATEMENT, f"a statement has rescued {largest} jobs")
    once = "SELECT count(DISTINCT job_id) FROM pgqueue.job_attempts WHERE outcome = 'crashed'"
    environment.expect(
        environment.scalar(once) == environment.scalar(RECORDED), "a job was rescued twice"
    )
    with environment.queue.session() as session:
        environment.queue.resume(session, "default")
        session.commit()
    environment.finish(workers)
    _the_log_is_quiet(environment)
    environment.judge()


def _claim_all_and_die(environment: Environment, jobs: int) -> None:
    """Claim as a worker does, and lose the connection; no handler starts."""
    import uuid

    worker_id = uuid.uuid4()
    with own_connection(environment.engine, CLAIMING) as connection:
        Workers(connection).register(
            worker_id, hostname="nowhere", pid=0, queues=["default"], slots=jobs
        )
        claim = Attempts(connection, worker_id).claim
        pairs = [ClaimCursor("default", priority, "-infinity", 0) for priority in range(10)]
        names = array_of([call.name])
        taken = sum(len(claim(pairs, tasks=names, limit=500).rows) for _ in range(jobs // 500))
    environment.expect(taken == jobs, f"only {taken} were claimed")


def _the_log_is_quiet(environment: Environment) -> None:
    """No statement of a second, no deadlock."""
    log = (environment.server.directory / "server.log").read_text(errors="replace").splitlines()
    loud = [line for line in log if "deadlock" in line or (SLOW in line and "pgqueue" in line)]
    # Enqueuing thousands and the judge's own questions are no part of the rescue.
    loud = [line for line in loud if "orphan" in line or "deadlock" in line]
    if loud:
        raise Broken(f"the server's log tells of {loud[:3]}")
