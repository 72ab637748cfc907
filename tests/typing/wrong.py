"""Wrong uses of tasks: mypy --strict refuses each line that says so, and no other."""

from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import pgqueue
from pgqueue import JobContext, PgQueue

queue = PgQueue()


@queue.task
def pay(session: Session, ctx: JobContext, order_id: int) -> str:
    return str(order_id)


@queue.task
async def pay_async(session: AsyncSession, order_id: int) -> str:
    return str(order_id)


def wrong_arguments(session: Session) -> None:
    pay("7")  # E: arg-type
    pay.enqueue(session, "7")  # E: arg-type
    pay.enqueue(session)  # E: call-arg
    pay.enqueue(session, 7, 8)  # E: call-arg
    pay.enqueue(session, id=7)  # E: call-arg
    pay.delay("7")  # E: arg-type
    pay.delay()  # E: call-arg
    pay.job("7")  # E: arg-type
    pay.job(order_id=None)  # E: arg-type
    pay.options(priority=0).enqueue(session, "7")  # E: arg-type
    pay.options(priority=0).delay("7")  # E: arg-type


def injected_parameters_are_not_arguments(session: Session, ctx: JobContext) -> None:
    pay(session, ctx, 7)  # E: call-arg arg-type
    pay(session, 7)  # E: call-arg arg-type
    pay.delay(session, 7)  # E: call-arg arg-type
    pay.job(session, 7)  # E: call-arg arg-type
    pay.enqueue(session, session, 7)  # E: call-arg arg-type


def the_transaction_is_not_left_out(session: Session) -> None:
    pay.enqueue(7)  # E: call-arg arg-type
    pay.enqueue_many([(7,)])  # E: call-arg arg-type
    pay.enqueue_many(session, [7])  # E: list-item


def misspelt_names() -> None:
    pgqueue.Retries  # E: attr-defined


def wrong_options() -> None:
    pay.options(dely=timedelta(hours=1))  # E: call-arg
    pay.options(delay=60)  # E: arg-type
    pay.options(priority="high")  # E: arg-type
    pay.options(executor="process")  # E: call-arg

    @queue.task(max_attempt=3)  # E: call-overload
    def misspelt() -> None: ...

    @queue.task(executor="fiber")  # E: call-overload
    def elsewhere() -> None: ...

    @queue.task(timeout=30)  # E: call-overload
    def unclear() -> None: ...


async def sessions_of_the_wrong_kind(session: Session, async_session: AsyncSession) -> None:
    pay.enqueue(async_session, 7)  # E: arg-type
    await pay.enqueue_async(session, 7)  # E: arg-type
    await pay.enqueue_async(async_session, "7")  # E: arg-type
    await pay_async.enqueue_async(async_session)  # E: call-arg
    await pay_async(async_session, 7)  # E: call-arg arg-type
    queue.cancel(async_session, 7)  # E: arg-type


# What stands behind the arguments stays in the signature, so a call has to give it.
@queue.task
def trailing(order_id: int, session: Session) -> None: ...


trailing.delay(7)  # E: call-arg
