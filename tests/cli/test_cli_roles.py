"""Roles from the command line: given their rights, and what a dashboard's may see and do."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from shop_rig import assert_one_line, enqueue, pgqueue, write_shop
from sqlalchemy import Engine, make_url, text

from pgqueue import PgQueue, Retry, Worker
from pgqueue.statements.listing import NOT_YOURS


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return write_shop(tmp_path)


@pytest.fixture
def role(engine: Engine) -> Iterator[str]:
    name = f"Ops {uuid.uuid4().hex[:8]}"
    with engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE \"{name}\" LOGIN PASSWORD 'x'"))
    yield name
    with engine.begin() as connection:
        connection.execute(text(f'DROP OWNED BY "{name}"'))
        connection.execute(text(f'DROP ROLE "{name}"'))


def url_of(role: str, database_url: str) -> str:
    url = make_url(database_url).set(username=role, password="x")
    return url.render_as_string(hide_password=False)


def fail_one(engine: Engine) -> int:
    queue = PgQueue(engine)

    @queue.task(retry=Retry.never())
    def charge(card: str) -> None:
        raise ValueError("declined")

    job_id = charge.delay("4111").id
    Worker(queue).run_until_empty(timeout=60)
    return job_id


def test_a_dashboard_sees_and_changes_all_but_payloads(
    shop: Path, engine: Engine, role: str, database_url: str
) -> None:
    failed = fail_one(engine)
    enqueue(engine, shop, "add", (1, 2))
    granted = pgqueue(shop, "--url", database_url, "grant", "--dashboard", role)
    assert (granted.returncode, granted.stdout) == (0, "Granted.\n")
    url = url_of(role, database_url)

    status = pgqueue(shop, "--url", url, "status", "--json")
    listed = pgqueue(shop, "--url", url, "jobs", "--json")
    shown = pgqueue(shop, "--url", url, "jobs", str(failed), "--json")
    doctor = pgqueue(shop, "--url", url, "doctor")
    requeued = pgqueue(shop, "--url", url, "requeue", str(failed))
    cancelled = pgqueue(shop, "--url", url, "cancel", "--status", "pending", "--yes")

    assert [one.returncode for one in (status, listed, shown, requeued, cancelled)] == [0] * 5
    assert "no row breaks one" in doctor.stdout
    job = json.loads(shown.stdout)
    assert (job["args"], job["result"]) == (NOT_YOURS, NOT_YOURS)
    assert job["last_error"] == "declined"
    assert [attempt["traceback"] for attempt in job["failed_attempts"]] == [NOT_YOURS]
    assert "4111" not in shown.stdout
    assert cancelled.stdout == "2 cancelled\n"


def test_what_was_granted_is_revoked(shop: Path, role: str, database_url: str) -> None:
    url = url_of(role, database_url)
    pgqueue(shop, "--url", database_url, "grant", "--dashboard", role)

    revoked = pgqueue(shop, "--url", database_url, "revoke", "--dashboard", role)

    assert (revoked.returncode, revoked.stdout) == (0, "Revoked.\n")
    assert_one_line(pgqueue(shop, "--url", url, "jobs"), "permission denied")


def test_printed_statements_do_the_same(
    shop: Path, engine: Engine, role: str, database_url: str
) -> None:
    printed = pgqueue(shop, "grant", "--worker", role, "--sql").stdout

    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(printed)

    worker = PgQueue(url_of(role, database_url))
    Worker(worker, ["default"]).run_until_empty(timeout=60)
    worker.engine.dispose()


@pytest.mark.parametrize("verb", ["grant", "revoke"])
def test_a_role_that_does_not_exist_is_named(shop: Path, database_url: str, verb: str) -> None:
    ended = pgqueue(shop, "--url", database_url, verb, "--worker", "nobody_here")

    assert_one_line(ended, 'role "nobody_here" does not exist')
