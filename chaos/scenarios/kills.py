"""kill -9, again and again, amid work of every kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sqlalchemy import text

from chaos.environment import Environment
from chaos.interleavings.logical_workers import run_together
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import call, pay, pay_and_follow, pay_async, pay_in_steps
from chaos.scenario import Size, scenario
from chaos.scenarios.batches import SAMPLED, Batches
from chaos.scenarios.limits import LimitedJobs
from chaos.scenarios.pruning import FAILED, OldJobs
from chaos.scenarios.signals import ToldJobs
from chaos.scenarios.unique_keys import ReplacedJobs
from chaos.scenarios.workflows import Graphs


@mutation
def rescue_loses_the_message(patch: Patch) -> None:
    """A rescuer takes a dead worker's leases away and writes no new messages."""
    from pgqueue.repository.workers import Workers

    orphans = text(
        "DELETE FROM pgqueue.leases AS lease USING pgqueue.workers AS worker"
        " WHERE worker.id = lease.worker_id AND worker.dead_at IS NOT NULL"
    )

    def rescue(self):  # type: ignore[no-untyped-def]
        self._executor.execute(orphans)
        return []

    patch.set(Workers, "rescue", rescue)


class Load(Protocol):
    """Work of one kind, enqueued by its constructor."""

    clients: list[Callable[[], None]]
    """What goes on while workers are killed, each in a thread of its own."""

    def succeeded(self) -> int:
        """How many of its jobs have to succeed."""

    def judge(self) -> None:
        """Look for what is wrong with it at the end."""


class Payments:
    """Handlers that write, and some that enqueue another in the same commit."""

    def __init__(self, environment: Environment, size: Size) -> None:
        self.clients: list[Callable[[], None]] = []
        # Where few are killed, each death has to meet a handler between its write and its end.
        row = (8 if size.faults < 50 else 1,)
        share = size.jobs // 5
        for task in (pay, pay_async, pay_in_steps, call):
            environment.enqueue(task.options(max_attempts=1000), [row] * share)
        parents = pay_and_follow.options(max_attempts=1000)
        self._jobs = 4 * share + 2 * len(environment.enqueue(parents, [row] * (share // 2)))

    def succeeded(self) -> int:
        return self._jobs

    def judge(self) -> None:
        """The checker knows all rules of payments."""


ENDED = "SELECT count(*) FROM pgqueue.jobs WHERE finished_at > :began"


@scenario(
    promises="P1 P2 P3 P4 P5 P8 P13 P14",
    full=Size(jobs=30_000, workers=8, faults=100),
    short=Size(jobs=400, workers=4, faults=5),
    mutated={
        "rescue_loses_the_message": "no worker will ever run it",
        "admissions_beside_each_other": "ran at once",
        "declares_no_limits": "ran at once",
        "retries_take_no_token": "within a second",
        "looks_without_lock": f"batches have ended before their last job|{SAMPLED}",
        "additions_without_lock": f"batches have ended before their last job|{SAMPLED}",
        "releases_after_the_first": "have started before what they wait for",
        "grows_behind_its_successors": "have started before what they wait for",
        "changes_jobs_that_have_started": "was asked for last",
        "keeps_the_key_at_the_start": "chains have stopped early",
        "prunes_by_age_alone": "old jobs are left|acknowledged jobs are gone|F8|sampled",
    },
    alone=True,
)
def kills(environment: Environment, size: Size) -> None:
    """kill -9 amid work of every kind: no job is lost or done twice, and each rule holds."""
    loads: list[Load] = [Payments(environment, size)]
    loads += [
        kind(environment, size.faults) for kind in (LimitedJobs, Batches, Graphs, ReplacedJobs)
    ]
    loads.append(OldJobs(environment, size.faults))  # the last: all that waits is as old
    _amid_kills(environment, size, loads)


@scenario(
    promises="P16",
    full=Size(jobs=10_000, workers=8, faults=100),
    short=Size(jobs=200, workers=4, faults=5),
    mutated={"delivers_to_those_that_sleep_already": "whose signals count as delivered"},
    alone=True,
)
def signals_under_kills(environment: Environment, size: Size) -> None:
    """kill -9 amid handlers that wait for signals and gather jobs: no signal is lost, and no step
    is run again."""
    loads: list[Load] = [Payments(environment, size), ToldJobs(environment, size.faults)]
    _amid_kills(environment, size, loads)


def _amid_kills(environment: Environment, size: Size, loads: Sequence[Load]) -> None:
    waiting = environment.unfinished()
    began = environment.scalar("SELECT clock_timestamp()")
    workers = environment.workers(size.workers, concurrency=4, poll_interval=0.1)

    def kill() -> None:
        for number in range(size.faults):
            # Not by what is left: while jobs enqueue others, that stays the same.
            share = (number + 1) * waiting // (size.faults + 2)
            environment.until(
                lambda share=share: environment.scalar(ENDED, began=began) >= share,  # type: ignore[misc]
                what=f"{share} jobs have ended",
            )
            workers.kill_one()

    run_together(*(client for load in loads for client in load.clients), kill)
    environment.finish(workers)
    for load in loads:
        load.judge()
    environment.judge(
        succeeded=sum(load.succeeded() for load in loads), failed=environment.scalar(FAILED)
    )
