"""The fixtures that people write for rolled-back tests, with a queue in their transaction."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import Engine, func, make_url, select, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from pgqueue import Job, JobStatus, NotBound, OptionError, PgQueue, SchemaMissing, Worker
from pgqueue.flask import PgQueue as FlaskQueue
from pgqueue.testing import assert_enqueued, enqueued, run_jobs


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


make_session = sessionmaker()
queue = PgQueue(make_session)


@queue.task
def receive(session: Session, order_id: int) -> None:
    session.add(Order(id=order_id))


@queue.task
async def receive_async(session: AsyncSession, order_id: int) -> None:
    session.add(Order(id=order_id))
    await session.commit()


def application(order_id: int) -> None:
    """Code under test, which opens its own Session and commits."""
    with make_session() as session:
        receive.enqueue(session, order_id)
        session.commit()
    receive.delay(order_id + 1)


def orders_and_jobs(engine: Engine) -> tuple[int, int]:
    """What other transactions see."""
    with Session(engine) as other:
        count = [other.scalar(select(func.count()).select_from(table)) for table in (Order, Job)]
        return count[0] or 0, count[1] or 0


# SQLAlchemy: "Joining a Session into an External Transaction (such as for test suites)".


@pytest.fixture
def db_session(engine: Engine) -> Iterator[Session]:
    Base.metadata.create_all(engine)
    connection = engine.connect()
    transaction = connection.begin()
    make_session.configure(bind=connection, join_transaction_mode="create_savepoint")
    with make_session() as session:
        yield session
    transaction.rollback()
    connection.close()
    assert orders_and_jobs(engine) == (0, 0)


def test_a_sessionmaker_on_a_connection(db_session: Session) -> None:
    application(1)
    receive(3)  # a plain call

    assert_enqueued(db_session, receive, order_id=2)
    assert len(run_jobs(db_session, queue=queue)) == 2
    assert db_session.scalars(select(Order.id).order_by(Order.id)).all() == [1, 2, 3]


def test_a_worker_on_a_connection_runs_in_its_transaction(db_session: Session) -> None:
    application(1)
    receive_async.delay(3)
    asyncio.run(receive_async(4))

    worker = Worker(queue, concurrency=1)

    assert worker.run_until_empty(raise_errors=True) == {"succeeded": 3}
    assert db_session.scalars(select(Order.id).order_by(Order.id)).all() == [1, 2, 3, 4]
    with pytest.raises(OptionError, match="call run_until_empty"):
        worker.run()
    with pytest.raises(NotBound, match="upgrade"):
        queue.upgrade()


def test_a_failed_enqueue_does_not_end_the_transaction(db_session: Session) -> None:
    db_session.execute(text("ALTER TABLE pgqueue.jobs RENAME TO hidden"))
    with pytest.raises(SchemaMissing):
        receive.delay(1)
    db_session.execute(text("ALTER TABLE pgqueue.hidden RENAME TO jobs"))

    first = receive.options(unique_key="one").delay(1)
    again = receive.options(unique_key="one").delay(2)

    assert again.id == first.id
    assert [job.id for job in enqueued(db_session)] == [first.id]


# Flask-SQLAlchemy: the engines of the app are replaced by connections.


@pytest.fixture
def shop(database_url: str) -> Iterator[tuple[Any, FlaskQueue]]:
    db, flask_queue, app = SQLAlchemy(model_class=Base), FlaskQueue(), Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = database_url
    db.init_app(app)
    flask_queue.init_app(app, db)
    with app.app_context():
        Base.metadata.create_all(db.engine)
        engines: Any = db.engines
        engine = engines[None]
        connection = engine.connect()
        transaction = connection.begin()
        engines[None] = connection
        yield db, flask_queue
        db.session.remove()
        transaction.rollback()
        connection.close()
        engines[None] = engine
        assert orders_and_jobs(engine) == (0, 0)
        engine.dispose()


def test_flask_sqlalchemy_with_its_engines_replaced(shop: tuple[Any, FlaskQueue]) -> None:
    db, flask_queue = shop

    @flask_queue.task(transactional=True)
    def receive(order_id: int) -> None:
        db.session.add(Order(id=order_id))
        db.session.commit()

    receive.enqueue(db.session, 1)
    db.session.commit()
    receive.delay(2)

    ran = run_jobs(db.session, queue=flask_queue)

    assert [job.status for job in ran] == [JobStatus.SUCCEEDED] * 2
    assert db.session.scalars(select(Order.id).order_by(Order.id)).all() == [1, 2]


# asyncio: an AsyncSession on an AsyncConnection whose transaction is rolled back.


@asynccontextmanager
async def async_db_session(url: str, driver: str) -> AsyncIterator[AsyncSession]:
    engine = create_async_engine(make_url(url).set(drivername=f"postgresql+{driver}"))
    async with engine.connect() as connection:
        transaction = await connection.begin()
        with queue.bound_to(connection):
            async with AsyncSession(
                connection, join_transaction_mode="create_savepoint", expire_on_commit=False
            ) as session:
                yield session
        await transaction.rollback()
    await engine.dispose()


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_an_async_session_on_an_async_connection(
    engine: Engine, database_url: str, driver: str
) -> None:
    Base.metadata.create_all(engine)

    async def test() -> None:
        async with async_db_session(database_url, driver) as session:
            await receive_async.enqueue_async(session, 1)
            await session.commit()
            await receive_async(2)  # a plain call
            await receive_async.run(session, 3)
            await session.run_sync(lambda _: receive.delay(4))
            await session.run_sync(assert_enqueued, receive_async, order_id=1)

            ran = await session.run_sync(run_jobs, queue=queue)

            assert [job.status for job in ran] == [JobStatus.SUCCEEDED] * 2
            found = await session.scalars(select(Order.id).order_by(Order.id))
            assert found.all() == [1, 2, 3, 4]

    asyncio.run(test())

    assert orders_and_jobs(engine) == (0, 0)


def test_a_queue_is_bound_to_a_connection_for_a_block(engine: Engine) -> None:
    own = PgQueue(sessionmaker(engine, expire_on_commit=False))

    with engine.connect() as connection, own.bound_to(connection):
        assert own.connection is connection
        assert not own.session().expire_on_commit

    assert own.connection is None
    assert own.engine is engine
