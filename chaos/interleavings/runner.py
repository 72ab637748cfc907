"""Runs pairs of scripts, one after the other, and judges them in batches.

Each has its job in a queue of its own, so that a few hundred can stand beside each other as
they ended, and one look at the tables judges them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

from sqlalchemy import Engine, text

from chaos.broken import Broken
from chaos.interleavings.logical_workers import TASKS, enqueue, pairs, worker_settings
from chaos.interleavings.scheduler import Scheduler, Stepper, raise_errors, run_in_order
from chaos.interleavings.scripts import OPENINGS, SCRIPTS, Pair
from chaos.interleavings.sessions import ScriptedJob, ScriptedSession
from pgqueue import PgQueue
from pgqueue.outcomes import Exhausted, Succeeded
from pgqueue.repository.settle import Attempts
from pgqueue.repository.workers import Workers

BATCH = 250

# What becomes of a job that has ended, as the server sees it, whoever does it.
RECORD_ENDINGS = """
CREATE TABLE IF NOT EXISTS public.endings (job bigint, word text);
CREATE OR REPLACE FUNCTION record_ending() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.endings VALUES (OLD.id, CASE
        WHEN NEW.outcome IS NULL AND NEW.finished_at IS NULL AND OLD.outcome != 'succeeded'
        THEN 'requeued' ELSE concat('changed from ', OLD.outcome, ' to ', NEW.outcome) END);
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER record_ending AFTER UPDATE ON pgqueue.jobs
    FOR EACH ROW WHEN (OLD.outcome IS NOT NULL) EXECUTE FUNCTION record_ending();
