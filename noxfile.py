"""The suite on the oldest and the newest versions we say we work with: `make test-matrix`."""

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False

OLDEST = (
    "alembic==1.13.0",
    "asyncpg==0.30.0",
    "click==8.1.3",
    "flask==3.0.0",
    "psycopg[binary]==3.2.1",
    "pydantic==2.6.0",
    "rich==13.0.0",
)
"""The least that pyproject.toml asks for; tests/unit/test_matrix.py compares the two."""

TRIALS = {
    "oldest": ("3.11", ("sqlalchemy==2.0.30", *OLDEST)),
    "2.0": ("3.12", ("sqlalchemy>=2.0.30,<2.1",)),
    "2.1-oldest": ("3.11", ("sqlalchemy==2.1.0", *OLDEST)),
    "2.1": ("3.13", ("sqlalchemy>=2.1,<2.2",)),
}
"""By SQLAlchemy: the Python, and what is pinned; all else is the newest there is."""


def _trial(session: nox.Session, name: str) -> None:
    session.install("--editable", ".[dev]", *TRIALS[name][1])
    session.run("python", "-m", "pytest", "-m", "not battery", *(session.posargs or ("-n", "auto")))


@nox.session(python=TRIALS["oldest"][0])
def oldest(session: nox.Session) -> None:
    """The oldest of everything."""
    _trial(session, "oldest")


@nox.session(name="sqlalchemy-2.0", python=TRIALS["2.0"][0])
def newest_of_2_0(session: nox.Session) -> None:
    """The newest SQLAlchemy 2.0, and the newest of all else."""
    _trial(session, "2.0")


@nox.session(name="sqlalchemy-2.1-oldest", python=TRIALS["2.1-oldest"][0])
def oldest_of_2_1(session: nox.Session) -> None:
    """The first SQLAlchemy 2.1, and the oldest of all else."""
    _trial(session, "2.1-oldest")


@nox.session(name="sqlalchemy-2.1", python=TRIALS["2.1"][0])
def newest_of_2_1(session: nox.Session) -> None:
    """The newest SQLAlchemy 2.1, and the newest of all else."""
    _trial(session, "2.1")
