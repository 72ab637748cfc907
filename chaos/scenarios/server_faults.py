"""The server crashes, refuses to write, or is another one: workers wait and go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import text

from chaos.enqueuer import EVERY, Enqueuer
from chaos.environment import Environment
from chaos.mutations import Patch, mutation
from chaos.scenario import Server, Size, scenario
from chaos.under_load import (
    PATIENT,
    all_run,
    ends_of_logs,
    goes_on,
    load,
    said_briefly,
    standing_still,
    until_all_say,
)
from chaos.workers import Member
from pgqueue.worker import liveness

LATE_TO_DISK = {"wal_writer_delay": "10s"}
"""What nobody waits for is written late: a commit that was acknowledged too early can be seen."""


@mutation
def commits_are_acknowledged_early(patch: Patch) -> None:
    """An enqueue does not wait until its COMMIT is on disk, or on the standby."""
    from pgqueue.repository.enqueue import Enqueues

    def enqueue_chunk(self, new, *, documents):  # type: ignore[no-untyped-def]
        self._executor.execute(text("SET LOCAL synchronous_commit = off"))
        return durably(self, new, documents=documents)

    durably = patch.set(Enqueues, "enqueue_chunk", enqueue_chunk)


@mutation
def witness_outlives_its_connection(patch: Patch) -> None:
    """A rescuer goes on to count, on a new connection, the time it has not seen."""
    from pgqueue.worker import heartbeat

    kept: list[Any] = []

    def witness():  # type: ignore[no-untyped-def]
        kept[:] = kept or [first()]
        return kept[0]

    first = patch.set(heartbeat, "Witness", witness)
    patch.set(liveness, "LONGEST_STEP", float("inf"))


@mutation
def loops_end_with_their_connection(patch: Patch) -> None:
    """A loop whose database fails it does not open another connection."""
    from pgqueue.worker import reconnecting

    patch.set(reconnecting, "BROKEN", ())


@mutation
def loops_survive_only_lost_connections(patch: Patch) -> None:
    """A loop waits for a server that is away, and not for one that refuses."""
    from sqlalchemy.exc import OperationalError

    from pgqueue.worker import reconnecting

    patch.set(reconnecting, "BROKEN", (OperationalError,))


def interrupt(environment: Environment, frozen: Member, interruption: Callable[[], None]) -> None:
    """Do it while one worker stands still, which beats again as soon as another has looked."""
    still_since = time.monotonic()
    environment.freeze(frozen)
    environment.until(
        lambda: time.monotonic() - still_since > PATIENT + 0.2, what="its last beat is old"
    )
    interruption()
    since = environment.scalar("SELECT clock_timestamp()")
    beats = "SELECT count(*) FROM pgqueue.workers WHERE heartbeat_at > :since"
    others = [member for member in environment.members if member is not frozen]

    def beat() -> bool:
        all_run(environment, others)
        return bool(environment.scalar(beats, since=since) == len(others))

    environment.until(beat, what="the others beat")
    beat_at = time.monotonic()
    environment.until(lambda: time.monotonic() - beat_at > 1, what="a rescuer has looked again")
    frozen.thaw()


def _again_and_again(
    environment: Environment, size: Size, fault: Callable[[Enqueuer], None], *, every: float = EVERY
) -> None:
    with load(environment, size, every=every, stock=size.jobs) as (workers, enqueuer):
        interrupt(environment, workers.members[0], lambda: fault(enqueuer))
        goes_on(environment)
        for _ in range(size.faults - 1):
            fault(enqueuer)
            goes_on(environment)
        said_briefly(environment, size.faults)


@scenario(
    promises="P1 P2 P4 P5",
    research="T18",
    full=Size(jobs=50_000, workers=4, faults=10),
    short=Size(jobs=200, workers=1, faults=3),
    mutated={
        "commits_are_acknowledged_early": "F1: .* acknowledged jobs are gone",
        "witness_outlives_its_connection": "declared dead, and all were well",
    },
    server=Server.OWN,
    settings=LATE_TO_DISK,
    alone=True,
)
def crashes_of_the_server(environment: Environment, size: Size) -> None:
    """The server crashes under load: nothing acknowledged is lost, and nobody taken for dead."""

    def crash(enqueuer: Enqueuer) -> None:
        with standing_still(environment.members):
            enqueuer.until_acknowledged()
            environment.server.crash()
        environment.count("server crashes")
        environment.server.start()

    _again_and_again(environment, size, crash, every=0.005)


@scenario(
    promises="P1 P2 P4 P5",
    research="T18",
    full=Size(jobs=10_000, workers=4, faults=10),
    short=Size(jobs=200, workers=1, faults=2),
    mutated={"witness_outlives_its_connection": "declared dead, and all were well"},
    server=Server.OWN,
    programs=("linux",),
    alone=True,
)
def crashes_of_a_backend(environment: Environment, size: Size) -> None:
    """One process of the server is killed, and it resets all: workers go on within 5 seconds."""

    def crash(_enqueuer: Enqueuer) -> None:
        named = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'w%' ORDER BY pid"
        ours = Path(f"/proc/{environment.scalar('SELECT pg_backend_pid()')}")
        os.kill(environment.dice.choice(environment.rows(named))[0], signal.SIGKILL)
        # Until the server has noticed, it answers as if nothing had happened.
        environment.until(lambda: not ours.exists(), what="the server has reset all")
        environment.count("server crashes")
        environment.until(lambda: environment.scalar("SELECT 1"), what="the server is back")

    _again_and_again(environment, size, crash)


@scenario(
    promises="P1 P2 P4 P5",
    research="T18",
    full=Size(jobs=10_000, workers=4, faults=5),
    short=Size(jobs=200, workers=1, faults=2),
    mutated={
        "loops_end_with_their_connection": "has ended by itself",
        "witness_outlives_its_connection": "declared dead, and all were well",
    },
    server=Server.OWN,
    alone=True,
)
def restarts_of_the_server(environment: Environment, size: Size) -> None:
    """The server is shut down and started again: all wait, say so, and go on in 5 seconds."""

    def restart(_enqueuer: Enqueuer) -> None:
        environment.server.stop()
        environment.count("server restarts")
        environment.server.start()

    _again_and_again(environment, size, restart)


@scenario(
    promises="P1 P2 P4 P5",
    research="T18",
    full=Size(workers=3, faults=200, seconds=0.05),
    long=Size(workers=3, faults=600, seconds=0.2),
    short=Size(workers=1, faults=20, seconds=0.05),
    mutated={"loops_end_with_their_connection": "has ended by itself"},
)
def storms_of_terminated_connections(environment: Environment, size: Size) -> None:
    """Connections are terminated at random, twenty a second: workers open others and go on."""
    end_one = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name LIKE 'w%' ORDER BY random() LIMIT 1"
    )
    with load(environment, size) as (workers, _):
        for _ in range(size.faults):
            environment.rows(end_one)
            environment.count("terminated connections")
            time.sleep(size.seconds)  # the pace of the storm
            all_run(environment, workers.members)
        goes_on(environment)


@scenario(
    promises="P1 P2 P4 P5",
    research="T18",
    full=Size(workers=2, faults=3, seconds=3),
    long=Size(workers=2, faults=3, seconds=20),
    short=Size(workers=1, faults=1, seconds=0.5),
    mutated={"loops_survive_only_lost_connections": "has ended by itself"},
)
def read_only_for_a_while(environment: Environment, size: Size) -> None:
    """The database refuses to write for a while: workers wait, say so, and go on."""
    name = environment.scalar("SELECT current_database()")
    end_all = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid != pg_backend_pid()"
    )
    with load(environment, size):
        for _ in range(size.faults):
            since = ends_of_logs(environment)
            environment.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
            environment.rows(end_all)
            until_all_say(environment, "read-only", since=since)
            time.sleep(size.seconds)  # the outage
            with environment.engine.connect() as connection:
                connection.execute(text("SET TRANSACTION READ WRITE"))
                connection.execute(text(f"ALTER DATABASE {name} RESET ALL"))
                connection.commit()
            environment.count("outages")
            environment.rows(end_all)
            goes_on(environment)
        said_briefly(environment, size.faults)