"""
ALLOWED_OF_DELETED = ("a message has a job", "a lease has a job")
"""A worker had it in its hands when the job was deleted: the next claim drops it."""


class ScriptRunner:
    """Two sessions for the scripts, one for the openings, and a connection to prepare jobs."""

    def __init__(self, url: str, engine: Engine) -> None:
        self._engine = engine
        self._workers = worker_settings(url)
        with engine.begin() as connection:
            connection.exec_driver_sql(RECORD_ENDINGS)
        self._sessions = [ScriptedSession(name, self._workers) for name in ("first", "second")]
        self._opener = ScriptedSession("opener", self._workers)
        self._connection = self._workers.connect().execution_options(isolation_level="AUTOCOMMIT")
        self._monitor = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        self._ran: dict[int, ScriptedJob] = {}
        self._count = 0
        self.orders = 0

    def close(self) -> None:
        for session in (*self._sessions, self._opener):
            session.close()
        self._connection.close()
        self._monitor.close()
        self._workers.dispose()

    def run(self, pair: Pair, scheduler: Scheduler) -> None:
        """Run both scripts once, in the order that the scheduler gives."""
        job = self._set(pair)
        for session in (self._opener, *self._sessions):
            session.take(job, self._connection)
        OPENINGS[pair.opening](self._opener)
        scripts = [SCRIPTS[pair.first], SCRIPTS[pair.second]]
        steppers = [
            Stepper(session.name, partial(script, session), session.pids)
            for session, script in zip(self._sessions, scripts, strict=True)
        ]
        for session, stepper in zip(self._sessions, steppers, strict=True):
            session.stepper = stepper
        job.order = run_in_order(steppers, scheduler, self._monitor)
        for session in (self._opener, *self._sessions):
            session.leave()
        raise_errors(steppers, str(job))
        self._ran[job.job_id] = job
        self.orders += 1
        if len(self._ran) == BATCH:
            self.check()

    def check(self) -> None:
        """Judge what was run since the last time, and drive it to its end."""
        self._raise_if(self._changed_after_the_end())
        self._raise_if(self._told_twice())
        self._raise_if(self._violations(of_deleted=False))
        self._drive_to_the_end()
        self._raise_if(self._violations(of_deleted=True))
        self._raise_if(self._unfinished())
        self._raise_if(self._changed_after_the_end())
        self._raise_if(self._foreign_results())
        self._ran.clear()

    def _set(self, pair: Pair) -> ScriptedJob:
        self._count += 1
        queue = f"q{self._count}"
        job_id = enqueue(self._connection, queue=queue, max_attempts=pair.max_attempts)
        return ScriptedJob(pair.name, queue, job_id)

    def _raise_if(self, wrong: Iterable[tuple[int | None, str]]) -> None:
        for job_id, words in wrong:
            job = self._ran.get(job_id) if job_id is not None else None
            raise Broken(f"{job or job_id}: {words}")

    def _told_twice(self) -> Iterable[tuple[int, str]]:
        """An attempt is given out once, and at most one outcome of it is accepted."""
        crashed = self._rows(
            "SELECT job_id, message_id, attempt FROM pgqueue.job_attempts"
            " WHERE outcome = 'crashed' AND job_id = ANY(:ids)"
        )
        endings = Counter(tuple(row) for row in crashed)
        starts: Counter[tuple[int, ...]] = Counter()
        for job in self._ran.values():
            endings.update(job.accepted)
            if not job.is_deleted:  # with the job goes the memory of its attempts
                starts.update(job.started)
        for attempt, count in endings.items():
            if count > 1:
                yield attempt[0], f"{count} outcomes of {attempt} were accepted"
        for attempt, count in starts.items():
            if count > 1:
                yield attempt[0], f"the attempt {attempt} was given out {count} times"

    def _violations(self, *, of_deleted: bool) -> Iterable[tuple[int | None, str]]:
        with self._engine.connect() as connection:
            violations = PgQueue().check(connection)
        for one in violations:
            job = self._ran.get(one.job_id or 0)
            is_deleted = job is not None and job.is_deleted
            if of_deleted or not is_deleted or one.rule not in ALLOWED_OF_DELETED:
                yield one.job_id, f"{one.rule}; {one.detail}"

    def _drive_to_the_end(self) -> None:
        """All workers die, and one that nobody has seen before does what is left."""
        with self._engine.begin() as connection:
            connection.execute(text("UPDATE pgqueue.workers SET dead_at = clock_timestamp()"))
            while Workers(connection).rescue():
                pass
        last = self._opener
        last.take(ScriptedJob("the last", "none", 0), self._connection)
        attempts = Attempts(self._connection, last.worker_id)
        everywhere = [pair for job in self._ran.values() for pair in pairs(job.queue, [5])]
        while (claim := attempts.claim(everywhere, tasks=TASKS, limit=BATCH)).taken:
            for one in claim.rows:
                over = one.attempt > one.max_attempts
                attempts.settle([(one, Exhausted() if over else Succeeded())])

    def _unfinished(self) -> Iterable[tuple[int, str]]:
        rows = self._rows("SELECT id FROM pgqueue.jobs WHERE outcome IS NULL AND id = ANY(:ids)")
        for row in rows:
            yield row[0], "no worker can end it"
        left = "SELECT target_id FROM pgqueue.message_queue UNION SELECT target_id FROM"
        for row in self._rows(f"{left} pgqueue.leases"):
            yield row[0], "it has ended, and its message or lease stays for ever"

    def _changed_after_the_end(self) -> Iterable[tuple[int, str]]:
        requeues: Counter[int] = Counter()
        for job_id, word in self._rows("SELECT job, word FROM endings WHERE job = ANY(:ids)"):
            if word != "requeued":
                yield job_id, f"it had ended, and was {word}"
            requeues[job_id] += 1
        for job_id, count in requeues.items():
            if count != self._ran[job_id].requeues:
                yield job_id, f"it began again {count} times, not as often as it was requeued"

    def _foreign_results(self) -> Iterable[tuple[int, str]]:
        kept = (
            "SELECT id, result #>> '{}' FROM pgqueue.jobs WHERE id = ANY(:ids)"
            " AND jsonb_typeof(result) = 'string'"
        )
        for job_id, result in self._rows(kept):
            if result not in self._ran[job_id].successes:
                yield job_id, f"its result is {result!r}, and nobody was told that it was kept"

    def _rows(self, statement: str) -> list[Any]:
        with self._engine.connect() as connection:
            of_these = {"ids": list(self._ran)} if ":ids" in statement else {}
            return list(connection.execute(text(statement), of_these))
