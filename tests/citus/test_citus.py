"""pgqueue on a real cluster of Citus: a coordinator and two workers.

``CITUS_HOME`` names a PostgreSQL in which Citus is installed: the folder that has ``bin/postgres``
and ``bin/initdb``, such as ``/usr/lib/postgresql/15``.  The tests make a cluster of their own with
these programs, and nothing of it stays.  Without ``CITUS_HOME`` they are skipped.
"""

import asyncio
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Self
from uuid import UUID

import pytest
from citus_cluster import HOST, Cluster, Node
from conftest import directory_for_server
from documents import ROOT
from hosts import host_revision
from sqlalchemy import Connection, event, text
from sqlalchemy.exc import DBAPIError, OperationalError, ProgrammingError
from sqlalchemy.orm import Session
from worker_rig import running

from chaos.workers import PATIENCE, wait_until
from pgqueue import DuplicateJob, Job, PgQueue, Retry, SchemaMissing, Task, Worker, schema
from pgqueue.database.opening import backend_pid
from pgqueue.repository.enqueue import NodeKey
from pgqueue.repository.nodes import BITS, TABLE
from pgqueue.repository.tables import SLEEPERS
from pgqueue.schema import SCHEMA_VERSION, upgrade_database, verify
from pgqueue.schema.citus import distributed_tables
from pgqueue.views.findings import of_nodes

pytestmark = [
    pytest.mark.citus,
    pytest.mark.skipif(
        "CITUS_HOME" not in os.environ, reason="CITUS_HOME names no PostgreSQL with Citus"
    ),
]

DONE = text("UPDATE orders SET done = done + 1 WHERE tenant = :tenant AND id = :id RETURNING id")
INSERT = text("INSERT INTO orders (tenant, id) VALUES (:tenant, :id)")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        patched.setenv("PGQUEUE_PG_BIN", str(Path(os.environ["CITUS_HOME"]) / "bin"))
        cluster = Cluster(stack.enter_context(directory_for_server()))
        stack.callback(cluster.stop)
        yield cluster


Ready = Callable[[int], None]
"""Called with the process id of the server when all is written; returns when it is to commit."""


def in_session(queue: PgQueue, tenant: int, order: int, ready: Ready) -> None:
    with queue.session() as session:
        queue.tasks["fulfil"].enqueue(session, order)
        session.execute(INSERT, {"tenant": tenant, "id": order})
        ready(session.scalar(PID))
        session.commit()


def in_async_session(queue: PgQueue, tenant: int, order: int, ready: Ready) -> None:
    async def write() -> None:
        async with queue.async_session() as session:
            await queue.tasks["fulfil"].enqueue_async(session, order)
            await session.execute(INSERT, {"tenant": tenant, "id": order})
            ready(await session.scalar(PID))
            await session.commit()

    asyncio.run(write())


def by_key(queue: PgQueue, tenant: int, order: int, ready: Ready) -> None:
    """The job is on the node of the key, as the order is."""
    with queue.session() as session:
        queue.tasks["fulfil"].options(node=tenant).enqueue(session, order)
        session.execute(INSERT, {"tenant": tenant, "id": order})
        ready(session.scalar(PID))
        session.commit()


PID = text("SELECT pg_backend_pid()")
KEYS = '"pgqueue_citus".keys_bigint'
LISTENING = f"""
    SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'
    AND (classid::bigint << 32) + objid::bigint = {SLEEPERS}
"""


def fulfil(order: int) -> None: ...


def commit_and_kill(here: Node, there: Node, write: Callable[[Ready], None]) -> None:
    """Write rows on both nodes, and kill this node when the other has been told to commit."""
    pids: Queue[int] = Queue()
    commits = threading.Event()

    def ready(pid: int) -> None:
        pids.put(pid)
        commits.wait(PATIENCE)

    def run() -> None:
        with suppress(DBAPIError):  # the server is killed
            write(ready)

    writing = threading.Thread(target=run)
    writing.start()
    try:
        pid = pids.get(timeout=PATIENCE)
        [(remote,)] = there.execute(
            "SELECT pid FROM pg_stat_activity"
            " WHERE application_name LIKE 'citus_internal%' AND state = 'idle in transaction'"
        )
        os.kill(remote, signal.SIGSTOP)
        commits.set()
        try:
            wait_until(lambda: here.is_committing(pid), what="the other node is told to commit")
            here.kill()
        finally:
            os.kill(remote, signal.SIGCONT)
    finally:
        commits.set()
        writing.join()
    here.start()
    ended = f"SELECT count(*) FROM pg_stat_activity WHERE pid = {remote}"
    wait_until(lambda: there.scalar(ended) == 0, what="the other node has noticed the kill")
    prepared = "SELECT count(*) FROM pg_prepared_xacts"
    wait_until(lambda: there.scalar(prepared) == 0, what="prepared transactions are recovered")


