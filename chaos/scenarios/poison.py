"""Jobs that take down whoever runs them."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from sqlalchemy import ColumnElement, literal_column

from chaos.environment import Environment
from chaos.history import START
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import AT_ONCE, call, note, pay, queue
from chaos.scenario import Size, scenario
from chaos.workers import Workers
from pgqueue import JobContext

ATTEMPTS = 2
ROOM = 192 * 1024 * 1024
CHUNK = 8 * 1024 * 1024
EATING = threading.Lock()
"""One at a time: the limit is the process's, and who has eaten enough lifts it for the others."""
THOUGHT = 0.1
SLOW = 2000 * THOUGHT
"""Milliseconds: they still run when their neighbour kills."""
DEATHS = 3
SOON = timedelta(seconds=1)
BESIDE = 7
"""Jobs that run while their neighbour kills."""


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def read_nothing() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def eat_memory() -> None:
    """Up to a limit that is there while it eats; the kernel's own would choose its victim."""
    with EATING:
        before = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
        try:
            eaten = []
            while True:
                eaten.append(bytearray(CHUNK))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)


def exit_at_once() -> NoReturn:
    os._exit(0)


def leave() -> NoReturn:
    sys.exit("this handler has had enough")


def recurse() -> None:
    recurse()


def block_signals_for_ever() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    threading.Event().wait()


POISONS: dict[Callable[[], None], str] = {
    kill_itself: "crashed",
    read_nothing: "crashed",
    exit_at_once: "crashed",
    eat_memory: "failed",
    leave: "failed",
    recurse: "failed",
    block_signals_for_ever: "timeout",
}
"""What each attempt of them is recorded as."""
BY_NAME = {act.__name__: act for act in POISONS}


@queue.task(retry=AT_ONCE, max_attempts=ATTEMPTS)
def poison(ctx: JobContext, kind: str) -> None:
    note(START, ctx)
    BY_NAME[kind]()


@queue.task(retry=AT_ONCE, max_attempts=ATTEMPTS, timeout=timedelta(seconds=0.5))
def poison_with_timeout(ctx: JobContext, kind: str) -> None:
    note(START, ctx)
    BY_NAME[kind]()


@queue.task(retry=AT_ONCE, max_attempts=ATTEMPTS)
def think_and_kill(ctx: JobContext) -> None:
    """Leaves its worker the time to claim others meanwhile."""
    note(START, ctx)
    time.sleep(THOUGHT)
    kill_itself()


@mutation
def crashes_cost_no_attempt(patch: Patch) -> None:
    """A rescued attempt is given back as if it had not started."""
    from pgqueue.repository import rescue

    real = rescue._crashed

    def for_free() -> list[ColumnElement[object]]:
        return [
            literal_column("0").label("used_up") if each.name == "used_up" else each
            for each in real()
        ]

    patch.set(rescue, "_crashed", for_free)
    patch.rebuild(rescue.rescue_leases)


@mutation
def poison_is_claimed_ahead(patch: Patch) -> None:
    """Jobs that have crashed before wait in a worker's memory like all others."""
    from pgqueue.repository import claim

    def due(*, suspects: bool, registered: bool) -> Any:
        return all_due(suspects=True, registered=registered)

    def taken(due: Any, *, ahead: bool, suspects: bool) -> Any:
        return all_taken(due, ahead=False, suspects=False)

    all_due = patch.set(claim, "_due_messages", due)
    all_taken = patch.set(claim, "_taken_messages", taken)
    patch.rebuild(claim.claim)


