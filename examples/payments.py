"""The application of all examples: a shop that takes payments and sends receipts.

A payment is a row in the shop's database, and belongs to a transaction.  A receipt is a mail,
which a rollback cannot undo.  A table, written on a separate connection, takes the place of the
mail server.
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
    """No constraint prevents a second payment of an order; the queue must prevent it."""

    __tablename__ = "payments"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    order_id: Mapped[int]


class Receipt(Base):
    __tablename__ = "receipts"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    order_id: Mapped[int]


class UnknownOrder(Exception): ...


def pay(connection: Connection | Session, order_id: int) -> None:
    """Insert the payment of an order, in the caller's transaction."""
    if order_id < 0:
        raise UnknownOrder(f"there is no order {order_id}")
    connection.execute(insert(Payment), {"order_id": order_id})


def send_receipt(order_id: int) -> None:
    """Send a receipt by mail.  A rollback does not undo it."""
    if order_id < 0:
        raise UnknownOrder(f"there is no order {order_id}")
    with mail_server(database_url()).begin() as connection:
        connection.execute(insert(Receipt), {"order_id": order_id})


def database_url() -> str:
    """Return ``DATABASE_URL`` with the driver psycopg."""
    url = make_url(os.environ["DATABASE_URL"]).set(drivername="postgresql+psycopg")
    return url.render_as_string(hide_password=False)


@cache
def mail_server(url: str) -> Engine:
    return create_engine(url, poolclass=NullPool)


def open_shop() -> Engine:
    """Create the shop's tables and return the engine."""
    engine = create_engine(database_url())
    Base.metadata.create_all(engine)
    return engine
