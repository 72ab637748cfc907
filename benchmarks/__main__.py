"""``python -m benchmarks``: measure, side by side, and say which goals are met."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import psycopg

from benchmarks import report
from benchmarks.against import compare
from benchmarks.arena import Spoiled
from benchmarks.case import CASES, Bench, Case
from benchmarks.contests import playing
from pgqueue.embedded import EmbeddedPostgres

SETTINGS = {
    "listen_addresses": "127.0.0.1",  # not every driver connects by a socket of the file system
    "shared_buffers": "1GB",
    "max_wal_size": "4GB",
    "min_wal_size": "2GB",
    "max_connections": "200",
}
"""Everything else is PostgreSQL's default: fsync and synchronous_commit are on."""

WAL_FILES = 128
"""As many as ``min_wal_size`` keeps."""


@click.group(invoke_without_command=True)
@click.option("--only", multiple=True, metavar="NAME", help="Only this case; may be repeated.")
@click.option("--smoke", "size", flag_value="smoke", help="Tiny: shows that the cases run.")
@click.option("--full", "size", flag_value="full", help="The sizes of the goals: takes hours.")
@click.option("--usual", "size", flag_value="usual", default="usual", hidden=True)
@click.option("--turns", type=int, help="How often each is measured, in turns.")
@click.option("--alone", is_flag=True, help="Without other queues.")
@click.option(
    "--url",
    help="A server of your own: databases are made and dropped, autovacuum is off for `idle`.",
)
@click.option("--write", is_flag=True, help="Put the report and the charts into docs/explanation.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures for a program.")
@click.option(
    "--against",
    metavar="REV",
    help="Measure this tree and that of another commit, in turns; needs --only.",
)
@click.pass_context
def main(
    context: click.Context,
    *,
    only: tuple[str, ...],
    size: str,
    turns: int | None,
    alone: bool,
    url: str | None,
    write: bool,
    as_json: bool,
    against: str | None,
) -> None:
    """Run the cases, one after the other, on one PostgreSQL."""
    if context.invoked_subcommand is not None:
        return
    chosen = _chosen(only)
    if against is not None:
        if not only:
            raise click.UsageError("--against needs --only NAME; see `list`")
        with server_for(url, aged=size != "smoke") as server:
            are_measured = compare(against, only, size=size, turns=turns or 20, url=server)
        raise SystemExit(not are_measured)
    results: list[report.Result] = []
    with ExitStack() as made:
        folder = made.enter_context(TemporaryDirectory(prefix="pgqueue-benchmarks-"))
        server = made.enter_context(server_for(url, aged=size != "smoke"))
        bench = Bench(server, Path(folder), with_peers=not alone and size != "smoke")
        made.callback(bench.close)
        # What is measured is measured alone; a smoke test measures nothing.
        with ThreadPoolExecutor(2 if size == "smoke" else 1) as side_by_side:
            for result in side_by_side.map(lambda one: _run(bench, one, size, turns), chosen):
                results.append(result)
                if not as_json:
                    report.show(result)
        about = report.about(bench, size)
    if as_json:
        click.echo(json.dumps([report.as_data(result) for result in results]))
    report.show_missing(bench.missing)
    if write:
        report.write(results, about)
    if any(result.failure for result in results):
        raise SystemExit(1)


@main.command("contests")
@click.option("--write", is_flag=True, help="Put the table into docs/explanation/reliability.md.")
def show_contests(write: bool) -> None:
    """Play three contests with other queues: kill -9, a zombie, a poison job."""
    with server_for(None) as server:
        figures = playing.compete(server)
    playing.show(figures)
    if write:
        playing.write(figures)


@main.command("list")
def show_list() -> None:
    """Name the cases."""
    for one in _chosen(()):
        click.echo(f"{one.name}\n    {one.title}")


def _chosen(only: tuple[str, ...]) -> list[Case]:
    import benchmarks.cases  # noqa: F401 - they register themselves

    unknown = set(only) - set(CASES)
    if unknown:
        raise click.BadParameter(f"there is no case {', '.join(unknown)}; see `list`")
    return [one for name, one in CASES.items() if not only or name in only]


def _run(bench: Bench, one: Case, size: str, turns: int | None) -> report.Result:
    began = time.monotonic()
    try:
        finding = one.run(bench, one.size(size, turns))
    except Spoiled as error:
        return report.Result(one, None, time.monotonic() - began, str(error))
    return report.Result(one, finding, time.monotonic() - began)


@contextmanager
def server_for(url: str | None, *, aged: bool = False) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with EmbeddedPostgres(settings={**SETTINGS, "port": port}):
        url = f"postgresql://postgres@127.0.0.1:{port}/postgres"
        if aged:
            _let_age(url)
        yield url


def _let_age(url: str) -> None:
    """Have the server make its WAL files, to use them again, as one does that has run for a while.

    To make one takes 50 ms, in which nobody's commit gets on.
    """
    with psycopg.connect(url, autocommit=True) as connection:
        for _ in range(WAL_FILES):
            connection.execute(
                "SELECT pg_logical_emit_message(false, 'pgqueue', ''), pg_switch_wal()"
            )
        connection.execute("CHECKPOINT")


if __name__ == "__main__":
    main()
