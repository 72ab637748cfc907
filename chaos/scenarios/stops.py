"""Signals that ask a worker to stop, at every moment."""

from __future__ import annotations

import signal
import time

from chaos.chores import call, call_async, pay, pay_async, wait, wait_and_pay
from chaos.fleet import Member
from chaos.history import START
from chaos.plants import Patch, plant
from chaos.scenario import Size, scenario
from chaos.stage import Stage

SOFT = [signal.SIGTERM, signal.SIGINT]
GRACE = 0.5
MARGIN = 2.0
ENDS = {
    (signal.SIGTERM,): "interrupted",
    (signal.SIGINT, signal.SIGINT): "interrupted",
    (signal.SIGHUP,): "crashed",
}
"""What is sent to a worker whose handlers do not end, and what becomes of their attempts."""
ENDED_AS = "SELECT outcome FROM pgqueue.job_attempts WHERE job_id = ANY(:jobs)"
BAD = "SELECT outcome, count(*) FROM pgqueue.job_attempts GROUP BY outcome"
STOPPING = "stopping: "


@plant
def stop_keeps_what_has_not_started(patch: Patch) -> None:
    """A stopped worker forgets what it has claimed and not started, instead of giving it back."""
    from pgqueue.worker.workbench import Workbench

    def forget(self):  # type: ignore[no-untyped-def]
        self.heap.clear()
        return []

    patch.set(Workbench, "drain", forget)


@plant
def interruptions_are_not_recorded(patch: Patch) -> None:
    """A process that ends while handlers run leaves their leases to the rescuers."""
    from pgqueue.worker.shift import Shift

    patch.set(Shift, "_interrupt", lambda self: self._close())


@plant
def stop_does_not_wait(patch: Patch) -> None:
    """A stopped worker closes at once, whatever its handlers do."""
    from pgqueue.worker.shift import Shift

    patch.set(Shift, "_are_alive", lambda _self: False)


@scenario(
    promises="P9",
    research="T13",
    full=Size(jobs=20_000, workers=4, faults=30),
    short=Size(jobs=2400, workers=2, faults=3),
    planted={"stop_keeps_what_has_not_started": "F6|crashed|left claimed"},
)
def rolling_restarts_in_lease_mode(stage: Stage, size: Size) -> None:
    """SIGTERM and SIGINT at any moment, lease mode: nothing is left claimed or burned."""
    _restart_in_turn(stage, size, "lease")


@scenario(
    promises="P9",
    research="T13",
    full=Size(jobs=20_000, workers=4, faults=30),
    short=Size(jobs=600, workers=2, faults=3),
    planted={"stop_does_not_wait": "stops have cost attempts|left claimed|F[0-9]:"},
)
def rolling_restarts_in_transaction_mode(stage: Stage, size: Size) -> None:
    """SIGTERM and SIGINT at any moment, transaction mode: the same."""
    _restart_in_turn(stage, size, "transaction")


def _restart_in_turn(stage: Stage, size: Size, mode: str) -> None:
    # Most are so quick that a worker claims many ahead, and holds them when it is stopped.
    for task, share in ((call, 6), (pay, 1), (pay_async, 1), (call_async, 1), (call, 3)):
        stage.enqueue(task.options(max_attempts=2), [(0,)] * (size.jobs * share // 12))
    fleet = stage.fleet(mode, size.workers, concurrency=2, poll_interval=0.1, batch=4)
    total = stage.unfinished()
    for number in range(size.faults):
        # Also a worker that has only begun: before its first claim, or during it.
        stage.until_left(total - number * total // (size.faults + 1))
        member = fleet.some()
        fleet.members.remove(member)
        fleet.add()
        _stop(stage, member, stage.dice.choice(SOFT), within=10 + MARGIN)
        _left_nothing(stage, member)
    stage.until_ended()
    fleet.stop()
    bad = {row[0]: row[1] for row in stage.rows(BAD)}
    stage.expect(not bad, f"stops have cost attempts: {bad}, such as crashed ones")
    stage.judge()


def _stop(stage: Stage, member: Member, *signals: signal.Signals, within: float) -> None:
    began = time.monotonic()
    for place, number in enumerate(signals, start=1):
        member.send(number)
        if place < len(signals):  # two at once would be one
            stage.until(lambda: STOPPING in member.log.read_text(), what="it stops")
    code = member.wait()
    took = time.monotonic() - began
    stage.count("stops")
    # One that has only begun does not heed signals yet, and ends as any program does.
    stage.expect(code in (0, -signals[0]), f"{member.name} was stopped and ended with {code}")
    stage.expect(took < within, f"{member.name} took {took:.1f} s to stop")


def _left_nothing(stage: Stage, member: Member) -> None:
    """Its row is gone, and with it all it held; a worker of transaction mode holds by its lock."""
    orphans = """
        SELECT count(*) FROM pgqueue.leases AS lease
        WHERE NOT EXISTS (SELECT FROM pgqueue.workers AS worker WHERE worker.id = lease.worker_id)
    """
    left = stage.scalar(orphans)
    stage.expect(left == 0, f"{member.name} has ended with {left} jobs left claimed")


@scenario(
    promises="P9 P10",
    research="T13",
    full=Size(jobs=20),
    short=Size(jobs=2),
    planted={"interruptions_are_not_recorded": "is recorded as|left claimed"},
)
def what_outlives_the_grace(stage: Stage, size: Size) -> None:
    """Handlers that outlive the grace, a second signal, a terminal that closes: one attempt each."""
    cases = []
    for mode in ("lease", "transaction"):
        for signals, end in ENDS.items():
            gate = f"{mode}-{len(cases)}"
            fleet = stage.fleet(
                mode,
                1,
                concurrency=2 * size.jobs,
                queues=[gate],
                grace=60.0 if len(signals) > 1 else GRACE,
            )
            jobs = stage.enqueue(wait.options(queue=gate), [(gate,)] * size.jobs)
            jobs += stage.enqueue(wait_and_pay.options(queue=gate), [(gate,)] * size.jobs)
            cases.append((mode, fleet.members[0], signals, end, gate, jobs))
    for *_, jobs in cases:
        stage.until_started(*jobs)
    for _, member, signals, end, gate, jobs in cases:
        _stop(stage, member, *signals, within=GRACE + MARGIN)
        member.was_harmed = True
        stage.open(gate)
        if end == "interrupted":
            _was_recorded(stage, jobs)
    last = [stage.fleet(mode, 1, queues=[gate]) for mode, *_, gate, _ in cases]
    stage.until_ended()
    for fleet in last:
        fleet.stop()
    for *_, end, _, jobs in cases:
        ends = {row[0] for row in stage.rows(ENDED_AS, jobs=jobs)}
        stage.expect(ends == {end}, f"{jobs} are recorded as {ends}, not {end}")
    stage.judge()


def _was_recorded(stage: Stage, jobs: list[int]) -> None:
    found = [row[0] for row in stage.rows(ENDED_AS, jobs=jobs)]
    words = f"what outlives the grace is recorded as {found}"
    stage.expect(found == ["interrupted"] * len(jobs), words)
    left = stage.scalar("SELECT count(*) FROM pgqueue.leases WHERE target_id = ANY(:j)", j=jobs)
    stage.expect(left == 0, f"{left} interrupted jobs are left claimed")
