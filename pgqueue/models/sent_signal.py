"""Signals, for which jobs wait."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Identity, Index, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base


class Signal(Base):
    """A fact that jobs wait for.  It is not used up: any number of jobs may receive it."""

    __tablename__ = "signals"
    __table_args__: Any = (
        Index("signals_name_key", "name", "key", "id"),
        Index("signals_undelivered", "id", postgresql_where=text("NOT delivered")),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    name: Mapped[str]
    key: Mapped[str]
    """Of what it is, for example the id of an order; may be empty."""
    payload: Mapped[Any] = mapped_column(JSONB(none_as_null=True), nullable=True)
    created_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
    delivered: Mapped[bool] = mapped_column(server_default=text("false"))
    """Whether no job sleeps any more that waits for it."""
