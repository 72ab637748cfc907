"""The declarative base, in a schema of its own so that a host's tables and ours never mix."""

import os
import re
from datetime import datetime
from typing import Any

from sqlalchemy import DateTime, MetaData, Text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase

from pgqueue.errors import OptionError


def _schema_name() -> str:
    """Read once at import: a translate map would not reach the application's own sessions."""
    name = os.environ.get("PGQUEUE_SCHEMA", "pgqueue")
    if not re.fullmatch(r"(?!pg_|public$)[a-z_][a-z0-9_]{0,62}", name):
        raise OptionError(
            f"PGQUEUE_SCHEMA={name!r} is not a schema name pgqueue accepts: use at most 63 "
            "lower-case letters, digits and underscores, not `public` and not `pg_...`"
        )
    return name


SCHEMA = _schema_name()

STARTS_IN_TIME = "run_at BETWEEN '2000-01-01 00:00:00+00' AND '9999-12-31 00:00:00+00'"
"""Finite, and within what Python's datetime can hold: a claim must never fail to read it."""


class Base(DeclarativeBase):
    """Metadata of our own: autogenerate of the host never sees these tables."""

    metadata = MetaData(schema=SCHEMA)
    type_annotation_map = {
        str: Text,
        datetime: DateTime(timezone=True),
        dict[str, Any]: JSONB,
        list[str]: JSONB,
    }
