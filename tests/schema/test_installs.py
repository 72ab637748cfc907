"""The migrations travel with the package, however it is installed."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import sqlalchemy
from checkouts import copy_of_checkout, run_program

pytestmark = pytest.mark.journey

pytest.importorskip("pip")
pytest.importorskip("build")

SITE_PACKAGES = Path(sqlalchemy.__file__).parents[1]
MIGRATIONS = {"env.py", "script.py.mako", "versions/0001_create_tables.py"}

EVERY_WAY = """
import io, sys
import pgqueue
from hosts import host_revision, offline_revision
from pgqueue.schema import SCHEMA_VERSION, downgrade, upgrade, upgrade_database, verify
from sqlalchemy import create_engine

engine = create_engine(sys.argv[1])
upgrade_database(engine)
with engine.begin() as connection, host_revision(connection):
    downgrade(to=0)
    upgrade(to=SCHEMA_VERSION)
    verify(connection)
with offline_revision(io.StringIO()):
    upgrade(to=SCHEMA_VERSION, base=0)
print(pgqueue.__file__)
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_checkout(tmp_path_factory.mktemp("installs") / "checkout")


@pytest.fixture(scope="module")
def built(checkout: Path) -> Path:
    """The directory of the sdist, and of the wheel that was built from the sdist."""
    run(sys.executable, "-m", "build", "--no-isolation", str(checkout))
    return checkout / "dist"


@pytest.fixture
def python(tmp_path: Path) -> str:
    """A new environment that has everything this one has, but for pgqueue."""
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"))
    others = tmp_path / "others"
    others.mkdir()
    for found in SITE_PACKAGES.iterdir():
        if "pgqueue" not in found.name and found.suffix != ".pth":
            (others / found.name).symlink_to(found)
    site_packages = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    (site_packages / "others.pth").write_text(f"{others}\n")
    return str(tmp_path / "venv" / "bin" / "python")


def test_the_wheel_holds_the_migrations_the_types_and_the_licence(built: Path) -> None:
    names = set(zipfile.ZipFile(next(built.glob("*.whl"))).namelist())

    assert {f"pgqueue/migrations/{name}" for name in MIGRATIONS} <= names
    assert "pgqueue/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert not [name for name in names if "__pycache__" in name or name.startswith("alembic")]


def test_the_sdist_holds_the_migrations_as_files(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        files = {member.name.split("/", 1)[-1] for member in sdist if member.isfile()}

    assert {f"pgqueue/migrations/{name}" for name in MIGRATIONS} <= files


def test_the_built_wheel_upgrades_in_every_way(
    built: Path, python: str, tmp_path: Path, empty_database_url: str
) -> None:
    install(python, str(next(built.glob("*.whl"))))

    imported_from = run_program(EVERY_WAY, empty_database_url, python=python)

    assert imported_from.startswith(str(tmp_path / "venv" / "lib"))


def test_an_editable_install_upgrades_in_every_way(
    checkout: Path, python: str, empty_database_url: str
) -> None:
    install(python, "--no-build-isolation", "--editable", str(checkout))

    imported_from = run_program(EVERY_WAY, empty_database_url, python=python)

    assert imported_from.startswith(str(checkout))


def test_a_bare_checkout_upgrades_in_every_way(
    checkout: Path, python: str, empty_database_url: str
) -> None:
    imported_from = run_program(EVERY_WAY, empty_database_url, python=python, path=checkout)

    assert imported_from.startswith(str(checkout))


def install(python: str, *what: str) -> None:
    run(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", *what
    )


def run(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
