"""pgqueue on a real cluster of Citus: a coordinator and two workers.

``CITUS_HOME`` names a PostgreSQL in which Citus is installed: the folder that has ``bin/postgres``
and ``bin/initdb``, such as ``/usr/lib/postgresql/15``.  The tests make a cluster of their own with
these programs, and nothing of it stays.  Without ``CITUS_HOME`` they are skipped.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from citus_cluster import Cluster, Node
from conftest import directory_for_server
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from chaos.workers import wait_until
from pgqueue import PgQueue
from pgqueue.repository.two_phase import TABLE

pytestmark = [
    pytest.mark.citus,
    pytest.mark.skipif(
        "CITUS_HOME" not in os.environ, reason="CITUS_HOME names no PostgreSQL with Citus"
    ),
]

INSERT = text("INSERT INTO orders (tenant, id) VALUES (:tenant, :id)")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        patched.setenv("PGQUEUE_PG_BIN", str(Path(os.environ["CITUS_HOME"]) / "bin"))
        cluster = Cluster(stack.enter_context(directory_for_server()))
        stack.callback(cluster.stop)
        yield cluster


def commit_and_kill(here: Node, there: Node, tenant: int, order: int) -> tuple[int, int]:
    """Commit an order of the other node with its job here, and kill this node inside of COMMIT.

    Returns how many orders and how many jobs there are when the cluster has recovered.
    """
    queue = PgQueue(here.url)
    task = queue.task(name="fulfil")(fulfil)
    with queue.session() as session, there.connect() as watching:
        pid = session.scalar(text("SELECT pg_backend_pid()"))
        task.enqueue(session, order)
        session.execute(INSERT, {"tenant": tenant, "id": order})
        [(remote,)] = watching.execute(
            "SELECT pid FROM pg_stat_activity"
            " WHERE application_name LIKE 'citus_internal%' AND state = 'idle in transaction'"
        ).fetchall()
        os.kill(remote, signal.SIGSTOP)
        committing = threading.Thread(target=_commit, args=[session])
        committing.start()
        try:
            wait_until(lambda: here.is_committing(pid), what="the other node is told to commit")
            here.kill()
        finally:
            os.kill(remote, signal.SIGCONT)
            committing.join()
    here.start()
    ended = f"SELECT count(*) FROM pg_stat_activity WHERE pid = {remote}"
    wait_until(lambda: there.scalar(ended) == 0, what="the other node has noticed the kill")
    prepared = "SELECT count(*) FROM pg_prepared_xacts"
    wait_until(lambda: there.scalar(prepared) == 0, what="prepared transactions are recovered")
    orders = there.scalar(f"SELECT count(*) FROM orders WHERE tenant = {tenant} AND id = {order}")
    jobs = here.scalar(f"SELECT count(*) FROM pgqueue.jobs WHERE args ->> 'order' = '{order}'")
    return orders, jobs


def fulfil(order: int) -> None: ...


def _commit(session: Session) -> None:
    with suppress(DBAPIError):  # the server is killed
        session.commit()


@pytest.mark.parametrize("place", [0, 1], ids=["coordinator", "worker"])
def test_a_node_that_dies_inside_of_commit_keeps_neither_order_nor_job(
    cluster: Cluster, place: int
) -> None:
    here, there = cluster.nodes[place], cluster.workers[1]
    assert commit_and_kill(here, there, cluster.tenant_on(there), 1 + place) == (0, 0)


def test_without_the_table_of_two_phases_the_order_is_kept_and_its_job_is_lost(
    cluster: Cluster,
) -> None:
    """What the table is for: without it the same moment separates them."""
    cluster.coordinator.execute(f"DROP TABLE {TABLE}")
    here, there = cluster.workers
    try:
        assert commit_and_kill(here, there, cluster.tenant_on(there), 7) == (1, 0)
    finally:
        cluster.upgrade()
