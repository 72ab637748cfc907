"""What a framework puts around each job, and sessions that choose their database themselves."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from pgqueue import Job, JobContext, PgQueue, Retry, Worker
from pgqueue.context import Around

KINDS = ("plain", "session", "async", "async_session")


class Base(DeclarativeBase): ...


class Note(Base):
    __tablename__ = "notes"
    id: Mapped[int] = mapped_column(primary_key=True)
    word: Mapped[str]


class Surrounded(PgQueue):
    """Writes down what happens around its jobs."""

    seen: list[tuple[str, Any]]
    fails_at_the_end = False

    def around_jobs(self) -> Around:
        self.seen = []
        return self._around

    @contextmanager
    def _around(self, context: JobContext) -> Iterator[None]:
        self.seen.append(("enter", context.job_id))
        self.seen.append(("session", type(context.session).__name__))
        try:
            yield
        except ValueError as error:
            self.seen.append(("error", str(error)))
            raise
        self.seen.append(("leave", context.job_id))
        if self.fails_at_the_end:
            raise LookupError("at the end")


@pytest.fixture
def queue(engine: Engine) -> Surrounded:
    Base.metadata.create_all(engine)
    return Surrounded(engine)


def enqueue(queue: Surrounded, kind: str, *, fails: bool = False) -> int:
    """A job of that kind of task, which leaves a row pending in its session if it has one."""
    options: dict[str, Any] = {"name": kind, "retry": Retry.never()}

    def act(session: Any) -> None:
        queue.seen.append(("handler", None))
        if session is not None:
            session.add(Note(word=kind))
        if fails:
            raise ValueError("in the handler")

    if kind == "plain":
        return queue.task(**options)(lambda: act(None)).delay().id
    if kind == "session":

        @queue.task(**options)
        def in_session(session: Session) -> None:
            act(session)

        return in_session.delay().id
    if kind == "async":

        @queue.task(**options)
        async def on_loop() -> None:
            act(None)

        return on_loop.delay().id

    @queue.task(**options)
    async def on_loop_in_session(session: AsyncSession) -> None:
        act(session)

    return on_loop_in_session.delay().id


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_runs_inside_and_its_rows_are_written_there(queue: Surrounded, kind: str) -> None:
    job_id = enqueue(queue, kind)

    def note_flush(*_: Any) -> None:
        queue.seen.append(("flush", None))

    event.listen(Note, "before_insert", note_flush)
    counts = Worker(queue, concurrency=1).run_until_empty(timeout=60)
    event.remove(Note, "before_insert", note_flush)

    session = {"session": "Joining", "async_session": "AsyncSession"}.get(kind, "NoneType")
    inside = [("handler", None), *([("flush", None)] if "session" in kind else [])]
    assert counts == {"succeeded": 1}
    assert queue.seen == [("enter", job_id), ("session", session), *inside, ("leave", job_id)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_a_handler_passes_through(queue: Surrounded, kind: str) -> None:
    enqueue(queue, kind, fails=True)

    counts = Worker(queue, concurrency=1).run_until_empty(timeout=60)

    assert counts == {"failed": 1}
    assert queue.seen[-1] == ("error", "in the handler")


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_at_the_end_fails_the_job_and_undoes_it(queue: Surrounded, kind: str) -> None:
    queue.fails_at_the_end = True
    job_id = enqueue(queue, kind)

    counts = Worker(queue, concurrency=1).run_until_empty(timeout=60)

    assert counts == {"failed": 1}
    with queue.session() as session:
        assert "at the end" in str(session.get_one(Job, job_id).last_error)
        assert session.scalars(text("SELECT word FROM notes")).all() == []


class Routed(Session):
    """Chooses by itself, as an application with several databases has its sessions do."""

    def get_bind(self, *_: Any, **__: Any) -> Any:
        return ROUTES["engine"]


ROUTES: dict[str, Engine] = {}


@pytest.mark.parametrize("kind", ["binds", "get_bind"])
def test_a_session_that_chooses_its_engine_is_in_the_transaction_of_its_job(
    engine: Engine, kind: str
) -> None:
    """The job is cancelled after its rows were written: they go if they are in its transaction."""
    Base.metadata.create_all(engine)
    ROUTES["engine"] = engine
    sessions: dict[str, sessionmaker[Any]] = {
        "binds": sessionmaker(engine, binds={Base: engine}),
        "get_bind": sessionmaker(engine, class_=Routed),
    }
    queue = PgQueue(sessions[kind])

    @queue.task(name="write", retry=Retry.never())
    def write(session: Session, ctx: JobContext) -> None:
        session.add(Note(word="written"))
        session.commit()
        with Session(engine) as another, another.begin():
            queue.cancel(another, ctx.job_id)

    write.delay()

    assert Worker(queue, concurrency=1).run_until_empty(20) == {"cancelled": 1}
    with engine.connect() as connection:
        assert connection.scalars(text("SELECT word FROM notes")).all() == []


def test_a_session_that_chooses_another_database_writes_there(
    engine: Engine, empty_database_url: str
) -> None:
    elsewhere = create_engine(empty_database_url)
    Base.metadata.create_all(elsewhere)
    queue = PgQueue(sessionmaker(engine, binds={Base: elsewhere}))

    @queue.task(name="write", retry=Retry.never())
    def write(session: Session) -> None:
        session.add(Note(word="elsewhere"))

    write.delay()

    assert Worker(queue, concurrency=1).run_until_empty(20) == {"succeeded": 1}
    with elsewhere.connect() as connection:
        assert connection.scalars(text("SELECT word FROM notes")).all() == ["elsewhere"]
    elsewhere.dispose()
