"""Unique jobs, which are replaced while workers start them and die."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from chaos.environment import Environment
from chaos.history import START
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import go_on, keep_newest

CLIENTS = 4
KEYS = 4
CHAINS = 3
ASKED = "CREATE TABLE asked (id serial PRIMARY KEY, job bigint NOT NULL, version int NOT NULL)"
ASK = text("INSERT INTO asked (job, version) VALUES (:job, :version)")
COUNT = "SELECT count(*) FROM pgqueue.jobs WHERE task = ANY(:tasks)"
LAST_ASKED = """
    SELECT DISTINCT ON (job) job, version, (args ->> 'version')::int
    FROM asked JOIN pgqueue.jobs ON jobs.id = job ORDER BY job, asked.id DESC
"""


@mutation
def changes_jobs_that_have_started(patch: Patch) -> None:
    """An enqueue replaces the arguments of the job that has the key, also if it has started."""
    from pgqueue.repository import unique_keys
    from pgqueue.repository.enqueue import Placed, PlacedAs

    change = text(
        "UPDATE pgqueue.jobs SET args = CAST(:args AS jsonb)"
        " WHERE queue = :queue AND held_unique_key = :key RETURNING id"
    )

    def carelessly(self: Any, new: Any, rows: Any) -> Any:
        placed = carefully(self, new, rows)
        for row in unique_keys._missing(rows, placed):
            named = {"args": json.dumps(row.args), "queue": new.queue, "key": row.unique_key}
            for id in self._executor.execute(change, named).scalars():
                placed[row.unique_key] = Placed(id, PlacedAs.CHANGED)
        return placed

    carefully: Callable[..., Any] = patch.set(unique_keys.KeyChanges, "_changed", carelessly)


@mutation
def keeps_the_key_at_the_start(patch: Patch) -> None:
    """A job that is to give its key back when it starts has it until its end."""
    from pgqueue.repository.settle import Attempts

    patch.set(Attempts, "free_key", lambda *_, **__: True)


class ReplacedJobs:
    """Jobs that clients replace by newer ones, and chains of jobs that enqueue their successor."""

    def __init__(self, environment: Environment, faults: int) -> None:
        self._environment = environment
        self._asks = 5 * faults
        environment.execute(ASKED)
        chains = [go_on.delay(chain, faults) for chain in range(CHAINS)]
        environment.acknowledged.update(chain.id for chain in chains)
        seeds = [environment.dice.random() for _ in range(CLIENTS)]
        self.clients: list[Callable[[], None]] = [partial(self._ask, seed) for seed in seeds]

    def succeeded(self) -> int:
        return int(self._environment.scalar(COUNT, tasks=[go_on.name, keep_newest.name]))

    def _ask(self, seed: float) -> None:
        """Enqueue newer and newer versions, and write down which job took each."""
        environment = self._environment
        environment.until(lambda: bool(environment.history(START)), what="a job has started")
        chance = random.Random(seed)
        for _ in range(self._asks):
            key, version = chance.randrange(KEYS), chance.randrange(10**9)
            soon = timedelta(milliseconds=chance.choice((0, 0, 5)))
            with Session(environment.engine) as session, session.begin():
                task = keep_newest.options(delay=soon, max_attempts=1000)
                job = task.enqueue(session, key, version)
                session.execute(ASK, {"job": job.id, "version": version})
                id, is_new = job.id, job.is_new
            environment.acknowledged.add(id)
            environment.counts["replaced"] += not is_new

    def judge(self) -> None:
        environment = self._environment
        ran: dict[int, list[int]] = defaultdict(list)
        starts = environment.history(START)
        for event in starts:
            if "version" in event.details:
                ran[event.job].append(event.details["version"])
        for job, asked, stored in environment.rows(LAST_ASKED):
            last = ran[job][-1] if ran[job] else None
            environment.expect(
                asked == stored == last,
                f"job {job} ran version {last} and has {stored}, and {asked} was asked for last",
            )
        ends = {event.job for event in starts if event.details.get("left", 1) == 0}
        environment.expect(
            len(ends) >= CHAINS, f"chains have stopped early: {len(ends)} of {CHAINS} have ended"
        )
