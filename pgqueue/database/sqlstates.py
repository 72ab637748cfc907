"""The SQLSTATEs of PostgreSQL's errors: how to read one, and those that several packages look for.

The codes are listed in the manual of PostgreSQL, appendix A, "PostgreSQL Error Codes".
"""

SERIALIZATION_FAILURE = "40001"
DEADLOCK = "40P01"
NO_RIGHT = "42501"
LOCK_TIMEOUT = "55P03"
STATEMENT_TIMEOUT = "57014"


def sqlstate_of(error: BaseException) -> str:
    """The SQLSTATE of an error of SQLAlchemy; empty if the server has sent none."""
    orig = getattr(error, "orig", None)
    # The attribute is sqlstate in psycopg and asyncpg, pgcode in psycopg2.
    return getattr(orig, "sqlstate", None) or getattr(orig, "pgcode", None) or ""
