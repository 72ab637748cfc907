"""What PostgreSQL itself says about the tables of a schema, one sentence per fact."""

import pytest
from sqlalchemy import Connection, create_engine, inspect, text

from pgqueue.models.base import SCHEMA

FACTS = text(
    """
    SELECT format('column %s.%s %s null:%s identity:%s default %s', relname, attname,
                  format_type(atttypid, atttypmod), NOT attnotnull, attidentity,
                  pg_get_expr(adbin, adrelid))
    FROM pg_class
    JOIN pg_attribute ON attrelid = pg_class.oid AND attnum > 0 AND NOT attisdropped
    LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
    WHERE relnamespace = to_regnamespace(:schema) AND relkind IN ('r', 'v')
    UNION ALL
    SELECT format('constraint %s.%s %s', relname, conname, pg_get_constraintdef(pg_constraint.oid))
    FROM pg_constraint JOIN pg_class ON pg_class.oid = conrelid
    WHERE relnamespace = to_regnamespace(:schema) AND contype <> 'n'
    UNION ALL
    SELECT format('index %s', pg_get_indexdef(indexrelid))
    FROM pg_index JOIN pg_class ON pg_class.oid = indrelid
    WHERE relnamespace = to_regnamespace(:schema)
    UNION ALL
    SELECT format('domain %s %s', typname, pg_get_constraintdef(pg_constraint.oid))
    FROM pg_constraint JOIN pg_type ON pg_type.oid = contypid
    WHERE typnamespace = to_regnamespace(:schema)
    UNION ALL
    SELECT format('storage %s %s', relname, reloptions)
    FROM pg_class
    WHERE relnamespace = to_regnamespace(:schema) AND relkind = 'r' AND reloptions IS NOT NULL
    UNION ALL
    SELECT format('view %s as %s', relname, pg_get_viewdef(oid))
    FROM pg_class
    WHERE relnamespace = to_regnamespace(:schema) AND relkind = 'v'
    """
)


def facts(url: str, schema: str = "pgqueue") -> set[str]:
    """Everything that makes up the tables of a schema, but for the history's own table."""
    engine = create_engine(url)
    with engine.connect() as connection:
        found = read_facts(connection, schema)
    engine.dispose()
    return found


def read_facts(connection: Connection, schema: str = "pgqueue") -> set[str]:
    found = connection.scalars(FACTS, {"schema": schema})
    return {fact for fact in found if "alembic_version" not in fact}


def needs_listed_schema(connection: Connection) -> None:
    """Skip where SQLAlchemy takes every schema whose name begins with pg for PostgreSQL's own.

    So do versions up to 2.0.52: https://github.com/sqlalchemy/sqlalchemy/issues/13472
    """
    if SCHEMA not in inspect(connection).get_schema_names():
        pytest.skip(f"this SQLAlchemy does not list the schema {SCHEMA}: its issue 13472")
