"""Several databases under one queue: what may be given, and what an id tells of its node."""

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hosts import host_revision
from kiosk import closing_engines, db, kiosk_app
from shop_rig import command
from some_nodes import DOWN, number_of, numbered
from sqlalchemy import make_url, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from chaos.workers import wait_until
from pgqueue import (
    ArgumentsError,
    Job,
    JobNotFound,
    JobStatus,
    MessageQueue,
    OptionError,
    PgQueue,
    PgQueueError,
    SchemaMissing,
    TaskDefinitionError,
    Unique,
    Worker,
)
from pgqueue.embedded import EmbeddedPostgres
from pgqueue.flask import PgQueue as FlaskQueue
from pgqueue.repository.enqueue import NodeKey
from pgqueue.repository.listing import Listing
from pgqueue.schema import SCHEMA_VERSION, upgrade
from pgqueue.schema.citus import set_number
from pgqueue.schema.state import wait_for_other_upgrades
from pgqueue.testing.databases import fresh_database

URL = "postgresql://app:hunter2@n1/shop"


@pytest.mark.parametrize(
    ("nodes", "error", "words"),
    [
        (URL, ArgumentsError, "nodes is no list of 1 to 511 URLs"),
        ({URL}, ArgumentsError, "nodes is no list"),
        ([], ArgumentsError, "nodes is no list of 1 to 511 URLs"),
        ([f"{URL}{n}" for n in range(512)], ArgumentsError, "nodes is no list of 1 to 511 URLs"),
        ([URL, URL.replace("app", "other")], OptionError, "nodes has n1:5432/shop twice"),
        (make_url(URL), ArgumentsError, "nodes is no list of 1 to 511 URLs"),
        ([URL, 7], ArgumentsError, "number 2 of nodes needs the URL of a database"),
        (["app:hunter2@n1"], ArgumentsError, "number 1 of nodes needs the URL of a database"),
        ([URL.replace("n1", "n1:x")], ArgumentsError, "number 1 of nodes needs the URL"),
        (["postgresql+odbc://n1/shop"], ArgumentsError, "number 1 of nodes needs the URL"),
        (["mysql://n1/shop"], ArgumentsError, "needs a PostgreSQL database, not mysql"),
    ],
)
def test_wrong_nodes_are_refused_without_their_passwords(
    nodes: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=re.escape(words)) as refusal:
        PgQueue(nodes=nodes)

    assert "hunter2" not in str(refusal.value)
    # Older versions of SQLAlchemy quote the URL in their own error.
    assert refusal.value.__cause__ is None
    assert refusal.value.__suppress_context__ or refusal.value.__context__ is None


def test_a_node_is_named_by_its_address_and_shows_no_password() -> None:
    at_socket = "postgresql+asyncpg:///shop?host=/run/pg&port=5433"

    one, other = PgQueue(nodes=[URL, at_socket]).nodes

    assert (one.name, other.name) == ("n1:5432/shop", "/run/pg:5433/shop")
    assert "hunter2" not in repr(one)
    assert PgQueue().nodes == []


def test_each_node_has_the_number_above_all_others_and_keeps_it(node_urls: list[str]) -> None:
    first, second, third = node_urls
    queue = PgQueue(nodes=node_urls)
    for url in (second, first):
        with queue.bound_to(url):
            queue.upgrade()
    reordered = PgQueue(nodes=[third, first, second])
    for node in reordered.nodes:
        with reordered.bound_to(node.url):
            reordered.upgrade()

    numbers = [number_of(node) for node in queue.nodes]

    assert numbers == [2, 1, 3]


def test_ids_of_jobs_and_messages_name_their_node(node_urls: list[str]) -> None:
    queue = numbered(node_urls)
    add = queue.task(name="add")(lambda: None)
    for number, node in enumerate(queue.nodes, 1):
        with queue.bound_to(node.url):
            assert add.delay().id == (number << 44) + 1
            with queue.session() as session:
                [message] = session.scalars(select(MessageQueue)).all()
            assert message.id >> 44 == number
            assert Worker(queue).run_until_empty(timeout=60) == {"succeeded": 1}


