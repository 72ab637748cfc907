"""``pgqueue dashboard``: the dashboard alone, behind a user and a password."""

import base64
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode, urlsplit
from urllib.request import Request, urlopen

import pytest
from click.testing import CliRunner
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session
from werkzeug.test import Client

from chaos.interleavings.logical_workers import enqueue_many, execute
from chaos.workers import wait_until
from pgqueue import PgQueue
from pgqueue.cli import main
from pgqueue.dashboard import Dashboard, serving
from pgqueue.repository.operator_actions import OperatorActions

APP = """
import os
from pgqueue import PgQueue
queue = PgQueue(os.environ["SHOP_URL"])
"""


def basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


@dataclass(frozen=True)
class Served:
    """A dashboard in a process of its own."""

    address: str
    process: subprocess.Popen[str]

    def text(self, path: str, form: dict[str, str] | None = None) -> str:
        """A page, or the answer to a form, as the operator gets it."""
        data = None if form is None else urlencode(form).encode()
        request = Request(self.address + path, data, basic("operator", "open sesame"))
        with urlopen(request, timeout=60) as response:
            return str(response.read().decode())


@contextmanager
def served(
    folder: Path, url: str, *options: str, password: str = "open sesame"
) -> Iterator[Served]:
    """A dashboard, stopped by Ctrl-C."""
    (folder / "shop_app.py").write_text(APP)
    command = [sys.executable, "-m", "pgqueue", "--app", "shop_app:queue", "dashboard", "--port=0"]
    command += options
    environment = {"SHOP_URL": url, "PGQUEUE_DASHBOARD_PASSWORD": password, "PATH": ""}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        yield Served(re.search(r"http://\S+", line)[0], process)  # type: ignore[index]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def status_of(address: str, headers: dict[str, str]) -> int:
    try:
        with urlopen(Request(address, headers=headers), timeout=60) as response:
            return int(response.status)
    except HTTPError as error:
        return error.code


TOKEN = re.compile(r'name="csrf" value="([^"]+)"')
WAIT_IN_THE_MIDDLE = """
CREATE FUNCTION public.wait() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0 AS
$$ BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NEW; END $$;
CREATE TRIGGER wait BEFORE UPDATE ON pgqueue.jobs
FOR EACH ROW WHEN (OLD.id = {id}) EXECUTE FUNCTION public.wait()
"""


@pytest.mark.journey
def test_a_server_that_is_killed_in_an_action_loses_nothing_and_doubles_nothing(
    tmp_path: Path, database_url: str, engine: Engine
) -> None:
    with Session(engine) as session:
        ids = enqueue_many(session, 750)
        PgQueue(engine).cancel_where(session, queue="default")
        session.execute(text(WAIT_IN_THE_MIDDLE.format(id=ids[599])))
        session.commit()
    form = {"action": "requeue", "q": "status:cancelled"}

    with served(tmp_path, database_url) as first, Session(engine) as session:
        session.execute(text("SELECT pg_advisory_xact_lock(7)"))
        form["csrf"] = TOKEN.search(first.text("you"))[1]  # type: ignore[index]
        asked = threading.Thread(target=ignore_errors, args=(first.text, "actions/requeue", form))
        asked.start()
        # The second portion waits for this transaction, or has waited for too long already.
        wait_until(lambda: is_any_waiting(engine) or not asked.is_alive())
        first.process.kill()
        asked.join(60)
    wait_until(lambda: not is_any_waiting(engine))
    execute(engine, "DROP FUNCTION public.wait CASCADE")
    with served(tmp_path, database_url) as second:
        page = second.text("log?unfinished=yes")
        stopped = count(engine)
        go_on = re.search(r'name="go_on" value="(\d+)"', page)[1]  # type: ignore[index]
        form = {"csrf": TOKEN.search(page)[1], "go_on": go_on}  # type: ignore[index]
        while go_on in re.findall(r'name="go_on" value="(\d+)"', second.text("log")):
            # 503 while the transaction of the killed server has not ended: the user tries again.
            ignore_errors(second.text, "actions/requeue", form)

    with Session(engine) as session:
        [action] = OperatorActions(session).newest(limit=9)
        assert PgQueue(engine).check(session) == []
    assert stopped == 500
    assert (action.jobs, action.skipped, count(engine)) == (750, 0, 750)
    assert action.cursor == ids[-1]


def ignore_errors(ask: Callable[..., str], *words: Any) -> None:
    with suppress(OSError, HTTPException):
        ask(*words)


def is_any_waiting(engine: Engine) -> bool:
    """Whether a server process waits for a lock."""
    waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    with engine.connect() as connection:
        return bool(connection.scalar(text(waits)))


def count(engine: Engine) -> int:
    """The messages, each of another job."""
    messages = "SELECT count(DISTINCT target_id) FROM pgqueue.message_queue"
    with engine.connect() as connection:
        return int(connection.scalar(text(messages)) or 0)