def orders_and_jobs(here: Node, order: int) -> tuple[int, int]:
    return (
        here.scalar(f"SELECT count(*) FROM orders WHERE id = {order}"),
        here.scalar(f"SELECT count(*) FROM pgqueue.jobs WHERE args ->> 'order' = '{order}'"),
    )


@pytest.mark.parametrize(
    ("place", "way"),
    [(0, in_session), (1, in_session), (1, in_async_session), (0, by_key)],
    ids=["coordinator", "worker", "async", "by key"],
)
def test_a_node_that_dies_inside_of_commit_keeps_neither_order_nor_job(
    cluster: Cluster, place: int, way: Callable[[PgQueue, int, int, Ready], None]
) -> None:
    here, there, order = cluster.nodes[place], cluster.workers[1], new_order()
    queue, tenant = queue_at(here), cluster.tenant_on(there)
    commit_and_kill(here, there, lambda ready: way(queue, tenant, order, ready))
    assert [orders_and_jobs(node, order) for node in cluster.nodes] == [(0, 0)] * 3


def test_without_the_table_of_two_phases_the_order_is_kept_and_its_job_is_lost(
    cluster: Cluster,
) -> None:
    """What the table is for: without it the same moment separates them."""
    cluster.coordinator.execute(f"DROP TABLE {TABLE}")
    [here, there], order = cluster.workers, new_order()
    queue, tenant = queue_at(here), cluster.tenant_on(there)
    try:
        commit_and_kill(here, there, lambda ready: in_session(queue, tenant, order, ready))
        assert orders_and_jobs(here, order) == (1, 0)
    finally:
        cluster.upgrade()


@pytest.mark.parametrize(
    ("key", "sql_type"),
    [
        (7, "bigint"),
        (7, "integer"),
        (7, "smallint"),
        ("acme", "text"),
        ("acme", "varchar"),
        (UUID(int=7), "uuid"),
    ],
)
def test_a_job_is_on_the_node_that_has_the_rows_of_its_key(
    cluster: Cluster, key: NodeKey, sql_type: str
) -> None:
    at = cluster.coordinator
    at.execute(f"CREATE TABLE of_{sql_type} (tenant {sql_type} PRIMARY KEY)")
    at.execute(f"SELECT create_distributed_table('of_{sql_type}', 'tenant')")
    queue = queue_at(at)
    due_at = datetime(2100, 1, 1, tzinfo=UTC)
    by_tenant = queue.tasks["fulfil"].options(node=key, tags=["a"], run_at=due_at)
    insert = text(f"INSERT INTO of_{sql_type} VALUES (:key)")

    with queue.session() as session:
        rolled_back = by_tenant.enqueue(session, new_order())
        session.execute(insert, {"key": key})
        session.rollback()
        kept = by_tenant.enqueue(session, new_order())
        session.execute(insert, {"key": key})
        session.commit()
    alone = queue.tasks["fulfil"].options(node=key, delay=timedelta(days=1)).delay(new_order())

    node = cluster.node_of(f"of_{sql_type}", key)
    group = node.scalar("SELECT groupid FROM pg_dist_local_group")
    for job in (rolled_back, kept, alone):
        assert job.id >> BITS == group
    with PgQueue(node.url).session() as session:
        assert session.get(Job, rolled_back.id) is None
        for job in (kept, alone):
            assert job.is_new
            row = session.get_one(Job, job.id)
            same = ("queue", "task", "args", "tags", "meta", "run_at", "created_at", "status")
            assert [getattr(job, name) for name in same] == [getattr(row, name) for name in same]
    assert kept.run_at == due_at
    assert round((alone.run_at - alone.created_at) / timedelta(days=1)) == 1
    assert at.scalar(f"SELECT count(*) FROM of_{sql_type}") == 1


def test_an_enqueue_by_key_wakes_the_worker_of_the_node(cluster: Cluster) -> None:
    at = cluster.coordinator
    queue, node = queue_at(at), cluster.node_of(KEYS, 7)
    by_key = queue.tasks["fulfil"].options(node=7)
    of_node = queue_at(node)
    # No poll would come within the test.
    with running(Worker(of_node, poll_interval=timedelta(hours=1))):
        for _ in range(5):
            wait_until(lambda: at.scalar(LISTENING) > 0, what="the worker listens")
            with queue.session() as session:
                job = by_key.enqueue(session, new_order())
                session.commit()
            wait_until(lambda: node.outcome(job.id) == "succeeded", what="the job has run")


