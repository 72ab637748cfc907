"""Whether pgqueue works at all with what is installed beside it: `make smoke`.

A program and no test: an environment of the oldest versions has no pytest.  It imports every
module, asks every command for its help, and runs jobs by the command line and by Flask's.
"""

import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path

import click
from click.testing import CliRunner
from sqlalchemy import create_engine, text

import pgqueue
from pgqueue.cli.commands import loaded
from pgqueue.embedded import EmbeddedPostgres

FOLDER = Path(__file__).parent
PROGRAMS = Path(sys.executable).parent
OURS = (str(PROGRAMS / "pgqueue"), "--app", "smoke_shop:queue")
FLASKS = (str(PROGRAMS / "flask"), "--app", "smoke_shop:create_app", "pgqueue")
SHOWN = ("alembic", "click", "flask", "psycopg", "pydantic", "rich", "sqlalchemy")


def main() -> None:
    for name in list(os.environ):  # what is meant for servers and applications of yours
        if name.startswith(("PG", "FLASK_")):
            del os.environ[name]
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in SHOWN)
    print(f"Python {sys.version.split()[0]}, {versions}")
    print(f"{import_every_module()} modules import")
    with EmbeddedPostgres() as server:
        os.environ["SMOKE_URL"] = server.url
        print(f"{show_every_help()} commands show their help")
        print(f"{run_jobs(server.url)} jobs ran by the command line and by Flask's")


def import_every_module() -> int:
    names = [
        found.name
        for found in pkgutil.walk_packages(pgqueue.__path__, "pgqueue.")
        if not found.name.startswith("pgqueue.migrations") and not found.name.endswith("__main__")
    ]
    for name in names:
        import_module(name)
    return len(names)


def show_every_help() -> int:
    sys.path.insert(0, str(FOLDER))
    from smoke_shop import create_app

    from pgqueue.cli import main as command_line

    paths = list(commands_under(command_line))
    for path in paths:
        ended = CliRunner().invoke(command_line, [*path, "--help"])
        assert ended.exit_code == 0, ended.output
        assert "Usage: " in ended.output
    ended = create_app().test_cli_runner().invoke(args=["pgqueue", "--help"])
    assert ended.exit_code == 0, ended.output
    return len(paths) + 1


def commands_under(command: click.Command, *path: str) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None, name
            yield from commands_under(loaded(inner), *path, name)


def run_jobs(url: str) -> int:
    from smoke_shop import create_app, flask_queue, queue, sell, sell_async, sell_in_flask

    engine = create_engine(url)
    run(*OURS, "upgrade")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE sold (item text)"))
    for task in (sell, sell_async):
        with queue.session() as session, session.begin():
            task.enqueue(session, task.name)
    run(*OURS, "worker", "--until-empty")
    with create_app().app_context(), flask_queue.session() as session, session.begin():
        sell_in_flask.enqueue(session, "flask")
    run(*FLASKS, "worker", "--until-empty")
    for command in (["status"], ["jobs"], ["jobs", "1"], ["doctor"]):
        run(*OURS, *command)
        run(*FLASKS, *command)
    with engine.begin() as connection:
        ended = connection.execute(
            text("SELECT count(*) FROM pgqueue.jobs WHERE outcome = 'succeeded'")
        )
        sold = connection.execute(text("SELECT count(DISTINCT item) FROM sold"))
        counts = (ended.scalar_one(), sold.scalar_one())
    assert counts == (3, 3), counts
    return counts[0]


def run(*command: str) -> None:
    ended = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout}{ended.stderr}"


if __name__ == "__main__":
    main()
