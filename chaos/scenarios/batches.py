"""Batches that end while workers die, and additions that come at the last moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy.orm import Session

from chaos.environment import Environment
from chaos.history import END, START
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import AT_ONCE, EFFECT, FIRST, effect, note, queue
from pgqueue import JobContext
from pgqueue.repository import batches

LEFT = 2
ROOTS = 2
PIECES = ROOTS * (2 ** (LEFT + 1) - 1)
"""The jobs of a batch, each of which but the last ones adds two."""
TAIL = 180.0
"""Seconds for the jobs of a batch, behind all others that wait."""
OF_A_ROUND = 3
"""Batches that are made together."""

OTHERS_HAVE_ENDED = """
    SELECT count(*) = 0 FROM pgqueue.jobs JOIN pgqueue.batch_jobs ON job_id = jobs.id
    WHERE batch_id = :batch AND outcome IS NULL
"""
LOOKED_AT = """
    SELECT count(*) > 0 FROM pgqueue.batches WHERE id = :other AND ended_at IS NOT NULL
"""
WITHOUT = """
    SELECT count(*) FROM pgqueue.batches
    WHERE NOT is_workflow AND workflow_id IS NULL
    AND EXISTS (
        SELECT FROM pgqueue.batch_jobs JOIN pgqueue.jobs ON jobs.id = job_id
        WHERE batch_id = batches.id AND task LIKE '%.pay_piece'
    ) AND NOT EXISTS (
        SELECT FROM pgqueue.jobs WHERE id = callback_id AND outcome = 'succeeded'
    )
"""
EARLY = """
    SELECT count(DISTINCT batches.id) FROM pgqueue.batches
    JOIN pgqueue.batch_jobs ON batch_id = batches.id
    JOIN pgqueue.jobs ON jobs.id = job_id
    WHERE jobs.finished_at > batches.ended_at
"""


@queue.task(retry=AT_ONCE, max_attempts=1000, priority=FIRST)
def pay_piece(session: Session, ctx: JobContext, batch_id: int, left: int = 0) -> int:
    """A row of the application, and two more jobs of the batch, in the commit of its end."""
    note(START, ctx)
    session.execute(EFFECT, effect(ctx))
    if left:
        with queue.extend_batch(session, batch_id):
            pay_piece.enqueue_many(session, [(batch_id, left - 1)] * 2)
    note(END, ctx)
    return ctx.attempt


@queue.task(retry=AT_ONCE, max_attempts=1000, priority=FIRST)
def pay_batch(session: Session, ctx: JobContext, batch_id: int) -> int:
    """The callback of a batch."""
    note(START, ctx)
    session.execute(EFFECT, effect(ctx))
    note(END, ctx)
    return ctx.attempt


def _without_lock(statement: Any) -> Any:
    unlocked = statement._generate()
    unlocked._for_update_arg = None
    return unlocked


@mutation
def looks_without_lock(patch: Patch) -> None:
    """A batch whose watch is over is read and not locked, so an addition is overlooked."""
    unlocked = _without_lock(batches.lock_batch())
    patch.set(batches, "lock_batch", lambda: unlocked)


@mutation
def additions_without_lock(patch: Patch) -> None:
    """An addition reads that its batch is open, and does not keep it open."""
    unlocked = _without_lock(batches.keep_open())
    patch.set(batches, "keep_open", lambda: unlocked)


SAMPLED = "added to a batch after its end"
"""What the sampler says, if it finds the bug first."""


class Batches:
    """Batches whose jobs add others; of each few, the last has an addition at its end."""

    def __init__(self, environment: Environment, faults: int) -> None:
        self._environment = environment
        self._rounds = faults
        self.clients: list[Callable[[], None]] = [self._make_batches]

    def succeeded(self) -> int:
        return int(self._rounds * (OF_A_ROUND * (PIECES + 1) + 1))

    def _make_batches(self) -> None:
        queue = self._environment.queue
        for _ in range(self._rounds):
            with queue.session() as session, session.begin():
                for _ in range(OF_A_ROUND):
                    with queue.batch(session, on_success=pay_batch) as batch:
                        pay_piece.enqueue_many(session, [(batch.id, LEFT)] * ROOTS)
            with queue.session() as session, session.begin(), queue.extend_batch(session, batch.id):
                pay_piece.enqueue(session, batch.id)
                self._until_the_end_is_near(batch.id)
            self._environment.count("late additions")
        # A moment after its last job, when nothing waits or runs, a callback may be blocked.
        self._environment.until(
            lambda: self._environment.scalar(WITHOUT) == 0, seconds=TAIL, what="all callbacks end"
        )

    def _until_the_end_is_near(self, batch: int) -> None:
        """Wait until the other jobs of a batch have ended and workers have looked at the batch: one
        that has been made after them has ended."""
        environment = self._environment
        environment.until(
            lambda: bool(environment.scalar(OTHERS_HAVE_ENDED, batch=batch)),
            seconds=TAIL,
            what="the other jobs of the batch have ended",
        )
        queue = environment.queue
        with queue.session() as session, session.begin(), queue.batch(session) as other:
            pass
        environment.until(
            lambda: bool(environment.scalar(LOOKED_AT, other=other.id)),
            seconds=TAIL,
            what="another batch has ended",
        )

    def judge(self) -> None:
        early = self._environment.scalar(EARLY)
        words = f"{early} batches have ended before their last job"
        self._environment.expect(not early, words)
