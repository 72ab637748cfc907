"""A shop: an order and the job that writes its receipt are one commit."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from secrets import compare_digest
from typing import Annotated, Any

from a2wsgi import WSGIMiddleware
from fastapi import Depends, FastAPI, HTTPException
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel
from sqlalchemy import ForeignKey, func, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from werkzeug import Request, Response

from pgqueue import BadToken, JobNotFound, PgQueue, WaitTimeout
from pgqueue.dashboard import RIGHTS, Access

engine = create_async_engine(os.environ["DATABASE_URL"])
sessions = async_sessionmaker(engine, expire_on_commit=False)
queue = PgQueue(os.environ["DATABASE_URL"], secret=os.environ["SECRET_KEY"])


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]
    cents: Mapped[int]


class Receipt(Base):
    __tablename__ = "receipts"
    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id), primary_key=True)
    text: Mapped[str]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    await run_in_threadpool(queue.upgrade)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield
    await engine.dispose()


async def session_of_request() -> AsyncIterator[AsyncSession]:
    async with sessions() as session:
        yield session


RequestSession = Annotated[AsyncSession, Depends(session_of_request)]
app = FastAPI(lifespan=lifespan)


@queue.task
async def write_receipt(session: AsyncSession, order_id: int) -> None:
    order = await session.get_one(Order, order_id)
    session.add(Receipt(order_id=order.id, text=f"{order.item}: {order.cents / 100:.2f}"))


class NewOrder(BaseModel):
    item: str
    cents: int


@app.post("/orders", status_code=201)
async def place_order(new: NewOrder, session: RequestSession) -> dict[str, int]:
    order = Order(item=new.item, cents=new.cents)
    session.add(order)
    await session.flush()  # the database gives the order its id
    await write_receipt.enqueue_async(session, order.id)
    if order.cents > 100_000:
        raise HTTPException(409)  # nothing is committed: neither the order nor its job
    await session.commit()
    return {"id": order.id}


@app.get("/orders/{order_id}")
async def show_order(order_id: int, session: RequestSession) -> dict[str, str | None]:
    order = await session.get(Order, order_id)
    if order is None:
        raise HTTPException(404)
    receipt = await session.get(Receipt, order_id)
    return {"item": order.item, "receipt": receipt.text if receipt else None}


@queue.task
async def sum_orders(session: AsyncSession, at_least: int) -> dict[str, int]:
    chosen = select(func.count(), func.sum(Order.cents)).where(Order.cents >= at_least)
    orders, cents = (await session.execute(chosen)).one()
    return {"orders": orders, "cents": cents or 0}


@app.post("/reports", status_code=202)
async def order_report(at_least: int, session: RequestSession) -> dict[str, str]:
    job = await sum_orders.enqueue_async(session, at_least)
    await session.commit()
    return {"token": queue.token(job)}


@app.get("/reports/{token}")
async def show_report(token: str) -> dict[str, Any]:
    try:
        state = await queue.wait_async(queue.job_id(token), timeout=timedelta(seconds=10))
    except WaitTimeout as error:
        state = error.state
    except (BadToken, JobNotFound) as error:
        raise HTTPException(404) from error
    return {"status": state.status, "result": state.result}


def may_operate(request: Request) -> Access | Response:
    given, password = request.authorization, os.environ["OPERATOR_PASSWORD"]
    if given is not None and compare_digest(given.password or "", password):
        return Access(user=given.username or "operator", rights=RIGHTS)
    return Response("A password, please.", 401, {"WWW-Authenticate": 'Basic realm="shop"'})


dashboard = queue.dashboard(authorize=may_operate)
app.mount("/ops", WSGIMiddleware(dashboard.wsgi))  # type: ignore[arg-type]
