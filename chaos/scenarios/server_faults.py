"""The server crashes, refuses to write, has no room left, or is another one: workers go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import text

from chaos.enqueuer import Enqueuer
from chaos.environment import Environment
from chaos.mutations import Patch, mutation
from chaos.proxy import Proxy
from chaos.scenario import Server, Size, scenario
from chaos.servers import hot_standby, small_disk
from chaos.under_load import (
    PATIENT,
    all_run,
    call_slowly,
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
    patch.set(liveness, "LONGEST_GAP", float("inf"))


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


def crash(environment: Environment, enqueuer: Enqueuer) -> None:
    with standing_still(environment.members):
        enqueuer.until_acknowledged()
        environment.server.crash()
    environment.count("server crashes")
    environment.server.start()


def crash_a_backend(environment: Environment, _enqueuer: Enqueuer) -> None:
    """One process of the server is killed, and it ends all connections."""
    named = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'w%' ORDER BY pid"
    ours = Path(f"/proc/{environment.scalar('SELECT pg_backend_pid()')}")
    os.kill(environment.dice.choice(environment.rows(named))[0], signal.SIGKILL)
    # Until the server has noticed, it answers as if nothing had happened.
    environment.until(lambda: not ours.exists(), what="the server has reset all")
    environment.count("server crashes")
    environment.until(lambda: environment.scalar("SELECT 1"), what="the server is back")


def restart(environment: Environment, _enqueuer: Enqueuer) -> None:
    environment.server.stop()
    environment.count("server restarts")
    environment.server.start()


END_ALL = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid != pg_backend_pid()"
)


def refuse_to_write(environment: Environment, _enqueuer: Enqueuer) -> None:
    """Until each worker has said so."""
    name = environment.scalar("SELECT current_database()")
    since = ends_of_logs(environment)
    environment.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    environment.rows(END_ALL)
    until_all_say(environment, "read-only", since=since)
    with environment.engine.connect() as connection:
        connection.execute(text("SET TRANSACTION READ WRITE"))
        connection.execute(text(f"ALTER DATABASE {name} RESET ALL"))
        connection.commit()
    environment.count("outages")
    environment.rows(END_ALL)


FAULTS = (crash_a_backend, restart, refuse_to_write, crash)
TERMINATED = 20
"""Connections of workers, one after the other, in each fault of the last kind."""


@scenario(
    promises="P1 P2 P4 P5",
    full=Size(jobs=20_000, workers=4, faults=20, seconds=0.05),
    long=Size(jobs=20_000, workers=4, faults=60, seconds=0.2),
    short=Size(jobs=200, workers=1, faults=3, seconds=0.05),
    mutated={
        "commits_are_acknowledged_early": "F1: .* acknowledged jobs are gone",
        "witness_outlives_its_connection": "declared dead, and all were well",
        "loops_end_with_their_connection": "has ended by itself",
        "loops_survive_only_lost_connections": "has ended by itself",
    },
    server=Server.OWN,
    settings=LATE_TO_DISK,
    programs=("linux",),
    alone=True,
)
def server_faults(environment: Environment, size: Size) -> None:
    """The server crashes, restarts, refuses to write, ends connections: workers go on in 5 s."""
    with load(environment, size, every=0.005, stock=size.jobs) as (workers, enqueuer):
        interrupt(environment, workers.members[0], lambda: crash(environment, enqueuer))
        goes_on(environment)
        for number in range(size.faults):
            FAULTS[number % len(FAULTS)](environment, enqueuer)
            goes_on(environment)
        said_briefly(environment, size.faults + 1)
        for _ in range(TERMINATED * size.faults):
            environment.rows(END_ONE)
            environment.count("terminated connections")
            time.sleep(size.seconds)  # the pace of the storm
            all_run(environment, workers.members)
        goes_on(environment)


END_ONE = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name LIKE 'w%' ORDER BY random() LIMIT 1"
)


@scenario(
    promises="P1 P2 P4 P5",
    full=Size(jobs=1000, workers=2, faults=3, seconds=3),
    short=Size(jobs=300, workers=1, faults=1, seconds=0.3),
    mutated={"loops_end_with_their_connection": "has ended by itself"},
    server=Server.OWN,
    programs=("linux", "root", "mount"),
)
def disk_full(environment: Environment, size: Size) -> None:
    """The disk is full for a while: workers wait, say so, and go on when there is room."""
    with small_disk(environment) as disk, load(environment, size):
        for _ in range(size.faults):
            # Settled meanwhile, their rows need room; enqueuers are refused.
            environment.enqueue(call_slowly.options(max_attempts=1000), [()] * size.jobs)
            since = ends_of_logs(environment)
            disk.fill()
            until_all_say(environment, "No space left on device", since=since)
            time.sleep(size.seconds)  # the outage
            disk.free()
            environment.count("outages")
            goes_on(environment)
        said_briefly(environment, size.faults, few=30)  # each connection tells what it is refused


@scenario(
    promises="P1 P2 P4 P5",
    full=Size(workers=3, faults=1),
    short=Size(workers=1, faults=1),
    mutated={"commits_are_acknowledged_early": "F1: .* acknowledged jobs are gone"},
    server=Server.OWN,
    settings=LATE_TO_DISK,
)
def promotion_of_a_standby(environment: Environment, size: Size) -> None:
    """A synchronous standby takes over: nothing acknowledged is lost, nobody taken for dead."""
    with (
        hot_standby(environment) as standby,
        Proxy(environment.url) as proxy,
        load(environment, size, url=proxy.url, every=0.005) as (workers, enqueuer),
    ):

        def take_over() -> None:
            with standing_still(environment.members):
                enqueuer.until_acknowledged()
                environment.server.crash()
            environment.count("server crashes")
            standby.promote()
            proxy.lead_to(standby.url)
            environment.lead_to(standby.url)

        interrupt(environment, workers.members[0], take_over)
        environment.count("promotions")
        goes_on(environment)
        said_briefly(environment, size.faults)
