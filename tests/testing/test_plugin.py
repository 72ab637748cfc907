"""The plugin for pytest, in a test run of its own, as an application has it."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from documents import ROOT, programs_of

pytestmark = pytest.mark.journey

PLUGIN = "pgqueue.testing.plugin"

CONFTEST = """
import pytest
from shop import Base, queue


@pytest.fixture(scope="session")
def pgqueue_queue():
    return queue


@pytest.fixture(scope="session")
def pgqueue_create_tables():
    return Base.metadata.create_all
"""

SHOP = """
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from pgqueue import PgQueue

queue = PgQueue()


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


@queue.task
def receive(session: Session, order_id: int) -> None:
    session.add(Order(id=order_id))
"""

TESTS = """
import os

import pytest
from shop import Order, queue, receive
from sqlalchemy import select
from sqlalchemy.orm import Session

from pgqueue import Job, Worker
from pgqueue.testing import enqueued, run_jobs


@pytest.mark.parametrize("time", [1, 2])
def test_rolled_back(pgqueue_session, time):
    assert enqueued(pgqueue_session) == []
    receive.delay(7)
    pgqueue_session.commit()
    run_jobs(pgqueue_session)
    assert pgqueue_session.get(Order, 7) is not None


@pytest.mark.parametrize("time", [1, 2])
def test_committed(pgqueue_database, time):
    receive.delay(7)
    assert Worker(queue).run_until_empty(raise_errors=True) == {"succeeded": 1}
    with Session(pgqueue_database) as session:
        assert session.scalars(select(Order.id)).all() == [7]


@pytest.mark.assert_no_pending
def test_marked_and_empty(pgqueue_session):
    receive.delay(7)
    run_jobs(pgqueue_session)


@pytest.mark.assert_no_pending
def test_marked_and_left(pgqueue_session):
    receive.delay(7)


@pytest.mark.assert_no_pending
def test_marked_without_a_session():
    pass


@pytest.fixture
def own_session(pgqueue_engine):
    with Session(pgqueue_engine) as session:
        yield session


@pytest.mark.assert_no_pending("own_session")
def test_marked_with_another_session(own_session):
    receive.enqueue(own_session, 7)


def test_not_marked(pgqueue_session, pgqueue_server_url):
    receive.delay(7)
    with open(os.environ["SERVERS"], "a") as servers:
        servers.write(pgqueue_server_url + "\\n")
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\naddopts = --strict-markers\n")
    return tmp_path


def run_pytest(directory: Path, *options: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**kept, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "SERVERS": "servers.txt"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", *options],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    return done.stdout + done.stderr


def test_the_fixtures_and_the_marker_of_the_plugin(directory: Path) -> None:
    (directory / "test_shop.py").write_text(TESTS)

    said = run_pytest(directory)

    failed = re.findall(r"^FAILED test_shop.py::(\w+)", said, re.MULTILINE)
    assert failed == [
        "test_marked_and_left",
        "test_marked_without_a_session",
        "test_marked_with_another_session",
    ], said
    assert re.search(r"1 job waits at the end of the test:\n  job \d+ shop.receive: ", said)
    assert "the test does not use the fixture 'pgqueue_session'" in said
    assert "3 failed, 6 passed" in said


def test_the_processes_of_xdist_share_one_server_which_ends_with_them(directory: Path) -> None:
    tests = TESTS[TESTS.index("def test_not_marked") :]
    head = TESTS[: TESTS.index("@pytest")]
    (directory / "test_shop.py").write_text(head + tests)
    (directory / "test_again.py").write_text(head + tests)

    said = run_pytest(directory, "-p", "xdist", "-n", "2", "--dist", "loadfile")

    assert "2 passed" in said, said
    servers = (directory / "servers.txt").read_text().splitlines()
    assert len(servers) == 2
    assert len(set(servers)) == 1
    folder = re.search(r"host=([^&]+)", servers[0])
    assert folder is not None
    assert not Path(folder[1].replace("%2F", "/")).exists() or "PGQUEUE_TEST_URL" in os.environ


def test_the_page_about_tests_is_a_test_file_that_passes(tmp_path: Path) -> None:
    (program,) = programs_of(ROOT / "docs" / "how-to" / "testing.md")
    (tmp_path / "test_page.py").write_text(program.source, "utf-8")

    said = run_pytest(tmp_path)

    assert f"{program.source.count('def test_')} passed" in said, said


def test_the_tests_of_the_example_service_pass(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "shop", tmp_path, dirs_exist_ok=True)

    said = run_pytest(tmp_path)

    assert "14 passed" in said, said


def test_an_application_must_name_its_queue(directory: Path) -> None:
    (directory / "conftest.py").unlink()
    (directory / "test_shop.py").write_text("def test(pgqueue_queue): ...\n")

    assert "define a fixture pgqueue_queue" in run_pytest(directory)


def test_pytest_loads_the_plugin_wherever_pgqueue_is_installed() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")

    points = tomllib.loads(project)["project"]["entry-points"]

    assert points == {"pytest11": {PLUGIN: PLUGIN}}
