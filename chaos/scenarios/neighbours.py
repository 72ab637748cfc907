"""Jobs that run beside one that kills its worker, each time it is tried."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from chaos.chores import call
from chaos.fleet import Fleet
from chaos.plants import Patch, plant
from chaos.scenario import Size, scenario
from chaos.scenarios.poison import THOUGHT, kill_itself, poison, think_and_kill
from chaos.stage import Stage

SLOW = 2000 * THOUGHT
"""Milliseconds: they still run when their neighbour kills."""
DEATHS = 3
SOON = timedelta(seconds=1)


@plant
def suspects_start_together(patch: Patch) -> None:
    """Jobs whose worker has died start in every free slot."""
    from pgqueue.worker.suspects import Suspects

    patch.set(Suspects, "are_welcome", lambda _self: True)
    patch.set(Suspects, "admit", lambda _self, found, *, are_all: len(found))


@plant
def extras_are_given_back_later(patch: Patch) -> None:
    """Of several suspects one starts, and the others go back with what is settled next."""
    from pgqueue.outcomes import Released
    from pgqueue.worker.claimer import Claimer

    def admitted(self, _connection, claim):  # type: ignore[no-untyped-def]
        found = [(each.message_id, each.crashes) for each in claim.rows if each.crashes]
        admitted = self._crew.suspects.admit(found, are_all=not self._was_full)
        extra = {message for message, _ in found[admitted:]}
        for each in claim.rows:
            if each.message_id in extra:
                self._crew.bench.in_flight[each.message_id] = each
                self._crew.bench.done(each, Released())
        return [each for each in claim.rows if each.message_id not in extra]

    patch.set(Claimer, "_admitted", admitted)


@scenario(
    promises="P5",
    research="T9",
    full=Size(jobs=7, workers=2, faults=4),
    short=Size(jobs=7, workers=1, faults=2),
    planted=dict.fromkeys(
        ("suspects_start_together", "extras_are_given_back_later"), "has lost more than one attempt"
    ),
)
def neighbours_of_poison_in_lease_mode(stage: Stage, size: Size) -> None:
    """A poison among slow jobs with two attempts, lease mode: each of them loses one at most."""
    _poison_beside_slow_jobs(stage, size, "lease")


@scenario(
    promises="P5",
    research="T9",
    full=Size(jobs=7, workers=2, faults=4),
    short=Size(jobs=7, workers=1, faults=2),
    planted={"suspects_start_together": "has lost more than one attempt"},
)
def neighbours_of_poison_in_transaction_mode(stage: Stage, size: Size) -> None:
    """The same in transaction mode."""
    _poison_beside_slow_jobs(stage, size, "transaction")


def _poison_beside_slow_jobs(stage: Stage, size: Size, mode: str) -> None:
    fleet = stage.fleet(mode, 0, concurrency=size.jobs + 1, poll_interval=0.1)
    for number in range(size.faults):
        # Claimed together.
        at = {"run_at": stage.scalar("SELECT clock_timestamp()") + SOON}
        good = call.options(max_attempts=2, **at)
        if number % 2:  # the first of them, which kills before anything else can be done
            stage.enqueue(poison.options(max_attempts=DEATHS, **at), [(kill_itself.__name__,)])
            stage.enqueue(good, [(SLOW,)] * size.jobs)
        else:
            stage.enqueue(good, [(SLOW,)] * (size.jobs // 2))
            stage.enqueue(think_and_kill.options(max_attempts=DEATHS, **at), [()])
            stage.enqueue(good, [(SLOW,)] * (size.jobs - size.jobs // 2))
        _run_under_a_supervisor(stage, fleet, size.workers)
    fleet.stop()
    deaths = DEATHS * size.faults
    stage.expect(stage.counts["deaths"] == deaths, f"{stage.counts['deaths']} deaths, not {deaths}")
    stage.judge(succeeded=size.jobs * size.faults, failed=size.faults)


def _run_under_a_supervisor(stage: Stage, fleet: Fleet, workers: int) -> None:
    while len(fleet.members) < workers:
        fleet.add()

    def supervise() -> None:
        if ended := fleet.replace_ended():
            stage.count("deaths", ended)
        _nobody_lost_two_attempts(stage)

    stage.until_ended(meanwhile=supervise)


def _nobody_lost_two_attempts(stage: Stage) -> None:
    crashed = """
        SELECT job_id FROM pgqueue.job_attempts JOIN pgqueue.jobs ON jobs.id = job_id
        WHERE job_attempts.outcome = 'crashed' AND jobs.max_attempts = 2
    """
    lost = Counter(job for (job,) in stage.rows(crashed))
    stage.counts["attempts lost by neighbours"] = sum(lost.values())
    twice = [job for job, times in lost.items() if times > 1]
    stage.expect(not twice, f"job {twice[:1]} has lost more than one attempt to one poison")
