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

from chaos.environment import Environment
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import (
    AT_ONCE,
    EFFECT,
    LOOK_EVERY,
    attend,
    attend_async,
    effect,
    is_open,
    pay,
    queue,
    until_open,
    wait_and_pay,
)
from chaos.scenario import Size, scenario
from pgqueue import JobContext

TIMEOUT = timedelta(seconds=0.4)
LONGEST = 4.0
"""Seconds after which a handler returns by itself, as if nothing had been."""
WITHIN = 5.0
"""Seconds; there are 128 handlers past their timeout at once, on two cores."""
IMPORT = 10.0
"""Seconds in which a child process, of which many start at once, is ready."""


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
    return attend(ctx, WAYS[way])


@queue.task(retry=AT_ONCE, max_attempts=2, timeout=TIMEOUT)
def overstay_and_pay(session: Session, ctx: JobContext, way: str) -> int:
    session.execute(EFFECT, effect(ctx))
    return attend(ctx, WAYS[way])


@queue.task(retry=AT_ONCE, max_attempts=2, timeout=TIMEOUT)
async def overstay_async(ctx: JobContext, way: str) -> int:
    return await attend_async(ctx, asyncio.sleep(LONGEST))


@queue.task(retry=AT_ONCE, max_attempts=2, timeout=TIMEOUT)
async def overstay_and_pay_async(session: AsyncSession, ctx: JobContext, way: str) -> int:
    """In a statement."""
    await session.execute(EFFECT, effect(ctx))
    return await attend_async(ctx, session.execute(text(f"SELECT pg_sleep({LONGEST})")))


@queue.task(retry=AT_ONCE, max_attempts=2, timeout=TIMEOUT, executor="process")
def overstay_in_process(ctx: JobContext, way: str) -> int:
    return attend(ctx, WAYS[way])


@queue.task(retry=AT_ONCE, max_attempts=1, timeout=TIMEOUT)
def overstay_at_gate(session: Session, ctx: JobContext, gate: str) -> int:
    """Writes, and returns when the gate opens: only its server process can be ended before."""
    session.execute(EFFECT, effect(ctx))
    return attend(ctx, lambda: until_open(gate))


@mutation
def threads_are_not_timed(patch: Patch) -> None:
    """Nobody looks whether a handler in a thread is past its timeout."""
    from pgqueue.worker.slots import Slots

    patch.set(Slots, "_replace_overdue", lambda _self: None)


@mutation
def coroutines_are_not_timed(patch: Patch) -> None:
    """The event loop does not cancel an async handler past its timeout.

    The watch over threads would find it a second later, and give up a thread for it.
    """
    patch.set(asyncio, "timeout", lambda _seconds: asyncio.Timeout(None))


@mutation
def processes_are_not_timed(patch: Patch) -> None:
    """Whoever waits for a child process waits until its handler returns."""
    from pgqueue.worker.processes.pool import ChildProcess

    def wait_for(self, event, *, until):  # type: ignore[no-untyped-def]
        return in_time(self, event, until=None)

    in_time = patch.set(ChildProcess, "_wait_for", wait_for)


@mutation
def timeouts_are_tried_once(patch: Patch) -> None:
    """What the database does not do when a handler is past its timeout is never done."""
    from pgqueue.worker.timeouts import Transactions

    patch.set(Transactions, "end_again", lambda _self: None)


IN_WORKER = (overstay, overstay_and_pay, overstay_async, overstay_and_pay_async)


@scenario(
    promises="P2 P5",
    full=Size(jobs=2),
    short=Size(jobs=1),
    mutated={
        "threads_are_not_timed": "not within|recorded as",
        "coroutines_are_not_timed": "was given up|not within",
        "processes_are_not_timed": "not within|recorded as",
    },
    alone=True,
)
def handlers_past_their_timeout(environment: Environment, size: Size) -> None:
    """Handlers past their timeout: recorded as such in time, and nothing is kept."""
    hard = [in_c.__name__] if size.jobs == 1 else list(WAYS)
    soft = [in_python.__name__] if size.jobs == 1 else [way for way in WAYS if way != in_c.__name__]
    slots = len(IN_WORKER) * len(soft) * size.jobs * 2
    engine = {"pool_size": slots}
    workers = environment.workers(1, concurrency=slots, engine=engine)
    workers.until_registered()
    good = len(environment.enqueue(pay, [(1,)] * 10))
    late = 0
    for task in IN_WORKER:
        late += len(environment.enqueue(task, [(way,) for way in soft] * size.jobs))
    _until_timed_out(environment, late, within=WITHIN)
    late += len(environment.enqueue(overstay_in_process, [(way,) for way in hard]))
    _until_timed_out(environment, late, within=WITHIN + len(hard) * IMPORT)
    environment.open("return")
    environment.until_ended()
    _coroutines_were_cancelled(environment)
    workers.stop()
    environment.judge(succeeded=good, failed=late)


