"""What it means when a server lets nobody in, and what to do about it."""

_ADVICE = (
    ("password authentication failed", "Check user and password in the URL, or ~/.pgpass."),
    ("no password supplied", "Put the password into the URL, or into ~/.pgpass."),
    ("no pg_hba.conf entry", "Check the user in the URL, and the server's pg_hba.conf."),
    ("authentication failed", "Check the user in the URL, and the server's pg_hba.conf."),
    ('database "', "does not exist", "Check the name of the database in the URL, or create it."),
    ('role "', "does not exist", "Check the user in the URL, or create the role."),
    ("too many", "Raise max_connections, or have fewer clients."),
    ("remaining connection slots", "Raise max_connections, or have fewer clients."),
    ("starting up", "Wait until the server has started."),
    ("shutting down", "Wait until the server is back."),
    ("resolve host", "Check the host in the URL."),
    ("translate host", "Check the host in the URL."),
)
"""By what libpq says: an error of connecting carries no SQLSTATE."""


def advice(said: str) -> str:
    """What to do when a connection is refused with these words."""
    for *signs, what_to_do in _ADVICE:
        if all(sign in said for sign in signs):
            return what_to_do
    return "Check the URL, and that the server runs."
