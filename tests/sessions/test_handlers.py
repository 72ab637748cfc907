"""The session a handler is given is the application's, however that makes its sessions."""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
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
from worker_rig import endings

from chaos.interleavings.logical_workers import execute
from pgqueue import Job, JobContext, OptionError, PgQueue, Retry, Worker


class Base(DeclarativeBase): ...


class Note(Base):
    __tablename__ = "notes"

    id: Mapped[int] = mapped_column(primary_key=True)
    word: Mapped[str]
    is_deleted: Mapped[bool] = mapped_column(default=False)


NEVER = Retry.never()


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


def declare_write(
    queue: PgQueue, kind: str, act: Callable[[Session, JobContext, bool], None]
) -> Any:
    """A task, sync or async, whose transactional handler does this."""
    if kind == "sync":

        @queue.task(name="write", retry=NEVER)
        def write(session: Session, ctx: JobContext, kept: bool) -> None:
            act(session, ctx, kept)

        return write

    @queue.task(name="write", retry=NEVER)
    async def write_async(session: AsyncSession, ctx: JobContext, kept: bool) -> None:
        await session.run_sync(act, ctx, kept)

    return write_async


class TestHowASessionmakerMayBeMade:
    @pytest.mark.parametrize("kind", ["sync", "async"])
    @pytest.mark.parametrize(
        "options",
        [
            {"twophase": True, "autobegin": False},
            {
                "autoflush": False,
                "expire_on_commit": False,
                "join_transaction_mode": "control_fully",
                "close_resets_only": False,
            },
        ],
        ids=lambda options: "-".join(options),
    )
    def test_no_option_of_a_sessionmaker_hinders_a_transactional_handler(
        self, engine: Engine, kind: str, options: dict[str, Any]
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

        write = declare_write(queue, kind, act)
        own = PgQueue(engine)
        own.tasks = queue.tasks
        with own.session() as session, session.begin():
            session.add_all([write.job(True), write.job(False)])

        counts = endings(Worker(queue, concurrency=1))

        assert counts == {"succeeded": 1, "cancelled": 1}
        first = ["begun by itself"] if options.get("autobegin", True) else []
        assert words(engine) == [*first, "in a block", "left pending"]

    def test_delay_begins_a_session_that_does_not_begin_by_itself(self, engine: Engine) -> None:
        queue = PgQueue(sessionmaker(engine, autobegin=False))

        @queue.task(name="once", unique_key=lambda: "one")
        def once() -> None: ...

        assert once.delay().id == once.delay().id

    def test_two_phases_prepared_by_hand_are_one_in_a_handler(self, engine: Engine) -> None:
        queue = PgQueue(sessionmaker(engine, twophase=True))

        @queue.task(name="write", retry=NEVER)
        def write(session: Session) -> None:
            session.add(Note(word="prepared"))
            session.prepare()
            session.commit()

        write.delay()

        assert endings(Worker(queue)) == {"succeeded": 1}
        assert words(engine) == ["prepared"]

    def test_two_phases_and_two_databases_are_told_of_at_start(
        self, engine: Engine, empty_database_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        elsewhere = create_engine(empty_database_url)
        sessions = sessionmaker(engine, binds={Base: elsewhere}, twophase=True)
        queue = PgQueue(sessions)

        @queue.task(name="write", retry=NEVER)
        def write(session: Session) -> None: ...

        Worker(queue).run_until_empty(timeout=60)

        assert "twophase=True" in caplog.text
        elsewhere.dispose()


def until_waiting(engine: Engine, pid: int) -> None:
    """Until this server process waits for a lock."""
    waits = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND pid = :pid")
    deadline = time.monotonic() + 60
    with engine.connect() as connection:
        while not connection.scalar(waits, {"pid": pid}):
            assert time.monotonic() < deadline
            time.sleep(0.01)


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
    def test_the_engine_of_a_tenant_may_be_that_of_the_queue(
        self, engine: Engine, tenant: str, kind: str
    ) -> None:
        clone = engine.execution_options(schema_translate_map={None: tenant})
        queue = PgQueue(sessionmaker(clone, binds={Base: clone}))

        def act(session: Session, ctx: JobContext, kept: bool) -> None:
            session.add(Note(word="of the tenant"))
            session.flush()
            if not kept:
                cancel_from_outside(queue, ctx.job_id)

        write = declare_write(queue, kind, act)
        write.delay(True)
        write.delay(False)

        counts = endings(Worker(queue, concurrency=1))

        assert counts == {"succeeded": 1, "cancelled": 1}
        assert (words(engine), words(engine, "tenant.notes")) == ([], ["of the tenant"])

    def test_the_engine_of_a_tenant_is_refused_at_start_among_the_binds(
        self, engine: Engine
    ) -> None:
        clone = engine.execution_options(schema_translate_map={None: "x"})
        queue = PgQueue(sessionmaker(engine, binds={Base: clone}))

        @queue.task(name="write", retry=NEVER)
        def write(session: Session) -> None: ...

        with pytest.raises(OptionError, match=r"schema_translate_map.*session\.connection\("):
            Worker(queue).run_until_empty(timeout=60)

    def test_the_engine_of_a_tenant_is_allowed_where_no_handler_is_transactional(
        self, engine: Engine
    ) -> None:
        clone = engine.execution_options(schema_translate_map={None: "x"})
        queue = PgQueue(sessionmaker(engine, binds={Base: clone}))
        queue.task(name="plain")(lambda: None).delay()

        assert endings(Worker(queue)) == {"succeeded": 1}

    @pytest.mark.parametrize("kind", ["sync", "async"])
    def test_the_engine_of_a_tenant_chosen_while_a_handler_runs_fails_it_and_writes_nothing(
        self, engine: Engine, tenant: str, kind: str
    ) -> None:
        CHOICE["engine"] = engine.execution_options(schema_translate_map={None: tenant})
        queue = PgQueue(sessionmaker(engine, class_=Chosen))

        def act(session: Session, _ctx: JobContext, _kept: bool) -> None:
            session.add(Note(word="of the tenant"))

        declare_write(queue, kind, act).delay(True)

        assert endings(Worker(queue)) == {"failed": 1}
        assert "schema_translate_map" in last_error(PgQueue(engine))
        assert words(engine, "tenant.notes") == []

    @pytest.mark.parametrize("kind", ["sync", "async"])
    def test_execution_options_that_a_handler_sets_do_not_reach_the_next_handler(
        self, engine: Engine, tenant: str, kind: str
    ) -> None:
        """The way to have tenants in a handler, as the refusal says."""
        queue = PgQueue(engine)
        schemas = iter([tenant, tenant, None])

        def act(session: Session, ctx: JobContext, kept: bool) -> None:
            schema = next(schemas)
            if schema:
                options: dict[str, Any] = {"schema_translate_map": {None: schema}}
                session.connection(execution_options=options)
            session.add(Note(word=f"of {schema or 'all'}"))
            session.commit()
            session.add(Note(word="and after its commit"))
            if not kept:
                cancel_from_outside(queue, ctx.job_id)

        write = declare_write(queue, kind, act)
        with queue.session() as session, session.begin():
            session.add_all([write.job(False), write.job(True), write.job(True)])

        counts = endings(Worker(queue, concurrency=1))

        assert counts == {"succeeded": 2, "cancelled": 1}
        assert words(engine) == ["of all", "and after its commit"]
        assert words(engine, "tenant.notes") == ["of tenant", "and after its commit"]

    @pytest.mark.parametrize(
        ("options", "kept"),
        [({"logging_token": "notes"}, []), ({"isolation_level": "AUTOCOMMIT"}, ["written"])],
        ids=["changes nothing", "autocommit"],
    )
    def test_an_engine_with_options_that_change_nothing_joins_and_in_autocommit_commits_on_its_own(
        self, engine: Engine, options: dict[str, Any], kept: list[str]
    ) -> None:
        clone = engine.execution_options(**options)
        queue = PgQueue(sessionmaker(engine, binds={Base: clone}))

        @queue.task(name="write", retry=NEVER)
        def write(session: Session, ctx: JobContext) -> None:
            session.add(Note(word="written"))
            session.flush()
            cancel_from_outside(queue, ctx.job_id)

        write.delay()

        assert endings(Worker(queue)) == {"cancelled": 1}
        assert words(engine) == kept

    def test_an_engine_with_a_pool_of_its_own_is_told_of_at_start(
        self, engine: Engine, caplog: pytest.LogCaptureFixture
    ) -> None:
        second = create_engine(engine.url)
        queue = PgQueue(sessionmaker(engine, binds={Base: second}))

        @queue.task(name="write", retry=NEVER)
        def write(session: Session) -> None: ...

        Worker(queue).run_until_empty(timeout=60)

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
    def test_the_session_of_an_async_handler_has_the_filters_of_the_application(
        self, engine: Engine, where: str
    ) -> None:
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

        assert endings(Worker(queue)) == {"succeeded": 2}
        assert found == {"sync": ["seen"], "async": ["seen"]}

    def test_the_session_of_an_async_handler_has_its_options_but_never_expires(
        self, engine: Engine
    ) -> None:
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

        assert endings(Worker(queue)) == {"succeeded": 1}
        assert seen == [[], ("kept", 7)]

    def test_the_session_of_an_async_handler_is_in_the_transaction_of_its_job_whatever_it_chooses(
        self, engine: Engine
    ) -> None:
        CHOICE["engine"] = engine
        queue = PgQueue(sessionmaker(engine, class_=Chosen, binds={Base: engine}))

        @queue.task(name="write", retry=NEVER)
        async def write(session: AsyncSession, ctx: JobContext) -> None:
            session.add(Note(word="written"))
            await session.commit()
            await asyncio.to_thread(cancel_from_outside, queue, ctx.job_id)

        write.delay()

        assert endings(Worker(queue)) == {"cancelled": 1}
        assert words(engine) == []

    def test_the_session_of_an_async_handler_blocks_no_event_loop_for_another_database(
        self, engine: Engine, empty_database_url: str
    ) -> None:
        elsewhere = create_engine(empty_database_url)
        Base.metadata.create_all(elsewhere)
        queue = PgQueue(sessionmaker(engine, binds={Base: elsewhere}))

        @queue.task(name="write", retry=NEVER)
        async def write(session: AsyncSession) -> None:
            session.add(Note(word="elsewhere"))

        write.delay()
        counts = endings(Worker(queue))

        assert (counts, words(elsewhere)) == ({"failed": 1}, [])
        assert "would block the event loop" in last_error(queue)
        elsewhere.dispose()


class TestTheAsyncSessionOfTheQueue:
    """Outside of workers, and so in an async task that is called as a function, it is one too."""

    def test_the_async_session_of_a_queue_has_its_options_and_never_expires(
        self, engine: Engine
    ) -> None:
        clone = engine.execution_options(tenant=7)
        queue = PgQueue(
            sessionmaker(clone, autoflush=False, twophase=True, autobegin=False, info={"n": 7})
        )

        @queue.task(name="look")
        async def look(session: AsyncSession) -> list[Any]:
            note = Note(word="kept")
            session.add(note)
            options = (await session.connection()).sync_connection
            assert options is not None
            seen = [list(await session.scalars(select(Note.word)))]
            await session.commit()
            return [seen, note.word, session.info["n"], options.get_execution_options()["tenant"]]

        assert asyncio.run(look()) == [[[]], "kept", 7, 7]
        assert words(engine) == ["kept"]


LEVEL = text("SELECT current_setting('transaction_isolation')")


def of_level(engine: Engine, level: str, made: str) -> Engine:
    """An engine of an application that wants another level, in one of the ways to say so."""
    if made == "execution_options":
        return engine.execution_options(isolation_level=level)
    if made == "create_engine":
        return create_engine(engine.url, isolation_level=level)
    with engine.begin() as connection:
        role = f"ALTER DATABASE {engine.url.database} SET default_transaction_isolation = "
        connection.execute(text(f"{role}'{level.lower()}'"))
    driver = "postgresql+psycopg2" if made == "psycopg2" else "postgresql+psycopg"
    return create_engine(engine.url.set(drivername=driver))


class TestTheIsolationOfTheApplication:
    @pytest.mark.parametrize(
        ("made", "level"),
        [
            ("execution_options", "REPEATABLE READ"),
            ("create_engine", "SERIALIZABLE"),
            ("server", "SERIALIZABLE"),
            ("psycopg2", "SERIALIZABLE"),
        ],
    )
    def test_handlers_have_the_isolation_of_the_application(
        self, engine: Engine, made: str, level: str
    ) -> None:
        own = of_level(engine, level, made)
        queue = PgQueue(own)
        found: list[str] = []

        @queue.task(name="sync", retry=NEVER, timeout=timedelta(minutes=1))
        def look(session: Session) -> None:
            found.append(session.scalars(LEVEL).one())
            session.rollback()
            found.append(session.scalars(LEVEL).one())

        @queue.task(name="async", retry=NEVER)
        async def look_async(session: AsyncSession) -> None:
            found.append((await session.scalars(LEVEL)).one())
            await session.rollback()
            found.append((await session.scalars(LEVEL)).one())

        look.delay()
        look_async.delay()

        assert endings(Worker(queue, concurrency=1)) == {"succeeded": 2}
        assert found == [level.lower()] * 4
        own.dispose()

    def test_an_engine_in_autocommit_gives_handlers_a_transaction(self, engine: Engine) -> None:
        queue = PgQueue(of_level(engine, "AUTOCOMMIT", "create_engine"))
        found: list[str] = []

        @queue.task(name="look", retry=NEVER)
        def look(session: Session, ctx: JobContext) -> None:
            found.append(session.scalars(LEVEL).one())
            session.add(Note(word="lost"))
            session.flush()
            raise ValueError("undone")

        look.delay()

        assert endings(Worker(queue)) == {"failed": 1}
        assert (found, words(engine)) == (["read committed"], [])
        queue.engine.dispose()


class TestATransactionThatCannotBeSerialized:
    """It begins again, in the same attempt."""

    @pytest.fixture(params=["sync", "async"])
    def kind(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def run(
        self, engine: Engine, kind: str
    ) -> Iterator[Callable[..., tuple[dict[str, int], list[int]]]]:
        """Run one job at a level; what has become of it, and its begun attempts."""
        begun: list[int] = []
        own = []

        def run(
            act: Callable[..., Any], *, level: str = "SERIALIZABLE", max_attempts: int = 2
        ) -> tuple[dict[str, int], list[int]]:
            own.append(of_level(engine, level, "create_engine"))
            queue = PgQueue(own[0])
            options: dict[str, Any] = {
                "name": "write",
                "retry": NEVER,
                "max_attempts": max_attempts,
            }

            def write(session: Session, ctx: JobContext) -> None:
                begun.append(ctx.attempt)
                act(session, ctx, len(begun))

            if kind == "sync":
                queue.task(**options)(write).delay()
            else:

                async def write_async(session: AsyncSession, ctx: JobContext) -> None:
                    await session.run_sync(write, ctx)

                queue.task(**options)(write_async).delay()
            return endings(Worker(queue, concurrency=1)), begun

        yield run
        own[0].dispose()

    @staticmethod
    def write_first(engine: Engine) -> None:
        with Session(engine) as session, session.begin():
            session.add(Note(word="first"))

    def change_first(self, engine: Engine) -> None:
        with engine.begin() as connection:
            connection.execute(text("UPDATE notes SET is_deleted = NOT is_deleted"))

    def test_a_handler_begins_again_when_a_statement_cannot_be_serialized(
        self, engine: Engine, run: Any
    ) -> None:
        self.write_first(engine)

        def act(session: Session, ctx: JobContext, begun: int) -> None:
            note = session.scalars(select(Note)).one()
            if begun <= 2:
                self.change_first(engine)
            note.word = f"changed at beginning {begun}"

        assert run(act, level="REPEATABLE READ") == ({"succeeded": 1}, [1, 1, 1])
        assert words(engine) == ["changed at beginning 3"]
        with Session(engine) as session:
            assert session.scalars(select(Job.attempts)).one() == 1
            assert PgQueue(engine).check(session) == []

    def test_a_handler_begins_again_when_its_commit_cannot_be_serialized(
        self, engine: Engine, run: Any
    ) -> None:
        def act(session: Session, ctx: JobContext, begun: int) -> None:
            count = len(session.scalars(select(Note)).all())
            if begun == 1:
                strict = engine.execution_options(isolation_level="SERIALIZABLE")
                with Session(strict) as other, other.begin():
                    other.add(Note(word=f"other, beside {len(other.scalars(select(Note)).all())}"))
            session.add(Note(word=f"handler, beside {count}"))

        assert run(act) == ({"succeeded": 1}, [1, 1])
        assert words(engine) == ["other, beside 0", "handler, beside 1"]

    @pytest.mark.parametrize(
        ("max_attempts", "begun"), [(2, [1] * 6), (1, [1])], ids=["again and again", "at once"]
    )
    def test_a_handler_that_is_never_serialized_fails_in_the_end(
        self, engine: Engine, run: Any, max_attempts: int, begun: list[int]
    ) -> None:
        self.write_first(engine)

        def act(session: Session, ctx: JobContext, begun: int) -> None:
            session.scalars(select(Note)).one().word = "never"
            self.change_first(engine)

        assert run(act, max_attempts=max_attempts) == ({"failed": 1}, begun)
        assert "could not serialize access" in last_error(PgQueue(engine))
        assert words(engine) == ["first"]

    @pytest.mark.parametrize("meanwhile", ["cancelled", "stale"])
    def test_a_handler_is_not_begun_again_when_its_job_was_cancelled_or_its_lease_has_passed_on(
        self, engine: Engine, run: Any, meanwhile: str
    ) -> None:
        def act(session: Session, ctx: JobContext, begun: int) -> None:
            session.add(Note(word="never"))
            session.flush()
            if meanwhile == "cancelled":
                cancel_from_outside(PgQueue(engine), ctx.job_id)
            else:
                execute(engine, "DELETE FROM pgqueue.leases")

        assert run(act, level="SERIALIZABLE") == ({meanwhile: 1}, [1])
        assert words(engine) == []

    def test_a_handler_begins_again_after_a_deadlock_at_any_level(
        self, engine: Engine, run: Any
    ) -> None:
        with Session(engine) as session, session.begin():
            session.add_all([Note(word="one"), Note(word="two")])
        change = "UPDATE notes SET word = word || :by WHERE id = :id"

        def act(session: Session, ctx: JobContext, begun: int) -> None:
            if begun > 1:
                session.execute(text(change), {"by": " again", "id": 1})
                return
            session.execute(text("SET LOCAL deadlock_timeout = '10ms'"))
            session.execute(text(change), {"by": " never", "id": 1})
            with engine.connect() as other, ThreadPoolExecutor(1) as thread:
                other.execute(text("SET LOCAL deadlock_timeout = '60s'"))
                other.execute(text(change), {"by": " other", "id": 2})
                pid = other.scalar(text("SELECT pg_backend_pid()"))
                waiting = thread.submit(other.execute, text(change), {"by": " other", "id": 1})
                try:
                    until_waiting(engine, pid)  # the server looks for a deadlock only once
                    session.execute(text(change), {"by": " never", "id": 2})
                finally:
                    session.rollback()
                    waiting.result(60)
                    other.commit()

        assert run(act, level="READ COMMITTED") == ({"succeeded": 1}, [1, 1])
        assert words(engine) == ["one other again", "two other"]


@pytest.mark.journey
class TestTheServersLimitsOnTransactions:
    """They do not end a handler within the timeout of its task.

    Of what else is done there each step must take less, also on a machine that is busy.
    """

    @pytest.mark.parametrize("kind", ["sync", "async"])
    @pytest.mark.parametrize(
        "limit", ["idle_in_transaction_session_timeout", "transaction_timeout"]
    )
    def test_limits_of_the_server_shorter_than_the_timeout_end_no_handler(
        self, engine: Engine, limit: str, kind: str
    ) -> None:
        with engine.connect() as connection:
            version = connection.scalar(text("SHOW server_version_num"))
            if int(version) < 170000 and limit == "transaction_timeout":
                pytest.skip("this server has no transaction_timeout")
        own = create_engine(engine.url, connect_args={"options": f"-c {limit}=2000"})
        queue = PgQueue(own)
        found: dict[str, str] = {}
        show = text(f"SELECT current_setting('{limit}')")

        if kind == "sync":

            @queue.task(name="compute", retry=NEVER, timeout=timedelta(seconds=20))
            def compute(session: Session) -> None:
                found["compute"] = session.scalars(show).one()
                time.sleep(2.5)  # what it computes
                session.add(Note(word="written"))

        else:

            @queue.task(name="compute", retry=NEVER, timeout=timedelta(seconds=20))
            async def compute(session: AsyncSession) -> None:
                found["compute"] = (await session.scalars(show)).one()
                await asyncio.sleep(2.5)
                session.add(Note(word="written"))

        @queue.task(name="look", retry=NEVER)
        def look(session: Session) -> None:
            found["look"] = session.scalars(show).one()

        with queue.session() as session, session.begin():
            session.add_all([compute.job(), look.job()])
        counts = endings(Worker(queue, concurrency=1))

        assert counts == {"succeeded": 2}
        assert found == {"compute": "80s", "look": "2s"}
        assert words(engine) == ["written"]
        own.dispose()
