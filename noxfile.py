"""The suite on the oldest and the newest versions we say we work with: `make test-matrix`."""

import nox

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


@nox.session
@nox.parametrize(
    ["python", "pins"],
    [
        nox.param("3.11", ("sqlalchemy==2.0.30", *OLDEST), id="oldest"),
        nox.param("3.12", ("sqlalchemy>=2.0.30,<2.1",), id="sqlalchemy-2.0"),
        nox.param("3.12", ("sqlalchemy==2.1.0", *OLDEST), id="sqlalchemy-2.1-oldest"),
        nox.param("3.13", ("sqlalchemy>=2.1,<2.2",), id="sqlalchemy-2.1"),
    ],
)
def tests(session: nox.Session, pins: tuple[str, ...]) -> None:
    """What is not pinned is the newest there is; what follows -- goes to pytest."""
    session.install("--editable", ".[dev]", *pins)
    session.run("python", "-m", "pytest", "-m", "not battery", *(session.posargs or ("-n", "auto")))
