"""Transactions that the server ends while a handler is at work in them."""

from __future__ import annotations

import time

from sqlalchemy import text
from sqlalchemy.orm import Session

from chaos.environment import Environment
from chaos.history import END, START, Event
from chaos.sample_tasks import AT_ONCE, EFFECT, LOOK_EVERY, effect, is_open, note, queue
from chaos.scenario import Size, scenario
from pgqueue import JobContext

TERMINATED = "terminated"
WAYS = {
    TERMINATED: "",
    "idle": "-c idle_in_transaction_session_timeout=700",
    "over": "-c transaction_timeout=700",
}
"""By an operator (57P01), by the limit on idleness (25P03), by the limit on transactions
(25P04); the settings of a connection that its handlers get."""
FIRST_WITH_OVER = 170000
BACKENDS = "SELECT count(*) FROM pg_stat_activity WHERE pid = ANY(:pids)"


@queue.task(retry=AT_ONCE, max_attempts=5)
def outstay_and_pay(session: Session, ctx: JobContext) -> int:
    """The transaction of its first attempt is gone when it comes back to it."""
    session.execute(EFFECT, effect(ctx))
    note(START, ctx, backend=session.scalar(text("SELECT pg_backend_pid()")))
    while ctx.attempt == 1 and not is_open("ended"):
        time.sleep(LOOK_EVERY)
    note(END, ctx)
    return ctx.attempt


@scenario(
    promises="P2 P3",
    research="T4",
    full=Size(jobs=20),
    short=Size(jobs=4),
    mutated={"writes_outside_the_transaction": "not within|late result|F[0-9]:|sampled"},
)
def transactions_ended_under_handlers(environment: Environment, size: Size) -> None:
    """The server ends transactions under their handlers: nothing of them is kept, none is lost."""
    version = int(environment.scalar("SHOW server_version_num"))
    ways = [way for way in WAYS if way != "over" or version >= FIRST_WITH_OVER]
    fleets = []
    first: list[int] = []
    for way in ways:
        first += environment.enqueue(outstay_and_pay.options(queue=way), [()] * size.jobs)
        engine = {"connect_args": {"options": WAYS[way]}, "pool_size": size.jobs}
        workers = environment.workers(1, concurrency=size.jobs, queues=[way], engine=engine)
        fleets.append((way, workers))
    # On a busy machine a limit may strike before a handler has begun: then its second is first.
    environment.until(
        lambda: set(first) == {event.job for event in environment.history(START)},
        what="all jobs start",
    )
    starts = [event for event in environment.history(START) if event.attempt == 1]
    for way, workers in fleets:
        names = {member.name for member in workers.members}
        _end_transactions(environment, way, [start for start in starts if start.worker in names])
    environment.open("ended")
    environment.until_ended()
    again = environment.scalar("SELECT count(*) FROM pgqueue.jobs WHERE attempts >= 2")
    environment.expect(again == len(first), f"a late result was kept: only {again} ran again")
    for _, workers in fleets:
        environment.expect(
            all(each.is_running for each in workers.members), "a worker did not survive"
        )
        for member in workers.members:
            member.was_harmed = True
        workers.stop()
    environment.check()


def _end_transactions(environment: Environment, way: str, starts: list[Event]) -> None:
    pids = [start.details["backend"] for start in starts]
    if way == TERMINATED:
        for pid in pids:
            environment.rows("SELECT pg_terminate_backend(:pid, 5000)", pid=pid)
    environment.until(
        lambda: environment.scalar(BACKENDS, pids=pids) == 0, what=f"the server ends them, {way}"
    )
    environment.count("ended transactions", len(pids))
