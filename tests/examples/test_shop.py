"""The whole shop, as one command starts it: its pages, its incident, and its end."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browsers import chromium
from documents import ROOT
from lessons import plain_environment
from sqlalchemy import create_engine, text

from chaos.broken import Broken
from chaos.workers import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.journey

LONGEST = 250.0
READY = "Press Ctrl-C to end."


@dataclass(frozen=True)
class Shop:
    """The command, and what it has printed."""

    process: subprocess.Popen[str]
    log: Path
    url: str

    @property
    def said(self) -> str:
        return self.log.read_text("utf-8")

    def found(self, pattern: str) -> str:
        found = re.search(pattern, self.said)
        assert found, self.said
        return found[1]

    def wait(self) -> int:
        return self.process.wait(LONGEST)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.said
        return READY in self.said


@contextmanager
def opened_shop(folder: Path, url: str, *options: str) -> Iterator[Shop]:
    log = folder / "shop.log"
    command = [sys.executable, "-m", "examples", "shop", "--url", url, "--port", free_port()]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, *options],
            cwd=ROOT,
            env=plain_environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    shop = Shop(process, log, url)
    try:
        wait_until(shop.is_ready, seconds=LONGEST)
        yield shop
    finally:
        process.terminate()
        process.wait(LONGEST)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def processes() -> dict[int, tuple[int, str]]:
    """The parent and the command line of each process that has not ended."""
    listed = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,stat=,args="],
        capture_output=True,
        text=True,
        check=True,
    )
    found = (line.split(None, 3) for line in listed.stdout.splitlines())
    return {int(pid): (int(parent), args) for pid, parent, stat, args in found if stat[0] != "Z"}


def under(parent: int) -> dict[int, str]:
    """The processes that a process and its children have started, with their command lines."""
    everywhere, found = processes(), {parent: ""}
    while new := {
        pid: args for pid, (of, args) in everywhere.items() if of in found and pid not in found
    }:
        found.update(new)
    del found[parent]
    return found


def assert_nothing_is_left(shop: Shop, started: dict[int, str]) -> None:
    left: list[tuple[object, ...]] = []

    def no_process() -> bool:  # another one may have got the number of one that has ended
        now = processes().items()
        left[:] = [(pid, args) for pid, (_, args) in now if started.get(pid) == args]
        return not left

    def no_connection() -> bool:
        left[:] = map(tuple, connection.execute(others))
        return not left

    others = text(
        "SELECT application_name, state, query FROM pg_stat_activity"
        " WHERE datname = current_database() AND backend_type = 'client backend'"
        " AND pid <> pg_backend_pid()"
    )
    engine = create_engine(shop.url, isolation_level="AUTOCOMMIT")
    try:
        wait_until(no_process, seconds=LONGEST)
        with engine.connect() as connection:
            wait_until(no_connection, seconds=LONGEST)
    except Broken as error:
        raise AssertionError(f"{left} are left; the shop said {shop.said}") from error
    engine.dispose()


@pytest.mark.timeout(900)
def test_an_operator_solves_the_incident_on_the_dashboard(
    tmp_path: Path, empty_database_url: str
) -> None:
    with (
        chromium() as browser,
        opened_shop(tmp_path, empty_database_url, "--incident-after", "1") as shop,
    ):
        page = browser.new_page()
        page.set_default_timeout(LONGEST * 1000)
        root = shop.found(r"The shop: +(http://\S+)/")
        page.goto(f"{root}/ops/")
        page.get_by_label("Password").fill(shop.found(r"The password is (\S+)"))
        page.get_by_role("button", name="Log in").click()
        wait_until(lambda: failed_payments(shop) > 10, seconds=LONGEST)
        solve_incident(page, root)
        wait_until(lambda: failed_payments(shop) < 10, seconds=LONGEST)

        page.goto(root)
        page.get_by_role("button", name="Buy a book").click()
        wait_until(lambda: paid_and_printed(page, root), seconds=LONGEST)
        page.get_by_role("button", name="Send a newsletter").click()
        page.get_by_text("300 of 300 mails").wait_for()
        page.get_by_text("All are sent.").wait_for()

        started = under(shop.process.pid)
        assert sum("worker" in args for args in started.values()) >= 3  # two and their parent
        shop.process.send_signal(signal.SIGINT)
        assert shop.wait() == 0
    assert "The shop has ended." in shop.said
    assert_nothing_is_left(shop, started)


def solve_incident(page: "Page", root: str) -> None:
    """Do what examples/shop/README.md says."""
    page.goto(f"{root}/ops/")
    line = page.locator("li, tr, p").filter(has_text="KeyError: 'currency'").first
    line.get_by_role("link", name="Look").click()
    assert "currency" in page.locator("main").inner_text()
    error = page.url

    page.goto(f"{root}/ops/tasks/payments.capture")
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Resume").wait_for()

    page.goto(f"{root}/ops/tasks/payments.use_gateway")
    page.get_by_role("link", name="Enqueue…").click()
    page.get_by_label("version").fill('"v1"')
    page.get_by_label("Reason").fill("v2 has no currency")
    page.get_by_role("button", name="Enqueue").click()
    page.get_by_text("succeeded").first.wait_for()

    page.goto(f"{root}/ops/tasks/payments.capture")
    page.get_by_role("button", name="Resume").click()
    page.get_by_role("button", name="Pause").wait_for()

    page.goto(error)
    page.get_by_role("button", name="Try one").click()
    page.get_by_role("link", name="Requeue the others…").click()
    page.get_by_role("button", name=re.compile("^Requeue ")).click()
    page.get_by_text(re.compile("jobs requeued")).first.wait_for()


def failed_payments(shop: Shop) -> int:
    engine = create_engine(shop.url)
    with engine.connect() as connection:
        failed = connection.scalar(
            text(
                "SELECT count(*) FROM pgqueue.jobs WHERE outcome = 'failed'"
                " AND task = 'payments.capture' AND last_error LIKE '%currency%'"
            )
        )
    engine.dispose()
    return int(failed)


def paid_and_printed(page: "Page", root: str) -> bool:
    page.goto(root)
    link = page.get_by_role("link", name="PDF")
    if link.count() == 0:
        return False
    answered = page.request.get(f"{root}{link.first.get_attribute('href')}")
    return answered.body().startswith(b"%PDF")


@pytest.mark.timeout(600)
def test_the_shop_ends_when_a_part_of_it_has_ended(tmp_path: Path, empty_database_url: str) -> None:
    with opened_shop(tmp_path, empty_database_url) as shop:
        started = under(shop.process.pid)
        [service] = [pid for pid, args in started.items() if "waitress" in args]
        os.kill(service, signal.SIGKILL)

        assert shop.wait() == 1
    assert "service has ended by itself" in shop.said
    assert_nothing_is_left(shop, started)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "examples", "shop", "--port", port]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST)

    assert ended.returncode == 1
    assert f"Port {port} is taken" in ended.stderr


def test_the_migrations_make_the_tables_of_the_models(empty_database_url: str) -> None:
    environment = {
        **plain_environment(),
        **dict.fromkeys(("SECRET_KEY", "OPERATOR_PASSWORD"), "of the tests"),
        "DATABASE_URL": empty_database_url,
    }
    for command in ("upgrade", "check"):
        subprocess.run(
            [sys.executable, "-m", "flask", "--app", "operations", "db", command],
            cwd=ROOT / "examples" / "shop",
            env=environment,
            check=True,
        )
