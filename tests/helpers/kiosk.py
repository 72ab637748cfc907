"""A Flask application with two databases, whose tasks the tests of the extension run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import Engine, create_engine, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from pgqueue import Job, JobStatus, Retry, Worker
from pgqueue.flask import PgQueue

NEVER = Retry.never()


class Base(DeclarativeBase): ...


db = SQLAlchemy(model_class=Base)

if TYPE_CHECKING:

    class Model(DeclarativeBase):
        def __init__(self, **values: Any) -> None: ...
else:
    Model = db.Model


class Note(Model):
    """In the database of the jobs."""

    __tablename__ = "notes"
    id: Mapped[int] = mapped_column(primary_key=True)
    word: Mapped[str]


class Record(Model):
    """In another one."""

    __tablename__ = "records"
    __bind_key__ = "archive"
    id: Mapped[int] = mapped_column(primary_key=True)
    word: Mapped[str]


def kiosk_app(queue: PgQueue, url: str, *, archive_url: str | None = None) -> Flask:
    """As a factory makes it, with its tables."""
    app = Flask("kiosk")
    app.config["SQLALCHEMY_DATABASE_URI"] = url
    app.config["SQLALCHEMY_BINDS"] = {"archive": archive_url or url}
    db.init_app(app)
    queue.init_app(app, db)
    with app.app_context():
        db.create_all()
    return app


@contextmanager
def closing_engines(app: Flask) -> Iterator[Flask]:
    yield app
    with app.app_context():
        for engine in db.engines.values():
            engine.dispose()


def work(app: Flask, queue: PgQueue, concurrency: int = 2) -> dict[str, int]:
    """Run what is due, as ``flask pgqueue worker`` does."""
    with app.app_context():
        worker = Worker(queue, concurrency=concurrency)
        return worker.run_until_empty(timeout=60)


def words_in(url: str, table: str = "notes") -> list[str]:
    with _engine(url) as engine, engine.connect() as connection:
        return list(connection.scalars(text(f"SELECT word FROM {table} ORDER BY word")))


def statuses_in(url: str) -> list[JobStatus]:
    with _engine(url) as engine, Session(engine) as session:
        return list(session.scalars(select(Job.status).order_by(Job.id)))


def errors_in(url: str) -> list[str | None]:
    with _engine(url) as engine, Session(engine) as session:
        return list(session.scalars(select(Job.last_error).order_by(Job.id)))


@contextmanager
def _engine(url: str) -> Iterator[Engine]:
    engine = create_engine(url)
    yield engine
    engine.dispose()
