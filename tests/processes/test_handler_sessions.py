"""The session a handler is given is the application's, however that makes its sessions."""

from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    sessionmaker,
)
from worker_rig import MODES

from pgqueue import Job, JobContext, PgQueue, Retry, Worker


class Base(DeclarativeBase): ...


class Note(Base):
    __tablename__ = "notes"

    id: Mapped[int] = mapped_column(primary_key=True)
    word: Mapped[str]
    is_deleted: Mapped[bool] = mapped_column(default=False)


NEVER = Retry.never()


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def notes(engine: Engine) -> None:
    Base.metadata.create_all(engine)


def words(engine: Engine, table: str = "notes") -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(text(f"SELECT word FROM {table} ORDER BY id")))


def last_error(queue: PgQueue) -> str:
    with queue.session() as session:
        return str(session.scalars(select(Job.last_error)).one())


def cancel_from_outside(queue: PgQueue, job_id: int) -> None:
    with Session(queue.engine.execution_options()) as session, session.begin():
        queue.cancel(session, job_id)


class TestHowASessionmakerMayBeMade:
    @pytest.mark.parametrize("kind", ["sync", "async"])
    @pytest.mark.parametrize(
        "options",
        [
            {"twophase": True},
            {"autobegin": False},
            {"twophase": True, "autobegin": False},
            {"autoflush": False, "expire_on_commit": False},
            {"join_transaction_mode": "control_fully"},
            {"close_resets_only": False},
            {"enable_baked_queries": False, "future": True},
        ],
        ids=lambda options: "-".join(options),
    )
    def test_is_no_obstacle_to_a_transactional_handler(
        self, engine: Engine, mode: str, kind: str, options: dict[str, Any]
    ) -> None:
        """One is kept with its job, of the other nothing: the job was cancelled meanwhile."""
        queue = PgQueue(sessionmaker(engine, **options))

        def act(session: Session, ctx: JobContext, kept: bool) -> None:
            if options.get("autobegin", True):
                session.add(Note(word="begun by itself"))
            with session.begin() if not session.in_transaction() else session.begin_nested():
                session.add(Note(word="in a block"))
            session.commit()
            session.begin()
            session.add(Note(word="left pending"))
            if not kept:
                cancel_from_outside(queue, ctx.job_id)

        if kind == "sync":

            @queue.task(name="write", retry=NEVER)
            def write(session: Session, ctx: JobContext, kept: bool) -> None:
                act(session, ctx, kept)

        else:

            @queue.task(name="write", retry=NEVER)
            async def write(session: AsyncSession, ctx: JobContext, kept: bool) -> None:
                await session.run_sync(act, ctx, kept)

        own = PgQueue(engine)
        own.tasks = queue.tasks
        with own.session() as session, session.begin():
            session.add_all([write.job(True), write.job(False)])

        counts = Worker(queue, mode=mode, concurrency=1).run_until_empty(timeout=20)

        assert counts == {"succeeded": 1, "cancelled": 1}
        first = ["begun by itself"] if options.get("autobegin", True) else []
        assert words(engine) == [*first, "in a block", "left pending"]

    def test_may_leave_it_to_its_user_to_begin_also_for_delay(self, engine: Engine) -> None:
        queue = PgQueue(sessionmaker(engine, autobegin=False))

        @queue.task(name="once", unique_key=lambda: "one")
        def once() -> None: ...

        assert once.delay().id == once.delay().id

    def test_two_phases_prepared_by_hand_are_one_here(self, engine: Engine, mode: str) -> None:
        queue = PgQueue(sessionmaker(engine, twophase=True))

        @queue.task(name="write", retry=NEVER)
        def write(session: Session) -> None:
            session.add(Note(word="prepared"))
            session.prepare()
            session.commit()

        write.delay()

        assert Worker(queue, mode=mode).run_until_empty(timeout=20) == {"succeeded": 1}
        assert words(engine) == ["prepared"]

    def test_two_phases_and_two_databases_are_told_of_at_start(
        self, engine: Engine, empty_database_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        elsewhere = create_engine(empty_database_url)
        sessions = sessionmaker(engine, binds={Base: elsewhere}, twophase=True)
        queue = PgQueue(sessions)

        @queue.task(name="write", retry=NEVER)
        def write(session: Session) -> None: ...

        Worker(queue).run_until_empty(timeout=20)

        assert "twophase=True" in caplog.text
        elsewhere.dispose()
