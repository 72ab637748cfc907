"""Brings the tables to the version this code is written for, or says what to run.

The revisions live in :file:`pgqueue/migrations`.  They run in a history of their own
(:func:`upgrade_database`), or inside the application's own Alembic history, where a revision
calls :func:`upgrade`.
"""

from dataclasses import dataclass

from sqlalchemy import Connection, Engine, func, select, text

from pgqueue.errors import SchemaError, SchemaMissing, SchemaTooNew, SchemaTooOld
from pgqueue.models.base import SCHEMA
from pgqueue.models.fleet import SchemaVersion

SCHEMA_VERSION = 1
"""What this code is written for.  Version N is brought by revision ``pgqueue_000N``."""

_UPGRADE_COMMAND = "pgqueue --app module:queue upgrade"


def upgrade_database(engine: Engine) -> None:
    """Create or upgrade the tables; any number of processes may do so at once."""
    # READ COMMITTED: whoever waited for the lock must see what the one before it has done.
    with engine.execution_options(isolation_level="READ COMMITTED").begin() as connection:
        _wait_for_other_upgrades(connection)
        found = _read_state(connection)
        if found.version is None or found.version < SCHEMA_VERSION:
            _refuse_other_histories(found)
            _upgrade_to_head(connection)
        verify(connection)


def verify(connection: Connection) -> None:
    """Raise an error that says what to run, unless this code can work with the tables."""
    found = _read_state(connection)
    if found.version is None or found.oldest_code is None:
        raise _missing(found)
    if found.version < SCHEMA_VERSION:
        raise SchemaTooOld(
            f"The pgqueue tables in schema {SCHEMA} have version {found.version}, and this code "
            f"needs version {SCHEMA_VERSION}. {_how_to_upgrade(found)}"
        )
    if found.oldest_code > SCHEMA_VERSION:
        raise SchemaTooNew(
            f"The pgqueue tables in schema {SCHEMA} serve code of version {found.oldest_code} "
            f"and later, and this code has version {SCHEMA_VERSION}: "
            "run `pip install -U sqlalchemy-pgqueue`."
        )
    if not found.is_claimable:
        raise SchemaError(
            f"{SCHEMA}.message_queue is partitioned or has child tables. A claim names messages "
            "by their place (ctid), and would take the rows of a neighbour: make it a plain table."
        )


@dataclass(frozen=True)
class _State:
    """What a database holds of pgqueue; the version is None where its row is missing."""

    tables: frozenset[str]
    is_claimable: bool
    version: int | None
    oldest_code: int | None
    revision: str | None
    """Where the stand-alone history stands; None when the host's history brings the tables."""


def _read_state(connection: Connection) -> _State:
    """Asks the catalog first: a missing table must not fail the caller's transaction."""
    found = connection.execute(_TABLES, {"schema": SCHEMA})
    plain = {table.name: table.is_plain for table in found}
    row = connection.execute(_VERSION).first() if "schema_version" in plain else None
    revision = connection.scalar(_REVISION) if "alembic_version" in plain else None
    return _State(
        tables=frozenset(plain),
        is_claimable=plain.get("message_queue", False),
        version=row.version if row else None,
        oldest_code=row.oldest_code if row else None,
        revision=revision,
    )


_TABLES = text(
    """
    SELECT relname AS name,
           relkind = 'r'
           AND NOT EXISTS (SELECT FROM pg_inherits WHERE inhparent = pg_class.oid) AS is_plain
    FROM pg_class
    JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE nspname = :schema
      AND relname IN ('message_queue', 'schema_version', 'alembic_version')
    """
)
_VERSION = select(SchemaVersion.version, SchemaVersion.oldest_code)
_REVISION = text(f'SELECT version_num FROM "{SCHEMA}".alembic_version')  # noqa: S608  # checked where it is read


def _wait_for_other_upgrades(connection: Connection) -> None:
    key = func.hashtextextended(f"pgqueue upgrades the schema {SCHEMA}", 0)
    connection.execute(select(func.pg_advisory_xact_lock(key)))


def _refuse_other_histories(found: _State) -> None:
    if found.version is not None and found.revision is None:
        raise SchemaError(
            f"The pgqueue tables in schema {SCHEMA} have version {found.version} and belong to "
            f"your application's own Alembic history. {_how_to_upgrade(found)}"
        )
    if found.version is None and found.revision is not None:
        raise _missing(found)


def _upgrade_to_head(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "pgqueue:migrations")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _missing(found: _State) -> SchemaError:
    if "schema_version" in found.tables:
        return SchemaError(
            f"{SCHEMA}.schema_version has lost its row. Insert it again: version {SCHEMA_VERSION} "
            f"and oldest_code {SCHEMA_VERSION}, if the tables were up to date."
        )
    if found.revision is not None:
        return SchemaError(
            f"{SCHEMA}.alembic_version says {found.revision}, but the tables are gone. "
            f"DROP SCHEMA {SCHEMA} CASCADE, then run `{_UPGRADE_COMMAND}`."
        )
    return SchemaMissing(
        f"There are no pgqueue tables in schema {SCHEMA} of this database. "
        f"Run `{_UPGRADE_COMMAND}`, or write a revision in your application's own Alembic "
        f"history that calls `pgqueue.schema.upgrade(to={SCHEMA_VERSION})` and run that."
    )


def _how_to_upgrade(found: _State) -> str:
    if found.revision is not None:
        return f"Run `{_UPGRADE_COMMAND}`."
    return (
        "Write a revision there that calls "
        f"`pgqueue.schema.upgrade(to={SCHEMA_VERSION}, base={found.version})` and run it."
    )
