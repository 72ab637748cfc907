"""The rights on the tables: five roles, each with the fewest that its work needs.

The server's administrator creates the roles; the functions here grant and revoke their rights.
After a grant a role has exactly the rights written here, whatever it had before, so the call can be
repeated.  It must be repeated after each upgrade of the tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from sqlalchemy import Connection, text

from pgqueue.models.base import SCHEMA
from pgqueue.schema.roles import QUOTE, RIGHTS, Roles

ONE_RIGHT = re.compile(r"([A-Z]+)(?: \(([^)]*)\))?")
"""A privilege of :data:`RIGHTS`, and its columns."""


def grant(
    *,
    worker: str | None = None,
    enqueue: str | None = None,
    dashboard: str | None = None,
    migrator: str | None = None,
    owner: str | None = None,
    connection: Connection | None = None,
) -> None:
    """Grant roles their rights on the tables, in one of your revisions or on a connection.

    Works offline (``--sql``) too.  Repeat the call after each upgrade of the tables.

    Args:
        worker: The role that runs jobs.
        enqueue: The role that only writes jobs.
        dashboard: The role that reads jobs without arguments, results and tracebacks, and may
            cancel, requeue, run now, change priorities and times, pause, set limits and make
            workers quiet.
        migrator: The role that upgrades, as a member of ``owner``.
        owner: The role that becomes the owner of the tables.
        connection: The connection; by default that of the running revision.

    Raises:
        OptionError: A name cannot be that of a role, or no role is named.
    """
    roles = Roles(
        worker=worker, enqueue=enqueue, dashboard=dashboard, migrator=migrator, owner=owner
    )
    _execute(grant_statements(roles), connection)


def revoke(
    *,
    worker: str | None = None,
    enqueue: str | None = None,
    dashboard: str | None = None,
    migrator: str | None = None,
    owner: str | None = None,
    connection: Connection | None = None,
) -> None:
    """Undo :func:`grant`: the roles keep no rights on the tables.

    The tables of ``owner`` pass to the role that runs this, and ``migrator`` is removed from
    ``owner``.

    Args:
        worker: As given to :func:`grant`.
        enqueue: As given to :func:`grant`.
        dashboard: As given to :func:`grant`.
        migrator: As given to :func:`grant`.
        owner: As given to :func:`grant`.
        connection: The connection; by default that of the running revision.

    Raises:
        OptionError: A name cannot be that of a role, or no role is named.
    """
    roles = Roles(
        worker=worker, enqueue=enqueue, dashboard=dashboard, migrator=migrator, owner=owner
    )
    _execute(revoke_statements(roles), connection)


def grant_statements(roles: Roles) -> list[str]:
    """Return the SQL of :func:`grant`, to run in one transaction."""
    return [
        *_owned_by(_literal(roles.owner) if roles.owner else None),
        *_membership(roles),
        # Revoke from all roles first: one role may serve two purposes.
        *_nothing_for(roles),
        *_rights_of(roles),
    ]


def revoke_statements(roles: Roles) -> list[str]:
    """Return the SQL of :func:`revoke`, to run in one transaction."""
    members = []
    if roles.migrator and roles.owner:
        members.append(f"REVOKE {_quoted(roles.owner)} FROM {_quoted(roles.migrator)}")
    return [*_nothing_for(roles), *_owned_by("current_user" if roles.owner else None), *members]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _owned_by(owner: str | None) -> Iterator[str]:
    """Change the owner of schema, tables, domains, functions and views; ``owner`` is an expression.

    The schema comes first: the owner of a table must have the right to create one there.
    """
    if owner is None:
        return
    schema = _literal(SCHEMA)
    yield _run_each(
        f"""
        SELECT pg_catalog.concat('ALTER ', kind, ' ', name, ' OWNER TO ',
                                 pg_catalog.quote_ident({owner}))
        FROM (SELECT 'SCHEMA', pg_catalog.quote_ident(nspname), nspowner
              FROM pg_catalog.pg_namespace
              WHERE nspname = {schema}
              UNION ALL
              SELECT 'TABLE',
                     pg_catalog.concat(pg_catalog.quote_ident(nspname), '.',
                                       pg_catalog.quote_ident(relname)),
                     relowner
              FROM pg_catalog.pg_class
              JOIN pg_catalog.pg_namespace ON pg_namespace.oid = relnamespace
              WHERE nspname = {schema} AND relkind IN ('r', 'p', 'v')
              UNION ALL
              SELECT 'TYPE',
                     pg_catalog.concat(pg_catalog.quote_ident(nspname), '.',
                                       pg_catalog.quote_ident(typname)),
                     typowner
              FROM pg_catalog.pg_type
              JOIN pg_catalog.pg_namespace ON pg_namespace.oid = typnamespace
              WHERE nspname = {schema} AND typtype = 'd'
              UNION ALL
              SELECT 'FUNCTION', CAST(CAST(pg_proc.oid AS regprocedure) AS text), proowner
              FROM pg_catalog.pg_proc
              JOIN pg_catalog.pg_namespace ON pg_namespace.oid = pronamespace
              WHERE nspname = {schema}) AS owned (kind, name, owner)
        WHERE pg_catalog.pg_get_userbyid(owner) <> {owner}
        ORDER BY kind
        """  # noqa: S608  # literals, quoted above
    )


def _membership(roles: Roles) -> Iterator[str]:
    """Only if it is missing: a migrator that runs this itself may not grant it."""
    if roles.migrator and roles.owner:
        migrator, owner = _literal(roles.migrator), _literal(roles.owner)
        yield _run_each(
            f"""
            SELECT pg_catalog.concat('GRANT ', pg_catalog.quote_ident({owner}),
                                     ' TO ', pg_catalog.quote_ident({migrator}))
            WHERE NOT pg_catalog.pg_has_role({migrator}, {owner}, 'MEMBER')
            """  # literals, quoted above
        )


def _nothing_for(roles: Roles) -> Iterator[str]:
    # Revoking a right on a table also revokes it on the columns.
    for name in roles.users.values():
        yield f'REVOKE ALL ON ALL TABLES IN SCHEMA "{SCHEMA}" FROM {_quoted(name)}'
        yield f'REVOKE ALL ON ALL FUNCTIONS IN SCHEMA "{SCHEMA}" FROM {_quoted(name)}'
        yield f'REVOKE ALL ON ALL SEQUENCES IN SCHEMA "{SCHEMA}" FROM {_quoted(name)}'
        yield f'REVOKE ALL ON SCHEMA "{SCHEMA}" FROM {_quoted(name)}'


def _rights_of(roles: Roles) -> Iterator[str]:
    """Grant rights on existing tables and columns; skip those of a later version.

    So an application's revision can be run again years later, from the beginning.
    """
    if not roles.users:
        return
    for name in roles.users.values():
        yield f'GRANT USAGE ON SCHEMA "{SCHEMA}" TO {_quoted(name)}'
    for name in filter(None, (roles.worker, roles.enqueue)):
        yield f'GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA "{SCHEMA}" TO {_quoted(name)}'
    wanted = ",\n                ".join(
        f"({', '.join(map(_literal, (name, table, privilege, '{' + columns + '}')))})"
        for purpose, name in roles.users.items()
        for table, rights in RIGHTS.items()
        for privilege, columns in ONE_RIGHT.findall(getattr(rights, purpose))
    )
    yield _run_each(
        f"""
        SELECT pg_catalog.concat(
                   'GRANT ', privilege,
                   '(' || pg_catalog.string_agg(pg_catalog.quote_ident(attname), ', '
                                                ORDER BY attnum)
                       FILTER (WHERE columns <> '{{}}') || ')',
                   ' ON ', pg_catalog.quote_ident({_literal(SCHEMA)}), '.',
                   pg_catalog.quote_ident(relname),
                   ' TO ', pg_catalog.quote_ident(role))
        FROM (VALUES
                {wanted}
             ) AS wanted (role, name, privilege, columns)
        JOIN pg_catalog.pg_class ON relname = name AND relkind IN ('r', 'p', 'v', 'S')
        JOIN pg_catalog.pg_namespace
          ON pg_namespace.oid = relnamespace AND nspname = {_literal(SCHEMA)}
        JOIN pg_catalog.pg_attribute ON attrelid = pg_class.oid AND attnum > 0 AND NOT attisdropped
        WHERE columns = '{{}}' OR attname = ANY(CAST(columns AS text[]))
        GROUP BY role, relname, privilege, columns
        """  # noqa: S608  # literals, quoted above
    )


def _run_each(query: str) -> str:
    return f"""DO {QUOTE}
DECLARE command text;
BEGIN
    FOR command IN {query.strip()}
    LOOP
        EXECUTE command;
    END LOOP;
END {QUOTE}"""


def _execute(statements: list[str], connection: Connection | None) -> None:
    for statement in statements:
        command = text(statement.replace(":", r"\:"))  # no colon here names a parameter
        if connection is not None:
            connection.execute(command)
        else:
            from alembic import op

            op.execute(command)
