"""Listeners to ``after_commit`` hear of the COMMIT of a job, once, and of nothing before it."""

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, event, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from chaos.workers import wait_until
from pgqueue import Cancel, JobContext, PgQueue, Retry, Worker


class Base(DeclarativeBase): ...


class Note(Base):
    __tablename__ = "notes"

    id: Mapped[int] = mapped_column(primary_key=True)
    word: Mapped[str]


class Searchable(Session):
    """Collects what is flushed, and brings it to a search index when it is committed."""


@event.listens_for(Searchable, "after_flush")
def _collect(session: Session, _: Any) -> None:
    session.info.setdefault("changed", []).extend(session.new)


@event.listens_for(Searchable, "after_commit")
def _index(session: Session) -> None:
    INDEX.append([note.word for note in session.info.pop("changed", [])])


@event.listens_for(Searchable, "after_rollback")
def _forget(session: Session) -> None:
    session.info.pop("changed", None)


INDEX: list[list[str]] = []
NEVER = Retry.never()


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    Base.metadata.create_all(engine)
    INDEX.clear()
    return PgQueue(sessionmaker(engine, class_=Searchable))


def task_of(queue: PgQueue, kind: str, act: Callable[..., Any], **options: Any) -> Any:
    options = {"name": act.__name__, "retry": NEVER, **options}
    if kind == "sync":

        def sync(session: Session, ctx: JobContext) -> Any:
            return act(session, ctx)

        return queue.task(**options)(sync)

    async def on_loop(session: AsyncSession, ctx: JobContext) -> Any:
        return await session.run_sync(act, ctx)

    return queue.task(**options)(on_loop)


def run(queue: PgQueue, kind: str, act: Callable[..., Any]) -> dict[str, int]:
    task_of(queue, kind, act).delay()
    return Worker(queue, concurrency=1).run_until_empty(timeout=60)


def words(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(text("SELECT word FROM notes ORDER BY id")))


def test_once_after_the_commit_however_often_the_handler_commits(
    engine: Engine, queue: PgQueue, kind: str
) -> None:
    seen_inside: list[int] = []
    committed: list[list[str]] = []

    def act(session: Session, _: JobContext) -> None:
        session.add(Note(word="first"))
        session.commit()
        with session.begin_nested():
            session.add(Note(word="second"))
        session.commit()
        seen_inside.append(len(INDEX))
        session.add(Note(word="pending"))
        event.listen(session, "after_commit", lambda _: committed.append(words(engine)))

    assert run(queue, kind, act) == {"succeeded": 1}
    assert seen_inside == [0]
    assert INDEX == [["first", "second", "pending"]]
    assert committed == [["first", "second", "pending"]], "another transaction sees it"


def test_also_after_a_commit_at_the_end_that_has_expired_what_they_read(
    queue: PgQueue, kind: str
) -> None:
    def act(session: Session, _: JobContext) -> None:
        session.add(Note(word="committed by the handler"))
        session.commit()

    assert run(queue, kind, act) == {"succeeded": 1}
    assert INDEX == [["committed by the handler"]]


@pytest.mark.parametrize("use", ["reads", "writes"])
def test_also_if_middleware_uses_the_session_after_its_handler(
    engine: Engine, queue: PgQueue, kind: str, use: str
) -> None:
    def use_session(session: Session) -> None:
        found = session.scalars(select(Note.word)).all()
        if use == "writes":
            session.add(Note(word=f"after {found[0]}"))

    if kind == "sync":

        @queue.middleware
        def around(ctx: JobContext) -> Iterator[None]:
            yield
            use_session(ctx.session)

    else:

        @queue.middleware
        async def around_async(ctx: JobContext) -> AsyncIterator[None]:
            yield
            await ctx.session.run_sync(use_session)

    def act(session: Session, _: JobContext) -> None:
        session.add(Note(word="its handler"))

    assert run(queue, kind, act) == {"succeeded": 1}
    written = ["its handler", "after its handler"][: 1 if use == "reads" else 2]
    assert (INDEX, words(engine)) == ([written], written)