def test_the_command_serves_pages_to_who_knows_the_password(
    tmp_path: Path, database_url: str
) -> None:
    with served(tmp_path, database_url) as server:
        assert status_of(server.address + "you", {}) == 401
        assert "You are operator" in server.text("you")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "Which password?"),
        (("--insecure", "--host", "0.0.0.0"), "--insecure is for a loopback address"),
    ],
)
def test_nobody_gets_in_by_default(options: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(main, ["--app", "shop_app:queue", "dashboard", *options])
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--public-host", "ops.example"), "the password has 5 characters"),
        (("--host", "0.0.0.0"), "the password has 5 characters"),
        (("--public-host", "https://ops.example"), "without scheme and port"),
        (("--url-prefix", "jobs"), "give a path such as /ops/jobs"),
        (("--public-host", "ops.example", "--insecure"), "--insecure is for a loopback address"),
    ],
)
def test_an_option_that_opens_the_dashboard_or_names_nothing_is_refused(
    options: tuple[str, ...], words: str
) -> None:
    environment = {"PGQUEUE_DASHBOARD_PASSWORD": "right"}
    command = ["--app", "shop_app:queue", "dashboard", *options]
    result = CliRunner().invoke(main, command, env=environment)
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize(
    ("user", "password"), [("operator", "wrong"), ("admin", "right"), ("operator", "")]
)
def test_a_wrong_password_is_refused(database_url: str, user: str, password: str) -> None:
    client = _client(database_url, "right")
    assert client.get("/you", headers=basic(user, password)).status_code == 401
    assert client.get("/you", headers=basic("operator", "right")).status_code == 200


def test_who_guesses_passwords_delays_nobody_else(database_url: str) -> None:
    client = _client(database_url, "right")
    guess = {"headers": basic("operator", "wrong"), "environ_base": {"REMOTE_ADDR": "192.0.2.7"}}

    answers = [client.get("/you", **guess) for _ in range(serving.FREE_GUESSES + 3)]

    statuses = [answer.status_code for answer in answers]
    assert statuses == [401] * serving.FREE_GUESSES + [429] * 3
    assert answers[-1].headers["Retry-After"] == "60"
    assert client.get("/you", headers=basic("operator", "right")).status_code == 200
    assert client.get("/you", headers=basic("operator", "wrong")).status_code == 401


def test_a_wrong_password_is_forgotten_and_the_list_of_addresses_has_an_end() -> None:
    guesses = serving.Guesses()
    first = [guesses.are_too_many("192.0.2.7", 0.0) for _ in range(serving.FREE_GUESSES + 1)]
    assert first[-2:] == [False, True]
    assert not guesses.are_too_many("192.0.2.7", serving.GUESSES_FOR)
    for number in range(serving.MOST_ADDRESSES + 1):
        guesses.are_too_many(str(number), 1.0)
    assert len(guesses._by_address) == serving.MOST_ADDRESSES


def test_a_large_body_is_refused_before_it_is_read(tmp_path: Path, database_url: str) -> None:
    with served(tmp_path, database_url) as server:
        host, port = server.address.removeprefix("http://").rstrip("/").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            head = f"POST /you/choose HTTP/1.1\r\nHost: {host}\r\nContent-Length: 500000000\r\n\r\n"
            connection.sendall(head.encode())
            answer = connection.recv(1000)
    assert answer.startswith(b"HTTP/1.1 413")


def test_the_dashboard_has_a_public_name_and_a_prefix_behind_a_proxy(
    tmp_path: Path, database_url: str
) -> None:
    options = ("--public-host", "ops.example", "--url-prefix", "/ops/jobs")
    with served(tmp_path, database_url, *options, password="long enough for all") as server:
        asked = basic("operator", "long enough for all") | {
            "Host": "ops.example",
            "X-Forwarded-Proto": "https",
            "X-Forwarded-For": "192.0.2.7",
        }
        connection = HTTPConnection(urlsplit(server.address).netloc, timeout=60)
        connection.request("GET", "/ops/jobs/you", headers=asked)
        page = connection.getresponse().read().decode()
        form = {"csrf": TOKEN.search(page)[1], "theme": "dark"}  # type: ignore[index]
        headers = asked | {
            "Origin": "https://ops.example",
            "Content-Type": "application/x-www-form-urlencoded",
        }
        connection.request("POST", "/ops/jobs/you/choose", urlencode(form), headers)
        answer = connection.getresponse()
    assert server.address.endswith("/ops/jobs/")
    assert 'href="/ops/jobs/jobs"' in page
    assert answer.status == 303
    assert answer.headers["Location"] == "/ops/jobs/"
    assert "Secure" in answer.headers["Set-Cookie"]


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:8080", 200), ("127.0.0.1", 200), ("[::1]:8080", 200), ("evil.example", 400)],
)
def test_on_loopback_another_host_name_is_refused(
    database_url: str, host: str, status: int
) -> None:
    client = _client(database_url, None, hosts=serving.LOOPBACK)
    assert client.get("/you", headers={"Host": host}).status_code == status


def _client(url: str, password: str | None, *, hosts: Collection[str] | None = None) -> Client:
    door = serving.AccessCheck("operator", password, hosts=hosts)
    return Client(Dashboard(PgQueue(url), authorize=door, secret="s").wsgi)
