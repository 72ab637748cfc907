"""In a job ``db.session`` is the job's own session, and is gone after it."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from flask import Flask, current_app, g
from flask_sqlalchemy_lite import SQLAlchemy as Lite
from kiosk import (
    NEVER,
    Note,
    Record,
    closing_engines,
    db,
    errors_in,
    kiosk_app,
    statuses_in,
    words_in,
    work,
)
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.util import ScopedRegistry

from pgqueue import JobContext, JobStatus, NotBound, Worker
from pgqueue.flask import PgQueue
from pgqueue.testing import run_jobs
from pgqueue.testing.databases import fresh_database

WORD = text("INSERT INTO notes (word) VALUES (:word)")


@pytest.fixture
def queue() -> PgQueue:
    return PgQueue()


@pytest.fixture
def app(queue: PgQueue, database_url: str) -> Iterator[Flask]:
    with closing_engines(kiosk_app(queue, database_url)) as app:
        yield app


def leftovers() -> dict[Any, Any]:
    """What is in the registry of ``db.session`` for any application context."""
    registry = db.session.registry
    assert isinstance(registry, ScopedRegistry)
    return dict(registry.registry)


def cancel(queue: PgQueue, ctx: JobContext) -> None:
    """As an operator does, who is somebody else."""
    with queue.session() as session, session.begin():
        queue.cancel(session, ctx.job_id)


def test_the_session_of_a_transactional_handler_is_db_session(
    app: Flask, queue: PgQueue, database_url: str
) -> None:
    found: list[bool] = []

    @queue.task(name="both", retry=NEVER)
    def both(session: Session, ctx: JobContext) -> None:
        found.append(db.session() is session is ctx.session)
        db.session.add(Note(word="pending"))  # written after the handler, in its app context

    with app.app_context():
        both.enqueue(db.session)
        db.session.commit()

    assert work(app, queue) == {"succeeded": 1}
    assert found == [True]
    assert words_in(database_url) == ["pending"]
    assert leftovers() == {}


def test_what_is_written_by_db_session_goes_when_the_job_does_not_end_well(
    app: Flask, queue: PgQueue, database_url: str
) -> None:
    """Cancelled after it was written, and before its end: one commit would keep or lose both."""

    @queue.task(name="write", retry=NEVER, transactional=True)
    def write(ctx: JobContext) -> None:
        db.session.add(Note(word="by the model"))
        db.session.execute(WORD, {"word": "by text"})
        db.session.commit()
        cancel(queue, ctx)

    with app.app_context():
        write.delay()

    assert work(app, queue) == {"cancelled": 1}
    assert statuses_in(database_url) == [JobStatus.CANCELLED]
    assert words_in(database_url) == []


def test_rows_of_another_bind_go_to_their_own_database(
    queue: PgQueue, database_url: str, empty_database_url: str
) -> None:
    app = kiosk_app(queue, database_url, archive_url=empty_database_url)

    @queue.task(name="archive", retry=NEVER, transactional=True)
    def archive() -> None:
        db.session.add_all([Note(word="here"), Record(word="there")])

    with closing_engines(app):
        with app.app_context():
            archive.delay()

        assert work(app, queue) == {"succeeded": 1}

    assert words_in(database_url) == ["here"]
    assert words_in(empty_database_url, "records") == ["there"]


class Threads:
    """A ``db`` of the kind Flask's manual describes: a session for each thread."""

    def __init__(self, url: str) -> None:
        self.engine = create_engine(url)
        self.session: scoped_session[Session] = scoped_session(sessionmaker(self.engine))


def app_with(kind: str, queue: PgQueue, url: str) -> tuple[Flask, Any]:
    if kind == "Flask-SQLAlchemy":
        return kiosk_app(queue, url), db
    app = Flask("other")
    other: Any = Threads(url)
    if kind == "Lite":
        app.config["SQLALCHEMY_ENGINES"] = {"default": url}
        other = Lite(app)
    queue.init_app(app, other)
    return app, other