def test_jobs_from_before_the_number_stay_and_run(node_urls: list[str]) -> None:
    queue = PgQueue(node_urls[0], nodes=node_urls)
    add = queue.task(name="add")(lambda: None)
    before = add.delay().id

    queue.upgrade()

    assert (before, add.delay().id) == (1, (1 << 44) + 1)
    assert Worker(queue).run_until_empty(timeout=60) == {"succeeded": 2}
    queue.engine.dispose()


def test_a_queue_without_nodes_numbers_nothing(database_url: str) -> None:
    queue = PgQueue(database_url)
    queue.upgrade()

    assert queue.task(name="add")(lambda: None).delay().id == 1
    queue.engine.dispose()


def test_a_number_is_refused_while_another_node_is_down_and_kept_without_it(
    node_urls: list[str],
) -> None:
    queue = PgQueue(node_urls[0], nodes=[node_urls[0], DOWN])
    with pytest.raises(PgQueueError, match=r"needs a number .* node 127.0.0.1:9/down does not"):
        queue.upgrade()
    PgQueue(node_urls[0], nodes=node_urls).upgrade()

    queue.upgrade()  # asks no other node

    assert number_of(queue.nodes[0]) == 1
    with pytest.raises(OperationalError):
        number_of(queue.nodes[1])


def test_of_two_upgrades_at_once_each_gives_another_number(node_urls: list[str]) -> None:
    queue = PgQueue(node_urls[1], nodes=node_urls)
    first, second, _ = queue.nodes
    with first.engine().connect() as other, ThreadPoolExecutor(1) as threads:
        wait_for_other_upgrades(other)
        upgrade = threads.submit(queue.upgrade)
        waiting = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        wait_until(lambda: bool(other.scalar(waiting)) or upgrade.done())
        set_number(other, 1)
        other.commit()
        upgrade.result()

    assert [number_of(first), number_of(second)] == [1, 2]
    queue.engine.dispose()


def test_two_upgrades_at_once_from_lists_in_other_orders_give_two_numbers(
    node_urls: list[str],
) -> None:
    lists = [node_urls[:2], node_urls[1::-1]]
    queues = [PgQueue(urls[0], nodes=urls) for urls in lists]
    adds = [queue.task(name="add")(lambda: None) for queue in queues]
    waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
    with ExitStack() as open, ThreadPoolExecutor(2) as threads:
        enqueuing = [open.enter_context(queue.session()) for queue in queues]
        for add, session in zip(adds, enqueuing, strict=True):
            add.enqueue(session)  # no number can be set before it commits
        upgrades = []
        with queues[0].engine.connect() as other:
            for number, queue in enumerate(queues, 1):
                upgrades.append(threads.submit(queue.upgrade))
                wait_until(lambda: len(upgrades) == number == other.scalar(waiting))
        for session in enqueuing:
            session.commit()
        for upgrade in upgrades:
            upgrade.result(60)

    assert sorted(map(str, map(number_of, queues[0].nodes))) == ["1", "2"]
    for queue in queues:
        queue.engine.dispose()


