"""An application upgrades pgqueue in its own history, by its own commands."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from alembic.config import Config
from catalog import facts
from hosts import ORDERS_WITH_JOBS, Host, alembic_host, flask_host
from sqlalchemy import Engine, create_engine, inspect

from pgqueue.errors import SchemaError
from pgqueue.schema import SCHEMA_VERSION, write_revision

pytestmark = pytest.mark.journey

MAKERS: dict[str, Callable[[Path, str], Host]] = {"alembic": alembic_host, "flask": flask_host}
CLEAN = "No new upgrade operations detected."


@pytest.fixture(params=MAKERS)
def host(request: pytest.FixtureRequest, tmp_path: Path, empty_database_url: str) -> Host:
    """An application that has models of its own to come, and imports pgqueue's."""
    host = MAKERS[request.param](tmp_path / "shop", empty_database_url)
    host.write_models("")
    return host


def test_one_history_brings_pgqueue_and_a_foreign_key_to_its_jobs(
    host: Host, database_url: str
) -> None:
    assert CLEAN in host.run("check")

    write_revision(host.migrations)
    host.run("upgrade", "head")
    assert CLEAN in host.run("check")
    assert facts(host.url) == facts(database_url)

    host.write_models(ORDERS_WITH_JOBS)
    host.autogenerate("orders")
    host.run("upgrade", "head")
    assert CLEAN in host.run("check")
    assert CLEAN in host.run("check", EVERY_SCHEMA="1")
    assert foreign_keys_of_orders(host.url) == [("pgqueue", "jobs", ["id"])]

    host.run("downgrade", "base")
    assert facts(host.url) == set()

    host.run("upgrade", "head")
    assert facts(host.url) == facts(database_url)


def test_the_history_can_be_written_as_sql_in_both_directions(
    host: Host, database_url: str
) -> None:
    revision = write_revision(host.migrations).name.split("_")[0]
    up = host.run("upgrade", "head", "--sql")
    down = host.run("downgrade", f"{revision}:base", "--sql")

    execute(host.url, up)
    assert facts(host.url) == facts(database_url)

    execute(host.url, down)
    assert facts(host.url) == set()


def foreign_keys_of_orders(url: str) -> list[tuple[str | None, str, list[str]]]:
    engine: Engine = create_engine(url)
    keys = inspect(engine).get_foreign_keys("orders")
    engine.dispose()
    return [
        (key["referred_schema"], key["referred_table"], key["referred_columns"]) for key in keys
    ]


def execute(url: str, script: str) -> None:
    """The script commits for itself."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(script)
    engine.dispose()


@pytest.fixture
def unused_host(tmp_path: Path) -> Host:
    return alembic_host(tmp_path / "shop", "postgresql+psycopg:///none")


@pytest.mark.parametrize("given", ["directory", "ini", "config", "directory alone"])
def test_the_revision_is_written_wherever_the_host_is_named(unused_host: Host, given: str) -> None:
    ini = unused_host.directory / "alembic.ini"
    names: dict[str, Any] = {"ini": ini, "config": Config(ini), "directory": unused_host.migrations}
    if given == "directory alone":
        ini.unlink()

    path = write_revision(names.get(given, str(unused_host.migrations)), message="jobs, please")

    assert path.parent == unused_host.migrations / "versions"
    assert "jobs_please" in path.name
    assert f"pgqueue.schema.upgrade(to={SCHEMA_VERSION}, base=0)" in path.read_text()
    assert f"pgqueue.schema.downgrade(to=0, base={SCHEMA_VERSION})" in path.read_text()


def test_a_second_revision_for_the_same_version_is_refused(unused_host: Host) -> None:
    write_revision(unused_host.migrations)

    with pytest.raises(
        SchemaError, match=rf"already calls pgqueue\.schema\.upgrade\(to={SCHEMA_VERSION}\)"
    ):
        write_revision(unused_host.migrations)

    assert len(list(unused_host.migrations.glob("versions/*.py"))) == 1


def test_a_template_with_no_place_for_the_call_is_reported(unused_host: Host) -> None:
    template = unused_host.migrations / "script.py.mako"
    template.write_text(template.read_text().replace("${upgrades if upgrades else ", "${"))

    with pytest.raises(SchemaError, match="has no place for the call"):
        write_revision(unused_host.migrations)


def test_a_directory_that_is_no_history_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="Alembic wrote no revision"):
        write_revision(tmp_path / "nowhere")