@pytest.mark.parametrize("kind", ["Flask-SQLAlchemy", "Lite", "a scoped_session"])
def test_a_queue_that_is_bound_takes_db_session_along(
    kind: str, queue: PgQueue, database_url: str, engine: Engine
) -> None:
    app, other = app_with(kind, queue, database_url)

    @queue.task(name="write", retry=NEVER, transactional=True)
    def write(word: str) -> None:
        other.session.execute(text("SELECT set_config('app.word', :word, false)"), {"word": word})

    @app.post("/")
    def enqueue() -> str:
        write.enqueue(other.session, "here")
        other.session.commit()
        return ""

    with engine.connect() as connection, queue.bound_to(connection), connection.begin() as outer:
        app.test_client().post("/")
        write.delay("there")
        with queue.session() as session:
            assert [job.status for job in run_jobs(session, queue=queue)] == [
                JobStatus.SUCCEEDED,
                JobStatus.SUCCEEDED,
            ]
            assert session.scalar(text("SELECT current_setting('app.word')")) == "there"
        outer.rollback()

    assert statuses_in(database_url) == []
    with app.app_context():
        assert other.engine.url == engine.url
        app.test_client().post("/")
    assert statuses_in(database_url) == [JobStatus.PENDING]


def test_a_queue_without_an_app_cannot_be_bound(queue: PgQueue, engine: Engine) -> None:
    with pytest.raises(NotBound, match="make the app before"), queue.bound_to(engine):
        pass


def test_a_worker_on_the_bound_database_needs_no_application_context(
    app: Flask, queue: PgQueue, engine: Engine, server_url: str, template_url: str
) -> None:
    @queue.task(name="note", retry=NEVER, transactional=True)
    def note(word: str) -> None:
        db.session.add(Note(word=word))

    with fresh_database(server_url, template_url=template_url) as url:
        other = create_engine(url)
        Note.metadata.create_all(other)
        with queue.bound_to(other):
            note.delay("there")
            assert Worker(queue, concurrency=1).run_until_empty(timeout=60) == {"succeeded": 1}
        assert words_in(url) == ["there"]
        other.dispose()
    assert words_in(app.config["SQLALCHEMY_DATABASE_URI"]) == []


def test_removing_the_session_of_the_job_fails_it(
    app: Flask, queue: PgQueue, database_url: str
) -> None:
    @queue.task(name="remove", retry=NEVER, transactional=True)
    def remove() -> None:
        db.session.add(Note(word="before"))
        db.session.remove()
        db.session.add(Note(word="after"))
        db.session.commit()

    with app.app_context():
        remove.delay()

    assert work(app, queue) == {"failed": 1}
    assert "has removed db.session" in (errors_in(database_url)[0] or "")
    assert leftovers() == {}


def test_a_handler_without_a_transaction_commits_db_session_itself(
    app: Flask, queue: PgQueue, database_url: str
) -> None:
    @queue.task(name="ordinary", retry=NEVER)
    def ordinary() -> None:
        db.session.add(Note(word="committed"))
        db.session.commit()
        db.session.add(Note(word="forgotten"))
        db.session.flush()

    @queue.task(name="failing", retry=NEVER)
    def failing() -> None:
        db.session.add(Note(word="failed"))
        db.session.flush()
        raise ValueError("after the flush")

    with app.app_context():
        ordinary.delay()
        failing.delay()

    assert work(app, queue) == {"succeeded": 1, "failed": 1}
    assert words_in(database_url) == ["committed"]
    assert leftovers() == {}


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_inside_of_finish_db_session_is_the_session_of_the_block(
    app: Flask, queue: PgQueue, database_url: str, kind: str
) -> None:
    seen: list[bool] = []

    def write(session: Session, before: Session) -> None:
        db.session.add(Note(word="in the block"))
        seen.append(db.session() is session and session is not before)
        event.listen(session, "after_commit", lambda it: seen.append(db.session() is it))

    @queue.task(name="sync", retry=NEVER)
    def finish(ctx: JobContext) -> None:
        db.session.add(Note(word="before"))
        before = db.session()
        with ctx.finish() as session:
            write(session, before)
        seen.append(db.session() is before)
        db.session.commit()

    @queue.task(name="async", retry=NEVER)
    async def afinish(ctx: JobContext) -> None:
        before = db.session()
        async with ctx.finish_async() as session:
            write(session.sync_session, before)
        seen.append(db.session() is before)

    with app.app_context():
        queue.tasks[kind].delay()

    assert work(app, queue) == {"succeeded": 1}
    assert seen == [True, True, True]
    assert set(words_in(database_url)) - {"before"} == {"in the block"}
    assert ("before" in words_in(database_url)) == (kind == "sync")
    assert leftovers() == {}


