"""The declarative base, with a schema of its own, apart from the application's tables."""

import os
import re
from datetime import datetime
from typing import Any, cast

from sqlalchemy import DateTime, MetaData, Table, Text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase

from pgqueue.errors import OptionError


def _schema_name() -> str:
    """Read once at import: a translate map would not apply to the application's sessions."""
    name = os.environ.get("PGQUEUE_SCHEMA", "pgqueue")
    if not re.fullmatch(r"(?!pg_|public$)[a-z_][a-z0-9_]{0,62}", name):
        raise OptionError(
            f"PGQUEUE_SCHEMA={name!r} is not a schema name pgqueue accepts: use at most 63 "
            "lower-case letters, digits and underscores, not `public` and not `pg_...`"
        )
    return name


SCHEMA = _schema_name()

STARTS_IN_TIME = "run_at BETWEEN '2000-01-01 00:00:00+00' AND '9999-12-31 00:00:00+00'"
"""Finite, and within the range of Python's datetime, so that a claim can always read it."""


def times_in_range(*columns: str) -> str:
    """A condition on columns that hold times: each is NULL or one that Python can read."""
    return " AND ".join(STARTS_IN_TIME.replace("run_at", column) for column in columns)


class Base(DeclarativeBase):
    """Has its own metadata: the application's autogenerate does not see these tables."""

    metadata = MetaData(schema=SCHEMA)
    type_annotation_map = {
        str: Text,
        datetime: DateTime(timezone=True),
        dict[str, Any]: JSONB(none_as_null=True),
        list[str]: JSONB(none_as_null=True),
    }


def table_of(model: type[Base]) -> Table:
    return cast(Table, model.__table__)  # declared as FromClause, always a Table here