def test_keys_follow_a_table_of_the_application(cluster: Cluster) -> None:
    """The statements of the page."""
    page = (ROOT / "docs" / "how-to" / "several-nodes.md").read_text("utf-8")
    [statements] = re.findall(r"^```sql\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    for statement in statements.strip().split(";"):
        cluster.coordinator.execute(statement)

    by_key = queue_at(cluster.coordinator).tasks["fulfil"]
    for tenant in range(20):
        node = cluster.node_of("orders", tenant)
        job = by_key.options(node=tenant).delay(new_order())
        assert job.id >> BITS == node.scalar("SELECT groupid FROM pg_dist_local_group")
        queue_at(node).tasks["fulfil"].options(node=tenant).delay(new_order())
    cluster.upgrade()  # keeps it so
    assert by_key.options(node=tenant).delay(new_order()).id >> BITS == job.id >> BITS


def test_one_unique_key_with_two_keys_of_a_node_needs_one_connection_to_it(
    cluster: Cluster,
) -> None:
    """The statement of the page: without it, the second enqueue waits for the first."""
    page = (ROOT / "docs" / "how-to" / "several-nodes.md").read_text("utf-8")
    [in_sequence] = re.findall(r"^SET LOCAL citus.*$", page, re.MULTILINE)
    queue, node = queue_at(cluster.coordinator), cluster.workers[0]
    of_node = [key for key in range(50) if cluster.node_of(KEYS, key) is node]
    cluster.coordinator.execute("CREATE TABLE seen (tenant bigint PRIMARY KEY, times int)")
    cluster.coordinator.execute(
        f"SELECT create_distributed_table('seen', 'tenant', colocate_with => '{KEYS}')"
    )
    fulfil, unique_key = queue.tasks["fulfil"], f"one {new_order()}"

    def ids(*first: str) -> set[int]:
        with queue.session() as session:
            # As if the statement took long.
            session.execute(text("SET LOCAL citus.force_max_query_parallelization = on"))
            for statement in first:
                session.execute(text(statement))
            session.execute(text("UPDATE seen SET times = times + 1"))
            by_keys = [fulfil.options(node=key, unique_key=unique_key) for key in of_node[:5]]
            return {by_key.enqueue(session, 1).id for by_key in by_keys}

    try:
        with pytest.raises(OperationalError, match="distributed deadlock"):
            ids()
        assert len(ids(in_sequence)) == 1
    finally:
        cluster.coordinator.execute("DROP TABLE seen")


def test_equal_unique_keys_meet_on_the_node_of_their_key(cluster: Cluster) -> None:
    queue, order = queue_at(cluster.coordinator), new_order()
    one_each = queue.tasks["fulfil"].options(node="meet", unique_key=f"meet {order}")
    with queue.session() as session:
        first = one_each.enqueue(session, order)
        again = one_each.enqueue(session, order)
        session.commit()

    assert (again.id, again.is_new, first.is_new) == (first.id, False, True)
    assert one_each.delay(order).id == first.id
    with pytest.raises(DuplicateJob):
        one_each.options(on_duplicate="raise").delay(order)
    assert one_each.options(unique_key=f"other {order}").delay(order).is_new


def test_without_its_function_an_enqueue_by_key_says_what_to_run(cluster: Cluster) -> None:
    queue = queue_at(cluster.coordinator)
    cluster.coordinator.execute("DROP SCHEMA pgqueue_citus CASCADE")
    try:
        with pytest.raises(SchemaMissing, match="upgrade --nodes all"):
            queue.tasks["fulfil"].options(node=7).delay(1)
    finally:
        cluster.upgrade()


@pytest.mark.parametrize(
    "break_it",
    [
        "DROP TABLE pgqueue_citus.two_phase",
        "DROP FUNCTION pgqueue_citus.enqueue_bigint",
        "CREATE OR REPLACE FUNCTION pgqueue_citus.enqueue_bigint(node_key bigint, given jsonb)"
        " RETURNS TABLE (id bigint, run_at numeric, created_at numeric, is_new boolean)"
        " LANGUAGE sql AS 'SELECT 1, 1, 1, true'",
    ],
    ids=["table missing", "function missing", "function old"],
)
def test_doctor_names_what_is_missing_or_old_and_an_upgrade_brings_it_back(
    cluster: Cluster, break_it: str
) -> None:
    queue = queue_at(cluster.coordinator)

    def found() -> list[str]:
        return [each.detail for each in of_nodes(queue.nodes) if each.subject == "citus"]

    assert found() == []
    cluster.coordinator.execute(break_it)
    try:
        details = found()
        assert [detail.partition(": ")[0] for detail in details] == [n.name for n in queue.nodes]
    finally:
        cluster.upgrade()
    assert found() == []
    node = cluster.node_of(KEYS, 7)
    job = queue.tasks["fulfil"].options(node=7).delay(new_order())
    assert job.id >> BITS == node.scalar("SELECT groupid FROM pg_dist_local_group")


def test_a_node_that_dies_inside_of_a_handlers_commit_keeps_nothing_of_the_attempt(
    cluster: Cluster,
) -> None:
    [here, there], order = cluster.workers, new_order()
    tenant, waiting = cluster.tenant_on(there), Queue[Ready]()
    queue = PgQueue(here.url)
    written: set[int] = set()

    @queue.task(name="order", max_attempts=100, retry=Retry.constant(timedelta(milliseconds=100)))
    def write_order(session: Session, order: int) -> None:
        session.execute(INSERT, {"tenant": tenant, "id": order})
        written.add(session.scalars(PID).one())

    # Not inside the handler: its savepoint is released on the other node too.
    @event.listens_for(queue.engine, "commit")
    def wait(connection: Connection) -> None:
        pid = backend_pid(connection)
        if pid in written:
            with suppress(Empty):
                waiting.get_nowait()(pid)

    job_id = write_order.delay(order).id
    with running(Worker(queue)):
        commit_and_kill(here, there, waiting.put)
        # An order of the first attempt would refuse that of the next.
        wait_until(lambda: here.outcome(job_id) == "succeeded", what="the job runs again")
    assert orders_and_jobs(here, order) == (1, 1)


class Load:
    """Orders with jobs from all nodes, each for a tenant of any node, and workers that fulfil
    them."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self.ended = threading.Event()
        self.committed = [0] * len(nodes)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for place, node in enumerate(self.nodes):
                queue = PgQueue(node.url, nodes="citus")
                task = self.task_of(queue)
                stack.enter_context(running(Worker(queue, concurrency=4)))
                enqueuer = threading.Thread(target=self.enqueue, args=[queue, task, place])
                enqueuer.start()
                stack.callback(enqueuer.join)
            stack.callback(self.ended.set)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self.stack:
            self.ended.set()
            if kind is None:
                wait_until(self.is_done, what="all jobs have ended, and nothing is prepared")

    def task_of(self, queue: PgQueue) -> Task[..., Any]:
        @queue.task(name="fulfil", max_attempts=1000, retry=Retry.constant(timedelta(seconds=0.2)))
        def fulfil(session: Session, tenant: int, order: int) -> None:
            done = (
                "UPDATE orders SET done = done + 1 WHERE tenant = :tenant AND id = :id RETURNING id"
            )
            # The row of another node may be visible a moment later than the job.
            session.execute(text(done), {"tenant": tenant, "id": order}).one()

        return fulfil

    def enqueue(self, queue: PgQueue, task: Task[..., Any], place: int) -> None:
        for number in count(1):
            if self.ended.is_set():
                return
            order, tenant = new_order(), number % 50
            try:
                with queue.session() as session:
                    session.execute(INSERT, {"tenant": tenant, "id": order})
                    by_key = task.options(node=tenant) if number % 2 else task
                    by_key.enqueue(session, tenant, order)
                    if number % 5:
                        session.commit()
                        self.committed[place] += 1
            except DBAPIError:  # a node is killed, or a shard has moved
                self.ended.wait(0.1)

    def goes_on(self) -> None:
        """Wait until each node has committed more."""
        before = list(self.committed)
        wait_until(
            lambda: all(now > past + 10 for now, past in zip(self.committed, before, strict=True)),
            what="orders are committed on all nodes",
        )

    def is_done(self) -> bool:
        open_jobs = "SELECT count(*) FROM pgqueue.jobs WHERE task = 'fulfil' AND outcome IS NULL"
        prepared = "SELECT count(*) FROM pg_prepared_xacts"
        return not any(node.scalar(open_jobs) + node.scalar(prepared) for node in self.nodes)

    def check(self) -> None:
        """Each order has one job, each job one order, and each was fulfilled once.

        Half of the jobs were enqueued by key, on any node.
        """
        orders = self.nodes[0].execute("SELECT id, done FROM orders")
        read = "SELECT (args ->> 'order')::bigint, 1 FROM pgqueue.jobs WHERE outcome = 'succeeded'"
        jobs = [row for node in self.nodes for row in node.execute(read)]
        assert len(orders) >= sum(self.committed) > 0
        assert sorted(jobs) == sorted(orders)
        for node in self.nodes:
            queue = PgQueue(node.url)
            with queue.session() as session:
                assert queue.check(session) == []


@pytest.fixture
def no_orders(cluster: Cluster) -> None:
    cluster.coordinator.execute("TRUNCATE orders")
    for node in cluster.nodes:
        node.execute("TRUNCATE pgqueue.jobs, pgqueue.message_queue, pgqueue.leases")


@pytest.mark.usefixtures("no_orders")
def test_kills_of_each_node_under_load_separate_no_order_from_its_job(cluster: Cluster) -> None:
    with Load(cluster.nodes) as load:
        for node in [*cluster.workers, cluster.coordinator]:
            load.goes_on()
            node.kill()
            node.start()
        load.goes_on()
    load.check()


@pytest.mark.usefixtures("no_orders")
def test_a_node_is_added_and_drained_under_load(cluster: Cluster) -> None:
    at = cluster.coordinator
    with ExitStack() as stack:
        node = cluster.server("worker-3")
        stack.callback(node.server.stop)
        with Load(cluster.nodes) as old:
            old.goes_on()
            at.execute(f"SELECT citus_add_node('{HOST}', {node.port})")
            upgrade_database(node.engine)
            with Load([node]) as new:
                new.goes_on()
                at.execute("SELECT rebalance_table_shards()")
                new.goes_on()
                # Until then, jobs by key are enqueued there.
                at.execute(f"SELECT citus_drain_node('{HOST}', {node.port})")
            at.execute(f"SELECT citus_remove_node('{HOST}', {node.port})")
            old.goes_on()
        old.nodes = [*old.nodes, node]
        old.check()


def test_a_revision_of_the_application_creates_plain_tables_on_a_node(cluster: Cluster) -> None:
    node = cluster.workers[0]
    node.execute("SET citus.enable_ddl_propagation = off; DROP SCHEMA pgqueue CASCADE")
    with node.engine.begin() as connection, host_revision(connection):
        schema.upgrade(to=SCHEMA_VERSION)
        # The rest of the revision may distribute the application's own tables.
        assert connection.scalar(text("SHOW citus.enable_ddl_propagation")) == "on"
    with node.engine.begin() as connection:
        verify(connection)
        assert not distributed_tables(connection)
    queue = queue_at(node)
    job = queue.tasks["fulfil"].delay(new_order())
    assert job.id >> BITS == node.scalar("SELECT groupid FROM pg_dist_local_group")
    assert Worker(queue).run_until_empty(timeout=PATIENCE) == {"succeeded": 1}


def test_a_role_that_may_only_enqueue_commits_in_two_phases(cluster: Cluster) -> None:
    [here, there], order = cluster.workers, new_order()
    cluster.coordinator.execute("CREATE ROLE app LOGIN; GRANT INSERT, SELECT ON orders TO app")
    with here.engine.begin() as connection:
        schema.grant(enqueue="app", connection=connection)
    queue = PgQueue(here.url.replace("postgres@", "app@"))
    queue.task(name="fulfil")(fulfil)
    tenant = cluster.tenant_on(there)
    commit_and_kill(here, there, lambda ready: in_session(queue, tenant, order, ready))
    assert orders_and_jobs(here, order) == (0, 0)


def test_who_enqueues_by_key_needs_the_right_to_enqueue_on_the_node(cluster: Cluster) -> None:
    cluster.coordinator.execute("CREATE ROLE clerk LOGIN")
    queue = PgQueue(cluster.coordinator.url.replace("postgres@", "clerk@"), nodes="citus")
    by_key = queue.task(name="fulfil")(fulfil).options(node=7)

    with pytest.raises(ProgrammingError, match="permission denied"):
        by_key.delay(new_order())

    for node in cluster.nodes:
        with node.engine.begin() as connection:
            schema.grant(enqueue="clerk", connection=connection)
    with queue.session() as session:
        assert by_key.enqueue(session, new_order()).is_new
        session.commit()
    assert by_key.options(unique_key="clerk").delay(1).is_new
    assert not by_key.options(unique_key="clerk").delay(1).is_new


def new_order() -> int:
    return next(_orders)


_orders = count(1)


def queue_at(node: Node) -> PgQueue:
    queue = PgQueue(node.url, nodes="citus")
    queue.task(name="fulfil")(fulfil)
    return queue
