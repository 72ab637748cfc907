"""The nodes of a queue: databases that each have tables, ids and workers of their own."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from sqlalchemy import URL, Engine, NullPool, create_engine
from sqlalchemy.exc import OperationalError

from pgqueue import redaction
from pgqueue.database.opening import connect_idle, on_psycopg
from pgqueue.errors import ArgumentsError, OptionError, PgQueueError, SchemaError
from pgqueue.repository.nodes import HIGHEST_NUMBER, read_number
from pgqueue.schema import citus
from pgqueue.schema.state import wait_for_other_upgrades

logger = redaction.logger(__name__)

CITUS = "citus"
PATIENCE = "10"
"""Seconds until a node that does not answer counts as down."""


@dataclass(frozen=True, slots=True)
class Node:
    """One of the databases of ``PgQueue(nodes=...)``."""

    url: URL
    """On psycopg, unless it names another driver.  Its ``repr`` hides the password."""
    number: int | None = None
    """The number of the node in the ids of its jobs, ``id >> 44``.  None for a node of a list,
    because only its database knows it."""

    @property
    def name(self) -> str:
        """``host:port/database``, without a password."""
        port = self._first("port") or "5432"
        return f"{self.host}:{port}/{self.url.database or self.url.username or ''}"

    @property
    def host(self) -> str:
        return self._first("host") or "localhost"

    def _first(self, parameter: str) -> str:  # of several
        _, parameters = self.url.get_dialect()().create_connect_args(self.url)
        return str(parameters.get(parameter) or "").partition(",")[0]

    def engine(self) -> Engine:
        """An engine that keeps no connections, and counts a node that is silent as down.

        Returns:
            The engine, which the caller disposes of.
        """
        url = self.url.update_query_dict({"connect_timeout": PATIENCE, **self.url.query})
        return create_engine(url, poolclass=NullPool, isolation_level="READ COMMITTED")


def checked_nodes(nodes: Any) -> list[Node]:
    """The nodes of a list of URLs; raises ArgumentsError or OptionError."""
    is_list = isinstance(nodes, Sequence) and not isinstance(nodes, str | URL)
    if not is_list or not 1 <= len(nodes) <= HIGHEST_NUMBER:
        raise ArgumentsError(
            f"PgQueue: nodes is no list of 1 to {HIGHEST_NUMBER} URLs; give those of all nodes, or "
            f'nodes="{CITUS}" to read them from Citus'
        )
    found: dict[str, Node] = {}
    for place, url in enumerate(nodes, 1):
        node = Node(on_psycopg(url, f"PgQueue: number {place} of nodes"))
        if found.setdefault(node.name, node) is not node:
            raise OptionError(f"PgQueue: nodes has {node.name} twice; give each database once")
    return list(found.values())


def nodes_of_citus(engine: Engine) -> list[Node]:
    """The nodes of the cluster to which an engine connects; raises PgQueueError without Citus.

    They have the user, the password and the database of the engine's URL.
    """
    group, nodes = _group_and_nodes(engine)
    if group is None:
        raise PgQueueError(
            "this database has no Citus, which would know the nodes: give PgQueue(nodes=[...]) the "
            "URLs of all nodes"
        )
    if group == 0 and 0 not in {node.number for node in nodes}:
        nodes.insert(0, Node(on_psycopg(engine.url), 0))  # it was not told its own address
    return nodes


def coordinator_of(engine: Engine) -> URL | None:
    """The URL of the coordinator, if the engine connects to another node, which knows it."""
    group, nodes = _group_and_nodes(engine)
    return next((node.url for node in nodes if group and node.number == 0), None)


def _group_and_nodes(engine: Engine) -> tuple[int | None, list[Node]]:
    at = on_psycopg(engine.url).difference_update_query(["host", "port"])
    with connect_idle(engine) as connection:
        connection.detach()  # asked once: the pool keeps none
        group = citus.group_of(connection)
        known = [] if group is None else citus.nodes_known(connection)
    return group, [Node(at.set(host=row.host, port=row.port), row.group) for row in known]


def number_in_list(engine: Engine, nodes: Sequence[Node]) -> None:
    """Give the node of an engine the number above all others, unless it has one.

    Does nothing for a database with Citus, which has numbered it; warns of one that is not in the
    list.  Raises SchemaError if a number is needed and another node does not answer.
    """
    name, names = Node(engine.url).name, sorted(node.name for node in nodes)
    if name not in names:
        logger.warning(
            "%s is none of the nodes of this queue (%s), so it gets no number, and its ids may be "
            "those of another node: name it in nodes as in its URL",
            name,
            ", ".join(names),
        )
        return
    with connect_idle(engine) as connection:
        if citus.group_of(connection) is not None or read_number(connection):
            return
    with ExitStack() as stack:
        connections = []
        for node in sorted(nodes, key=lambda node: node.name):
            try:
                connections.append(stack.enter_context(node.engine().connect()))
            except OperationalError as error:
                raise SchemaError(
                    f"node {name} needs a number that no other node has, and node {node.name} does "
                    "not answer: upgrade again when all nodes run"
                ) from error
        # One process at a time: two would give the same number to two nodes.  Every list has
        # another order, so all nodes are locked, in the order of their names.
        for connection in connections:
            wait_for_other_upgrades(connection)
        numbers = [read_number(connection) or 0 for connection in connections]
        if not numbers[names.index(name)]:
            with connect_idle(engine) as connection, connection.begin():
                citus.set_number(connection, max(numbers) + 1)
