"""The work that the examples share: a shop that takes payments and sends receipts.

A payment is a row of the shop's own database and belongs to a transaction.  A receipt is a mail:
what is sent is sent, whatever becomes of the sender.  The mail server is played by a table that
is written on a connection of its own.
"""

import os
from functools import cache

from sqlalchemy import (
    Connection,
    Engine,
    Identity,
    NullPool,
    create_engine,
    insert,
    make_url,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column


class Base(DeclarativeBase): ...


class Payment(Base):
    """Nothing here keeps an order from being paid twice: that is the queue's part."""

    __tablename__ = "payments"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    order_id: Mapped[int]


class Receipt(Base):
    __tablename__ = "receipts"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    order_id: Mapped[int]


class UnknownOrder(Exception): ...


def pay(connection: Connection | Session, order_id: int) -> None:
    """Take the money for an order, in the caller's transaction."""
    if order_id < 0:
        raise UnknownOrder(f"there is no order {order_id}")
    connection.execute(insert(Payment), {"order_id": order_id})


def send_receipt(order_id: int) -> None:
    """Mail a receipt, which no rollback takes back."""
    if order_id < 0:
        raise UnknownOrder(f"there is no order {order_id}")
    with mail_server(database_url()).begin() as connection:
        connection.execute(insert(Receipt), {"order_id": order_id})


def database_url() -> str:
    """``DATABASE_URL``, on the driver that pgqueue brings along."""
    url = make_url(os.environ["DATABASE_URL"]).set(drivername="postgresql+psycopg")
    return url.render_as_string(hide_password=False)


@cache
def mail_server(url: str) -> Engine:
    return create_engine(url, poolclass=NullPool)


def open_shop() -> Engine:
    """The shop's database, with its tables."""
    engine = create_engine(database_url())
    Base.metadata.create_all(engine)
    return engine
