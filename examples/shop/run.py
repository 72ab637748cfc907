"""Starts the whole shop, and ends it: a database, the service, two workers and traffic."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import click
from sqlalchemy import make_url

from pgqueue.embedded import EmbeddedPostgres

SHOP = Path(__file__).parent
FLASK = ("-m", "flask", "--app", "operations")
PATIENCE = 30.0
"""Seconds for a part to end, before it is killed."""
URL = click.Option(["--url"], help="An empty database of yours.  Default: a private PostgreSQL.")


@click.command("shop")
@click.option("--port", default=5000, show_default=True, help="Where the shop listens.")
@click.option("--incident-after", default=45, show_default=True, help="In seconds.")
def main(url: str | None, port: int, incident_after: int) -> None:
    """Run a shop with its service, workers, traffic and dashboard, until Ctrl-C."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        try:
            _run(stack, url, port, incident_after)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must leave no part
    click.echo("The shop has ended.")


main.params.append(URL)


def _run(stack: ExitStack, url: str | None, port: int, incident_after: int) -> None:
    _refuse_taken(port)
    if url is None:
        click.echo("Starting a PostgreSQL, which is removed at the end ...")
        url = stack.enter_context(EmbeddedPostgres()).url
    address, password = f"http://127.0.0.1:{port}", secrets.token_urlsafe(9)
    environment = {
        **os.environ,
        "DATABASE_URL": _on_psycopg(url),
        "SECRET_KEY": secrets.token_hex(),
        "OPERATOR_PASSWORD": password,
        "PARTNER_URL": f"{address}/partner",
        "RELEASE": "1.0",
    }
    parts = Parts(stack, environment)
    parts.run("tables", *FLASK, "db", "upgrade")
    listen = ("--threads=8", f"--listen=127.0.0.1:{port}")
    parts.start("service", "-m", "waitress", *listen, "--call", "operations:create_app")
    parts.start("workers", *FLASK, "pgqueue", "worker", "--queues", "*", "--processes", "2")
    while not _answers(address):
        parts.watch()
    endless = ("--seconds", str(10**9), "--incident-after", str(incident_after))
    parts.start("traffic", *FLASK, "traffic", *endless)
    click.echo(f"The shop:      {address}/")
    click.echo(f"The dashboard: {address}/ops/  The password is {password}")
    click.echo(f"In {incident_after} seconds, payments begin to fail: see examples/shop/README.md.")
    click.echo("Press Ctrl-C to end.")
    while True:
        parts.watch()


class Parts:
    """The processes of the shop.  The stack ends them, the last one first."""

    def __init__(self, stack: ExitStack, environment: Mapping[str, str]) -> None:
        self._stack = stack
        self._environment = environment
        self._logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shop-")))
        self._parts: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str) -> None:
        log = self._stack.enter_context((self._logs / name).open("wb"))
        part = self._parts[name] = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=SHOP,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only this process, which ends the others
        )
        self._stack.callback(_end, part)

    def run(self, name: str, *arguments: str) -> None:
        """Start a part and wait for its end."""
        self.start(name, *arguments)
        if self._parts.pop(name).wait() != 0:
            self._fail(name)

    def watch(self) -> None:
        """Wait a moment; fail if a part has ended by itself."""
        time.sleep(0.1)
        for name, part in self._parts.items():
            if part.poll() is not None:
                self._fail(name)

    def _fail(self, name: str) -> None:
        said = (self._logs / name).read_text("utf-8", "replace").splitlines()
        raise click.ClickException("\n".join([f"{name} has ended by itself:", *said[-20:]]))


def _end(part: subprocess.Popen[bytes]) -> None:
    part.terminate()
    try:
        part.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        part.kill()
        part.wait()


def _answers(address: str) -> bool:
    try:
        with urlopen(address, timeout=5):
            return True
    except (URLError, OSError):
        return False


def _refuse_taken(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise click.ClickException(
                f"Port {port} is taken: choose another one, as --port 5050"
            ) from error


def _on_psycopg(url: str) -> str:
    chosen = make_url(url).set(drivername="postgresql+psycopg")
    return chosen.render_as_string(hide_password=False)


if __name__ == "__main__":
    main()
