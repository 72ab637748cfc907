"""Bad input with a promise of its own, checked in a transaction that is rolled back."""

import io
from collections.abc import Callable, Mapping
from typing import Any

from bad_calls import Point, keyed, pay, plain, queue
from bad_input_kinds import Checked
from click.testing import CliRunner
from flask import Flask
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from pgqueue import Job
from pgqueue.arguments import MAX_PAYLOAD_BYTES
from pgqueue.cli import main
from pgqueue.flask import PgQueue as FlaskPgQueue
from pgqueue.repository.tables import CHANNEL

EVIL = ["a'; DROP TABLE pgqueue.jobs;--", "<script>", "\x1b[2J", ""]
MEGABYTE = 2**20
LONGEST_CHANNEL = 63
"""LISTEN cuts a name there without a word."""

PATHS = ("/", "/pgqueue", "/pgqueue/jobs/1")


@queue.task(name="shop.place")
def place(point: Point) -> None: ...


def checked(name: str) -> Callable[[Callable[[Session], None]], Checked]:
    """Make a function the check of a case of that name."""
    return lambda check: Checked(name, check)


@checked("256 KiB")
def full_payload(session: Session) -> None:
    job = pay.enqueue(session, "x" * (MAX_PAYLOAD_BYTES - len('{"order":""}')))

    assert len(_stored(session, job, "args->>'order'")) > 262_000


@checked("dataclass with its annotation")
def dataclass_with_annotation(session: Session) -> None:
    job = place.enqueue(session, Point(1))

    assert place.payload.loads(_stored(session, job, "args::text")) == {"point": Point(1)}


@checked("queues that differ by case are two")
def queues_by_case(session: Session) -> None:
    first = keyed.options(queue="mail").enqueue(session, "k")

    assert keyed.options(queue="Mail").enqueue(session, "k") is not first


@checked("no queue is in the name of the channel")
def channel(session: Session) -> None:
    job = pay.options(queue="q" * 64).enqueue(session, 1)

    assert _stored(session, job, "queue") == "q" * 64
    assert len(CHANNEL.encode()) <= LONGEST_CHANNEL


@checked("key of a megabyte")
def long_key(session: Session) -> None:
    first, second = (
        pay.options(unique_key="k" * MEGABYTE + end).enqueue(session, 1) for end in "ab"
    )

    assert second is not first
    assert pay.options(unique_key="k" * MEGABYTE + "a").enqueue(session, 1) is first


@checked("key None is no key")
def no_key(session: Session) -> None:
    task = pay.options(unique_key=None)

    assert task.enqueue(session, 1) is not task.enqueue(session, 1)


@checked("a taken key with other arguments is that of its job")
def taken_key(session: Session) -> None:
    task = pay.options(unique_key="k")
    first = task.enqueue(session, 1)

    assert task.enqueue(session, 2) is first
    assert first.args == {"order": 1}


@checked("tags and meta of SQL, HTML and ANSI are data")
def inert_tags(session: Session) -> None:
    job = pay.job(1)
    job.tags, job.meta = EVIL, dict.fromkeys(EVIL, EVIL)
    session.add(job)
    session.flush()
    session.expire(job)

    assert (job.tags, job.meta) == (EVIL, dict.fromkeys(EVIL, EVIL))


def command(name: str, *lines: tuple[str, ...], said: str) -> Checked:
    """A command line that ends with code 2 and words, before it has touched the database."""

    def check(session: Session) -> None:
        url = _engine(session).url.render_as_string(hide_password=False)
        for line in lines:
            ended = CliRunner().invoke(main, ["--url", url, *line])
            assert ended.exit_code == 2, ended.output
            assert said in ended.output, ended.output
            assert "Traceback" not in ended.output, ended.output

    return Checked(name, check, way="O")


def visit(
    name: str,
    method: str = "GET",
    *,
    paths: tuple[str, ...] = PATHS,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    environ: Mapping[str, Any] | None = None,
) -> Checked:
    """A request that finds nothing: an application with our extension has no route of ours."""

    def check(session: Session) -> None:
        client = _site(_engine(session)).test_client()
        for path in paths:
            stream = io.BytesIO(body)
            answer = client.open(
                path,
                method=method,
                headers=dict(headers or {}),
                input_stream=stream,
                environ_overrides=dict(environ or {}),
            )
            assert answer.status_code == 404, answer.text
            assert "Location" not in answer.headers, answer.headers

    return Checked(f"{name}, and no dashboard yet", check, way="O")


class Database:
    """What the extension needs of an application's SQLAlchemy object."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.session = scoped_session(sessionmaker(engine))


def _site(engine: Engine) -> Flask:
    app = Flask("kiosk")
    own = FlaskPgQueue(app, Database(engine))
    own.task(plain)
    return app


def _engine(session: Session) -> Engine:
    engine = session.get_bind()
    assert isinstance(engine, Engine)
    return engine


def _stored(session: Session, job: Job, column: str) -> str:
    statement = text(f"SELECT {column} FROM pgqueue.jobs WHERE id = :id")
    return str(session.scalar(statement, {"id": job.id}))
