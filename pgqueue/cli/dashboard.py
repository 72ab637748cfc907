"""``pgqueue dashboard``: the pages of the dashboard, served alone."""

import os
from pathlib import Path

import click

from pgqueue.cli.app_loader import CliState
from pgqueue.cli.options import on_app
from pgqueue.errors import OptionError

USER, PASSWORD = "PGQUEUE_DASHBOARD_USER", "PGQUEUE_DASHBOARD_PASSWORD"  # names


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", default=8080, show_default=True, type=click.IntRange(0, 65535))
@click.option(
    "--password-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help=f"A file with the password; else it is that of {PASSWORD}.",
)
@click.option("--insecure", is_flag=True, help="Ask for no password; on a loopback address only.")
@click.option(
    "--public-host",
    "public_hosts",
    multiple=True,
    metavar="NAME",
    help="The name of the site, if a proxy on this machine stands before it.",
)
@click.option(
    "--url-prefix", default="", metavar="PATH", help="Where it is on that site, e.g. /ops/jobs."
)
@click.option("--environment", default="", help="A word shown on each page, e.g. production.")
@on_app
def dashboard(
    given: CliState,
    host: str,
    port: int,
    password_file: Path | None,
    insecure: bool,
    public_hosts: tuple[str, ...],
    url_prefix: str,
    environment: str,
) -> None:
    """Serve the dashboard, until Ctrl-C.

    The user is that of PGQUEUE_DASHBOARD_USER, by default `operator`, with all rights.  In a web
    application, mount it instead, behind the application's own login: queue.dashboard(...).

    \b
    Example:  pgqueue --app shop.jobs:queue dashboard --insecure
    """
    try:
        from pgqueue.dashboard.serving import check_options, is_loopback, serve
    except ImportError as error:
        raise click.ClickException(
            f"The dashboard needs {error.name}: install sqlalchemy-pgqueue[dashboard]"
        ) from error
    password = os.environ.get(PASSWORD)
    if password_file is not None:
        password = password_file.read_text().rstrip("\r\n")
    if insecure and (public_hosts or not is_loopback(host)):
        where = f"--public-host {public_hosts[0]}" if public_hosts else host
        raise click.UsageError(f"--insecure is for a loopback address, and {where} is none")
    if not password and not insecure:
        raise click.UsageError(
            f"Which password? Set {PASSWORD}, or give --password-file; on your own machine "
            "--insecure asks for none"
        )
    try:
        check_options(host, None if insecure else password, public_hosts, url_prefix)
    except OptionError as error:
        raise click.UsageError(str(error)) from error
    queue = given.application()
    try:
        serve(
            queue,
            host=host,
            port=port,
            user=os.environ.get(USER) or "operator",
            password=None if insecure else password,
            public_hosts=public_hosts,
            url_prefix=url_prefix,
            environment=environment,
            around=queue.around_calls(),
            on_start=lambda address: click.echo(f"The dashboard is at {address}"),
        )
    except OSError as error:
        raise click.ClickException(f"{host}:{port} cannot be opened: {error.strerror}") from error


COMMANDS = (dashboard,)
