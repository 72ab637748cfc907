"""``PgQueue`` in Flask applications: made once, given every app, clear about what is missing."""

import inspect
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, get_type_hints
from urllib.request import urlopen

import click
import pytest
from flask import Flask, abort, current_app
from kiosk import (
    NEVER,
    Note,
    closing_engines,
    db,
    kiosk_app,
    statuses_in,
    words_in,
    work,
)
from prometheus_client import CollectorRegistry
from sqlalchemy import create_engine

import pgqueue
from pgqueue import (
    BadToken,
    JobContext,
    JobStatus,
    Limit,
    NotBound,
    PayloadError,
    PgQueueError,
    Worker,
)
from pgqueue.cli import main
from pgqueue.cli.commands import loaded
from pgqueue.flask import PgQueue
from pgqueue.job_queue import QueueOptions
from pgqueue.metrics import serving


@pytest.fixture
def queue() -> PgQueue:
    return PgQueue()


@pytest.fixture
def app(queue: PgQueue, database_url: str) -> Iterator[Flask]:
    with closing_engines(kiosk_app(queue, database_url)) as app:
        yield app


def test_the_secret_key_of_the_app_signs_tokens(app: Flask, queue: PgQueue) -> None:
    with app.app_context():
        for key in ("text", b"\xff bytes"):
            app.secret_key = key
            token = queue.token(4711)
            assert queue.job_id(token) == 4711
        app.secret_key = "another"
        with pytest.raises(BadToken):
            queue.job_id(token)


def test_a_request_that_fails_enqueues_nothing(
    app: Flask, queue: PgQueue, database_url: str
) -> None:
    @queue.task(name="follow")
    def follow(word: str) -> None: ...

    @app.post("/notes/<word>")
    def write(word: str) -> str:
        db.session.add(Note(word=word))
        follow.enqueue(db.session, word)
        if word == "bad":
            abort(400)
        if word == "worse":
            raise ZeroDivisionError
        db.session.commit()
        return word

    client = app.test_client()
    answers = [client.post(f"/notes/{word}").status_code for word in ("good", "bad", "worse")]

    assert answers == [200, 400, 500]
    assert words_in(database_url) == ["good"]
    assert statuses_in(database_url) == [JobStatus.PENDING]


def test_delay_in_a_request_is_a_transaction_of_its_own(
    app: Flask, queue: PgQueue, database_url: str
) -> None:
    @queue.task(name="report")
    def report() -> None: ...

    @app.post("/")
    def fail() -> str:
        db.session.add(Note(word="lost"))
        db.session.flush()
        report.delay()
        abort(400)

    app.test_client().post("/")

    assert words_in(database_url) == []
    assert statuses_in(database_url) == [JobStatus.PENDING]
    with app.app_context():
        assert queue.engine is db.engine


def test_schedules_are_fired_in_an_application_context(app: Flask, queue: PgQueue) -> None:
    """Functions of on_enqueue run for each tick, and may ask for the app."""

    @queue.schedule(every=timedelta(seconds=1))
    @queue.task(name="tick")
    def tick(ctx: JobContext) -> None:
        seen.append(ctx.meta["app"])
        worker.stop()

    queue.on_enqueue(lambda task: {"app": current_app.name})
    seen: list[str] = []
    with app.app_context():
        worker = Worker(queue)
        worker.run()

    assert seen[0] == app.name


def test_resources_are_opened_and_closed_in_an_application_context(
    app: Flask, queue: PgQueue
) -> None:
    @queue.resource
    def name() -> Iterator[None]:
        seen.append(current_app.name)
        yield
        seen.append(current_app.name)

    seen: list[str] = []
    with app.app_context():
        Worker(queue).run_until_empty()

    assert seen == [app.name] * 2


def test_two_apps_share_the_tasks_and_nothing_else(
    queue: PgQueue, database_url: str, empty_database_url: str
) -> None:
    @queue.task(name="write", retry=NEVER, transactional=True)
    def write(word: str) -> None:
        db.session.add(Note(word=word))

    first = kiosk_app(queue, database_url)
    second = kiosk_app(queue, empty_database_url)
    with closing_engines(first), closing_engines(second):
        with second.app_context():
            queue.upgrade()
            write.delay("second")
        with first.app_context():
            write.delay("first")

        assert work(second, queue) == {"succeeded": 1}
        assert statuses_in(database_url) == [JobStatus.PENDING]
        assert work(first, queue) == {"succeeded": 1}

    assert first.extensions["pgqueue"] is second.extensions["pgqueue"] is queue
    assert words_in(database_url) == ["first"]
    assert words_in(empty_database_url) == ["second"]


def test_a_queue_may_be_given_its_app_at_once_and_before_db_is(database_url: str) -> None:
    from flask_sqlalchemy import SQLAlchemy

    app, late = Flask("early"), SQLAlchemy()
    app.config["SQLALCHEMY_DATABASE_URI"] = database_url
    queue = PgQueue(app, late)
    late.init_app(app)

    with app.app_context():
        assert queue.engine is late.engine
        late.engine.dispose()


def test_a_queue_holds_those_who_enqueue_to_its_own_limit(database_url: str) -> None:
    queue = PgQueue(max_payload_bytes=2048)

    @queue.task(name="note")
    def note(words: str) -> None: ...

    with closing_engines(kiosk_app(queue, database_url)) as app, app.app_context():
        note.delay("x" * 2000)
        with pytest.raises(PayloadError, match="2,048"):
            note.delay("x" * 3000)

    assert statuses_in(database_url) == [JobStatus.PENDING]


