"""Upgrades the tables to the version this code is written for, or says what to run.

The revisions are in ``pgqueue/migrations`` and run in one of two ways: in a history of their own
(:func:`upgrade_database`), or in the application's own Alembic history, where a revision calls
:func:`upgrade`.  Use exactly one of the two for a database.
"""

from pgqueue.schema.host_history import downgrade, include_name, upgrade
from pgqueue.schema.own_history import upgrade_database
from pgqueue.schema.revision_file import find_host, write_revision
from pgqueue.schema.rights import grant, grant_statements, revoke, revoke_statements
from pgqueue.schema.roles import Roles
from pgqueue.schema.state import SCHEMA_VERSION, verify

__all__ = [
    "SCHEMA_VERSION",
    "verify",
    "upgrade_database",
    "upgrade",
    "downgrade",
    "include_name",
    "grant",
    "revoke",
    "Roles",
    "grant_statements",
    "revoke_statements",
    "find_host",
    "write_revision",
]