@scenario(
    promises="P1 P5",
    full=Size(jobs=2000, workers=4, faults=20),
    short=Size(jobs=60, workers=2, faults=1),
    mutated={"crashes_cost_no_attempt": "starts the same attempt again"},
    programs=("linux",),
)
def poison_among_good_jobs(environment: Environment, size: Size) -> None:
    """Seven kinds of poison: each ends after its attempts, its neighbours succeed."""
    good: list[int] = []
    bad: dict[int, str] = {}
    for task in (pay, call):
        good += environment.enqueue(task.options(max_attempts=1000), [(1,)] * (size.jobs // 4))
    for act, end in POISONS.items():
        kind = poison_with_timeout if end == "timeout" else poison
        for job in environment.enqueue(kind, [(act.__name__,)] * size.faults):
            bad[job] = act.__name__
    for task in (pay, call):
        good += environment.enqueue(task.options(max_attempts=1000), [(1,)] * (size.jobs // 4))
    # A worker full of stuck threads ends, and gives its other handlers the grace before.
    workers = environment.workers(size.workers, concurrency=4, poll_interval=0.1, grace=2)
    _until_ended_under_a_supervisor(environment, workers)
    _each_poison_has_its_reason(environment, bad)
    _no_good_job_lost_two_attempts_in_waiting(environment, good)
    for member in workers.members:
        member.was_harmed = True  # a neighbour of a poison may have started twice
        member.send(signal.SIGTERM)
        member.exit_code()  # whatever its code is: one without memory may be about to end by itself
    environment.judge(succeeded=len(good), failed=len(bad))


def _until_ended_under_a_supervisor(environment: Environment, workers: Workers) -> None:
    def supervise() -> None:
        if ended := workers.replace_ended():
            environment.count("deaths", ended)
        starts = Counter((event.job, event.attempt) for event in environment.history(START))
        starts.subtract(environment.interruptions())  # a worker with too many stuck threads ends
        again = [start for start, times in starts.items() if times > 1]
        environment.expect(not again, f"a job starts the same attempt again: {again[:3]}")

    environment.until_ended(meanwhile=supervise)


def _each_poison_has_its_reason(environment: Environment, bad: dict[int, str]) -> None:
    ended = "SELECT id, outcome, attempts, last_error IS NOT NULL FROM pgqueue.jobs"
    jobs = {row[0]: tuple(row[1:]) for row in environment.rows(ended)}
    recorded: dict[int, list[str]] = {}
    for job, end in environment.rows("SELECT job_id, outcome FROM pgqueue.job_attempts"):
        recorded.setdefault(job, []).append(end)
    for job, kind in bad.items():
        found = (jobs[job], recorded.get(job, []))
        expected = ("failed", ATTEMPTS, True)
        # Any attempt may end by the death of a neighbour, also one that finds all used up, or
        # because its worker ends with too many threads that are stuck.
        own = POISONS[BY_NAME[kind]]
        fits = set(found[1]) <= {own, "crashed", "interrupted"} and len(found[1]) >= ATTEMPTS
        environment.expect(
            found[0] == expected and fits, f"{kind}, job {job}, is recorded as {found}"
        )


def _no_good_job_lost_two_attempts_in_waiting(environment: Environment, good: list[int]) -> None:
    started = {(event.job, event.attempt) for event in environment.history(START)}
    crashed = "SELECT job_id, attempt FROM pgqueue.job_attempts WHERE outcome = 'crashed'"
    lost = [tuple(row) for row in environment.rows(crashed) if row[0] in set(good)]
    environment.count("attempts lost by neighbours", len(lost))
    # A death may strike between the claim and the handler; not two for one job,
    # but for the few that had their slot at that very moment.  Who only waits never pays twice:
    # that is shown by neighbours_of_poison.
    waiting = Counter(job for job, attempt in lost if (job, attempt) not in started)
    again = sum(times - 1 for times in waiting.values())
    deaths = environment.counts["deaths"]
    environment.expect(
        again <= deaths, f"{deaths} deaths have cost {again} second attempts in waiting"
    )


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
    full=Size(jobs=2000, workers=2, faults=4),
    short=Size(jobs=500, workers=1, faults=2),
    mutated=dict.fromkeys(
        ("suspects_start_together", "poison_is_claimed_ahead"), "has lost more than one attempt"
    ),
)
def neighbours_of_poison(environment: Environment, size: Size) -> None:
    """A poison among jobs of two attempts, which run or wait beside it: each loses one at most."""
    workers = environment.workers(0, concurrency=BESIDE + 1, poll_interval=0.1)
    for number in range(size.faults):
        # Claimed together.
        at = {"run_at": environment.scalar("SELECT clock_timestamp()") + SOON}
        good = call.options(max_attempts=2, **at)
        if number % 2:  # the first of them, which kills before anything else can be done
            environment.enqueue(
                poison.options(max_attempts=DEATHS, **at), [(kill_itself.__name__,)]
            )
            environment.enqueue(good, [(SLOW,)] * BESIDE)
        else:
            environment.enqueue(good, [(SLOW,)] * (BESIDE // 2))
            environment.enqueue(think_and_kill.options(max_attempts=DEATHS, **at), [()])
            environment.enqueue(good, [(SLOW,)] * (BESIDE - BESIDE // 2))
        while len(workers.members) < size.workers:
            workers.add()
        environment.until_ended(meanwhile=lambda: _replace_the_dead(environment, workers))
    workers.stop()
    found = environment.counts["deaths"]
    environment.expect(found == DEATHS * size.faults, f"{found} workers have died")
    _poison_the_prefetched(environment, size.jobs)
    failed = environment.scalar("SELECT count(*) FROM pgqueue.jobs WHERE outcome = 'failed'")
    environment.expect(failed == size.faults + 1, f"{failed} jobs have failed, innocent ones too")
    environment.judge(succeeded=len(environment.acknowledged) - failed, failed=failed)


def _poison_the_prefetched(environment: Environment, jobs: int) -> None:
    """One poison among many jobs that its worker has claimed ahead."""
    lost_before = environment.counts["attempts lost by neighbours"]
    innocent = call.options(max_attempts=2)
    environment.enqueue(innocent, [()] * (jobs // 2))
    environment.enqueue(think_and_kill, [()])
    environment.enqueue(innocent, [()] * (jobs // 2))
    quick = call.options(max_attempts=1000, priority=0)
    workers = environment.workers(0, concurrency=1, poll_interval=0.1)

    def is_over() -> bool:
        if not _replace_the_dead(environment, workers) and workers.members:
            return environment.unfinished() == 0
        # Quick jobs that come first teach the worker to claim far ahead.
        environment.enqueue(quick, [()] * 300)
        if not workers.members:
            workers.add()
        return False

    environment.until(is_over, seconds=120, what="all jobs end")
    workers.stop()
    lost = environment.counts["attempts lost by neighbours"] - lost_before
    environment.expect(lost > 0, "nothing was claimed ahead with the poison: this shows nothing")


def _replace_the_dead(environment: Environment, workers: Workers) -> int:
    ended = workers.replace_ended()
    if ended:
        environment.count("deaths", ended)
    crashed = """
        SELECT job_id FROM pgqueue.job_attempts JOIN pgqueue.jobs ON jobs.id = job_id
        WHERE job_attempts.outcome = 'crashed' AND max_attempts = 2 AND jobs.task = :task
    """
    lost = Counter(job for (job,) in environment.rows(crashed, task=call.name))
    environment.counts["attempts lost by neighbours"] = sum(lost.values())
    twice = [job for job, times in lost.items() if times > 1]
    environment.expect(not twice, f"job {twice[:1]} has lost more than one attempt to one poison")
    return ended
