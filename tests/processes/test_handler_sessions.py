"""The session a handler is given is the application's, however that makes its sessions."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    ORMExecuteState,
    Session,
    mapped_column,
    sessionmaker,
    with_loader_criteria,
)
from worker_rig import MODES

from pgqueue import Job, JobContext, OptionError, PgQueue, Retry, Worker


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


class Chosen(Session):
    """Chooses its engine by itself, as an application with tenants has its sessions do."""

    def get_bind(self, *_: Any, **__: Any) -> Any:
        return CHOICE["engine"]


CHOICE: dict[str, Engine] = {}


@pytest.fixture
def tenant(engine: Engine) -> str:
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA tenant"))
        connection.execute(text("CREATE TABLE tenant.notes (LIKE notes INCLUDING ALL)"))
    return "tenant"


class TestAnEngineOfATenant:
    """``engine.execution_options(schema_translate_map=...)`` shares its pool with the engine."""

    @pytest.mark.parametrize("kind", ["sync", "async"])
    def test_may_be_that_of_the_queue(
        self, engine: Engine, mode: str, tenant: str, kind: str
    ) -> None:
        clone = engine.execution_options(schema_translate_map={None: tenant})
        queue = PgQueue(sessionmaker(clone, binds={Base: clone}))

        def act(session: Session, ctx: JobContext, kept: bool) -> None:
            session.add(Note(word="of the tenant"))
            session.flush()
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

        write.delay(True)
        write.delay(False)

        counts = Worker(queue, mode=mode, concurrency=1).run_until_empty(timeout=20)

        assert counts == {"succeeded": 1, "cancelled": 1}
        assert (words(engine), words(engine, "tenant.notes")) == ([], ["of the tenant"])

    @pytest.mark.parametrize("other", ["isolation_level", "schema_translate_map", "tenant_id"])
    def test_is_refused_at_start_among_the_binds(
        self, engine: Engine, mode: str, other: str
    ) -> None:
        value: Any = {"isolation_level": "SERIALIZABLE", "schema_translate_map": {None: "x"}}
        clone = engine.execution_options(**{other: value.get(other, 7)})
        queue = PgQueue(sessionmaker(engine, binds={Base: clone}))

        @queue.task(name="write", retry=NEVER)
        def write(session: Session) -> None: ...

        with pytest.raises(OptionError, match=rf"{other}.*session\.connection\("):
            Worker(queue, mode=mode).run_until_empty(timeout=20)

    def test_is_nobodys_business_where_no_handler_is_transactional(self, engine: Engine) -> None:
        clone = engine.execution_options(schema_translate_map={None: "x"})
        queue = PgQueue(sessionmaker(engine, binds={Base: clone}))
        queue.task(name="plain")(lambda: None).delay()

        assert Worker(queue).run_until_empty(timeout=20) == {"succeeded": 1}

    @pytest.mark.parametrize("kind", ["sync", "async"])
    def test_chosen_while_a_handler_runs_fails_it_and_writes_nothing(
        self, engine: Engine, mode: str, tenant: str, kind: str
    ) -> None:
        CHOICE["engine"] = engine.execution_options(schema_translate_map={None: tenant})
        queue = PgQueue(sessionmaker(engine, class_=Chosen))
        if kind == "sync":

            @queue.task(name="write", retry=NEVER)
            def write(session: Session) -> None:
                session.add(Note(word="of the tenant"))

        else:

            @queue.task(name="write", retry=NEVER)
            async def write(session: AsyncSession) -> None:
                session.add(Note(word="of the tenant"))

        write.delay()

        assert Worker(queue, mode=mode).run_until_empty(timeout=20) == {"failed": 1}
        assert "schema_translate_map" in last_error(PgQueue(engine))
        assert words(engine, "tenant.notes") == []

    @pytest.mark.parametrize("kind", ["sync", "async"])
    def test_what_a_handler_asks_of_its_connection_is_not_the_next_ones(
        self, engine: Engine, mode: str, tenant: str, kind: str
    ) -> None:
        """The way to have tenants in a handler, as the refusal says."""
        queue = PgQueue(engine)
        if kind == "sync":

            @queue.task(name="write", retry=NEVER)
            def write(session: Session, ctx: JobContext, schema: str, kept: bool) -> None:
                if schema:
                    options: dict[str, Any] = {"schema_translate_map": {None: schema}}
                    session.connection(execution_options=options)
                session.add(Note(word=f"of {schema or 'all'}"))
                session.commit()
                session.add(Note(word="and after its commit"))
                if not kept:
                    cancel_from_outside(queue, ctx.job_id)

        else:

            @queue.task(name="write", retry=NEVER)
            async def write(
                session: AsyncSession, ctx: JobContext, schema: str, kept: bool
            ) -> None:
                if schema:
                    options: dict[str, Any] = {"schema_translate_map": {None: schema}}
                    await session.run_sync(lambda own: own.connection(execution_options=options))
                session.add(Note(word=f"of {schema or 'all'}"))
                await session.commit()
                session.add(Note(word="and after its commit"))
                if not kept:
                    cancel_from_outside(queue, ctx.job_id)

        with queue.session() as session, session.begin():
            session.add_all(
                [write.job(tenant, False), write.job(tenant, True), write.job("", True)]
            )

        counts = Worker(queue, mode=mode, concurrency=1).run_until_empty(timeout=20)

        assert counts == {"succeeded": 2, "cancelled": 1}
        assert words(engine) == ["of all", "and after its commit"]
        assert words(engine, "tenant.notes") == ["of tenant", "and after its commit"]

    def test_that_changes_nothing_joins(self, engine: Engine, mode: str) -> None:
        clone = engine.execution_options(logging_token="notes")
        queue = PgQueue(sessionmaker(engine, binds={Base: clone}))

        @queue.task(name="write", retry=NEVER)
        def write(session: Session, ctx: JobContext) -> None:
            session.add(Note(word="written"))
            session.flush()
            cancel_from_outside(queue, ctx.job_id)

        write.delay()

        assert Worker(queue, mode=mode).run_until_empty(timeout=20) == {"cancelled": 1}
        assert words(engine) == []

    def test_in_autocommit_commits_on_its_own_as_it_asks_for(
        self, engine: Engine, mode: str
    ) -> None:
        clone = engine.execution_options(isolation_level="AUTOCOMMIT")
        queue = PgQueue(sessionmaker(engine, binds={Base: clone}))

        @queue.task(name="write", retry=NEVER)
        def write(session: Session, ctx: JobContext) -> None:
            session.add(Note(word="written"))
            session.flush()
            cancel_from_outside(queue, ctx.job_id)

        write.delay()

        assert Worker(queue, mode=mode).run_until_empty(timeout=20) == {"cancelled": 1}
        assert words(engine) == ["written"]

    def test_with_a_pool_of_its_own_is_told_of_at_start(
        self, engine: Engine, database_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        second = create_engine(database_url)
        queue = PgQueue(sessionmaker(engine, binds={Base: second}))

        @queue.task(name="write", retry=NEVER)
        def write(session: Session) -> None: ...

        Worker(queue).run_until_empty(timeout=20)

        assert "another engine on the same database" in caplog.text
        second.dispose()


class Tenants(Session):
    """Shows nobody a row that was deleted, as an application's own class does."""


