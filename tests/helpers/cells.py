"""The application whose handlers run in child processes, in the tests of those.

Apart from ``chores``, because a child imports what it needs and nothing else.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from chores import (
    AT_ONCE,
    EFFECT,
    effect,
    note,
    queue,
    until_cancelled,
    until_open,
    until_stopping,
)
from sqlalchemy import text

from pgqueue import Cancel, Discard, JobContext, Snooze

SOON = timedelta(seconds=0.5)
MEBIBYTE = 2**20
kept: list[Any] = []
"""What a handler leaves behind in its process."""


tenants: list[str] = []


@queue.middleware
def keep_tenant(ctx: JobContext) -> Iterator[None]:
    tenants.append(ctx.meta.get("tenant", ""))
    yield
    tenants.pop()


@queue.task(executor="process", retry=AT_ONCE)
def surrounded() -> list[str]:
    return tenants


@queue.task(executor="process", retry=AT_ONCE)
def echo(ctx: JobContext, value: dict[str, Any] | None = None) -> Any:
    note("start", ctx, group=os.getpgid(0), worker=os.getppid())
    return value


@queue.task(executor="process", retry=AT_ONCE, max_attempts=2)
def die(ctx: JobContext, how: str) -> None:
    note("start", ctx)
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(7)
        case "exit well":
            os._exit(0)
        case "segfault":
            ctypes.string_at(0)
        case "close":
            os.closerange(3, 64)
        case "fork and die":  # the copy keeps the socket to the worker
            if os.fork() == 0:
                os.setsid()
                time.sleep(60)
            os._exit(8)


@queue.task(executor="process", retry=AT_ONCE, max_attempts=2)
def sys_exit(ctx: JobContext) -> None:
    sys.exit(3)


@queue.task(executor="process", retry=AT_ONCE, max_attempts=1, timeout=SOON)
def overrun_in(ctx: JobContext, where: str) -> None:
    note("start", ctx)
    match where:
        case "sleep":
            time.sleep(60)
        case "C loop":  # holds the GIL: no other thread of the process runs
            sum(range(10**12))
        case "socket":
            left, _right = socket.socketpair()
            left.recv(1)
        case "subprocess":
            program = subprocess.Popen(["sleep", "60"])
            note("program", ctx, program=program.pid)
            program.wait()
        case "signals":
            for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_IGN)
            time.sleep(60)


@queue.task(executor="process", retry=AT_ONCE, max_attempts=2, memory_limit=768 * MEBIBYTE)
def fill_memory(ctx: JobContext, mebibytes: int) -> int:
    note("start", ctx)
    return len(bytearray(mebibytes * MEBIBYTE)) // MEBIBYTE


@queue.task(executor="process", retry=AT_ONCE, max_attempts=1, memory_limit=32 * MEBIBYTE)
def cramped(ctx: JobContext) -> None:
    note("start", ctx)


@queue.task(executor="process", retry=AT_ONCE, max_attempts=2)
def wait_in_cell(ctx: JobContext, gate: str) -> str:
    note("start", ctx)
    until_open(gate)
    return gate


@queue.task(executor="process", retry=AT_ONCE, max_attempts=2)
def spin(ctx: JobContext) -> None:
    """Holds the GIL for ever."""
    note("start", ctx)
    sum(range(10**12))


@queue.task(executor="process", retry=AT_ONCE)
def heed_in_cell(ctx: JobContext) -> None:
    note("start", ctx)
    until_cancelled(ctx)


@queue.task(executor="process", retry=AT_ONCE)
def heed_stop_in_cell(ctx: JobContext) -> Snooze:
    note("start", ctx)
    return until_stopping(ctx)


@queue.task(executor="process", retry=AT_ONCE)
def pay_in_cell(ctx: JobContext) -> None:
    with queue.session() as session, session.begin():
        session.execute(EFFECT, effect(ctx))
        echo.enqueue(session, {"paid": ctx.job_id})
        assert session.scalar(text("SELECT 1")) == 1


@queue.task(executor="process", retry=AT_ONCE, max_attempts=2)
def pay_at_end_in_cell(ctx: JobContext, then: str = "") -> str:
    note("start", ctx)
    with ctx.finish({"paid": ctx.job_id}) as session:
        session.execute(EFFECT, effect(ctx))
        if then == "lose its lease":
            with queue.session() as other, other.begin():  # as a rescue and the next claim do
                other.execute(text("UPDATE pgqueue.leases SET attempt = 9"))
        if then == "be cancelled":
            with queue.session() as other, other.begin():
                queue.cancel(other, ctx.job_id)
        if then == "die inside" and ctx.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    assert ctx.is_finished
    note("end", ctx)
    match then:
        case "raise":
            raise ValueError("too late to fail")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "wait":
            until_open("after")
    return "not kept"


@queue.task(executor="process", retry=AT_ONCE, max_attempts=1)
def only_say_it_has_ended(ctx: JobContext) -> None:
    link = _link()  # first: the connection to the database is a socket too
    with queue.session() as session:
        lease = text("SELECT message_id, attempt FROM pgqueue.leases WHERE target_id = :id")
        of = list(session.execute(lease, {"id": ctx.job_id}).one())
    said = json.dumps({"finished": True, "of": of}, separators=(",", ":"))
    link.sendall(said.encode() + b"\n")
    raise ZeroDivisionError("by naught")


@queue.task(executor="process", retry=AT_ONCE, max_attempts=1, timeout=SOON)
def overrun_at_end(ctx: JobContext) -> None:
    with ctx.finish() as session:
        session.execute(EFFECT, effect(ctx))
    time.sleep(60)


@queue.task(executor="process", retry=AT_ONCE)
def say(ctx: JobContext, what: str) -> Any:
    match what:
        case "cancel":
            return Cancel("enough")
        case "discard":
            raise Discard("not for me")
        case "snooze":
            return Snooze(timedelta(hours=1))
        case "count":
            kept.append(ctx.job_id)
            return len(kept)
    return None


class Bomb:
    """Runs a command wherever it is unpickled."""

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {os.environ['CHORES_DIRECTORY']}/gate-exploded",))


class Bombast(Exception):
    def __reduce__(self) -> Any:
        return Bomb().__reduce__()

    def __str__(self) -> str:
        raise SystemExit(1)


NASTY: dict[str, Any] = {
    "bomb": Bomb(),
    "nan": float("nan"),
    "huge int": 10**5000,
    "too large": "x" * (2 * MEBIBYTE),
    "half a pair": "\ud800",
    "nul": "a\0b",
    "lambda": lambda: 1,
}


@queue.task(executor="process", retry=AT_ONCE, max_attempts=1)
def give(ctx: JobContext, name: str) -> Any:
    if name == "deep":
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        return deep
    return NASTY[name]


@queue.task(executor="process", retry=AT_ONCE, max_attempts=1)
def throw(ctx: JobContext, kind: str) -> None:
    secret = "only in a variable"  # noqa: F841
    raise Bombast if kind == "bombast" else ZeroDivisionError("by naught")


@queue.task(executor="process", retry=AT_ONCE, max_attempts=1)
def forge(ctx: JobContext, line: str) -> None:
    """Writes to the worker itself, as a handler that nobody trusts may."""
    _link().sendall(line.encode())
    time.sleep(60)


@queue.task(executor="process", retry=AT_ONCE, max_attempts=1)
def babble(ctx: JobContext) -> None:
    """Fills the memory of the worker, if it listens."""
    link = _link()
    while True:
        link.sendall(b"x" * MEBIBYTE)


def _link() -> socket.socket:
    for number in range(3, 64):
        try:
            return socket.socket(fileno=os.dup(number))
        except OSError:
            continue
    raise LookupError("no socket to the worker")


@queue.task(executor="process", retry=AT_ONCE, max_attempts=1)
def leave_a_thread(ctx: JobContext) -> None:
    threading.Thread(target=time.sleep, args=(3600,)).start()


@queue.task(executor="process")
def report(ctx: JobContext, total: int) -> None:
    ctx.progress(0, total, "begun")
    until_open("report")
    for done in range(total + 1):
        ctx.progress(done, total)
