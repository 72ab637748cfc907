"""For applications with Alembic: their own revisions call ours, in one common history."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy import text

from pgqueue.errors import SchemaError, SchemaTooNew
from pgqueue.models.base import SCHEMA
from pgqueue.repository.tables import SEARCH_PATH
from pgqueue.schema import citus
from pgqueue.schema.state import SCHEMA_VERSION, installed, read_state, wait_for_other_upgrades

if TYPE_CHECKING:
    from alembic.script import Script


def upgrade(*, to: int, base: int | None = None) -> None:
    """Upgrade the tables to a version, inside a revision of the application's own history.

    Steps that the database already has are skipped.  A node of Citus gets its number here, unless
    offline; other nodes by ``pgqueue upgrade --nodes`` afterwards.

    Args:
        to: The version.
        base: Offline (``--sql``), where there is no database to query: the version of the database,
            0 if there are no tables yet.

    Raises:
        SchemaError: This code does not know the version, or offline ``base`` is missing.
    """
    from alembic import op

    _refuse_unknown(to, lowest=1)
    found = _version_found("upgrade", to=to, base=base, offline_default=0)
    with _settings_of_ours():
        for step in _our_revisions()[found:to]:
            step.module.upgrade()
        if not op.get_context().as_sql:
            citus.set_number(op.get_bind(), citus.group_of(op.get_bind()))


def downgrade(*, to: int, base: int | None = None) -> None:
    """Downgrade the tables to a version, inside a revision of the application's own history.

    Args:
        to: The version.  Version 0 has no tables.
        base: Offline, the version of the database, by default the newest.

    Raises:
        SchemaError: This code does not know the version, or offline ``base`` is missing.
    """
    _refuse_unknown(to, lowest=0)
    found = _version_found("downgrade", to=to, base=base, offline_default=SCHEMA_VERSION)
    if found > SCHEMA_VERSION:
        raise SchemaTooNew(
            f"The pgqueue tables have version {found}, and {installed()} knows the way back "
            f"from version {SCHEMA_VERSION}. Run `pip install -U sqlalchemy-pgqueue`."
        )
    with _settings_of_ours():
        for step in reversed(_our_revisions()[to:found]):
            step.module.downgrade()


def include_name(
    name: str | None,
    type_: str,
    parent_names: Mapping[Any, str | None],  # Any: Alembic's own key type is not public
) -> bool:
    """Keep pgqueue's schema out of autogenerate, for applications with ``include_schemas=True``.

    Alembic calls this before it reads a schema, and reads nothing of a schema that is refused.

    Args:
        name: The name of what Alembic has found.
        type_: Of which type it is, such as "schema".
        parent_names: The names of what it belongs to.

    Returns:
        False for pgqueue's schema.
    """
    return not (type_ == "schema" and name == SCHEMA)


def _refuse_unknown(to: int, *, lowest: int) -> None:
    if to < lowest:
        raise SchemaError(f"pgqueue has no version {to} to go to: {lowest} is the lowest here.")
    if to > SCHEMA_VERSION:
        raise SchemaError(
            f"This revision wants version {to} of the pgqueue tables, and {installed()} knows "
            f"versions up to {SCHEMA_VERSION}. Run `pip install -U sqlalchemy-pgqueue`."
        )


def _version_found(verb: str, *, to: int, base: int | None, offline_default: int) -> int:
    from alembic import op

    if not op.get_context().as_sql:
        connection = op.get_bind()
        wait_for_other_upgrades(connection)
        found = read_state(connection)
        if damage := found.damage():
            raise damage
        if found.revision is not None:
            # Leave the tables to the host's history: two would each run the next revision.
            connection.execute(
                text(
                    f"""
                    DELETE FROM "{SCHEMA}".alembic_version
                    WHERE pg_catalog.starts_with(version_num, 'pgqueue_')
                    """  # noqa: S608  # the schema name is checked where it is read
                )
            )
        return found.version or 0
    if base is not None:
        _refuse_unknown(base, lowest=0)
        return base
    if abs(offline_default - to) > 1:
        raise SchemaError(
            f"pgqueue.schema.{verb}(to={to}) takes more than one step, and offline there is no "
            f"database to ask for the first: say pgqueue.schema.{verb}(to={to}, base=...)."
        )
    return offline_default


@contextmanager
def _settings_of_ours() -> Iterator[None]:
    """Set our search_path while the tables and views are created: names are resolved only then.
    Citus must leave the tables alone.

    The rest of the host's revision gets its own settings back.  Transaction settings keep them,
    because offline they cannot be queried.
    """
    from alembic import op

    names = ("search_path", *citus.SETTINGS)
    for name in names:
        op.execute(_copy(name, f"pgqueue.{name}"))
    op.execute(f"SET LOCAL search_path = {SEARCH_PATH}")
    for name in citus.SETTINGS:
        op.execute(f"SET LOCAL {name} = off")
    yield
    for name in names:
        op.execute(_copy(f"pgqueue.{name}", name))


def _copy(name: str, to: str) -> str:
    value = f"pg_catalog.current_setting('{name}', true)"  # NULL if there is no such setting
    return f"SELECT pg_catalog.set_config('{to}', {value}, true)"


def _our_revisions() -> list[Script]:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", "pgqueue:migrations")
    newest_first = ScriptDirectory.from_config(config).walk_revisions()
    return list(newest_first)[::-1]
