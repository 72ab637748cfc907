"""pgqueue in a Flask application: ``from pgqueue.flask import PgQueue``.

extension   the PgQueue that gets its database from ``init_app``
sessions    how ``db.session`` becomes the session of the running job
commands    ``flask pgqueue ...``
"""

try:
    import flask as _flask  # noqa: F401  # imported here for a clear error if it is missing
except ModuleNotFoundError as error:
    if error.name != "flask":
        raise
    raise ModuleNotFoundError(
        "pgqueue.flask needs Flask: pip install 'sqlalchemy-pgqueue[flask]'", name="flask"
    ) from error

from pgqueue.flask.extension import PgQueue

__all__ = ["PgQueue"]
