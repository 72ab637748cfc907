"""Unique jobs that are replaced while workers start them, and die."""

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
from chaos.interleavings.logical_workers import run_together
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import go_on, keep_newest
from chaos.scenario import Size, scenario

CLIENTS = 8
KEYS = 4
CHAINS = 3
ASKED = "CREATE TABLE asked (id serial PRIMARY KEY, job bigint NOT NULL, version int NOT NULL)"
ASK = text("INSERT INTO asked (job, version) VALUES (:job, :version)")
LAST_ASKED = """
    SELECT DISTINCT ON (job) job, version, (args ->> 'version')::int
    FROM asked JOIN pgqueue.jobs ON jobs.id = job ORDER BY job, asked.id DESC
"""


@mutation
def changes_jobs_that_have_started(patch: Patch) -> None:
    """An enqueue replaces the arguments of the job that has the key, also if it has started."""
    from pgqueue.repository import enqueue
    from pgqueue.repository.enqueue import Placed

    carefully: Callable[..., Any] = enqueue._changed
    change = text(
        "UPDATE pgqueue.jobs SET args = CAST(:args AS jsonb)"
        " WHERE queue = :queue AND held_unique_key = :key RETURNING id"
    )

    def carelessly(executor: Any, new: Any, unique: Any, rows: Any) -> Any:
        placed = carefully(executor, new, unique, rows)
        for row in enqueue._missing(rows, placed):
            named = {"args": json.dumps(row.args), "queue": new.queue, "key": row.unique_key}
            for id in executor.execute(change, named).scalars():
                placed[row.unique_key] = Placed(id, is_new=False, is_changed=True)
        return placed

    patch.set(enqueue, "_changed", carelessly)


@mutation
def keeps_the_key_at_the_start(patch: Patch) -> None:
    """A job that is to give its key back when it starts has it until its end."""
    from pgqueue.repository.settle import Attempts

    patch.set(Attempts, "free_key", lambda *_, **__: True)


@scenario(
    promises="P1 P5",
    research="T25",
    full=Size(jobs=400, workers=3, faults=30),
    short=Size(jobs=40, workers=1, faults=3),
    mutated={
        "changes_jobs_that_have_started": "was asked for last",
        "keeps_the_key_at_the_start": "chains have stopped early",
    },
    alone=True,
)
def replaced_jobs(environment: Environment, size: Size) -> None:
    """Jobs are replaced while workers start them and are killed: the last arguments are run."""
    environment.execute(ASKED)
    chains = [go_on.delay(chain, size.jobs // 4) for chain in range(CHAINS)]
    environment.acknowledged.update(chain.id for chain in chains)
    workers = environment.workers(2 * size.workers, concurrency=2, poll_interval=0.05)
    workers.until_registered()

    def kill() -> None:
        for number in range(size.faults):
            environment.until_ended_are(number * size.jobs // (size.faults + 1))
            workers.kill_one()

    seeds = [environment.dice.random() for _ in range(CLIENTS)]
    run_together(*(partial(_ask, environment, size, seed) for seed in seeds), kill)
    environment.finish(workers)
    _judge(environment)
    environment.check(succeeded=environment.scalar("SELECT count(*) FROM pgqueue.jobs"))


def _ask(environment: Environment, size: Size, seed: float) -> None:
    """Enqueue newer and newer versions, and write down which job took each."""
    chance = random.Random(seed)
    for _ in range(size.jobs):
        key, version = chance.randrange(KEYS), chance.randrange(10**9)
        soon = timedelta(milliseconds=chance.choice((0, 0, 5)))
        with Session(environment.engine) as session, session.begin():
            job = keep_newest.options(delay=soon).enqueue(session, key, version)
            session.execute(ASK, {"job": job.id, "version": version})
            id, is_new = job.id, job.is_new
        environment.acknowledged.add(id)
        environment.counts["replaced"] += not is_new


def _judge(environment: Environment) -> None:
    ran: dict[int, list[int]] = defaultdict(list)
    for event in environment.history(START):
        if "version" in event.details:
            ran[event.job].append(event.details["version"])
    rows = environment.rows(LAST_ASKED)
    environment.count("jobs replaced or not", len(rows))
    for job, asked, stored in rows:
        last = ran[job][-1] if ran[job] else None
        environment.expect(
            asked == stored == last,
            f"job {job} ran version {last} and has {stored}, and {asked} was asked for last",
        )
    ends = {event.job for event in environment.history(START) if event.details.get("left", 1) == 0}
    environment.expect(
        len(ends) >= CHAINS, f"chains have stopped early: {len(ends)} of {CHAINS} have ended"
    )
