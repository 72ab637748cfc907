"""Sessions that send reads to a replica, by ``get_bind``: what pgqueue does goes to the leader."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import Delete, Engine, Update, UpdateBase, create_engine, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from pgqueue import Job, JobStatus, PgQueue, Unique


class Routing(Session):
    """As SQLAlchemy's manual routes: "Custom Vertical Partitioning"."""

    writes: tuple[type[UpdateBase], ...] = (Update, Delete)

    def get_bind(self, mapper: Any = None, clause: Any = None, **_: Any) -> Any:
        if self._flushing or isinstance(clause, self.writes):
            return self.info["leader"]
        return self.info["replica"]


class RoutingAnyWrite(Routing):
    writes = (UpdateBase,)


@pytest.fixture
def replica(engine: Engine) -> Any:
    """The same database, without the uncommitted rows of the leader, and read-only."""
    options = {"options": "-c default_transaction_read_only=on"}
    replica = create_engine(engine.url, connect_args=options)
    yield replica
    replica.dispose()


@pytest.mark.parametrize("routing", [Routing, RoutingAnyWrite])
def test_what_is_enqueued_claimed_and_cancelled_is_on_the_leader(
    engine: Engine, replica: Engine, routing: type[Session]
) -> None:
    places = {"leader": engine, "replica": replica}
    queue = PgQueue(sessionmaker(engine, class_=routing, info=places))

    @queue.task
    def work(n: int) -> None: ...

    @queue.task(unique=Unique())
    def once(n: int) -> None: ...

    @queue.task(unique=Unique(on_conflict="postpone"))
    def settle_down(n: int) -> None: ...

    with queue.session() as session:
        first = work.enqueue(session, 1)
        work.enqueue_many(session, [{"n": 2}, {"n": 3}])
        assert once.enqueue(session, 4).id == once.enqueue(session, 4).id
        assert settle_down.enqueue(session, 5).id == settle_down.enqueue(session, 5).id
        assert queue.cancel(session, first.id)
        with queue.batch(session):
            work.enqueue(session, 6)
        with queue.claim(session) as claimed:
            assert claimed is not None
        session.commit()
    assert once.delay(4).is_new is False
    settle_down.delay(5)

    with Session(engine) as session:
        ended = session.scalars(select(Job.outcome).where(Job.outcome.is_not(None))).all()
        assert sorted(map(str, ended)) == [JobStatus.CANCELLED, JobStatus.SUCCEEDED]
        assert len(session.scalars(select(Job)).all()) == 6


def test_an_async_session_too(engine: Engine, replica: Engine) -> None:
    queue = PgQueue(engine)

    @queue.task
    def work() -> None: ...

    async def enqueue() -> None:
        leader, other = (create_async_engine(one.url) for one in (engine, replica))
        info = {"leader": leader.sync_engine, "replica": other.sync_engine}
        async with AsyncSession(sync_session_class=Routing, info=info) as session:
            await work.enqueue_async(session)
            await session.commit()
        await leader.dispose()
        await other.dispose()

    asyncio.run(enqueue())

    with Session(engine) as session:
        assert session.scalars(select(Job.status)).all() == [JobStatus.PENDING]
