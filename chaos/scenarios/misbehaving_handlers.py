"""Handlers that treat their session and its connection badly."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from threading import Thread
from typing import Any

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from chaos.environment import Environment
from chaos.history import START
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import EFFECT, effect, note, queue
from chaos.scenario import Size, scenario
from pgqueue import JobContext

PREPARED = """
    CREATE TABLE parents (id int PRIMARY KEY);
    CREATE TABLE children (parent int REFERENCES parents DEFERRABLE INITIALLY DEFERRED);
    DO $$ BEGIN CREATE ROLE pgqueue_chaos_nobody; EXCEPTION WHEN duplicate_object
    OR unique_violation THEN NULL; END $$
"""
STATE = text("SELECT current_user, current_setting('transaction_isolation')")


def sql(statement: str) -> Callable[[Session], None]:
    def act(session: Session) -> None:
        session.execute(text(statement))

    return act


def hide_an_error(session: Session) -> None:
    try:
        session.execute(text("SELECT 1/0"))
    except SQLAlchemyError:
        return


def use_a_thread(session: Session) -> None:
    thread = Thread(target=session.execute, args=(text("SELECT 1"),))
    thread.start()
    thread.join()


WELL, BADLY = {"succeeded"}, {"failed"}
ACTS: dict[str, tuple[Callable[[Session], None], set[str]]] = {
    "commit": (Session.commit, WELL),
    "rollback": (Session.rollback, WELL),
    "close": (Session.close, WELL),
    "raw BEGIN": (sql("BEGIN"), WELL),
    "raw COMMIT": (sql("COMMIT"), BADLY),
    "raw ROLLBACK": (sql("ROLLBACK"), BADLY),
    "failing SQL": (sql("SELECT 1/0"), BADLY),
    "hidden error": (hide_an_error, BADLY),
    "deferred constraint": (sql("INSERT INTO children VALUES (1)"), BADLY),
    "role": (sql("SET ROLE pgqueue_chaos_nobody"), BADLY),
    "thread": (use_a_thread, WELL),
}
"""What a handler does before it writes its row, and how its job may end."""


async def exit_in_a_task() -> None:
    async def leave() -> None:
        sys.exit(3)

    await asyncio.create_task(leave())


async def stop_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)


ASYNC_ACTS: dict[str, tuple[Callable[[], Awaitable[None]], set[str]]] = {
    "exit in a task": (exit_in_a_task, BADLY),
    "loop.stop()": (stop_the_loop, WELL),
}
"""What only a handler on an event loop can do."""


def act_and_write(session: Session, ctx: JobContext, name: str) -> None:
    if name == COMMIT_AND_RAISE:
        session.execute(EFFECT, effect(ctx))
        session.commit()
        raise ValueError("after its commit")
    ACTS[name][0](session)
    session.execute(EFFECT, effect(ctx))


COMMIT_AND_RAISE = "commit, then raise"


@queue.task(max_attempts=1)
def misbehave_and_pay(session: Session, ctx: JobContext, name: str) -> int:
    note(START, ctx, name=name)
    act_and_write(session, ctx, name)
    return ctx.attempt


@queue.task(max_attempts=1)
async def misbehave_and_pay_async(session: AsyncSession, ctx: JobContext, name: str) -> int:
    note(START, ctx, name=name)
    if name in ASYNC_ACTS:
        await ASYNC_ACTS[name][0]()
        await session.execute(EFFECT, effect(ctx))
    else:
        await session.run_sync(act_and_write, ctx, name)
    return ctx.attempt


@queue.task(max_attempts=1)
def look_and_pay(session: Session, ctx: JobContext, after: str) -> int:
    note(START, ctx, after=after, state=list(session.execute(STATE).one()))
    session.execute(EFFECT, effect(ctx))
    return ctx.attempt


@queue.task(max_attempts=1)
async def look_and_pay_async(session: AsyncSession, ctx: JobContext, after: str) -> int:
    note(START, ctx, after=after, state=list((await session.execute(STATE)).one()))
    await session.execute(EFFECT, effect(ctx))
    return ctx.attempt


@mutation
def sessions_join_without_savepoint(patch: Patch) -> None:
    """A handler's session joins its transaction so that its commit() is that of the transaction."""
    from pgqueue.handler import transaction

    def fully(sessions, connection, **_):  # type: ignore[no-untyped-def]
        return sessions(bind=connection, join_transaction_mode="control_fully")

    patch.set(transaction, "joined_session", fully)


@mutation
def loops_end_with_a_task(patch: Patch) -> None:
    """An event loop runs until it stops, whoever has stopped it."""
    from pgqueue.worker import event_loop

    patch.set(event_loop, "_keep_running", lambda loop, _is_over: loop.run_forever())


PAIRS: tuple[tuple[Any, Any, list[str]], ...] = (
    (misbehave_and_pay, look_and_pay, [*ACTS, COMMIT_AND_RAISE]),
    (misbehave_and_pay_async, look_and_pay_async, [*ACTS, *ASYNC_ACTS, COMMIT_AND_RAISE]),
)


@scenario(
    promises="P2 P6",
    research="T14",
    full=Size(faults=5),
    short=Size(faults=1),
    mutated={
        "sessions_join_without_savepoint": "F3|ended as",
        "loops_end_with_a_task": "has ended",
    },
)
def hostile_handlers(environment: Environment, size: Size) -> None:
    """Handlers that commit, roll back, fail and stop their loop: the next finds nothing of it."""
    environment.execute(PREPARED)
    misbehaved: dict[int, str] = {}
    fleets = []
    for number, (misbehave, look, acts) in enumerate(PAIRS):
        name = f"pair-{number}"
        environment.enqueue(look.options(queue=name), [("nothing",)])
        for act in acts * size.faults:
            [job] = environment.enqueue(misbehave.options(queue=name), [(act,)])
            misbehaved[job] = act
            environment.enqueue(look.options(queue=name), [(act,)])
            environment.count("misdeeds")
        # One connection, so that each neighbour gets that of the one before.
        fleets.append(environment.workers(1, concurrency=1, queues=[name], engine={"pool_size": 1}))
    environment.until_ended(meanwhile=lambda: _the_next_finds_nothing(environment))
    _the_next_finds_nothing(environment)
    outcomes = {row[0]: row[1] for row in environment.rows("SELECT id, outcome FROM pgqueue.jobs")}
    for job, act in misbehaved.items():
        _, allowed = ACTS.get(act) or ASYNC_ACTS.get(act) or (None, BADLY)
        environment.expect(outcomes[job] in allowed, f"{act}: job {job} ended as {outcomes[job]}")
    for workers in fleets:
        workers.stop()
    failed = sum(outcomes[job] == "failed" for job in misbehaved)
    environment.check(succeeded=len(outcomes) - failed, failed=failed)


def _the_next_finds_nothing(environment: Environment) -> None:
    for member in environment.members:
        environment.expect(member.is_running, f"{member.name} has ended over what its handlers did")
    looks = [event for event in environment.history(START) if "state" in event.details]
    clean = next(
        (each.details["state"] for each in looks if each.details["after"] == "nothing"), ""
    )
    for look in looks:
        found, after = look.details["state"], look.details["after"]
        environment.expect(found == clean, f"after {after!r} the next finds {found}, not {clean}")