def _until_timed_out(environment: Environment, jobs: int, *, within: float) -> None:
    ended = "SELECT count(*) FROM pgqueue.job_attempts"
    environment.until(
        lambda: environment.scalar(ended) == 2 * jobs,
        seconds=2 * within,
        what="both attempts of each time out",
    )
    environment.counts["timeouts"] = 2 * jobs
    outcome = "SELECT DISTINCT outcome FROM pgqueue.job_attempts"
    found = [row[0] for row in environment.rows(outcome)]
    environment.expect(found == ["timeout"], f"attempts past their timeout are recorded as {found}")


def _coroutines_were_cancelled(environment: Environment) -> None:
    """No thread is lost for a coroutine, which ends where it waits."""
    coroutines = "SELECT id, task FROM pgqueue.jobs WHERE task LIKE '%async'"
    log = environment.members[0].log.read_text()
    for job, task in environment.rows(coroutines):
        given_up = f"job {job} {task}: past its timeout; its thread is abandoned" in log
        environment.expect(not given_up, f"a thread was given up for the coroutine of job {job}")


REFUSED = re.compile("MainThread .*too many connections")
"""In the log of a worker, when whoever carries out its timeouts gets no connection."""
OPEN = """
    SELECT count(*) FROM pg_stat_activity
    WHERE usename = :role AND state LIKE 'idle in transaction%'
"""


@scenario(
    promises="P2 P5",
    full=Size(jobs=8, seconds=10),
    short=Size(jobs=2, seconds=10),
    mutated={"timeouts_are_tried_once": "not within|recorded as"},
)
def timeouts_without_connections(environment: Environment, size: Size) -> None:
    """Timeouts while the server takes no connections: carried out when it takes some again."""
    role = f"pgqueue_chaos_{uuid.uuid4().hex[:8]}"
    environment.execute(f"CREATE ROLE {role} LOGIN")
    environment.execute(f"GRANT {environment.scalar('SELECT quote_ident(current_user)')} TO {role}")
    url = make_url(environment.url).set(username=role).render_as_string(hide_password=False)
    slots = 2 * size.jobs
    workers = environment.workers(0, concurrency=slots, engine={"pool_size": slots})
    workers.add(url=url)
    # One for each slot, so that all have their connections when there are no others.
    environment.until_started(*environment.enqueue(wait_and_pay, [("awake",)] * slots))
    environment.open("awake")
    environment.until_ended()
    environment.execute(f"ALTER ROLE {role} CONNECTION LIMIT 1")
    late = environment.enqueue(overstay_at_gate, [("return",)] * size.jobs)
    environment.until_started(*late)
    for member in environment.members:
        environment.until(
            lambda member=member: REFUSED.search(member.log.read_text()),  # type: ignore[misc]
            what=f"{member.name} is refused a connection for its timeouts",
        )
    environment.expect(
        environment.scalar(OPEN, role=role) >= len(late), "a transaction has ended by itself"
    )
    environment.execute(f"ALTER ROLE {role} CONNECTION LIMIT -1")
    environment.until(
        lambda: environment.scalar(OPEN, role=role) == 0,
        seconds=size.seconds,
        what="the transactions of handlers past their timeout end",
    )
    environment.until_ended()
    _are_timeouts(environment, len(late))
    environment.open("return")
    workers.stop()
    environment.execute(f"DROP ROLE {role}")
    environment.judge(succeeded=slots, failed=len(late))


def _are_timeouts(environment: Environment, count: int) -> None:
    found = [row[0] for row in environment.rows("SELECT outcome FROM pgqueue.job_attempts")]
    environment.count("timeouts", len(found))
    words = f"attempts past their timeout are recorded as {found}"
    environment.expect(found == ["timeout"] * count, words)
