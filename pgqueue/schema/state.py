"""The state of pgqueue's tables in a database, and whether this code can work with them."""

from dataclasses import dataclass
from importlib import metadata

from sqlalchemy import Connection, select, text

from pgqueue.errors import SchemaError, SchemaMissing, SchemaTooNew, SchemaTooOld
from pgqueue.models.base import SCHEMA
from pgqueue.models.schema_version import SchemaVersion
from pgqueue.repository.row_security import OURS, rows_hidden
from pgqueue.repository.tables import pg
from pgqueue.schema import citus

SCHEMA_VERSION = 1
"""The version this code is written for.  Revision ``pgqueue_000N`` creates version N."""

BY_PLACE = ("message_queue", "leases")

_UPGRADE_COMMAND = "pgqueue --app module:queue upgrade"


def verify(connection: Connection) -> None:
    """Check that this code can work with the tables.

    Args:
        connection: A connection to the database.

    Raises:
        SchemaMissing: There are no tables.
        SchemaTooOld: The tables are older than this code needs.
        SchemaTooNew: The tables are newer than this code knows.
        SchemaError: The tables are no plain tables.
    """
    found = read_state(connection)
    if damage := found.damage():
        raise damage
    if found.version is None or found.oldest_code is None:
        database = connection.scalar(select(pg.current_database()))
        raise SchemaMissing(
            f"There are no pgqueue tables in schema {SCHEMA} of the database {database}. "
            f"Run `{_UPGRADE_COMMAND}`, in a Flask application `flask pgqueue upgrade`. Or write a "
            "revision in your application's own Alembic history with `pgqueue revision`, which "
            f"calls `pgqueue.schema.upgrade(to={SCHEMA_VERSION})`, and run it."
        )
    if found.version < SCHEMA_VERSION:
        raise found.too_old()
    if found.oldest_code > SCHEMA_VERSION:
        raise SchemaTooNew(
            f"The pgqueue tables in schema {SCHEMA} have version {found.version}, which serves "
            f"code of version {found.oldest_code} and later, and this code has version "
            f"{SCHEMA_VERSION}. Run `pip install -U sqlalchemy-pgqueue`."
        )
    if found.not_plain:
        raise SchemaError(
            f"{SCHEMA}.{found.not_plain[0]} is missing, partitioned, or has child tables. Its rows "
            "are named by their place (ctid), and a neighbour's would be taken: make it a plain "
            "table."
        )
    if distributed := citus.distributed_tables(connection):
        table = f"{SCHEMA}.{distributed[0]}"
        raise SchemaError(
            f"Citus has distributed {table}, and nothing of pgqueue works on such a table: run "
            f"SELECT undistribute_table('{table}') for each of {', '.join(distributed)}, or use "
            "another PGQUEUE_SCHEMA."
        )


@dataclass(frozen=True)
class SchemaState:
    """What a database contains of pgqueue; the version is None if its row is missing."""

    tables: frozenset[str]
    not_plain: tuple[str, ...]
    """Tables whose rows are deleted by ctid and that are not plain tables."""
    version: int | None
    oldest_code: int | None
    revision: str | None
    """The revision of our own history; None if the application's history upgrades the tables."""

    def damage(self) -> SchemaError | None:
        """The error for tables that no upgrade can take on: those from before the first release,
        and those that have lost their version; None for a new database."""
        if self.version is not None and self.oldest_code is not None:
            # A revision serves the code of the version before, and no older code.
            if self.version - self.oldest_code <= 1:
                return None
            return SchemaError(
                f"The pgqueue tables in schema {SCHEMA} are from before the first release, and no "
                "revision upgrades them. When their jobs are done, run `DROP SCHEMA "
                f'"{SCHEMA}" CASCADE` and `{_UPGRADE_COMMAND}`; in a history of your own, let one '
                f"revision call `pgqueue.schema.upgrade(to={SCHEMA_VERSION}, base=0)`."
            )
        if "schema_version" in self.tables:
            return SchemaError(
                f"{SCHEMA}.schema_version has lost its row, as after a TRUNCATE or in a copy "
                f"without data. Run `{_UPGRADE_COMMAND}`, which writes the row again if the tables "
                "are those of this version."
            )
        if self.revision is not None:
            return SchemaError(
                f"{SCHEMA}.alembic_version says {self.revision}, but the tables are gone. "
                "Delete that row, and run this again."
            )
        return None

    def too_old(self) -> SchemaTooOld:
        """Name the command that upgrades the tables in the history that created them."""
        way_up = f"Run `{_UPGRADE_COMMAND}`."
        if self.revision is None:
            way_up = (
                "Your application's own Alembic history brought them: write a revision there that "
                f"calls `pgqueue.schema.upgrade(to={SCHEMA_VERSION}, base={self.version})`, "
                "and run it."
            )
        return SchemaTooOld(
            f"The pgqueue tables in schema {SCHEMA} have version {self.version}, and this code "
            f"needs version {SCHEMA_VERSION}. {way_up}"
        )


def read_state(connection: Connection) -> SchemaState:
    """Queries the catalog first: a missing table must not fail the caller's transaction.

    Raises RowsHidden if row security hides rows from this role, such as that of the version.
    """
    found = connection.execute(_TABLES).all()
    if any(table.is_hidden for table in found):
        raise rows_hidden(connection)
    plain = {table.name: table.is_plain for table in found}
    row = connection.execute(_VERSION).first() if "schema_version" in plain else None
    revision = connection.scalar(_REVISION) if "alembic_version" in plain else None
    return SchemaState(
        tables=frozenset(plain),
        not_plain=tuple(name for name in BY_PLACE if not plain.get(name, False)),
        version=row.version if row else None,
        oldest_code=row.oldest_code if row else None,
        revision=revision,
    )


def wait_for_other_upgrades(connection: Connection) -> None:
    """Take a lock until the transaction ends, in whichever history the upgrade runs."""
    key = pg.hashtextextended(f"pgqueue upgrades schema {SCHEMA}", 0)
    connection.execute(select(pg.pg_advisory_xact_lock(key)))


def installed() -> str:
    """The name and version of the distribution, for messages."""
    try:
        return f"the installed sqlalchemy-pgqueue {metadata.version('sqlalchemy-pgqueue')}"
    except metadata.PackageNotFoundError:
        return "this checkout of sqlalchemy-pgqueue"


_TABLES = text(
    f"""
    SELECT relname AS name,
           relkind = 'r'
           AND NOT EXISTS (SELECT FROM pg_catalog.pg_inherits
                           WHERE inhparent = pg_class.oid) AS is_plain,
           pg_catalog.row_security_active(pg_class.oid) AS is_hidden
    FROM pg_catalog.pg_class
    JOIN pg_catalog.pg_namespace ON pg_namespace.oid = relnamespace
    WHERE nspname = '{SCHEMA}'
      AND relname IN ({OURS}, 'alembic_version')
    """  # noqa: S608  # the schema name is checked where it is read
)
_VERSION = select(SchemaVersion.version, SchemaVersion.oldest_code)
# A host may keep its own history's version table in the same schema.
_REVISION = text(
    f"""
    SELECT version_num FROM "{SCHEMA}".alembic_version
    WHERE pg_catalog.starts_with(version_num, 'pgqueue_')
    """  # noqa: S608  # the schema name is checked where it is read
)
