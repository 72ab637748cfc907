"""Every order of the statements of two sessions that work on the same job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import sqlalchemy
from sqlalchemy import bindparam, delete, exists, select, update

from chaos.environment import Environment
from chaos.interleavings.runner import ScriptRunner
from chaos.interleavings.scheduler import GivenOrder, SomeOrder
from chaos.interleavings.scripts import Pair, all_pairs
from chaos.mutations import Patch, mutation
from chaos.scenario import Size, scenario
from pgqueue.repository import fence, jobs, rescue, settle, workflows
from pgqueue.repository.tables import leases, stands_at_place_of

KNOWN = [
    (Pair("ready", "lease and succeed", "rescue and lease"), "00111111100"),
    (Pair("ready", "lease and fail", "delete"), "001011"),
    (Pair("ready", "lease and retry", "cancel and requeue"), "011111101111111"),
    (Pair("ready", "hold and succeed", "rescue"), "1000101111"),
    (Pair("ready", "lease and succeed", "cancel"), "0100"),
]
"""Orders that have shown a bug, of the product or a planted one."""


class _Without:
    """An UPDATE of which one condition gets lost."""

    def __init__(self, statement: Any, number: int) -> None:
        self._statement, self._number = statement, number

    def where(self, *conditions: Any) -> Any:
        kept = [one for number, one in enumerate(conditions) if number != self._number]
        return self._statement.where(*kept)


def _rebuild_settles(patch: Patch) -> None:
    patch.rebuild(
        settle.settle,
        settle.settle_succeeded,
        settle.settle_one_success,
        rescue.rescue_leases,
    )


@mutation
def settles_ended_jobs(patch: Patch) -> None:
    """A settle updates its job without `outcome IS NULL`."""
    changed = {**vars(sqlalchemy), "update": lambda table: _Without(update(table), 1)}
    patch.set(settle, "sa", SimpleNamespace(**changed))
    _rebuild_settles(patch)


@mutation
def fence_by_job_alone(patch: Patch) -> None:
    """A settle deletes whatever lease its job has."""

    def gone(condition: Any) -> Any:
        deleted = delete(leases).where(condition).returning(*fence.lease_columns())
        return deleted.cte("gone")

    def of_these_jobs(given):  # type: ignore[no-untyped-def]
        return gone(leases.c.target_id.in_(select(given.c.target_id)))

    def of_this_job():  # type: ignore[no-untyped-def]
        return gone(leases.c.target_id == bindparam("job_id"))

    patch.set(fence, "deleted_leases", of_these_jobs)
    patch.set(fence, "deleted_lease", of_this_job)
    _rebuild_settles(patch)


@mutation
def requeue_asks_for_messages_only(patch: Patch) -> None:
    """A requeue does not see a claim that was committed since its first statement."""
    for module in (jobs, workflows):
        patch.set(module, "is_placed", lambda job_id: exists().where(stands_at_place_of(job_id)))
    for name in ("is_with_a_worker", "requeue_jobs"):
        patch.set(jobs, name, getattr(jobs, name).__wrapped__)  # not from the cache


@scenario(
    promises="P1 P2 P3",
    full=Size(jobs=1000),
    short=Size(jobs=60),
    mutated={
        "settles_ended_jobs": "it had ended, and was changed",
        "fence_by_job_alone": "outcomes of .* were accepted|a message or a lease",
        "requeue_asks_for_messages_only": "at most one message",
    },
    alone=True,
)
def interleavings(environment: Environment, size: Size) -> None:
    """Two sessions at one job, in every order of their statements: it ends once, and it ends."""
    runner = ScriptRunner(environment.url, environment.engine)
    try:
        for pair, order in KNOWN:
            runner.run(pair, GivenOrder(order))
        runner.check()
        every = all_pairs()
        for pair in environment.dice.sample(every * -(-size.jobs // len(every)), size.jobs):
            runner.run(pair, SomeOrder(environment.dice))
        runner.check()
    finally:
        runner.close()
        environment.count("orders", runner.orders)
