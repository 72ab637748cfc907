"""Pruning beside enqueues, kills and foreign keys."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from chaos.environment import Environment
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import call, pay
from chaos.scenario import Size, scenario
from pgqueue import Keep
from pgqueue.database.opening import own_connection
from pgqueue.database.settings import PRUNING
from pgqueue.repository import prune as pruning
from pgqueue.repository.tables import clock, jobs
from pgqueue.rules.retention import Retention
from pgqueue.worker.duties.prune import Progress, PruneRound

PRUNERS = 3
RULES = Retention(Keep(failed=timedelta(days=14)), {}, {call.name: None, pay.name: None})
OLD = """
    WITH job AS (
        INSERT INTO pgqueue.jobs (task, outcome, attempts, created_at, finished_at)
        SELECT :task, (ARRAY['succeeded', 'failed'])[1 + n % 2], 1, '2020-01-01', '2020-01-01'
        FROM generate_series(1, :number) AS n RETURNING id, outcome, queue, task
    ), letter AS (
        INSERT INTO pgqueue.dead_letters (job_id, outcome, queue, task)
        SELECT * FROM job WHERE outcome = 'failed'
    )
    INSERT INTO pgqueue.job_attempts (job_id, message_id, attempt, outcome)
    SELECT id, 1, 1, 'failed' FROM job WHERE outcome = 'failed'
"""
TABLES = """
    CREATE TABLE strict (job bigint REFERENCES pgqueue.jobs);
    CREATE TABLE follows (job bigint PRIMARY KEY REFERENCES pgqueue.jobs ON DELETE CASCADE);
    CREATE TABLE hidden (job bigint REFERENCES follows DEFERRABLE INITIALLY DEFERRED);
    CREATE INDEX ON strict (job);
    CREATE INDEX ON hidden (job);
"""
REFERENCES = """
    INSERT INTO strict SELECT id FROM pgqueue.jobs WHERE id % 7 = 0;
    INSERT INTO follows SELECT id FROM pgqueue.jobs WHERE id % 5 = 0;
    INSERT INTO hidden SELECT job FROM follows WHERE job % 65 = 0;
"""


@mutation
def prunes_by_age_alone(patch: Patch) -> None:
    """Pruning asks how old a job is, and not whether it has ended."""
    age = timedelta(days=14)
    patch.set(pruning, "_is_due", lambda _references: jobs.c.created_at < clock() - age)
    patch.rebuild(pruning.prune)


@scenario(
    promises="P1 P13",
    research="retention",
    full=Size(jobs=20_000, workers=4, faults=60),
    short=Size(jobs=400, workers=2, faults=4),
    mutated={"prunes_by_age_alone": "were pruned, with|acknowledged jobs are gone|F8"},
)
def pruning_beside_work(environment: Environment, size: Size) -> None:
    """Several prune at once beside enqueues, kills and foreign keys: only what is due goes."""
    environment.execute(OLD, task=call.name, number=2 * size.jobs)
    for statement in (TABLES, REFERENCES):
        environment.execute(statement)
    kept = environment.scalar("SELECT count(*) FROM strict") + environment.scalar(
        "SELECT count(*) FROM hidden WHERE job NOT IN (SELECT job FROM strict)"
    )
    environment.enqueue(pay, [()] * (size.jobs // 2))
    environment.execute("UPDATE pgqueue.jobs SET created_at = '2020-01-01' WHERE outcome IS NULL")
    workers = environment.workers(size.workers)
    workers.until_registered()
    with ThreadPoolExecutor(PRUNERS) as pool:
        rounds = [pool.submit(_prune, environment) for _ in range(PRUNERS)]
        for _ in range(size.faults):
            environment.enqueue(call, [()] * (size.jobs // 2 // size.faults))
            workers.kill_one()
        deleted = sum(one.result() for one in rounds)
    environment.finish(workers)
    environment.count("jobs pruned", deleted)
    environment.expect(
        deleted == 2 * size.jobs - kept, f"{deleted} were pruned, with {kept} kept by their rows"
    )
    orphans = environment.scalar(
        "SELECT count(*) FROM pgqueue.job_attempts WHERE NOT EXISTS"
        " (SELECT FROM pgqueue.jobs WHERE id = job_id)"
    )
    environment.expect(orphans == 0, f"{orphans} records of pruned jobs are left")
    failed = environment.scalar("SELECT count(*) FROM pgqueue.jobs WHERE outcome = 'failed'")
    succeeded = len(environment.acknowledged) + kept - failed
    environment.check(succeeded=succeeded, failed=failed)


def _prune(environment: Environment) -> int:
    """Rounds until one has deleted nothing and was refused only what is kept."""
    deleted = 0
    while True:
        prune_round = PruneRound(RULES)
        with own_connection(
            environment.engine, PRUNING, isolation_level="READ COMMITTED", purpose="prune"
        ) as connection:
            while prune_round.step(connection) is not Progress.DONE:
                pass
        deleted += prune_round.deleted
        if not prune_round.deleted:
            return deleted