def test_an_upgrade_of_a_database_that_is_none_of_the_nodes_says_so(
    node_urls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    queue = PgQueue(node_urls[2], nodes=node_urls[:2])

    queue.upgrade()

    [line] = [line for line in caplog.messages if "none of the nodes" in line]
    assert all(node.name in line for node in queue.nodes)
    queue.engine.dispose()


def test_an_operation_on_the_wrong_node_names_the_right_one(node_urls: list[str]) -> None:
    queue = numbered(node_urls)
    add = queue.task(name="add")(lambda: None)
    one, two, _ = queue.nodes
    with queue.bound_to(one.url):
        job_id = add.delay().id
    words = f"job {job_id} is not in this database, which is node 2: its id is one of node 1"

    with queue.bound_to(two.url), queue.session() as session:
        for operation in (
            lambda: queue.cancel(session, job_id),
            lambda: queue.requeue(session, job_id),
            lambda: queue.run_now(session, job_id),
            lambda: queue.job_state(session, job_id),
            lambda: Listing(session).job(job_id),
        ):
            with pytest.raises(JobNotFound, match=re.escape(words)):
                operation()
        for unknown in ((2 << 44) + 7, (512 << 44) + 7):  # no node has the number 512
            with pytest.raises(JobNotFound, match="never committed, or has been deleted"):
                queue.cancel(session, unknown)
    with queue.bound_to(one.url), queue.session() as session, session.begin():
        queue.cancel(session, job_id)
        assert session.get_one(Job, job_id).status is JobStatus.CANCELLED


def test_tables_of_a_hosts_history_get_their_number_by_the_same_upgrade(
    server_url: str, node_urls: list[str]
) -> None:
    with fresh_database(server_url) as url:
        queue = PgQueue(url, nodes=[*node_urls, url])
        with queue.engine.begin() as connection, host_revision(connection):
            upgrade(to=SCHEMA_VERSION)

        queue.upgrade()

        assert number_of(queue.nodes[3]) == 1
        queue.engine.dispose()


def test_a_flask_application_works_on_the_node_to_which_its_queue_is_bound(
    node_urls: list[str],
) -> None:
    numbered(node_urls)
    queue = FlaskQueue(nodes=node_urls)
    note = queue.task(name="note")(lambda: None)
    with closing_engines(kiosk_app(queue, node_urls[0])) as app, app.app_context():
        with queue.bound_to(queue.nodes[1].url):
            assert note.delay().id >> 44 == 2
            assert note.enqueue(db.session).id >> 44 == 2
            db.session.rollback()
            assert Worker(queue).run_until_empty(timeout=60) == {"succeeded": 1}

        assert note.delay().id >> 44 == 1


@pytest.mark.journey
def test_a_node_that_was_stopped_goes_on_where_it_was(
    node_urls: list[str], server_directory: Path
) -> None:
    with EmbeddedPostgres(server_directory) as server:
        queue = numbered([node_urls[0], server.url])
        add = queue.task(name="add")(lambda: None)
        _, node = queue.nodes
        with queue.bound_to(node.url):
            job_id = add.delay().id
        server.crash()

        down = command(queue, "status", "--nodes", "all")
        add.delay()  # the other node has no part in it
        assert Worker(queue).run_until_empty(timeout=60) == {"succeeded": 1}
        server.start()

        assert down.returncode == 1
        assert f"Error: {node.name}: No connection" in down.stderr
        assert command(queue, "status", "--nodes", "all").returncode == 0
        with queue.bound_to(node.url):
            assert add.delay().id >> 44 == job_id >> 44 == 2
            assert Worker(queue).run_until_empty(timeout=60) == {"succeeded": 2}
        queue.engine.dispose()


def note(id: int) -> None: ...


class UUIDOfDriver(UUID):
    """As asyncpg has one."""


@pytest.mark.parametrize("key", [7, "acme", UUID(int=7), UUIDOfDriver(int=7)])
@pytest.mark.parametrize("nodes", [None, "citus"])
def test_a_key_of_a_node_needs_citus_and_the_functions_of_an_upgrade(
    session: Session, nodes: str | None, key: NodeKey
) -> None:
    queue = PgQueue(session.get_bind(), nodes=nodes)
    task = queue.task(name="t")(note)

    with pytest.raises(SchemaMissing, match=r"upgrade --nodes all.*elsewhere omit node"):
        task.options(node=key).enqueue(session, 1)


def test_a_key_of_a_node_is_refused_by_what_is_written_on_the_node_of_the_session(
    session: Session,
) -> None:
    queue = PgQueue(session.get_bind(), nodes="citus")
    task = queue.task(name="t")(note)
    by_key = task.options(node="acme")

    with pytest.raises(OptionError, match="enqueue_many takes no node"):
        by_key.enqueue_many(session, [(1,)])
    with pytest.raises(OptionError, match=r"session.add\(.* takes no node"):
        by_key.job(1)
    with pytest.raises(OptionError, match="takes no unique key, delay, run_at or node"):
        queue.batch(session, on_success=by_key).__enter__()
    with pytest.raises(TaskDefinitionError, match=r"on_failed takes .* no delay, run_at, node"):
        queue.task(name="of", on_failed=by_key)(note)
    with pytest.raises(OptionError, match=r"'replace' changes no job on another node"):
        task.options(node=7, unique=Unique(on_conflict="replace"))
    with queue.batch(session), pytest.raises(OptionError, match="a batch takes no node"):
        by_key.enqueue(session, 1)
