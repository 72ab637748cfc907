"""The versions of applications that workers have run."""

from datetime import datetime

from sqlalchemy import text
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base


class Deploy(Base):
    """A version of an application, as ``PgQueue(version=...)`` names it."""

    __tablename__ = "deploys"

    application: Mapped[str] = mapped_column(primary_key=True)
    """Empty for an application without a name."""
    version: Mapped[str] = mapped_column(primary_key=True)
    first_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
    """When a worker of this version has written its first statistics."""
