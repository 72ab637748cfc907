"""Workers that die while batches end, and additions that come at the last moment."""

from __future__ import annotations

from typing import Any

from chaos.environment import Environment
from chaos.mutations import Patch, mutation
from chaos.scenario import Size, scenario
from pgqueue.repository import batches

LEFT = 2
ROOTS = 2
PIECES = ROOTS * (2 ** (LEFT + 1) - 1)
"""The jobs of a batch, each of which but the last ones adds two."""

OTHERS_HAVE_ENDED = """
    SELECT count(*) = 0 FROM pgqueue.jobs JOIN pgqueue.batch_jobs ON job_id = jobs.id
    WHERE batch_id = :batch AND outcome IS NULL
"""
LOOKED_AT = """
    SELECT count(*) > 0 FROM pgqueue.batches WHERE id = :other AND ended_at IS NOT NULL
"""
TWICE = """
    SELECT count(*) FROM (
        SELECT FROM pgqueue.jobs WHERE task LIKE '%pay_batch'
        GROUP BY args->>'batch_id' HAVING count(*) > 1
    ) AS x
"""
WITHOUT = """
    SELECT count(*) FROM pgqueue.batches
    WHERE on_success IS NOT NULL AND NOT EXISTS (
        SELECT FROM pgqueue.jobs WHERE id = callback_id AND outcome = 'succeeded'
    )
"""
EARLY = """
    SELECT count(DISTINCT batches.id) FROM pgqueue.batches
    JOIN pgqueue.batch_jobs ON batch_id = batches.id
    JOIN pgqueue.jobs ON jobs.id = job_id
    WHERE jobs.finished_at > batches.ended_at
"""


def _without_lock(statement: Any) -> Any:
    unlocked = statement._generate()
    unlocked._for_update_arg = None
    return unlocked


@mutation
def ends_without_lock(patch: Patch) -> None:
    """The batch that may have ended is read and not locked."""
    unlocked = _without_lock(batches.lock_candidate())
    patch.set(batches, "lock_candidate", lambda: unlocked)


@mutation
def additions_without_lock(patch: Patch) -> None:
    """An addition reads that its batch is open, and does not keep it open."""
    unlocked = _without_lock(batches.keep_open())
    patch.set(batches, "keep_open", lambda: unlocked)


SAMPLED = "added to a batch after its end"
"""What the sampler says, if it finds the bug first."""


@scenario(
    promises="P14",
    research="L2",
    full=Size(jobs=200, workers=8, faults=40),
    short=Size(jobs=24, workers=4, faults=4),
    mutated={
        "ends_without_lock": f"batches have two callbacks|{SAMPLED}",
        "additions_without_lock": f"batches have ended before their last job|{SAMPLED}",
    },
    alone=True,
)
def ends_of_batches(environment: Environment, size: Size) -> None:
    """kill -9 amid batches, and additions up to the end: one callback each, after the last job."""
    from chaos.batch_tasks import pay_batch, pay_piece  # here: no other scenario has batches

    options = {"concurrency": 4, "poll_interval": 0.1, "imports": ["chaos.batch_tasks"]}
    workers = environment.workers(size.workers, **options)
    queue, made, added = environment.queue, 0, 0
    for _ in range(size.faults):
        with queue.session() as session, session.begin():
            for _ in range(size.jobs // size.faults):
                with queue.batch(session, on_success=pay_batch) as batch:
                    pay_piece.enqueue_many(session, [(batch.id, LEFT)] * ROOTS)
                made += 1
        with queue.session() as session, session.begin(), queue.extend_batch(session, batch.id):
            pay_piece.enqueue(session, batch.id)
            added += 1
            workers.kill_one()
            _until_the_end_is_near(environment, batch.id)
        environment.count("late additions")
    everything = made * (PIECES + 1) + added
    environment.until_ended_are(everything)
    workers.stop()
    counts = {
        "batches have two callbacks": environment.scalar(TWICE),
        "batches have no callback": environment.scalar(WITHOUT),
        "batches have ended before their last job": environment.scalar(EARLY),
    }
    wrong = [f"{count} {words}" for words, count in counts.items() if count]
    environment.expect(not wrong, ", ".join(wrong))
    environment.check(succeeded=everything)


def _until_the_end_is_near(environment: Environment, batch: int) -> None:
    """Wait until the other jobs of a batch have ended and workers have looked at the batch: one
    that has been made after them has ended."""
    environment.until(
        lambda: bool(environment.scalar(OTHERS_HAVE_ENDED, batch=batch)),
        what="the other jobs of the batch have ended",
    )
    queue = environment.queue
    with queue.session() as session, session.begin(), queue.batch(session) as other:
        pass
    environment.until(
        lambda: bool(environment.scalar(LOOKED_AT, other=other.id)), what="another batch has ended"
    )
