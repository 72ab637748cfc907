"""Jobs that wait for others, while workers die."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from chaos.environment import Environment
from chaos.history import END, START
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import AT_ONCE, EFFECT, FIRST, call, effect, note, pay, queue
from pgqueue import JobContext
from pgqueue.repository import blocked, workflows

OF_A_ROUND = 4
"""Workflows that are made together."""
WIDTH = 5
ADDED = 2
"""Jobs that a running one adds before its successors."""
JOBS = WIDTH + 1 + ADDED + WIDTH + 2
"""The jobs of a workflow."""
TAIL = 180.0
"""Seconds for what waits, behind all other jobs."""

OPEN = "SELECT count(*) FROM pgqueue.batches WHERE is_workflow AND ended_at IS NULL"
NOT_SUCCEEDED = "SELECT count(*) FROM pgqueue.batches WHERE is_workflow AND outcome <> 'succeeded'"
EARLY = """
    WITH edges AS (
        SELECT job_id AS id, after_id FROM pgqueue.dependencies WHERE after_id > 0
        UNION ALL
        SELECT dependencies.job_id, batch_jobs.job_id FROM pgqueue.dependencies
        JOIN pgqueue.batch_jobs ON batch_id = -after_id
    )
    SELECT count(DISTINCT node.id) FROM edges
    JOIN pgqueue.jobs AS node ON node.id = edges.id
    JOIN pgqueue.jobs AS before ON before.id = after_id
    WHERE node.started_at < before.finished_at
"""

BEFORE_ADDED = """
    SELECT count(DISTINCT part.id) FROM pgqueue.batches
    JOIN pgqueue.batch_jobs AS one ON one.batch_id = batches.id AND is_workflow
    JOIN pgqueue.jobs AS added ON added.id = one.job_id AND added.tags ? 'added'
    JOIN pgqueue.batch_jobs AS other ON other.batch_id = batches.id
    JOIN pgqueue.jobs AS part ON part.id = other.job_id AND part.tags ? 'part'
    WHERE part.started_at < added.finished_at
"""


@queue.task(retry=AT_ONCE, max_attempts=1000, priority=FIRST)
def pay_and_grow(session: Session, ctx: JobContext) -> int:
    """Adds jobs for which its successors wait too, in the commit of its end."""
    note(START, ctx)
    session.execute(EFFECT, effect(ctx))
    assert ctx.workflow_id is not None
    with queue.extend_workflow(session, ctx.workflow_id, before_successors_of=ctx.job_id):
        urgent(pay).options(tags=["added"]).enqueue_many(session, [()] * ADDED)
    note(END, ctx)
    return ctx.attempt


def urgent(task: Any) -> Any:
    return task.options(max_attempts=1000, priority=FIRST)


@mutation
def releases_after_the_first(patch: Patch) -> None:
    """A job is released when the node that it watches has ended, whatever else it waits for."""
    real = blocked.predecessors()
    columns = list(real.selected_columns)  # type: ignore[attr-defined]  # a Select
    hasty = real.with_only_columns(  # type: ignore[attr-defined]
        columns[0], sa.null().label("after_id"), *columns[2:], maintain_column_froms=True
    )
    patch.set(blocked, "predecessors", lambda: hasty)


@mutation
def grows_behind_its_successors(patch: Patch) -> None:
    """Jobs that are added before successors do not keep these from being released."""
    patch.set(workflows.Workflows, "let_successors_wait", lambda *_: None)


class Graphs:
    """Workflows of two fan-ins, and a job between them that adds others before its successors."""

    def __init__(self, environment: Environment, faults: int) -> None:
        self._environment = environment
        self._rounds = faults
        self.clients: list[Callable[[], None]] = [self._make_workflows]

    def succeeded(self) -> int:
        return self._rounds * OF_A_ROUND * JOBS

    def _make_workflows(self) -> None:
        for _ in range(self._rounds):
            with self._environment.queue.session() as session, session.begin():
                for _ in range(OF_A_ROUND):
                    self._make(session)
        self._environment.until(
            lambda: self._environment.scalar(OPEN) == 0, seconds=TAIL, what="all workflows end"
        )

    def _make(self, session: Session) -> None:
        with self._environment.queue.workflow(session) as flow:
            first = [flow.add(urgent(pay).job()) for _ in range(WIDTH)]
            grown = flow.add(pay_and_grow.job(), after=first)
            part = urgent(call).options(tags=["part"])
            parts = flow.add_many(part, [()] * WIDTH, after=grown)
            flow.add(urgent(pay).job(), after=[parts, *first])
            flow.add(urgent(pay).job(), after=first, when="ended")

    def judge(self) -> None:
        environment = self._environment
        early = environment.scalar(EARLY) + environment.scalar(BEFORE_ADDED)
        environment.expect(not early, f"{early} jobs have started before what they wait for ended")
        wrong = environment.scalar(NOT_SUCCEEDED)
        environment.expect(not wrong, f"{wrong} workflows have not succeeded")
