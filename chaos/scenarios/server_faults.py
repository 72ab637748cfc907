"""The server crashes, refuses to write, or is another one: workers wait and go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from sqlalchemy import text
from sqlalchemy.orm import Session

from chaos.chores import AT_ONCE, EFFECT, LOOK_EVERY, call, effect, is_open, note, queue
from chaos.enqueuer import EVERY, Enqueuer
from chaos.fleet import Fleet, Member
from chaos.history import END, START
from chaos.plants import Patch, plant
from chaos.scenario import Server, Size, scenario
from chaos.stage import Stage
from pgqueue import JobContext

BUSY = 0.1
"""Seconds a handler takes while there is trouble: few commits flush the log for each other."""
SOON = 5.0
PATIENT = 2.5
"""The fast grace, longer than usual: on a busy machine a frozen worker needs time to beat again."""
FEW = 8
"""Lines of warning by one thread of a worker for one trouble, of which it tells each word once."""


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


@plant
def commits_are_acknowledged_early(patch: Patch) -> None:
    """An enqueue does not wait until its COMMIT is on disk, or on the standby."""
    from pgqueue.repository import Jobs

    def enqueue_chunk(self, new, *, documents):  # type: ignore[no-untyped-def]
        self._executor.execute(text("SET LOCAL synchronous_commit = off"))
        return durably(self, new, documents=documents)

    durably = patch.set(Jobs, "enqueue_chunk", enqueue_chunk)


@plant
def witness_outlives_its_connection(patch: Patch) -> None:
    """A rescuer goes on to count, on a new connection, the time it has not seen."""
    from pgqueue.worker import upkeep

    kept: list[Any] = []

    def witness():  # type: ignore[no-untyped-def]
        kept[:] = kept or [first()]
        return kept[0]

    first = patch.set(upkeep, "Witness", witness)


@plant
def loops_end_with_their_connection(patch: Patch) -> None:
    """A loop whose database fails it does not open another connection."""
    from pgqueue.worker import line

    patch.set(line, "BROKEN", ())


@plant
def loops_survive_only_lost_connections(patch: Patch) -> None:
    """A loop waits for a server that is away, and not for one that refuses."""
    from sqlalchemy.exc import OperationalError

    from pgqueue.worker import line

    patch.set(line, "BROKEN", (OperationalError,))


class Load(NamedTuple):
    fleets: list[Fleet]
    enqueuer: Enqueuer


@contextmanager
def load(
    stage: Stage, size: Size, *, url: str | None = None, every: float = EVERY
) -> Iterator[Load]:
    """Workers of both modes under load; at the end they still run, and have done all of it."""
    fleets = [
        stage.fleet(mode, 0, concurrency=3, fast_grace=PATIENT) for mode in ("lease", "transaction")
    ]
    for fleet in fleets:
        for _ in range(size.workers):
            fleet.add(url=url).was_harmed = True
    for fleet in fleets:
        fleet.until_registered()
    pids = [member.pid for member in stage.members]
    with Enqueuer(stage, [call_slowly, pay_slowly], every=every) as enqueuer:
        stage.until(lambda: len(stage.history(END)) > size.workers, what="work is being done")
        yield Load(fleets, enqueuer)
    stage.open("calm")
    _nothing_has_happened(stage, pids)
    stage.until_ended()
    for fleet in fleets:
        fleet.stop()
    found = stage.scalar("SELECT count(*) FROM pgqueue.jobs")
    stage.count("unacknowledged", found - len(stage.acknowledged))
    stage.judge(succeeded=found)


def _nothing_has_happened(stage: Stage, pids: list[int]) -> None:
    dead = stage.rows("SELECT id, heartbeat_at FROM pgqueue.workers WHERE dead_at IS NOT NULL")
    stage.expect(not dead, f"{len(dead)} workers were declared dead, and all were well")
    _all_run(stage, stage.members)
    stage.expect(pids == [member.pid for member in stage.members], "a worker was replaced")


def _all_run(stage: Stage, members: list[Member]) -> None:
    for member in members:
        stage.expect(member.is_running, f"{member.name} has ended by itself: {member.exit_code}")


def goes_on(stage: Stage) -> None:
    """A job enqueued now is done soon: the server answers again."""
    ids: list[int] = []

    def enqueued() -> bool:
        ids.extend(stage.enqueue(call.options(priority=0), [(0,)] * 2))
        return True

    stage.until(enqueued, what="the server accepts a job again")
    began = time.monotonic()

    def are_done() -> bool:
        _all_run(stage, stage.members)
        return {event.job for event in stage.history(END)} >= set(ids)

    stage.until(are_done, seconds=SOON, what="the workers go on")
    stage.counts["slowest ms"] = max(
        stage.counts["slowest ms"], int(1000 * (time.monotonic() - began))
    )


def said_briefly(stage: Stage, troubles: int) -> None:
    """Each thread of a worker tells each trouble in a few lines, however often it tries."""
    for member in stage.members:
        lines = member.log.read_text(errors="replace").splitlines()
        said = [line for line in lines if "waiting for the database" in line]
        stage.expect(bool(said), f"{member.name} did not say that it waits for the database")
        threads = {line.split()[2] for line in said}
        stage.expect(
            len(said) <= FEW * troubles * (len(threads) + 3),
            f"{member.name} said {len(said)} times that it waits for the database",
        )


def _has_looked_again(stage: Stage, since: float) -> bool:
    """Whether a rescuer has looked at the fleet on a connection of its own made since then."""
    look = """
        SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'w%'
            AND (query LIKE '%pg_locks%' OR query LIKE '%pg_try_advisory_xact_lock%')
            AND extract(epoch FROM backend_start) > :since
    """
    return bool(stage.scalar(look, since=since))


def _interrupt(stage: Stage, frozen: Member, interruption: Callable[[], None]) -> None:
    """Do it while one worker stands still, which beats again as soon as it can."""
    still_since = time.monotonic()
    frozen.freeze()
    stage.count("freezes")
    stage.until(lambda: time.monotonic() - still_since > PATIENT + 0.2, what="its last beat is old")
    since = time.time()
    interruption()
    stage.until(lambda: _has_looked_again(stage, since), what="a rescuer looks again")
    frozen.thaw()


def _crash_again_and_again(
    stage: Stage, size: Size, crash: Callable[[Enqueuer], None], *, every: float = EVERY
) -> None:
    with load(stage, size, every=every) as (fleets, enqueuer):
        _interrupt(stage, fleets[0].members[0], lambda: crash(enqueuer))
        goes_on(stage)
        for _ in range(size.faults - 1):
            crash(enqueuer)
            goes_on(stage)
        stage.count("server crashes", size.faults)
        said_briefly(stage, size.faults)


@scenario(
    promises="P1 P2 P5",
    research="T18",
    full=Size(workers=2, faults=10),
    short=Size(workers=1, faults=3),
    planted={
        "commits_are_acknowledged_early": "F1: .* acknowledged jobs are gone",
        "witness_outlives_its_connection": "declared dead, and all were well",
    },
    server=Server.OWN,
    alone=True,
)
def crashes_of_the_server(stage: Stage, size: Size) -> None:
    """The server crashes under load: nothing acknowledged is lost, and nobody taken for dead."""

    def crash(enqueuer: Enqueuer) -> None:
        enqueuer.until_acknowledged()
        stage.server.crash()
        stage.server.start()

    _crash_again_and_again(stage, size, crash, every=0.005)


@scenario(
    promises="P1 P2 P5",
    research="T18",
    full=Size(workers=2, faults=10),
    short=Size(workers=1, faults=2),
    planted={"witness_outlives_its_connection": "declared dead, and all were well"},
    server=Server.OWN,
    programs=("linux",),
    alone=True,
)
def crashes_of_a_backend(stage: Stage, size: Size) -> None:
    """One process of the server is killed, and it resets all: workers go on within 5 seconds."""

    def crash(_enqueuer: Enqueuer) -> None:
        named = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'w%' ORDER BY pid"
        os.kill(stage.dice.choice(stage.rows(named))[0], signal.SIGKILL)
        stage.until(lambda: stage.scalar("SELECT 1"), what="the server is back")

    _crash_again_and_again(stage, size, crash)


@scenario(
    promises="P1 P2 P5",
    research="T18",
    full=Size(workers=3, faults=200, seconds=0.05),
    short=Size(workers=1, faults=20, seconds=0.05),
    planted={"loops_end_with_their_connection": "has ended by itself"},
)
def storms_of_terminated_connections(stage: Stage, size: Size) -> None:
    """Connections are terminated at random, twenty a second: workers open others and go on."""
    end_one = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name LIKE 'w%' ORDER BY random() LIMIT 1"
    )
    with load(stage, size) as (fleets, _):
        for _ in range(size.faults):
            stage.scalar(end_one)
            stage.count("terminated connections")
            time.sleep(size.seconds)  # the pace of the storm
            for fleet in fleets:
                _all_run(stage, fleet.members)
        goes_on(stage)


@scenario(
    promises="P1 P2 P5",
    research="T18",
    full=Size(workers=2, faults=3, seconds=3),
    short=Size(workers=1, faults=1, seconds=0.5),
    planted={"loops_survive_only_lost_connections": "has ended by itself"},
)
def read_only_for_a_while(stage: Stage, size: Size) -> None:
    """The database refuses to write for a while: workers wait, say so, and go on."""
    name = stage.scalar("SELECT current_database()")
    end_all = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid != pg_backend_pid()"
    )
    with load(stage, size):
        for _ in range(size.faults):
            since = ends_of_logs(stage)
            stage.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
            stage.rows(end_all)
            until_all_say(stage, "read-only", since=since)
            time.sleep(size.seconds)  # the outage
            with stage.engine.connect() as connection:
                connection.execute(text("SET TRANSACTION READ WRITE"))
                connection.execute(text(f"ALTER DATABASE {name} RESET ALL"))
                connection.commit()
            stage.count("outages")
            stage.rows(end_all)
            goes_on(stage)
        said_briefly(stage, size.faults)


def ends_of_logs(stage: Stage) -> dict[str, int]:
    return {member.name: member.log.stat().st_size for member in stage.members}


def until_all_say(stage: Stage, word: str, *, since: dict[str, int]) -> None:
    """Wait until every worker has said this since its log was so long."""

    def say() -> bool:
        _all_run(stage, stage.members)
        logs = [member.log.read_bytes()[since[member.name] :] for member in stage.members]
        return all(word.encode() in log for log in logs)

    stage.until(say, what=f"all workers say {word!r}")
