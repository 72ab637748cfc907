"""Work under which a scenario takes the server away, and what must hold when it is back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from sqlalchemy.orm import Session

from chaos.enqueuer import EVERY, Enqueuer
from chaos.environment import Environment
from chaos.history import END, START
from chaos.sample_tasks import AT_ONCE, EFFECT, LOOK_EVERY, call, effect, is_open, note, pay, queue
from chaos.scenario import Size
from chaos.workers import Member, Workers
from pgqueue import JobContext

BUSY = 0.1
"""Seconds a handler takes while there is trouble: few commits flush the log for each other."""
SOON = 5.0
PATIENT = 3.0
"""The fast grace, longer than usual: on a busy machine a frozen worker needs time to beat again."""
FEW = 8
"""Lines of warning in which a worker may tell one trouble, which may come and go meanwhile."""


@queue.task(retry=AT_ONCE)
def call_slowly(ctx: JobContext) -> int:
    note(START, ctx)
    _take_time()
    note(END, ctx)
    return ctx.attempt


@queue.task(retry=AT_ONCE)
def pay_slowly(session: Session, ctx: JobContext) -> int:
    note(START, ctx)
    session.execute(EFFECT, effect(ctx))
    _take_time()
    note(END, ctx)
    return ctx.attempt


def _take_time() -> None:
    ends_at = time.monotonic() + BUSY
    while time.monotonic() < ends_at and not is_open("calm"):
        time.sleep(LOOK_EVERY)


class Load(NamedTuple):
    workers: Workers
    enqueuer: Enqueuer


@contextmanager
def load(
    environment: Environment,
    size: Size,
    *,
    url: str | None = None,
    every: float = EVERY,
    stock: int = 0,
) -> Iterator[Load]:
    """Workers under load; at the end they still run, and have done all of it.

    Besides the few slow jobs that come all the while there may be a stock of quick ones.
    """
    workers = environment.workers(0, concurrency=3, fast_grace=PATIENT)
    for _ in range(2 * size.workers):
        workers.add(url=url).was_harmed = True
    workers.until_registered()
    pids = [member.pid for member in environment.members]
    for task in (call, pay):
        environment.enqueue(task.options(max_attempts=1000), [()] * (stock // 2))
    with Enqueuer(environment, [call_slowly, pay_slowly], every=every) as enqueuer:
        environment.until(
            lambda: len(environment.history(END)) > size.workers, what="work is being done"
        )
        yield Load(workers, enqueuer)
    environment.open("calm")
    _nothing_has_happened(environment, pids)
    environment.until_ended()
    workers.stop()
    found = environment.scalar("SELECT count(*) FROM pgqueue.jobs")
    environment.count("unacknowledged", found - len(environment.acknowledged))
    environment.judge(succeeded=found)


@contextmanager
def standing_still(members: list[Member]) -> Iterator[None]:
    """While no worker commits anything, and so flushes to disk what others have committed."""
    frozen = [member for member in members if not member.stands_still]
    for member in frozen:
        member.freeze()
    try:
        yield
    finally:
        for member in frozen:
            member.thaw()


def _nothing_has_happened(environment: Environment, pids: list[int]) -> None:
    dead = environment.rows(
        "SELECT id, heartbeat_at FROM pgqueue.workers WHERE dead_at IS NOT NULL"
    )
    environment.expect(not dead, f"{len(dead)} workers were declared dead, and all were well")
    all_run(environment, environment.members)
    environment.expect(
        pids == [member.pid for member in environment.members], "a worker was replaced"
    )


def all_run(environment: Environment, members: list[Member]) -> None:
    for member in members:
        ended = (
            "" if member.is_running else f"{member.name} has ended by itself: {member.exit_code()}"
        )
        environment.expect(not ended, ended)


def goes_on(environment: Environment) -> None:
    """A job enqueued now is done soon: the server answers again."""
    ids: list[int] = []

    def enqueued() -> bool:
        ids.extend(environment.enqueue(call.options(priority=0), [(0,)] * 2))
        return True

    environment.until(enqueued, what="the server accepts a job again")
    began = time.monotonic()

    ended = "SELECT count(*) FROM pgqueue.jobs WHERE id = ANY(:ids) AND outcome IS NOT NULL"

    def are_done() -> bool:
        all_run(environment, environment.members)
        return bool(environment.scalar(ended, ids=ids) == len(ids))

    environment.until(are_done, seconds=SOON, what="the workers go on")
    environment.timed(began)


def said_briefly(environment: Environment, troubles: int, *, few: int = FEW) -> None:
    """A worker tells each trouble in a few lines, however often its threads meet it."""
    words = ("waiting for the database", "the database refuses")
    for member in environment.members:

        def said(log: Path = member.log) -> list[str]:
            written = log.read_text(errors="replace").splitlines()
            return [line for line in written if any(word in line for word in words)]

        # A connection that was idle notices it last.
        lines = environment.until(said, what=f"{member.name} says that it waits for the database")
        environment.expect(
            len(lines) <= few * troubles,
            f"{member.name} said {len(lines)} times that it waits for the database: {lines}",
        )


def ends_of_logs(environment: Environment) -> dict[Path, int]:
    return {member.log: member.log.stat().st_size for member in environment.members}


def logs_since(ends: dict[Path, int]) -> list[str]:
    """What each worker has said since its log ended there."""
    return [log.read_bytes()[end:].decode(errors="replace") for log, end in ends.items()]


def until_all_say(environment: Environment, word: str, *, since: dict[Path, int]) -> None:
    def say() -> bool:
        all_run(environment, environment.members)
        return all(word in log for log in logs_since(since))

    environment.until(say, what=f"all workers say {word!r}")
