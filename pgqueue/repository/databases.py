"""The databases of a test run: made, copied and dropped outside of transactions.

The names are the caller's own and contain only letters, digits and underscores.
"""

import sqlalchemy as sa


def create_database(name: str, *, template: str | None, copies_files: bool) -> sa.Executable:
    """An empty database, or a copy of the template, to which nobody may be connected.

    ``copies_files``: faster than writing each page to the log; from PostgreSQL 15 it must be asked
    for.
    """
    copied = f"TEMPLATE {template or 'template0'}"
    strategy = " STRATEGY file_copy" if template and copies_files else ""
    return sa.text(f"CREATE DATABASE {name} {copied}{strategy}")


def drop_database(name: str) -> sa.Executable:
    """Drop a database and end its connections."""
    return sa.text(f"DROP DATABASE {name} WITH (FORCE)")
