"""Handlers that run past the timeout of their task."""

from __future__ import annotations

import asyncio
import ctypes
import re
import select
import socket
import subprocess
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from chaos.chores import (
    AT_ONCE,
    EFFECT,
    LOOK_EVERY,
    effect,
    is_open,
    note,
    pay,
    queue,
    wait_and_pay,
)
from chaos.history import END, START
from chaos.plants import Patch, plant
from chaos.scenario import Size, scenario
from chaos.stage import Stage
from pgqueue import JobContext

TIMEOUT = timedelta(seconds=0.4)
LONGEST = 4.0
"""Seconds after which a handler returns by itself, as if nothing had been."""
WITHIN = 5.0
"""Seconds; there are 128 handlers past their timeout at once, on two cores."""
IMPORT = 3.0
"""Seconds in which a child process of each mode, of which many start at once, is ready."""


def in_python() -> None:
    until = time.monotonic() + LONGEST
    while not is_open("return") and time.monotonic() < until:
        time.sleep(LOOK_EVERY)


def in_one_sleep() -> None:
    time.sleep(LONGEST)


def on_a_socket() -> None:
    one, other = socket.socketpair()
    with one, other:
        select.select([one], [], [], LONGEST)


def in_a_program() -> None:
    subprocess.run(["sleep", str(LONGEST)], check=True)


def in_c() -> None:
    """Never lets go of the interpreter lock: in a thread, all of the worker would stand still."""
    ctypes.PyDLL(None).usleep(int(LONGEST * 1e6))


WAYS: dict[str, Callable[[], None]] = {
    act.__name__: act for act in (in_python, in_one_sleep, on_a_socket, in_a_program, in_c)
}


@queue.task(retry=AT_ONCE, max_attempts=2, timeout=TIMEOUT)
def overstay(ctx: JobContext, way: str) -> int:
    note(START, ctx)
    WAYS[way]()
    note(END, ctx)
    return ctx.attempt


@queue.task(retry=AT_ONCE, max_attempts=2, timeout=TIMEOUT)
def overstay_and_pay(session: Session, ctx: JobContext, way: str) -> int:
    session.execute(EFFECT, effect(ctx))
    note(START, ctx)
    WAYS[way]()
    note(END, ctx)
    return ctx.attempt


@queue.task(retry=AT_ONCE, max_attempts=2, timeout=TIMEOUT)
async def overstay_async(ctx: JobContext, way: str) -> int:
    note(START, ctx)
    await asyncio.sleep(LONGEST)
    note(END, ctx)
    return ctx.attempt


@queue.task(retry=AT_ONCE, max_attempts=2, timeout=TIMEOUT)
async def overstay_and_pay_async(session: AsyncSession, ctx: JobContext, way: str) -> int:
    """In a statement: in transaction mode nothing but the end of its backend ends that."""
    await session.execute(EFFECT, effect(ctx))
    note(START, ctx)
    await session.execute(text(f"SELECT pg_sleep({LONGEST})"))
    note(END, ctx)
    return ctx.attempt


@queue.task(retry=AT_ONCE, max_attempts=2, timeout=TIMEOUT, executor="process")
def overstay_in_process(ctx: JobContext, way: str) -> int:
    note(START, ctx)
    WAYS[way]()
    note(END, ctx)
    return ctx.attempt


@queue.task(retry=AT_ONCE, max_attempts=1, timeout=TIMEOUT)
def overstay_at_gate(session: Session, ctx: JobContext, gate: str) -> int:
    """Writes, and returns when the gate opens: only its server process can be ended before."""
    session.execute(EFFECT, effect(ctx))
    note(START, ctx)
    while not is_open(gate):
        time.sleep(LOOK_EVERY)
    note(END, ctx)
    return ctx.attempt


@plant
def threads_are_not_timed(patch: Patch) -> None:
    """Nobody looks whether a handler in a thread is past its timeout."""
    from pgqueue.worker.shift import Shift

    patch.set(Shift, "_replace_overdue", lambda _self: None)


@plant
def coroutines_are_not_timed(patch: Patch) -> None:
    """The event loop does not cancel an async handler past its timeout.

    The watch over threads would find it a second later, and give up a thread for it.
    """
    patch.set(asyncio, "timeout", lambda _seconds: asyncio.Timeout(None))


@plant
def processes_are_not_timed(patch: Patch) -> None:
    """Whoever waits for a child process waits until its handler returns."""
    from pgqueue.worker.child import Child

    def receive(self, _until):  # type: ignore[no-untyped-def]
        return in_time(self, None)

    in_time = patch.set(Child, "_receive", receive)


@plant
def timeouts_are_tried_once(patch: Patch) -> None:
    """What the database does not do when a handler is past its timeout is never done."""
    from pgqueue.worker.shift import Shift

    patch.set(Shift, "_end_again", lambda _self: None)


IN_WORKER = (overstay, overstay_and_pay, overstay_async, overstay_and_pay_async)


