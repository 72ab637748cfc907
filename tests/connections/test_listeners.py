"""Listeners of the application for new connections, which may do anything."""

from collections.abc import Iterator
from datetime import timedelta
from threading import Event, Thread, current_thread
from typing import Any

import pytest
from click.testing import CliRunner
from flask import Flask, current_app
from kiosk import closing_engines, db, kiosk_app
from sqlalchemy import create_engine, event, make_url, select, text
from sqlalchemy.orm import Session

from chaos.workers import wait_until
from pgqueue import Job, JobStatus, PgQueue, Unique, Worker
from pgqueue.cli import main
from pgqueue.cli.app_loader import CliState
from pgqueue.flask import PgQueue as FlaskQueue

PATIENCE = timedelta(seconds=60)


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
@pytest.mark.parametrize("moment", ["connect", "checkout"])
def test_a_listener_may_leave_a_transaction_open(
    empty_database_url: str, moment: str, driver: str
) -> None:
    engine = create_engine(make_url(empty_database_url).set(drivername=f"postgresql+{driver}"))

    @event.listens_for(engine, moment)
    def set_tenant(connection: Any, *_: Any) -> None:
        connection.cursor().execute("SELECT set_config('shop.tenant', '7', false)")

    queue, tenants = PgQueue(engine), []

    @queue.task
    def work() -> None: ...

    @queue.task
    def look(session: Session) -> None:
        tenants.append(session.scalar(text("SELECT current_setting('shop.tenant', true)")))

    @queue.task(unique=Unique(on_conflict="postpone"))
    def later() -> None: ...

    queue.upgrade()
    for task in (work, look, later):
        task.delay()
    Worker(queue, concurrency=1).run_until_empty(timeout=PATIENCE.total_seconds())

    assert CliRunner().invoke(main, ["status"], obj=CliState(queue=queue)).exit_code == 0
    with queue.session() as session:
        assert set(session.scalars(select(Job.status))) == {JobStatus.SUCCEEDED}
    assert tenants == (["7"] if driver == "psycopg" else [None])
    engine.dispose()


def test_a_worker_says_that_listeners_are_not_called_on_another_driver(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = create_engine(make_url(database_url).set(drivername="postgresql+psycopg2"))

    @event.listens_for(engine, "connect")
    def set_tenant(connection: Any, _: Any) -> None: ...

    Worker(PgQueue(engine)).run_until_empty(timeout=PATIENCE.total_seconds())
    engine.dispose()

    [line] = [line for line in caplog.messages if "listeners" in line]
    assert line.startswith("the engine is on psycopg2")
    assert "set_tenant" in line


def test_a_worker_waits_for_a_listener_that_raises(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = create_engine(database_url)
    has_run, is_broken = Event(), True

    @event.listens_for(engine, "connect")
    def fetch_password(connection: Any, _: Any) -> None:
        if is_broken:
            raise RuntimeError("the vault does not answer")

    queue = PgQueue(engine)

    @queue.task
    def work() -> None:
        has_run.set()

    worker = Worker(queue, poll_interval=timedelta(seconds=0.1))
    runs = Thread(target=worker.run)
    runs.start()
    try:
        wait_until(lambda: "RuntimeError: the vault does not answer" in caplog.text)
        is_broken = False
        work.delay()
        assert has_run.wait(PATIENCE.total_seconds())
    finally:
        worker.stop()
        runs.join(PATIENCE.total_seconds())
    engine.dispose()


def test_a_listener_that_raises_costs_a_job_no_attempt(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = create_engine(database_url)
    is_broken, has_run = False, Event()

    @event.listens_for(engine, "checkout")
    def check(*_: Any) -> None:
        if is_broken and current_thread().name.startswith("pgqueue-slot"):
            raise RuntimeError("no more connections for you")

    queue = PgQueue(engine)

    @queue.task(max_attempts=1)
    def work(session: Session) -> None:
        has_run.set()

    worker = Worker(queue, concurrency=1)
    runs = Thread(target=worker.run)
    runs.start()
    try:
        is_broken = True
        work.delay()
        wait_until(lambda: "no more connections for you" in caplog.text)
        is_broken = False
        assert has_run.wait(PATIENCE.total_seconds())
    finally:
        worker.stop()
        runs.join(PATIENCE.total_seconds())

    with Session(engine) as session:
        assert session.scalars(select(Job.attempts)).all() == [1]
    engine.dispose()


@pytest.fixture
def flask_queue() -> FlaskQueue:
    return FlaskQueue()


@pytest.fixture
def app(flask_queue: FlaskQueue, database_url: str) -> Iterator[Flask]:
    with closing_engines(kiosk_app(flask_queue, database_url)) as app:
        yield app


def test_a_listener_of_a_flask_application_has_its_app(app: Flask, flask_queue: FlaskQueue) -> None:
    names = set()

    @flask_queue.task
    def work(session: Session) -> None: ...

    @flask_queue.task
    def plain() -> None: ...

    with app.app_context():
        for moment in ("connect", "checkout"):
            event.listen(db.engine, moment, lambda *_: names.add(current_app.name))
        work.delay()
        plain.delay()
        Worker(flask_queue).run_until_empty(timeout=PATIENCE.total_seconds())
        statuses = set(db.session.scalars(select(Job.status)))

    assert statuses == {JobStatus.SUCCEEDED}
    assert names == {app.name}