def test_a_block_of_finish_that_fails_leaves_the_earlier_session_alone(
    app: Flask, queue: PgQueue, database_url: str
) -> None:
    @queue.task(name="finish", retry=NEVER)
    def finish(ctx: JobContext) -> None:
        db.session.add(Note(word="before"))
        try:
            with ctx.finish():
                db.session.add(Note(word="in the block"))
                raise LookupError
        except LookupError:
            db.session.commit()

    with app.app_context():
        finish.delay()

    assert work(app, queue) == {"succeeded": 1}
    assert words_in(database_url) == ["before"]


def test_each_job_has_an_application_context_of_its_own(app: Flask, queue: PgQueue) -> None:
    seen: list[tuple[bool, int]] = []

    @queue.task(name="look")
    def look() -> None:
        g.jobs = g.get("jobs", 0) + 1
        seen.append((current_app._get_current_object() is app, g.jobs))  # type: ignore[attr-defined]  # a proxy

    with app.app_context():
        g.jobs = 100
        look.delay()
        look.delay()
        db.session.remove()
        work(app, queue, concurrency=1)

    assert seen == [(True, 1), (True, 1)]


def test_the_end_of_the_context_is_told_the_error_and_may_fail_the_job(
    app: Flask, queue: PgQueue, database_url: str
) -> None:
    told: list[BaseException | None] = []

    @app.teardown_appcontext
    def tell(error: BaseException | None) -> None:
        if "job" in g:
            told.append(error)
            if error is None:
                raise LookupError("at the end of the context")

    @queue.task(name="fail", retry=NEVER)
    def fail() -> None:
        g.job = True
        raise ValueError("in the handler")

    @queue.task(name="succeed", retry=NEVER, transactional=True)
    def succeed() -> None:
        g.job = True
        db.session.add(Note(word="lost"))

    with app.app_context():
        fail.delay()
        succeed.delay()

    assert work(app, queue, concurrency=1) == {"failed": 2}
    assert [str(error) for error in told] == ["in the handler", "None"]
    assert "at the end of the context" in (errors_in(database_url)[1] or "")
    assert words_in(database_url) == []


def test_in_an_async_handler_db_session_is_the_session_inside_its_own(
    app: Flask, queue: PgQueue, database_url: str
) -> None:
    @queue.task(name="write", retry=NEVER)
    async def write(session: AsyncSession, ctx: JobContext, ending: str) -> None:
        assert db.session() is session.sync_session
        db.session.add(Note(word=f"added, {ending}"))

        def in_greenlet(_: Session) -> None:
            db.session.execute(WORD, {"word": f"executed, {ending}"})

        await session.run_sync(in_greenlet)
        if ending == "failed":
            raise ValueError(ending)
        if ending == "cancelled":
            await asyncio.to_thread(_cancel_in, app, queue, ctx)

    with app.app_context():
        for ending in ("succeeded", "failed", "cancelled"):
            write.delay(ending)

    assert work(app, queue) == {"succeeded": 1, "failed": 1, "cancelled": 1}
    assert words_in(database_url) == ["added, succeeded", "executed, succeeded"]
    assert errors_in(database_url)[1] == "failed"  # and no other error at its end
    assert leftovers() == {}


def _cancel_in(app: Flask, queue: PgQueue, ctx: JobContext) -> None:
    with app.app_context():
        cancel(queue, ctx)


def test_async_handlers_at_the_same_time_have_sessions_of_their_own(
    app: Flask, queue: PgQueue, database_url: str
) -> None:
    sessions: list[Session] = []
    met = asyncio.Event()

    @queue.task(name="meet", retry=NEVER)
    async def meet(word: str) -> None:
        sessions.append(db.session())
        db.session.add(Note(word=word))
        if len(sessions) == 2:
            met.set()
        await asyncio.wait_for(met.wait(), 10)
        db.session.commit()
        assert sessions[0] is not sessions[1]

    with app.app_context():
        meet.delay("one")
        meet.delay("two")

    assert work(app, queue) == {"succeeded": 2}
    assert words_in(database_url) == ["one", "two"]
    assert leftovers() == {}


def test_a_session_scoped_by_threads_is_removed_after_each_job(
    queue: PgQueue, engine: Any, database_url: str
) -> None:
    app, threads = Flask("threads"), Threads(database_url)
    queue.init_app(app, threads)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE notes (word text)"))
    found: list[int] = []

    @queue.task(name="ordinary", retry=NEVER)
    def ordinary(fails: bool) -> None:
        found.append(len(list(threads.session.info)))
        threads.session.info["mine"] = True
        threads.session.execute(WORD, {"word": "never committed"})
        if fails:
            raise ValueError("in the handler")

    @queue.task(name="together", retry=NEVER)
    def together(session: Session) -> None:
        found.append(len(list(threads.session.info)))
        assert threads.session() is session
        threads.session.execute(WORD, {"word": "together"})

    with app.app_context():
        with queue.session() as session, session.begin():
            session.add_all([ordinary.job(True), ordinary.job(False), together.job()])

        assert work(app, queue, concurrency=1) == {"succeeded": 2, "failed": 1}

    assert found == [0, 0, 0]
    assert words_in(database_url) == ["together"]
    threads.engine.dispose()