def test_of_what_was_rolled_back_they_hear_nothing(queue: PgQueue, kind: str) -> None:
    def act(session: Session, _: JobContext) -> None:
        session.add(Note(word="rolled back"))
        session.flush()
        session.rollback()
        session.add(Note(word="kept"))

    assert run(queue, kind, act) == {"succeeded": 1}
    assert INDEX == [["kept"]]


@pytest.mark.parametrize("ending", ["raises", "cancelled", "stale", "by its constraint"])
def test_never_when_nothing_was_committed(
    engine: Engine, queue: PgQueue, kind: str, ending: str
) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE parents (id int PRIMARY KEY)"))
        late = "REFERENCES parents DEFERRABLE INITIALLY DEFERRED"
        connection.execute(text(f"CREATE TABLE children (parent int {late})"))

    def act(session: Session, ctx: JobContext) -> None:
        session.add(Note(word="phantom"))
        session.commit()
        if ending == "raises":
            raise ValueError("after its commit")
        if ending == "by its constraint":
            session.execute(text("INSERT INTO children VALUES (7)"))
            session.commit()
        with Session(engine) as other, other.begin():
            if ending == "cancelled":
                queue.cancel(other, ctx.job_id)
            if ending == "stale":
                other.execute(text("DELETE FROM pgqueue.leases"))

    word = {"cancelled": "cancelled", "stale": "stale"}.get(ending, "failed")
    assert run(queue, kind, act) == {word: 1}
    assert (INDEX, words(engine)) == ([], [])


def test_when_a_wish_is_returned_and_what_was_written_kept(queue: PgQueue, kind: str) -> None:
    def act(session: Session, _: JobContext) -> Cancel:
        session.add(Note(word="kept"))
        return Cancel("and yet")

    assert run(queue, kind, act) == {"cancelled": 1}
    assert INDEX == [["kept"]]


def test_their_errors_change_no_outcome(
    queue: PgQueue, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def act(session: Session, _: JobContext) -> None:
        def fail(_: Session) -> None:
            raise SystemExit("in a listener")

        event.listen(session, "after_commit", fail, insert=True)
        session.add(Note(word="kept"))

    assert run(queue, kind, act) == {"succeeded": 1}
    assert INDEX == [["kept"]]
    assert "a listener to after_commit has failed" in caplog.text


def test_they_are_called_in_what_surrounds_handlers(
    engine: Engine, queue: PgQueue, kind: str
) -> None:
    depth: list[str] = []
    heard: list[list[str]] = []

    class Surrounded(PgQueue):
        def around_jobs(self) -> Any:
            @contextmanager
            def around(_: JobContext) -> Iterator[None]:
                depth.append("in")
                yield
                depth.pop()

            return around

    surrounded = Surrounded(sessionmaker(engine, class_=Searchable))

    def act(session: Session, _: JobContext) -> None:
        event.listen(session, "after_commit", lambda _: heard.append(list(depth)))
        session.add(Note(word="kept"))

    assert run(surrounded, kind, act) == {"succeeded": 1}
    assert heard == [["in"]]


def test_an_object_changed_after_the_last_commit_is_written(
    engine: Engine, queue: PgQueue, kind: str
) -> None:
    def act(session: Session, _: JobContext) -> None:
        session.expire_on_commit = False
        kept, gone = Note(word="first"), Note(word="second")
        session.add_all([kept, gone])
        session.commit()
        kept.word = "changed"
        if kind == "sync":
            session.delete(gone)

    assert run(queue, kind, act) == {"succeeded": 1}
    assert words(engine) == (["changed"] if kind == "sync" else ["changed", "second"])


@pytest.mark.journey  # its handler ends within its timeout only if the machine goes on
def test_a_listener_past_the_timeout_does_not_fail_the_job(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    queue, gate = PgQueue(engine), threading.Event()

    @queue.task(timeout=timedelta(seconds=0.2))
    def write(session: Session) -> None:
        event.listen(session, "after_commit", lambda _: gate.wait(60))
        session.execute(text("SELECT 1"))

    @queue.task
    def wait() -> None:
        wait_until(lambda: "past its timeout" in caplog.text)
        gate.set()

    write.delay()
    wait.delay()

    assert Worker(queue, concurrency=2).run_until_empty(timeout=60) == {"succeeded": 2}
    assert "has failed" not in caplog.text