def test_a_queue_takes_every_option_that_a_queue_without_flask_takes() -> None:
    queue = PgQueue(queue_limits={"mail": Limit(3)}, keep=None)

    assert queue.queue_limits
    given = inspect.signature(pgqueue.PgQueue).parameters
    options = {name for name, one in given.items() if one.kind is one.KEYWORD_ONLY}
    assert options == get_type_hints(QueueOptions).keys()
    assert inspect.signature(PgQueue).parameters["options"].kind is inspect.Parameter.VAR_KEYWORD


def test_an_app_has_one_queue(app: Flask, queue: PgQueue) -> None:
    with pytest.raises(PgQueueError, match="'kiosk' has a PgQueue already: call init_app once"):
        queue.init_app(app, db)
    with pytest.raises(PgQueueError, match="has a PgQueue already"):
        PgQueue(app, db)


@pytest.mark.usefixtures("app")
def test_outside_of_an_application_context_the_queue_says_so(queue: PgQueue) -> None:
    @queue.task(name="report")
    def report() -> None: ...

    for use in (report.delay, queue.session, queue.upgrade, Worker(queue).run_until_empty):
        with pytest.raises(NotBound, match=r"outside of an application context: .*app_context"):
            use()


@pytest.mark.usefixtures("app")
def test_an_app_that_was_not_given_to_the_queue_is_named(queue: PgQueue) -> None:
    with Flask("stranger").app_context(), pytest.raises(NotBound, match=r"'stranger': call queue"):
        queue.session()


@pytest.mark.parametrize(
    ("app", "database", "words"),
    [
        (db, db, "needs a Flask app and its db, not SQLAlchemy"),
        (Flask("a"), None, "NoneType has no 'engine'"),
        (Flask("b"), create_engine("postgresql+psycopg://"), "Engine has no 'session'"),
    ],
)
def test_what_is_no_app_or_no_database_is_refused(
    queue: PgQueue, app: Any, database: Any, words: str
) -> None:
    with pytest.raises(PgQueueError, match=words):
        queue.init_app(app, database)
    with pytest.raises(PgQueueError, match=r"give PgQueue\(app, db\)"):
        PgQueue(Flask("c"))


def test_a_session_of_unknown_making_is_refused_when_it_is_needed(
    queue: PgQueue, database_url: str
) -> None:
    class Odd:
        engine = create_engine(database_url)
        session = object()

    app = Flask("odd")
    queue.init_app(app, Odd())

    with app.app_context(), pytest.raises(PgQueueError, match="needs a scoped_session"):
        queue.session()


def test_another_database_than_postgresql_is_refused(queue: PgQueue) -> None:
    app = kiosk_app(queue, "sqlite://")

    with app.app_context(), pytest.raises(PgQueueError, match="not sqlite"):
        queue.session()


def test_a_database_is_given_by_init_app_alone(queue: PgQueue, database_url: str) -> None:
    with pytest.raises(PgQueueError, match="init_app"):
        queue.bind(database_url)


def paths_of(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    """The names that lead to each command below a group."""
    for name, command in group.commands.items():
        yield (*path, name)
        command = loaded(command)
        if isinstance(command, click.Group):
            yield from paths_of(command, *path, name)


def test_every_command_on_a_database_joins_flask_without_naming_an_app(app: Flask) -> None:
    listed = app.test_cli_runner().invoke(args=["pgqueue", "--help"]).output
    names = set(main.commands) - {"demo"}

    assert {"upgrade", "worker", "status", "doctor", "revision"} <= names
    for name in names:
        assert f"\n  {name} " in listed
    for path in paths_of(main):
        if path[0] in names:
            help = app.test_cli_runner().invoke(args=["pgqueue", *path, "--help"]).output
            assert f"pgqueue {' '.join(path)}" in help
            assert "--app" not in help
            assert "--url " not in help
    assert "demo" not in listed
    assert "\n  demo" in app.test_cli_runner().invoke(main, ["--help"]).output


def test_the_commands_of_flask_are_those_of_the_app_that_runs_them(
    app: Flask, queue: PgQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    @queue.task(name="report", queue="reports")
    def report() -> None: ...

    with app.app_context():
        report.delay()
    monkeypatch.setenv("PGQUEUE_URL", "postgresql://nobody@nowhere/nothing")
    run = app.test_cli_runner().invoke

    assert "reports" in run(args=["pgqueue", "status"]).output
    assert run(args=["pgqueue", "doctor", "--json"]).exit_code in (0, 1)
    assert "up to date" in run(args=["pgqueue", "upgrade"]).output


def test_the_other_command_line_says_which_one_to_use(app: Flask, queue: PgQueue) -> None:
    module = type(sys)("kiosk_of_test")
    module.queue = queue  # type: ignore[attr-defined]  # a module made here
    sys.modules["kiosk_of_test"] = module

    refused = app.test_cli_runner().invoke(main, ["--app", "kiosk_of_test:queue", "status"])

    del sys.modules["kiosk_of_test"]
    assert refused.exit_code == 1
    assert "flask pgqueue" in refused.output


def test_without_flask_the_import_says_what_to_install() -> None:
    program = "import sys; sys.modules['flask'] = None; import pgqueue; import pgqueue.flask"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == (
        "ModuleNotFoundError: pgqueue.flask needs Flask: pip install 'sqlalchemy-pgqueue[flask]'"
    )


def test_the_metrics_of_a_worker_need_no_application_context(app: Flask, queue: PgQueue) -> None:
    @queue.task(name="report")
    def report() -> None: ...

    with app.app_context():
        report.delay()
        worker = Worker(queue)
        with (
            serving(worker, queue, port=0, registry=CollectorRegistry()) as port,
            urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer,
        ):
            said = answer.read().decode()

    assert 'pgqueue_jobs_waiting{queue="default"} 1.0' in said