def test_async_handlers_leave_a_session_scoped_by_threads_alone(
    queue: PgQueue, database_url: str
) -> None:
    app, threads = Flask("threads"), Threads(database_url)
    queue.init_app(app, threads)
    taken: list[bool] = []

    @queue.task(name="look", retry=NEVER)
    async def look(session: AsyncSession) -> None:
        taken.append(threads.session.registry.has())

    with app.app_context():
        look.delay()

        assert work(app, queue) == {"succeeded": 1}

    assert taken == [False]
    threads.engine.dispose()


def test_flask_sqlalchemy_lite_is_served_alike(queue: PgQueue, database_url: str) -> None:
    lite = Lite()
    app = Flask("lite")
    app.config["SQLALCHEMY_ENGINES"] = {"default": database_url}
    queue.init_app(app, lite)
    lite.init_app(app)

    @queue.task(name="together", retry=NEVER)
    def together(session: Session, ctx: JobContext) -> None:
        assert lite.session is session
        lite.session.execute(WORD, {"word": "written"})
        lite.session.commit()
        cancel(queue, ctx)

    @queue.task(name="ordinary", retry=NEVER)
    def ordinary() -> None:
        lite.session.execute(WORD, {"word": "ordinary"})
        lite.session.commit()

    with app.app_context():
        lite.session.execute(text("CREATE TABLE notes (word text)"))
        together.enqueue(lite.session)
        ordinary.enqueue(lite.session)
        lite.session.commit()

    assert work(app, queue) == {"cancelled": 1, "succeeded": 1}
    assert words_in(database_url) == ["ordinary"]
    with app.app_context():
        lite.engine.dispose()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_listeners_to_after_commit_hear_of_the_commit_of_the_job_in_its_app(
    app: Flask, queue: PgQueue, database_url: str, kind: str
) -> None:
    """A search index, say, whose client is the app's."""
    heard: list[tuple[str, list[str], list[str]]] = []

    def collect(session: Session, *_: Any) -> None:
        session.info["changed"] = [note for note in session.new if isinstance(note, Note)]

    def index(session: Session) -> None:
        assert db.session() is session
        changed = [note.word for note in session.info.pop("changed", [])]
        heard.append((current_app.name, changed, words_in(database_url)))

    if kind == "sync":

        @queue.task(name="write", retry=NEVER)
        def write(session: Session, fails: bool) -> None:
            db.session.add(Note(word="indexed"))
            db.session.commit()
            if fails:
                raise ValueError("after the commit")

    else:

        @queue.task(name="write", retry=NEVER)
        async def write(session: AsyncSession, fails: bool) -> None:
            db.session.add(Note(word="indexed"))
            await session.commit()
            if fails:
                raise ValueError("after the commit")

    event.listen(db.session, "before_commit", collect)
    event.listen(db.session, "after_commit", index)
    try:
        with app.app_context():
            write.delay(True)
            write.delay(False)
            counts = work(app, queue, concurrency=1)
    finally:
        event.remove(db.session, "before_commit", collect)
        event.remove(db.session, "after_commit", index)

    assert counts == {"failed": 1, "succeeded": 1}
    assert heard == [(app.name, ["indexed"], ["indexed"])]


def test_a_batch_joins_db_session_and_a_job_extends_it(app: Flask, queue: PgQueue) -> None:
    told: list[tuple[int, int]] = []

    @queue.task(name="told")
    def tell(batch_id: int) -> None:
        told.append((batch_id, queue.get_batch(db.session, batch_id).total))

    @queue.task(name="spread", transactional=True)
    def spread(batch_id: int, left: int) -> None:
        with queue.extend_batch(db.session, batch_id):
            spread.enqueue_many(db.session, [(batch_id, left - 1)] * left)

    with app.app_context():
        with queue.batch(db.session, on_success=tell) as batch:
            spread.enqueue(db.session, batch.id, 2)
        db.session.commit()

    assert work(app, queue) == {"succeeded": 6}
    assert told == [(batch.id, 5)]