@scenario(
    promises="P2 P5",
    research="T19",
    full=Size(jobs=2),
    short=Size(jobs=1),
    planted={
        "threads_are_not_timed": "not within|recorded as",
        "coroutines_are_not_timed": "was given up|not within",
        "processes_are_not_timed": "not within|recorded as",
    },
    alone=True,
)
def handlers_past_their_timeout(stage: Stage, size: Size) -> None:
    """Handlers past their timeout, in both modes: recorded as such in time, and nothing is kept."""
    hard = [in_c.__name__] if size.jobs == 1 else list(WAYS)
    soft = [in_python.__name__] if size.jobs == 1 else [way for way in WAYS if way != in_c.__name__]
    slots = len(IN_WORKER) * len(soft) * size.jobs * 2
    engine = {"pool_size": slots}
    modes = ("lease", "transaction")
    fleets = [
        stage.fleet(mode, 1, queues=[mode], concurrency=slots, engine=engine) for mode in modes
    ]
    for fleet in fleets:
        fleet.until_registered()
    late, good = 0, 0
    for mode in modes:
        good += len(stage.enqueue(pay.options(queue=mode), [(1,)] * 10))
        for task in IN_WORKER:
            rows = [(way,) for way in soft] * size.jobs
            late += len(stage.enqueue(task.options(queue=mode), rows))
    _until_timed_out(stage, late, within=WITHIN)
    for mode in modes:
        rows = [(way,) for way in hard]
        late += len(stage.enqueue(overstay_in_process.options(queue=mode), rows))
    _until_timed_out(stage, late, within=WITHIN + len(hard) * IMPORT)
    stage.open("return")
    stage.until_ended()
    _coroutines_were_cancelled(stage)
    for fleet in fleets:
        fleet.stop()
    stage.judge(succeeded=good, failed=late)


def _until_timed_out(stage: Stage, jobs: int, *, within: float) -> None:
    ended = "SELECT count(*) FROM pgqueue.job_attempts"
    stage.until(
        lambda: stage.scalar(ended) == 2 * jobs,
        seconds=2 * within,
        what="both attempts of each time out",
    )
    stage.counts["timeouts"] = 2 * jobs
    outcome = "SELECT DISTINCT outcome FROM pgqueue.job_attempts"
    found = [row[0] for row in stage.rows(outcome)]
    stage.expect(found == ["timeout"], f"attempts past their timeout are recorded as {found}")


def _coroutines_were_cancelled(stage: Stage) -> None:
    """In lease mode no thread is lost for a coroutine, which ends where it waits."""
    coroutines = "SELECT id FROM pgqueue.jobs WHERE queue = 'lease' AND task LIKE '%async'"
    log = stage.members[0].log.read_text()
    for (job,) in stage.rows(coroutines):
        given_up = f"job {job}: past its timeout; its thread is given up" in log
        stage.expect(not given_up, f"a thread was given up for the coroutine of job {job}")


REFUSED = re.compile("MainThread .*too many connections")
"""In the log of a worker, when whoever carries out its timeouts gets no connection."""
OPEN = """
    SELECT count(*) FROM pg_stat_activity
    WHERE usename = :role AND state LIKE 'idle in transaction%'
"""


@scenario(
    promises="P2 P5",
    research="T19",
    full=Size(jobs=8, seconds=10),
    short=Size(jobs=2, seconds=10),
    planted={"timeouts_are_tried_once": "not within|recorded as"},
)
def timeouts_without_connections(stage: Stage, size: Size) -> None:
    """Timeouts while the server takes no connections: carried out when it takes some again."""
    role = f"pgqueue_chaos_{uuid.uuid4().hex[:8]}"
    stage.execute(f"CREATE ROLE {role} LOGIN")
    stage.execute(f"GRANT {stage.scalar('SELECT quote_ident(current_user)')} TO {role}")
    url = make_url(stage.url).set(username=role).render_as_string(hide_password=False)
    fleets = []
    for mode in ("lease", "transaction"):
        fleet = stage.fleet(mode, 0, queues=[mode], concurrency=2 * size.jobs)
        fleet.add(url=url)
        fleets.append(fleet)
        # One for each slot, so that all have their connections when there are no others.
        wakers = wait_and_pay.options(queue=mode)
        stage.until_started(*stage.enqueue(wakers, [("awake",)] * 2 * size.jobs))
    stage.open("awake")
    stage.until_ended()
    stage.execute(f"ALTER ROLE {role} CONNECTION LIMIT 1")
    late = [
        job
        for mode in ("lease", "transaction")
        for job in stage.enqueue(overstay_at_gate.options(queue=mode), [("return",)] * size.jobs)
    ]
    stage.until_started(*late)
    for member in stage.members:
        stage.until(
            lambda member=member: REFUSED.search(member.log.read_text()),  # type: ignore[misc]
            what=f"{member.name} is refused a connection for its timeouts",
        )
    stage.expect(stage.scalar(OPEN, role=role) >= len(late), "a transaction has ended by itself")
    stage.execute(f"ALTER ROLE {role} CONNECTION LIMIT -1")
    stage.until(
        lambda: stage.scalar(OPEN, role=role) == 0,
        seconds=size.seconds,
        what="the transactions of handlers past their timeout end",
    )
    stage.until_ended()
    _are_timeouts(stage, len(late))
    stage.open("return")
    for fleet in fleets:
        fleet.stop()
    stage.execute(f"DROP ROLE {role}")
    stage.judge(succeeded=4 * size.jobs, failed=len(late))


def _are_timeouts(stage: Stage, count: int) -> None:
    found = [row[0] for row in stage.rows("SELECT outcome FROM pgqueue.job_attempts")]
    stage.count("timeouts", len(found))
    words = f"attempts past their timeout are recorded as {found}"
    stage.expect(found == ["timeout"] * count, words)
