"""PGQUEUE_SCHEMA names the schema, in both histories."""

from pathlib import Path

import pytest
from catalog import facts
from checkouts import run_program
from hosts import CHECKOUT, ORDERS_WITH_JOBS, alembic_host

from pgqueue.schema import write_revision

pytestmark = pytest.mark.journey

UPGRADE = """
import sys
from pgqueue.schema import upgrade_database
from sqlalchemy import create_engine

upgrade_database(create_engine(sys.argv[1]))
"""


@pytest.mark.parametrize("schema", ["other", "order"], ids=["a plain name", "a reserved word"])
def test_our_history_creates_the_schema_that_is_named(
    monkeypatch: pytest.MonkeyPatch, empty_database_url: str, database_url: str, schema: str
) -> None:
    monkeypatch.setenv("PGQUEUE_SCHEMA", schema)

    run_program(UPGRADE, empty_database_url, path=CHECKOUT)

    assert renamed(facts(empty_database_url, schema), schema) == facts(database_url)
    assert facts(empty_database_url) == set()


def test_a_host_stays_clean_with_the_schema_that_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty_database_url: str, database_url: str
) -> None:
    monkeypatch.setenv("PGQUEUE_SCHEMA", "other")
    host = alembic_host(tmp_path / "shop", empty_database_url)
    host.write_models(ORDERS_WITH_JOBS)
    write_revision(host.migrations)

    host.run("upgrade", "head")
    host.autogenerate("orders")
    host.run("upgrade", "head")

    assert "No new upgrade operations detected." in host.run("check", EVERY_SCHEMA="1")
    assert renamed(facts(host.url, "other"), "other") == facts(database_url)


def renamed(found: set[str], schema: str) -> set[str]:
    quoted = f'"{schema}"' if schema == "order" else schema
    return {fact.replace(f"{quoted}.", "pgqueue.") for fact in found}
