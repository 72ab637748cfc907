"""Jobs that run beside one that kills its worker, each time it is tried."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

from chaos.environment import Environment
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import call
from chaos.scenario import Size, scenario
from chaos.scenarios.poison import THOUGHT, kill_itself, poison, think_and_kill
from chaos.workers import Workers

SLOW = 2000 * THOUGHT
"""Milliseconds: they still run when their neighbour kills."""
DEATHS = 3
SOON = timedelta(seconds=1)


@mutation
def suspects_start_together(patch: Patch) -> None:
    """Jobs whose worker has died start in every free slot."""
    from pgqueue.repository import claim
    from pgqueue.worker.claiming.crash_isolation import CrashIsolation

    def taken(due: Any, *, ahead: bool, suspects: bool) -> Any:
        return only_one(due, ahead=ahead, suspects=False)

    only_one = patch.set(claim, "_taken_messages", taken)
    patch.rebuild(claim.claim)
    patch.set(CrashIsolation, "are_welcome", lambda _self: True)


@scenario(
    promises="P5",
    research="T9",
    full=Size(jobs=7, workers=2, faults=4),
    short=Size(jobs=7, workers=1, faults=2),
    mutated={"suspects_start_together": "has lost more than one attempt"},
)
def neighbours_of_poison(environment: Environment, size: Size) -> None:
    """A poison among slow jobs with two attempts: each of them loses one at most."""
    workers = environment.workers(0, concurrency=size.jobs + 1, poll_interval=0.1)
    for number in range(size.faults):
        # Claimed together.
        at = {"run_at": environment.scalar("SELECT clock_timestamp()") + SOON}
        good = call.options(max_attempts=2, **at)
        if number % 2:  # the first of them, which kills before anything else can be done
            environment.enqueue(
                poison.options(max_attempts=DEATHS, **at), [(kill_itself.__name__,)]
            )
            environment.enqueue(good, [(SLOW,)] * size.jobs)
        else:
            environment.enqueue(good, [(SLOW,)] * (size.jobs // 2))
            environment.enqueue(think_and_kill.options(max_attempts=DEATHS, **at), [()])
            environment.enqueue(good, [(SLOW,)] * (size.jobs - size.jobs // 2))
        _run_under_a_supervisor(environment, workers, size.workers)
    workers.stop()
    deaths = DEATHS * size.faults
    environment.expect(
        environment.counts["deaths"] == deaths,
        f"{environment.counts['deaths']} deaths, not {deaths}",
    )
    environment.check(succeeded=size.jobs * size.faults, failed=size.faults)


def _run_under_a_supervisor(environment: Environment, workers: Workers, count: int) -> None:
    while len(workers.members) < count:
        workers.add()

    def supervise() -> None:
        if ended := workers.replace_ended():
            environment.count("deaths", ended)
        _nobody_lost_two_attempts(environment)

    environment.until_ended(meanwhile=supervise)


def _nobody_lost_two_attempts(environment: Environment) -> None:
    crashed = """
        SELECT job_id FROM pgqueue.job_attempts JOIN pgqueue.jobs ON jobs.id = job_id
        WHERE job_attempts.outcome = 'crashed' AND jobs.max_attempts = 2
    """
    lost = Counter(job for (job,) in environment.rows(crashed))
    environment.counts["attempts lost by neighbours"] = sum(lost.values())
    twice = [job for job, times in lost.items() if times > 1]
    environment.expect(not twice, f"job {twice[:1]} has lost more than one attempt to one poison")
