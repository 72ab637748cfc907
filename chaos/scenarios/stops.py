"""Signals that ask a worker to stop, at every moment."""

from __future__ import annotations

import asyncio
import signal
import time
from concurrent.futures import ThreadPoolExecutor

from chaos.environment import Environment
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import (
    AT_ONCE,
    attend,
    attend_async,
    call,
    call_async,
    pay,
    pay_async,
    queue,
    until_open,
    wait,
    wait_and_pay,
)
from chaos.scenario import Size, scenario
from chaos.workers import Member
from pgqueue import JobContext
from pgqueue.cli.working import INTERRUPTED

SOFT = [signal.SIGTERM, signal.SIGINT]
GRACE = 0.5
MARGIN = 2.0
LONG = 60.0
CASES: list[tuple[float, tuple[signal.Signals, ...], str | None]] = [
    (LONG, (signal.SIGTERM,), None),
    (GRACE, (signal.SIGHUP,), "interrupted"),
    (LONG, (signal.SIGINT, signal.SIGINT), "interrupted"),
]
"""The grace, what is sent to a worker while its handlers run, and what becomes of the attempts.
Those of the first end within the grace."""
BAD = "SELECT outcome, count(*) FROM pgqueue.job_attempts GROUP BY outcome"
STOPPING = "stopping; "


@queue.task(retry=AT_ONCE)
def wait_for_pool(ctx: JobContext, gate: str) -> int:
    """Python ends no process before the threads of an executor have ended."""
    with ThreadPoolExecutor(1) as pool:
        return attend(ctx, lambda: pool.submit(until_open, gate).result())


@queue.task(retry=AT_ONCE)
async def wait_for_thread(ctx: JobContext, gate: str) -> int:
    return await attend_async(ctx, asyncio.to_thread(until_open, gate))


WAITERS = (wait, wait_and_pay, wait_for_pool, wait_for_thread)


@mutation
def stop_keeps_what_has_not_started(patch: Patch) -> None:
    """A stopped worker forgets what it has claimed and not started, instead of giving it back."""
    from pgqueue.worker.supervisor import Supervisor

    real = Supervisor._end

    def forget(self, grace):  # type: ignore[no-untyped-def]
        buffer = self._runtime.buffer
        buffer.drain = lambda: buffer.heap.clear() or []
        real(self, grace)

    patch.set(Supervisor, "_end", forget)


@mutation
def interruptions_are_not_recorded(patch: Patch) -> None:
    """A process that ends while handlers run leaves their leases to the rescuers."""
    from pgqueue.worker.supervisor import Supervisor

    patch.set(Supervisor, "interrupt", lambda self: self._close())


@mutation
def interruptions_use_up_attempts(patch: Patch) -> None:
    """An attempt that a stop interrupts counts towards max_attempts."""
    from pgqueue.outcomes import AttemptEnd, ErrorReport, Interrupted, Retried
    from pgqueue.repository import settle

    real = settle._row_of

    def row_of(claimed, outcome):  # type: ignore[no-untyped-def]
        if isinstance(outcome, Interrupted):
            outcome = Retried(None, ErrorReport("Interrupted", "", ""), AttemptEnd.INTERRUPTED)
        return real(claimed, outcome)

    patch.set(settle, "_row_of", row_of)


@mutation
def stop_does_not_wait(patch: Patch) -> None:
    """A stopped worker closes at once, whatever its handlers do."""
    from pgqueue.worker.slots import Slots

    patch.set(Slots, "are_alive", lambda _self: False)


@scenario(
    promises="P5 P10",
    full=Size(jobs=20_000, workers=4, faults=30),
    short=Size(jobs=2400, workers=2, faults=3),
    mutated={
        "stop_keeps_what_has_not_started": "F6|crashed|left claimed",
        "interruptions_are_not_recorded": "recorded as|left claimed|ended with 0",
        "interruptions_use_up_attempts": "interruptions have used up",
        "stop_does_not_wait": "stopped and ended with 3|recorded as|left claimed",
    },
    alone=True,
)
def stops(environment: Environment, size: Size) -> None:
    """SIGTERM, SIGINT, SIGHUP at any moment: no job is left claimed, no attempt is used up."""
    _restart_all_the_while(environment, size)
    cases = [_Case(environment, size.faults, *case) for case in CASES]
    for case in cases:
        environment.until_started(*case.jobs)
    for case in cases:
        case.stop()
    last = environment.workers(1, queues=[case.queue for case in cases])
    environment.finish(last)
    for case in cases:
        case.was_recorded()
    environment.judge()