@event.listens_for(Tenants, "do_orm_execute")
def _without_deleted(state: ORMExecuteState) -> None:
    if state.is_select and not state.is_column_load:
        options = with_loader_criteria(Note, Note.is_deleted.is_(False))
        state.statement = state.statement.options(options)


class TestTheSessionOfAnAsyncHandler:
    """It is an AsyncSession around a Session of the application's."""

    @pytest.mark.parametrize("where", ["class", "sessionmaker"])
    def test_has_its_filters(self, engine: Engine, mode: str, where: str) -> None:
        sessions: sessionmaker[Any] = sessionmaker(engine)
        if where == "class":
            sessions = sessionmaker(engine, class_=Tenants)
        else:
            event.listen(sessions, "do_orm_execute", _without_deleted)
        queue = PgQueue(sessions)
        found: dict[str, list[str]] = {}

        @queue.task(name="sync", retry=NEVER)
        def read(session: Session) -> None:
            found["sync"] = list(session.scalars(select(Note.word)))

        @queue.task(name="async", retry=NEVER)
        async def read_async(session: AsyncSession) -> None:
            found["async"] = list(await session.scalars(select(Note.word)))

        with Session(engine) as session, session.begin():
            session.add_all([Note(word="seen"), Note(word="deleted", is_deleted=True)])
        read.delay()
        read_async.delay()

        assert Worker(queue, mode=mode).run_until_empty(timeout=20) == {"succeeded": 2}
        assert found == {"sync": ["seen"], "async": ["seen"]}

    def test_has_its_options_but_never_expires(self, engine: Engine, mode: str) -> None:
        queue = PgQueue(sessionmaker(engine, autoflush=False, info={"tenant": 7}))
        seen: list[Any] = []

        @queue.task(name="look", retry=NEVER)
        async def look(session: AsyncSession) -> None:
            note = Note(word="kept")
            session.add(note)
            seen.append(list(await session.scalars(select(Note.word))))
            await session.commit()
            seen.append((note.word, session.info["tenant"]))

        look.delay()

        assert Worker(queue, mode=mode).run_until_empty(timeout=20) == {"succeeded": 1}
        assert seen == [[], ("kept", 7)]

    def test_is_in_the_transaction_of_its_job_whatever_it_chooses(
        self, engine: Engine, mode: str
    ) -> None:
        CHOICE["engine"] = engine
        queue = PgQueue(sessionmaker(engine, class_=Chosen, binds={Base: engine}))

        @queue.task(name="write", retry=NEVER)
        async def write(session: AsyncSession, ctx: JobContext) -> None:
            session.add(Note(word="written"))
            await session.commit()
            await asyncio.to_thread(cancel_from_outside, queue, ctx.job_id)

        write.delay()

        assert Worker(queue, mode=mode).run_until_empty(timeout=20) == {"cancelled": 1}
        assert words(engine) == []

    def test_blocks_no_event_loop_for_another_database(
        self, engine: Engine, empty_database_url: str, mode: str
    ) -> None:
        elsewhere = create_engine(empty_database_url)
        Base.metadata.create_all(elsewhere)
        queue = PgQueue(sessionmaker(engine, binds={Base: elsewhere}))

        @queue.task(name="write", retry=NEVER)
        async def write(session: AsyncSession) -> None:
            session.add(Note(word="elsewhere"))

        write.delay()
        counts = Worker(queue, mode=mode).run_until_empty(timeout=20)

        if mode == "lease":
            assert (counts, words(elsewhere)) == ({"failed": 1}, [])
            assert "would block the event loop" in last_error(queue)
        else:
            assert (counts, words(elsewhere)) == ({"succeeded": 1}, ["elsewhere"])
        elsewhere.dispose()
