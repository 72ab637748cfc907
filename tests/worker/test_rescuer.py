"""Rescuers after an outage: what was seen before it proves nothing."""

import time
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, Executable, create_engine, func, make_url, select, text
from worker_rig import promised, runtime_of

from pgqueue import PgQueue
from pgqueue.database.opening import own_connection
from pgqueue.database.settings import UPKEEP
from pgqueue.worker.duties.admit import Admitter
from pgqueue.worker.duties.rescue import RESCUE_LOCK
from pgqueue.worker.heartbeat import Heartbeat
from pgqueue.worker.janitor import Janitor
from pgqueue.worker.liveness import FAST_GRACE
from pgqueue.worker.slots import Slots
from pgqueue.worker.upkeep import Upkeep

pytestmark = pytest.mark.journey

OUTAGE = FAST_GRACE + timedelta(seconds=0.5)
A_WORKER = text(
    "INSERT INTO pgqueue.workers (id, hostname, pid, backend_pid, queues, slots)"
    " VALUES (gen_random_uuid(), 'elsewhere', 1, 0, '[]', 1)"
)
OURS = "application_name LIKE 'witness worker % heartbeat' AND datname = current_database()"
HAS_LOOKED = text(
    f"SELECT pid FROM pg_stat_activity WHERE {OURS} AND query_start > backend_start + '0.3 s'"
)
UNTIL_DEAD = text(
    f"SELECT dead_at - backend_start FROM pgqueue.workers, pg_stat_activity WHERE {OURS}"
    " AND dead_at IS NOT NULL"
)


def until(engine: Engine, statement: Executable) -> Any:
    deadline = time.monotonic() + 60
    while True:
        with engine.connect() as connection:
            if (found := connection.execute(statement).scalar()) is not None:
                return found
        assert time.monotonic() < deadline, f"never: {statement}"


def test_a_worker_is_watched_for_the_whole_grace_again_after_a_reconnect(
    engine: Engine, database_url: str, server_url: str
) -> None:
    """Or the first to be back after an outage would declare all others dead at once."""
    name = make_url(database_url).database
    outside = create_engine(server_url, isolation_level="AUTOCOMMIT")
    watched = create_engine(
        make_url(database_url).update_query_dict({"application_name": "witness"})
    )
    with engine.begin() as connection:
        connection.execute(A_WORKER)
    runtime = runtime_of(queue := PgQueue(engine))
    slots = Slots(runtime, 1)
    upkeep = Upkeep(
        runtime,
        slots,
        Admitter(runtime, queue, most_ready=1, poll_interval=timedelta(seconds=1)),
        timers=None,
        looks=None,
        janitor=Janitor(runtime),
        notify=False,
    )
    heartbeat = Heartbeat(
        watched,
        runtime.identity,
        runtime.outage,
        attempts_ended=int,
        on_others_dead=upkeep.reap,
        on_declared_dead=slots.give_up,
    )
    for thread in (upkeep, heartbeat):
        thread.start()
    try:
        backend = until(engine, HAS_LOOKED)
        with outside.connect() as server:
            server.exec_driver_sql(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
            server.exec_driver_sql(f"SELECT pg_terminate_backend({backend})")
            over = time.monotonic() + OUTAGE.total_seconds()
            while time.monotonic() < over:
                time.sleep(0.05)
            server.exec_driver_sql(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')

        seen_for = until(engine, UNTIL_DEAD)

        assert seen_for >= FAST_GRACE
    finally:
        heartbeat.stop(seconds=5)
        upkeep.stop(seconds=5)
        watched.dispose()
        outside.dispose()


@pytest.mark.timed
def test_a_worker_that_is_frozen_while_it_rescues_keeps_the_others_from_it_for_seconds(
    engine: Engine,
) -> None:
    """Or nobody would rescue what it holds itself, for as long as its host answers for it."""
    lock = select(func.pg_try_advisory_xact_lock(RESCUE_LOCK))
    with own_connection(engine, UPKEEP, isolation_level="READ COMMITTED") as frozen:
        assert frozen.scalar(lock)

        took = -time.monotonic()
        until(engine, select(1).where(lock.scalar_subquery()))
        took += time.monotonic()

        frozen.invalidate()  # the server has ended it
    assert took < promised(8)