def _restart_all_the_while(environment: Environment, size: Size) -> None:
    # Most are so quick that a worker claims many ahead, and holds them when it is stopped.
    for task, share in ((call, 6), (pay, 1), (pay_async, 1), (call_async, 1), (call, 3)):
        environment.enqueue(task.options(max_attempts=2), [(0,)] * (size.jobs * share // 12))
    workers = environment.workers(size.workers, concurrency=2, poll_interval=0.1)
    total = environment.unfinished()
    for number in range(size.faults):
        # Also a worker that has only begun: before its first claim, or during it.
        environment.until_left(total - number * total // (size.faults + 1))
        member = workers.some()
        workers.members.remove(member)
        workers.add()
        _stop(environment, member, environment.dice.choice(SOFT), within=10 + MARGIN)
        _left_nothing(environment, member)
    environment.finish(workers)
    bad = {row[0]: row[1] for row in environment.rows(BAD)}
    environment.expect(not bad, f"stops have cost attempts: {bad}, such as crashed ones")


def _stop(
    environment: Environment,
    member: Member,
    *signals: signal.Signals,
    within: float,
    codes: tuple[int, ...] = (0,),
) -> None:
    began = time.monotonic()
    for place, number in enumerate(signals, start=1):
        member.send(number)
        if place < len(signals):  # two at once would be one
            environment.until(lambda: STOPPING in member.log.read_text(), what="it stops")
    code = member.exit_code()
    took = time.monotonic() - began
    environment.count("stops")
    # One that has only begun does not heed signals yet, and ends as any program does.
    environment.expect(
        code in (*codes, -signals[0]), f"{member.name} was stopped and ended with {code}"
    )
    environment.expect(took < within, f"{member.name} took {took:.1f} s to stop")


def _left_nothing(environment: Environment, member: Member) -> None:
    """Its row is gone, and with it all it held."""
    orphans = """
        SELECT count(*) FROM pgqueue.leases AS lease
        WHERE NOT EXISTS (SELECT FROM pgqueue.workers AS worker WHERE worker.id = lease.worker_id)
    """
    left = environment.scalar(orphans)
    environment.expect(left == 0, f"{member.name} has ended with {left} jobs left claimed")


class _Case:
    """A worker with a queue and handlers of its own, and how it is stopped."""

    def __init__(
        self,
        environment: Environment,
        count: int,
        grace: float,
        signals: tuple[signal.Signals, ...],
        end: str | None,
    ) -> None:
        self._environment, self._signals, self._end = environment, signals, end
        self.queue = f"{end}-{len(signals)}"
        slots = len(WAITERS) * count
        self._workers = environment.workers(1, concurrency=slots, queues=[self.queue], grace=grace)
        self.jobs = [
            job
            for task in WAITERS
            for job in environment.enqueue(task.options(queue=self.queue), [(self.queue,)] * count)
        ]

    def stop(self) -> None:
        [member] = self._workers.members
        if self._end is None:
            member.send(self._signals[0])
            self._environment.until(lambda: STOPPING in member.log.read_text(), what="it stops")
            self._environment.open(self.queue)
            member.exit_code()
            self._environment.count("stops")
        else:
            member.was_harmed = True
            codes = (INTERRUPTED,)
            _stop(self._environment, member, *self._signals, within=GRACE + MARGIN, codes=codes)
        self.was_recorded()
        self._environment.open(self.queue)

    def was_recorded(self) -> None:
        ended = "SELECT outcome FROM pgqueue.job_attempts WHERE job_id = ANY(:jobs)"
        found = [row[0] for row in self._environment.rows(ended, jobs=self.jobs)]
        expected = [] if self._end is None else [self._end] * len(self.jobs)
        words = f"what was stopped as {self.queue} is recorded as {found}"
        self._environment.expect(found == expected, words)
        if self._end is not None:
            used = (
                "SELECT sum(attempts) FROM pgqueue.jobs WHERE id = ANY(:jobs) AND outcome IS NULL"
            )
            count = self._environment.scalar(used, jobs=self.jobs) or 0
            self._environment.expect(count == 0, f"interruptions have used up {count} attempts")
        left = "SELECT count(*) FROM pgqueue.leases WHERE target_id = ANY(:jobs)"
        count = self._environment.scalar(left, jobs=self.jobs)
        self._environment.expect(count == 0, f"{self.queue}: {count} jobs are left claimed")
