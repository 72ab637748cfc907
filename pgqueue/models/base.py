"""The declarative base, with a schema of its own, apart from the application's tables, and the
types of columns whose values have a range."""

import os
import re
from datetime import datetime
from typing import Any, ClassVar, cast

from sqlalchemy import DateTime, MetaData, SmallInteger, Table, Text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.types import TypeEngine

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


class Domain(TypeEngine[Any]):
    """The type of a column whose values have a range: a domain of PostgreSQL, in our schema.

    A CHECK constraint of a table is parsed anew by each statement that writes the table, whichever
    columns it writes.  The condition of a domain is prepared once in a session, and checked where a
    value of the domain is written.  Parameters are sent as the type below the domain.
    https://www.postgresql.org/docs/current/sql-createdomain.html
    """

    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        compiles(cls, "postgresql")(_name_of_domain)


def _name_of_domain(domain: Domain, _: object, **__: Any) -> str:
    return f"{SCHEMA}.{domain.name}"


class FiniteTime(Domain, DateTime):
    """A time within the range of Python's datetime, so that reading it never fails."""

    name = "finite_time"

    def __init__(self) -> None:
        super().__init__(timezone=True)


class Priority(Domain, SmallInteger):
    name = "priority"


class Attempts(Domain, SmallInteger):
    """A counter of a message.  One that overflows would fail the claim of all.

    A crash may follow the last attempt, so its maximum is above that of :class:`MaxAttempts`.
    """

    name = "attempts"


class MaxAttempts(Domain, SmallInteger):
    name = "max_attempts"


class Ended(Domain, Text):
    """How a job or a batch has ended: succeeded, failed or cancelled."""

    name = "outcome"


class Base(DeclarativeBase):
    """Has its own metadata: the application's autogenerate does not see these tables."""

    metadata: ClassVar[MetaData] = MetaData(schema=SCHEMA)
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: Text,
        datetime: FiniteTime(),
        dict[str, Any]: JSONB(none_as_null=True),
        list[str]: JSONB(none_as_null=True),
    }


def table_of(model: type[Base]) -> Table:
    return cast(Table, model.__table__)  # declared as FromClause, always a Table here
