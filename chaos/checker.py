"""The judge: what the tables and the histories must say when a run is over.

The rules have the names that they carry in the report.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from chaos.broken import Broken
from chaos.history import START, Event
from chaos.sampler import Sampler
from chaos.workers import Run
from pgqueue import PgQueue


class CheckedRun(Run, Protocol):
    """What the judge reads of an environment."""

    acknowledged: set[int]
    counts: Counter[str]
    requeued: Counter[int]
    queue: PgQueue
    sampler: Sampler

    def history(self, word: str | None = None) -> list[Event]: ...
    def interruptions(self) -> Counter[tuple[int, int]]: ...


class Checker:
    """Looks at one run.  Raises :class:`Broken` with the first rules that do not hold."""

    def __init__(self, run: CheckedRun) -> None:
        self._run = run
        self._starts = run.history(START)
        self._wrong: list[str] = []

    def all(self, outcomes: dict[str, int]) -> None:
        self._acknowledged_jobs_have_ended(outcomes)
        self._nothing_came_from_nowhere()
        self._each_success_has_one_effect()
        self._the_outcome_is_that_of_the_last_attempt()
        self._starts_stay_below_max_attempts()
        self._only_jobs_of_harmed_workers_started_twice()
        self._invariants_hold()
        self._nothing_is_left_open()
        if self._wrong:
            raise Broken("\n".join(self._wrong))

    def _query(self, rule: str, statement: str) -> None:
        """The rule is broken by every row this returns."""
        rows = self._run.rows(statement)
        if rows:
            shown = ", ".join(str(tuple(row)) for row in rows[:5])
            self._wrong.append(f"{rule}: {len(rows)} break it, such as {shown}")

    def _acknowledged_jobs_have_ended(self, outcomes: dict[str, int]) -> None:
        """F1: what COMMIT acknowledged exists, and has ended as expected."""
        count = "SELECT coalesce(outcome, 'unfinished'), count(*) FROM pgqueue.jobs GROUP BY 1"
        found = {row[0]: row[1] for row in self._run.rows(count)}
        ids = {row[0] for row in self._run.rows("SELECT id FROM pgqueue.jobs")}
        lost = self._run.acknowledged - ids
        if lost:
            self._wrong.append(f"F1: {len(lost)} acknowledged jobs are gone, such as {min(lost)}")
        if found != {name: count for name, count in outcomes.items() if count}:
            self._wrong.append(f"F1: jobs have ended as {found}, expected {outcomes}")

    def _nothing_came_from_nowhere(self) -> None:
        """F2: every start is of a job that exists."""
        ids = {row[0] for row in self._run.rows("SELECT id FROM pgqueue.jobs")}
        ghosts = {event.job for event in self._starts} - ids
        if ghosts:
            self._wrong.append(f"F2: jobs that were never committed have started: {ghosts}")

    def _each_success_has_one_effect(self) -> None:
        """F3: a transactional handler's row is there once if its job succeeded, else not."""
        self._query(
            "F3: one effect for each success, none otherwise",
            """
            SELECT job.id, job.outcome, effect.n
            FROM (SELECT id, outcome FROM pgqueue.jobs WHERE task LIKE '%.%pay%') AS job
            FULL JOIN (SELECT job, count(*) AS n FROM effects GROUP BY job) AS effect
                ON effect.job = job.id
            WHERE job.id IS NULL
               OR coalesce(effect.n, 0)
                  != CASE WHEN job.outcome = 'succeeded' THEN 1 ELSE 0 END
            """,
        )

    def _the_outcome_is_that_of_the_last_attempt(self) -> None:
        """F4: the result that was kept is the last attempt's, and so is the effect."""
        self._query(
            "F4: the kept result is that of the accepted attempt",
            "SELECT id, attempts, result FROM pgqueue.jobs WHERE outcome = 'succeeded'"
            " AND jsonb_typeof(result) = 'number' AND result::text::int != attempts",
        )
        self._query(
            "F4: the kept effect is that of the accepted attempt",
            "SELECT job, attempt, attempts FROM effects JOIN pgqueue.jobs ON id = job"
            " WHERE attempt != attempts AND task NOT LIKE '%.pay_in_steps'",
        )

    def _starts_stay_below_max_attempts(self) -> None:
        """F5, and no attempt starts twice: an attempt's number is given out once, and once more
        for each time that a stop has interrupted it.

        A crash of the server may forget the outcomes of the last moment, as is documented.
        """
        interrupted = self._run.interruptions()
        most = {r[0]: r[1] for r in self._run.rows("SELECT id, max_attempts FROM pgqueue.jobs")}
        requeued = self._run.requeued
        starts = Counter(event.job for event in self._starts)
        starts.subtract(Counter(job for job, _ in interrupted.elements()))
        over = [job for job, n in starts.items() if n > most.get(job, n) * (1 + requeued[job])]
        if over:
            self._wrong.append(f"F5: started more often than max_attempts: {over[:5]}")
        if not self._run.counts["server crashes"]:
            numbers = Counter((event.job, event.attempt) for event in self._starts)
            numbers.subtract(interrupted)
            twice = [one for one, n in numbers.items() if n > 1 and not requeued[one[0]]]
            if twice:
                self._wrong.append(f"F5: (job, attempt) has started twice: {twice[:5]}")

    def _only_jobs_of_harmed_workers_started_twice(self) -> None:
        """F6: a second start has a reason: the worker of the first was harmed, or it failed."""
        harmed = {member.name for member in self._run.members if member.was_harmed}
        failed = {
            (row[0], row[1])
            for row in self._run.rows(
                "SELECT job_id, attempt FROM pgqueue.job_attempts WHERE outcome != 'crashed'"
            )
        }
        last: dict[int, Event] = {}
        duplicates = 0
        for event in self._starts:
            earlier = last.get(event.job)
            last[event.job] = event
            if earlier is None or (earlier.job, earlier.attempt) in failed:
                continue
            duplicates += 1
            if earlier.worker not in harmed and not self._run.requeued[event.job]:
                self._wrong.append(
                    f"F6: job {event.job} started again although {earlier.worker} was well"
                )
        self._run.counts["second starts"] += duplicates

    def _invariants_hold(self) -> None:
        """F8, at the end; the sampler has looked all the time."""
        self._run.sampler.raise_if_broken()
        with self._run.queue.session() as session:
            violations = self._run.queue.check(session)
        if violations:
            self._wrong.append(f"F8: {', '.join(map(str, violations[:5]))}")
        self._run.counts["samples"] = self._run.sampler.looks

    def _nothing_is_left_open(self) -> None:
        """F9: no worker has left a transaction, and nobody holds a row."""
        names = [member.name for member in self._run.members]
        self._query(
            "F9: no transaction is left open",
            "SELECT pid, application_name, state FROM pg_stat_activity"
            f" WHERE split_part(application_name, ' ', 1) = ANY('{{{','.join(names)}}}')"
            " AND datname = current_database()"
            " AND state LIKE 'idle in transaction%'"
            " AND clock_timestamp() - state_change > interval '5 seconds'",
        )
