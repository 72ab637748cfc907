"""The rows of a query, a page at a time: no committed row is repeated or skipped."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, ForeignKey, Integer, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, aliased, mapped_column
from worker_rig import endings

from chaos.workers import wait_until
from pgqueue import JobContext, PgQueue, Retry, Worker
from pgqueue.tables import Job, JobStep

AT_ONCE = Retry.constant(timedelta(0))


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    code: Mapped[str | None]


class Line(Base):
    __tablename__ = "lines"

    number: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"))


def export(session: Session, orders: Sequence[Order]) -> None:
    session.add_all(Line(order_id=order.id) for order in orders)


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    queue = PgQueue(engine)
    Base.metadata.create_all(engine)
    with queue.session() as session, session.begin():
        session.add_all(Order(id=n, code=f"{n // 2:03}") for n in range(1, 11))
    return queue


def exported(queue: PgQueue) -> list[int]:
    with queue.session() as session:
        return list(session.scalars(select(Line.order_id).order_by(Line.number)))


def end_of(
    queue: PgQueue, handler: Callable[[JobContext], Any], **options: Any
) -> tuple[dict[str, int], Any]:
    """How the attempts of a handler end, and its result or error."""
    job_id = queue.task(name="export", retry=AT_ONCE, **options)(handler).delay().id
    ends = endings(Worker(queue, concurrency=1))
    with queue.session() as session:
        job = session.get_one(Job, job_id)
        return ends, job.last_error or job.result


def test_every_row_comes_once_whatever_fails(queue: PgQueue) -> None:
    pages: list[int] = []

    def fail_now_and_then(session: Session, orders: Sequence[Order], word: str) -> None:
        export(session, orders)
        pages.append(len(orders))
        if len(pages) in (2, 3, 5):
            raise ValueError(word)

    def handler(ctx: JobContext) -> int:
        return ctx.each("orders", select(Order), fail_now_and_then, "planned", size=3)

    ends, result = end_of(queue, handler, max_attempts=9)

    assert (ends, result) == ({"retried": 3, "succeeded": 1}, 10)
    assert exported(queue) == list(range(1, 11))
    assert pages == [3, 3, 3, 3, 3, 3, 1]


def test_a_later_attempt_does_not_read_again_what_is_done(queue: PgQueue) -> None:
    def handler(ctx: JobContext) -> int:
        done = ctx.each("orders", select(Order), export)
        if ctx.attempt == 1:
            raise ValueError("planned")
        return done

    ends, result = end_of(queue, handler)

    assert (ends, result) == ({"retried": 1, "succeeded": 1}, 10)
    assert exported(queue) == list(range(1, 11))


def test_a_stop_hands_the_job_on(queue: PgQueue) -> None:
    def stop_after_a_page(session: Session, ctx: JobContext, orders: Sequence[Order]) -> None:
        export(session, orders)
        if orders[-1].id == 4:
            worker.stop()
            wait_until(ctx.is_stopping)

    @queue.task(name="export", max_attempts=1)
    def handler(ctx: JobContext) -> None:
        ctx.each("orders", select(Order), stop_after_a_page, size=2)

    job_id = handler.delay().id
    worker = Worker(queue, concurrency=1)
    worker.run()

    assert exported(queue) == [1, 2, 3, 4]
    with queue.session() as session:
        job = session.get_one(Job, job_id)
        assert (job.status, job.attempts) == ("pending", 0)
    assert endings(Worker(queue)) == {"succeeded": 1}
    assert exported(queue) == list(range(1, 11))


def test_a_cancelled_job_ends_between_two_pages(queue: PgQueue) -> None:
    def cancel_after_a_page(session: Session, ctx: JobContext, orders: Sequence[Order]) -> None:
        export(session, orders)
        with queue.session() as other, other.begin():
            queue.cancel(other, ctx.job_id)
        wait_until(ctx.is_cancelled)

    def handler(ctx: JobContext) -> None:
        ctx.each("orders", select(Order), cancel_after_a_page, size=2)

    assert end_of(queue, handler)[0] == {"cancelled": 1}
    assert exported(queue) == [1, 2]


def test_async_handlers_go_through_rows(queue: PgQueue) -> None:
    async def export_async(session: AsyncSession, orders: Sequence[Order]) -> None:
        session.add_all(Line(order_id=order.id) for order in orders)
        await session.flush()

    async def handler(ctx: JobContext) -> list[int]:
        return [
            await ctx.each_async("orders", select(Order), export_async, size=4),
            await ctx.each_async("again", select(Order).where(Order.id > 8), export, size=1),
        ]

    assert end_of(queue, handler)[1] == [10, 2]
    assert exported(queue) == [*range(1, 11), 9, 10]


@pytest.mark.parametrize(
    "query",
    [
        pytest.param(lambda: (select(Order.id, Order.code), (Order.code, Order.id)), id="columns"),
        pytest.param(lambda: (select(aliased(Order, name="other")), None), id="an alias"),
        pytest.param(lambda: (select(func.upper(Order.code), Order.id), Order.id), id="one key"),
    ],
)
def test_queries_and_keys_of_any_kind(queue: PgQueue, query: Callable[[], Any]) -> None:
    seen: list[Any] = []

    def look(_session: Session, rows: Sequence[Any]) -> None:
        seen.extend(row.id for row in rows)

    def handler(ctx: JobContext) -> int:
        asked, key = query()
        return ctx.each("rows", asked, look, key=key, size=3)

    assert end_of(queue, handler)[1] == 10
    assert seen == list(range(1, 11))


def null_of_seven() -> Any:
    return func.nullif(Order.id, 7, type_=Integer)


def scalars(session: Session, rows: Sequence[int]) -> None:
    assert all(isinstance(row, int) for row in rows)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda ctx: ctx.each("a", iter([1]), export), "come from a select(), not from list_iter"),
        (lambda ctx: ctx.each("a", select(Order).order_by(Order.code), export), "omit order_by"),
        (lambda ctx: ctx.each("a", select(Order).limit(5), export), "omit order_by, limit and"),
        (lambda ctx: ctx.each("a", select(Order.id), export), "give key=, the column"),
        (lambda ctx: ctx.each("a", select(Order), len), "takes a Session first"),
        (lambda ctx: ctx.each("a", select(Order), export, size=0), "size is from 1 to 10000"),
        (
            lambda ctx: ctx.each("a", select(Order), export, key=Order.code, size=2),
            "two rows have the key 001, so one would be skipped",
        ),
        (
            lambda ctx: ctx.each("a", select(Order.id), scalars, key=func.nullif(Order.id, 7)),
            "SQLAlchemy does not know the type of the key",
        ),
        (
            lambda ctx: ctx.each("a", select(Order.id), scalars, key=null_of_seven()),
            "the key of a row is NULL",
        ),
    ],
)
def test_rows_without_an_order_are_refused(
    queue: PgQueue, call: Callable[[JobContext], Any], words: str
) -> None:
    ends, error = end_of(queue, call_of(call), max_attempts=1)

    assert ends == {"failed": 1}
    assert words in error
    with queue.session() as session:
        assert session.scalars(select(JobStep)).all() == []


def call_of(call: Callable[[JobContext], Any]) -> Callable[[JobContext], Any]:
    def handler(ctx: JobContext) -> Any:
        return call(ctx)

    return handler
