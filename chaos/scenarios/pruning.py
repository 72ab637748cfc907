"""Old jobs, which several prune at once beside the work."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from chaos.environment import Environment
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import call, pay
from pgqueue import Keep
from pgqueue.database.opening import own_connection
from pgqueue.database.settings import JANITOR
from pgqueue.repository import prune as pruning
from pgqueue.repository.tables import clock, jobs
from pgqueue.rules.retention import Retention
from pgqueue.worker.duties.prune import PruneRound, RoundState

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
KEPT = """
    SELECT (SELECT count(*) FROM strict)
        + (SELECT count(*) FROM hidden WHERE job NOT IN (SELECT job FROM strict))
"""
LEFT = "SELECT count(*) FROM pgqueue.jobs WHERE finished_at = '2020-01-01'"
FAILED = "SELECT count(*) FROM pgqueue.jobs WHERE outcome = 'failed'"
ORPHANS = """
    SELECT count(*) FROM pgqueue.job_attempts
    WHERE NOT EXISTS (SELECT FROM pgqueue.jobs WHERE id = job_id)
"""
REFERENCES = """
    INSERT INTO strict SELECT id FROM pgqueue.jobs WHERE id % 7 = 0 AND outcome IS NOT NULL;
    INSERT INTO follows SELECT id FROM pgqueue.jobs WHERE id % 5 = 0 AND outcome IS NOT NULL;
    INSERT INTO hidden SELECT job FROM follows WHERE job % 65 = 0;
"""


@mutation
def prunes_by_age_alone(patch: Patch) -> None:
    """Pruning asks how old a job is, and not whether it has ended."""
    age = timedelta(days=14)
    patch.set(pruning, "_is_due", lambda _references: jobs.c.created_at < clock() - age)
    patch.rebuild(pruning.prune)


class OldJobs:
    """Jobs that ended long ago.  Foreign keys keep some of them."""

    def __init__(self, environment: Environment, faults: int) -> None:
        self._environment = environment
        self._deleted: list[int] = []
        environment.execute(OLD, task=call.name, number=100 * faults)
        for statement in (TABLES, REFERENCES):
            environment.execute(statement)
        self._kept = environment.scalar(KEPT)
        # What is not to be pruned is as old.
        environment.execute(
            "UPDATE pgqueue.jobs SET created_at = '2020-01-01' WHERE outcome IS NULL"
        )
        self.clients: list[Callable[[], None]] = [self._prune] * PRUNERS

    def succeeded(self) -> int:
        return int(self._kept - self._environment.scalar(FAILED))

    def _prune(self) -> None:
        """Rounds until one has deleted nothing and was refused only what is kept."""
        while True:
            prune_round = PruneRound(RULES)
            with own_connection(
                self._environment.engine, JANITOR, isolation_level="READ COMMITTED", purpose="prune"
            ) as connection:
                while prune_round.step(connection) is not RoundState.DONE:
                    pass
            self._deleted.append(prune_round.deleted)
            if not prune_round.deleted:
                return

    def judge(self) -> None:
        environment = self._environment
        environment.count("jobs pruned", sum(self._deleted))
        left = environment.scalar(LEFT)  # the workers prune as well, if there is time
        environment.expect(
            left == self._kept, f"{left} old jobs are left, and {self._kept} are kept by their rows"
        )
        orphans = environment.scalar(ORPHANS)
        environment.expect(orphans == 0, f"{orphans} records of pruned jobs are left")
