"""The version of the tables."""

from typing import Any

from sqlalchemy import CheckConstraint, Integer, text
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base


class SchemaVersion(Base):
    """The one row with the revision of the tables, whichever migration history wrote it."""

    __tablename__ = "schema_version"
    __table_args__: Any = (CheckConstraint("only_row", name="schema_version_only_row"),)

    only_row: Mapped[bool] = mapped_column(primary_key=True, server_default=text("true"))
    version: Mapped[int] = mapped_column(Integer)
    oldest_code: Mapped[int] = mapped_column(Integer)
    """The lowest version for which a running worker may have been written."""
