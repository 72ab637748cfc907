"""A Citus cluster of real servers, for tests/citus."""

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import Engine, NullPool, create_engine

from chaos.workers import wait_until
from pgqueue.embedded import EmbeddedPostgres
from pgqueue.schema import upgrade_database

HOST = "127.0.0.1"

SHOP = """
    CREATE TABLE orders (tenant bigint, id bigint, done int DEFAULT 0, PRIMARY KEY (tenant, id));
    SELECT create_distributed_table('orders', 'tenant', shard_count => 8);
"""


class Node:
    """One server of the cluster."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port: int = probe.getsockname()[1]
        self.server = EmbeddedPostgres(
            directory,
            durable=False,  # the machine stays up; what is committed survives a kill all the same
            settings={
                "synchronous_commit": "on",
                "port": str(self.port),
                "listen_addresses": HOST,
                "shared_preload_libraries": "citus",
                "wal_level": "logical",
                "max_connections": "200",
                "max_prepared_transactions": "200",
                "max_wal_size": "1GB",
                "citus.node_conninfo": "sslmode=disable",
                "citus.enable_statistics_collection": "off",
                "citus.recover_2pc_interval": "1s",
                "citus.shard_count": "4",  # to move each takes two seconds
            },
        )
        self.url = f"postgresql+psycopg://postgres@{HOST}:{self.port}/postgres?sslmode=disable"
        self.engine: Engine = create_engine(self.url, poolclass=NullPool)

    def connect(self, *, autocommit: bool = True) -> "psycopg.Connection[Any]":
        url = self.url.replace("+psycopg", "")
        return psycopg.connect(url, autocommit=autocommit)

    def execute(self, statement: str) -> list[Any]:
        """Run SQL in its own transaction; returns the rows of the last statement."""
        with self.connect() as connection, connection.cursor() as cursor:
            cursor.execute(statement.encode())
            while cursor.nextset():
                pass
            return cursor.fetchall() if cursor.description else []

    def scalar(self, statement: str) -> Any:
        [(value,)] = self.execute(statement)
        return value

    def outcome(self, job_id: int) -> str | None:
        """How a job has ended; None also while the node is down."""
        with suppress(psycopg.OperationalError):
            outcome = self.scalar(f"SELECT outcome FROM pgqueue.jobs WHERE id = {job_id}")
            return None if outcome is None else str(outcome)
        return None

    def is_committing(self, pid: int) -> bool:
        """Whether a server process waits for other nodes in its COMMIT."""
        return bool(
            self.scalar(
                f"SELECT count(*) FROM pg_stat_activity WHERE pid = {pid} AND state = 'active'"
                " AND query LIKE 'COMMIT%' AND wait_event_type IN ('Client', 'Extension')"
            )
        )

    def kill(self) -> None:
        """``kill -9`` of the server and all its processes."""
        data = self.server.directory / "data"
        postmaster = int((data / "postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        for pid in [postmaster, *map(int, children)]:
            with suppress(ProcessLookupError):  # it has ended with the server
                os.kill(pid, signal.SIGKILL)
        # Until it has ended it answers, and a start would take it for a server that runs.
        gone = Path(f"/proc/{postmaster}")
        wait_until(lambda: not gone.exists(), what="the killed server has ended")

    def start(self) -> None:
        self.server.start()


class Cluster:
    """A coordinator and workers, with the application's table ``orders``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.coordinator = self.server("coordinator")
        self.workers = [self.server("worker-1"), self.server("worker-2")]
        self.coordinator.execute(
            f"SELECT citus_set_coordinator_host('{HOST}', {self.coordinator.port})"
        )
        for worker in self.workers:
            self.coordinator.execute(f"SELECT citus_add_node('{HOST}', {worker.port})")
        self.upgrade()
        self.coordinator.execute(SHOP)

    @property
    def nodes(self) -> list[Node]:
        return [self.coordinator, *self.workers]

    def server(self, name: str) -> Node:
        """Start one more server, with Citus, that is no node yet."""
        node = Node(self._directory / name)
        node.start()
        node.execute("CREATE EXTENSION citus")
        return node

    def upgrade(self) -> None:
        """Create pgqueue's tables on each node, the coordinator first."""
        for node in self.nodes:
            upgrade_database(node.engine)

    def stop(self) -> None:
        for node in self.nodes:
            node.server.stop()

    def tenant_on(self, node: Node) -> int:
        """A tenant whose orders are on this node."""
        [(tenant,)] = self.coordinator.execute(
            f"""
            SELECT tenant FROM generate_series(1, 1000) AS tenant
            JOIN pg_dist_placement
              ON shardid = get_shard_id_for_distribution_column('orders', tenant)
            JOIN pg_dist_node USING (groupid)
            WHERE nodeport = {node.port}
            LIMIT 1
            """
        )
        return int(tenant)

    def node_of(self, table: str, key: object) -> Node:
        """The node that has the rows of a key."""
        port = self.coordinator.scalar(
            f"""
            SELECT nodeport FROM pg_dist_placement JOIN pg_dist_node USING (groupid)
            WHERE shardid = get_shard_id_for_distribution_column('{table}', '{key}')
            """
        )
        [node] = [node for node in self.nodes if node.port == port]
        return node
