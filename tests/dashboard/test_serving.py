"""``pgqueue dashboard``: the dashboard alone, behind a user and a password."""

import base64
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from click.testing import CliRunner
from werkzeug.test import Client

from pgqueue import PgQueue
from pgqueue.cli import main
from pgqueue.dashboard import Dashboard, serving

APP = """
import os
from pgqueue import PgQueue
queue = PgQueue(os.environ["SHOP_URL"])
"""


def basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


@contextmanager
def served(folder: Path, url: str, *options: str) -> Iterator[str]:
    """The address of a dashboard in a process of its own, stopped by Ctrl-C."""
    (folder / "shop_app.py").write_text(APP)
    command = [sys.executable, "-m", "pgqueue", "--app", "shop_app:queue", "dashboard", "--port=0"]
    environment = {"SHOP_URL": url, "PGQUEUE_DASHBOARD_PASSWORD": "open sesame", "PATH": ""}
    process = subprocess.Popen(
        [*command, *options], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        yield re.search(r"http://\S+", line)[0]  # type: ignore[index]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def status_of(address: str, headers: dict[str, str]) -> int:
    try:
        with urlopen(Request(address, headers=headers), timeout=60) as response:
            return int(response.status)
    except HTTPError as error:
        return error.code


def test_the_command_serves_pages_to_who_knows_the_password(
    tmp_path: Path, database_url: str
) -> None:
    with served(tmp_path, database_url) as address:
        assert status_of(address + "you", {}) == 401
        assert status_of(address + "you", basic("operator", "open sesame")) == 200


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
    ("user", "password"), [("operator", "wrong"), ("admin", "right"), ("operator", "")]
)
def test_a_wrong_password_is_refused_and_takes_a_while(
    database_url: str, user: str, password: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "DELAY", 0.0)
    client = _client(database_url, "right", is_local=False)
    assert client.get("/you", headers=basic(user, password)).status_code == 401
    assert client.get("/you", headers=basic("operator", "right")).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:8080", 200), ("127.0.0.1", 200), ("[::1]:8080", 200), ("evil.example", 400)],
)
def test_on_loopback_another_host_name_is_refused(
    database_url: str, host: str, status: int
) -> None:
    client = _client(database_url, None, is_local=True)
    assert client.get("/you", headers={"Host": host}).status_code == status


def _client(url: str, password: str | None, *, is_local: bool) -> Client:
    door = serving.Door("operator", password, is_local=is_local)
    return Client(Dashboard(PgQueue(url), authorize=door, secret="s").wsgi)
