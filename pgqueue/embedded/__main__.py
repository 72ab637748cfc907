"""``python -m pgqueue.embedded DIRECTORY`` runs a PostgreSQL for a project on this machine."""

import signal
from pathlib import Path

import click

from pgqueue.embedded import EmbeddedPostgres, NoPostgres, PostgresFailed


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--url", "only_url", is_flag=True, help="Print the server's URL, and start nothing.")
def main(directory: Path, only_url: bool) -> None:
    """Run a PostgreSQL until Ctrl-C; DIRECTORY keeps its data.

    For trials and development: every user of this account has all rights.

    \b
    Example:  python -m pgqueue.embedded postgres
              export DATABASE_URL=$(python -m pgqueue.embedded postgres --url)
    """
    try:
        server = EmbeddedPostgres(directory)
        if only_url:
            click.echo(server.url)
        else:
            _serve(server)
    except (NoPostgres, PostgresFailed) as error:
        raise click.ClickException(str(error)) from error


def _serve(server: EmbeddedPostgres) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    ours = False
    try:
        with server:
            ours = server.is_started_here
            click.echo(server.url)
            until = "until Ctrl-C" if ours else "already, and goes on after Ctrl-C here"
            click.echo(f"PostgreSQL runs {until}; {server.directory} keeps its data.")
            signal.pause()
    except KeyboardInterrupt:
        if ours:
            click.echo("PostgreSQL has stopped.")


if __name__ == "__main__":
    main(prog_name="python -m pgqueue.embedded")
