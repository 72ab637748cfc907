"""``pgqueue health``: whether a worker lives, by its port or by its heartbeat."""

import socket
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import click

from pgqueue.cli.app_loader import opened
from pgqueue.cli.status import live_workers
from pgqueue.job_queue import PgQueue
from pgqueue.worker.health import LONGEST_SILENCE

PATIENCE = 5.0
"""Seconds for the worker to answer."""


def ask_port(port: int) -> None:
    """Ask the worker that serves its health on this port of this host."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/healthz", timeout=PATIENCE) as answer:
            click.echo(answer.read().decode().strip())
    except HTTPError as error:
        raise click.ClickException(error.read().decode().strip()) from error
    except (URLError, OSError) as error:
        raise click.ClickException(
            f"No worker answers on port {port} ({getattr(error, 'reason', error)}); does one run "
            f"with --metrics-port {port}?"
        ) from error


def ask_database(queue: PgQueue) -> None:
    """Look for workers of this host whose last heartbeat is recent."""
    host = socket.gethostname()
    with opened(queue) as session:
        live = [
            worker
            for worker in live_workers(session)
            if worker["hostname"] == host and worker["heartbeat_age"] < LONGEST_SILENCE
        ]
    if not live:
        raise click.ClickException(f"No worker lives on {host}")
    click.echo(f"Live on {host}: {', '.join(str(worker['pid']) for worker in live)}")
