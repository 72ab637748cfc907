"""The command line, as a shell sees it: output, one line of error, exit code."""

import pkgutil
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

import click
import pytest
from click.testing import CliRunner
from shop_rig import (
    PATIENCE,
    assert_one_line,
    command,
    enqueue,
    pgqueue,
    running,
    running_worker,
    wait_until,
    write_shop,
)
from sqlalchemy import Engine, func, make_url, select, text
from sqlalchemy.orm import Session

from pgqueue import Job, JobAttempt, PgQueue, cli
from pgqueue.cli import main
from pgqueue.cli.commands import COMMANDS, loaded
from pgqueue.tables import WorkerProcess


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A directory with an application in it."""
    return write_shop(tmp_path)


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/command-line.md").read_text("utf-8")


def commands_of(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, inner in group.commands.items():
        inner = loaded(inner)
        yield (*path, name), inner
        if isinstance(inner, click.Group):
            yield from commands_of(inner, *path, name)


def names_of(command: click.Command) -> set[str | None]:
    return {parameter.name for parameter in command.params}


class TestHelp:
    def test_help_of_every_command_has_an_example(self) -> None:
        for words, _ in commands_of(main):
            ended = command(PgQueue(), *words, "--help")

            assert ended.returncode == 0
            assert "Example:  pgqueue" in ended.stdout, words

    def test_the_page_fits_the_commands_and_their_options(self) -> None:
        commands = dict(commands_of(main))
        options = {
            option
            for command in (main, *commands.values())
            for parameter in command.get_params(click.Context(command))
            for option in parameter.opts
        }
        documents = PAGE.partition("| command | document |")[2].partition("\n\n")[0]
        with_document = {
            name
            for row in documents.splitlines()
            for name in re.findall(r"`([\w-]+)", row.partition(" | ")[0])
        }

        named = set(re.findall(r"(?:`|pgqueue )([a-z][\w-]+)", PAGE))
        assert {words[0] for words in commands} <= named
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", PAGE)) <= options
        with_json = {words[0] for words, one in commands.items() if "as_json" in names_of(one)}
        assert with_json <= with_document

    def test_help_imports_neither_sqlalchemy_nor_commands(self) -> None:
        code = (
            "import sys; from pgqueue.cli import main; main(['--help'], standalone_mode=False); "
            "print(*{name.partition('.')[0] for name in sys.modules}); "
            "print(*(name for name in sys.modules if name.startswith('pgqueue')))"
        )

        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        *_, packages, ours = ended.stdout.splitlines()

        assert not {"sqlalchemy", "psycopg", "alembic", "rich"} & {*packages.split()}
        light = ["pgqueue", "pgqueue.cli", "pgqueue.cli.app_options", "pgqueue.cli.commands"]
        assert sorted(ours.split()) == light

    def test_help_lists_the_commands_of_all_modules(self) -> None:
        modules = {each.name for each in pkgutil.iter_modules(cli.__path__)} - {"commands"}
        lines = sorted(
            f"{each.name} {module} {each.get_short_help_str(limit=85)}\n"
            for module in modules
            for each in getattr(import_module(f"pgqueue.cli.{module}"), "COMMANDS", ())
        )
        table = "".join(lines)

        assert table == COMMANDS, f"put these lines into pgqueue/cli/commands.py:\n{table}"

    def test_help_tells_the_exit_codes(self) -> None:
        help = command(PgQueue(), "--help").stdout

        assert re.findall(r"^ +(\d+)  +\w", help.partition("Exit codes:")[2], re.M) == [
            "0",
            "1",
            "2",
            "3",
            "130",
        ]

    def test_version_is_the_distribution_s(self) -> None:
        assert command(PgQueue(), "--version").stdout.startswith("pgqueue, version 0.")


class TestWrongApp:
    @pytest.mark.parametrize(
        ("app", "words"),
        [
            ("nowhere:queue", "no module 'nowhere'"),
            ("shop:nix", "has no 'nix'"),
            ("shop:number", "is int, not a PgQueue"),
            ("shop", "holds queue, unbound"),
            ("torn", "SyntaxError"),
            ("os", "holds no PgQueue"),
            ("web", "run `flask --app web pgqueue`"),
            (":queue", "names no module"),
            ("exploding:queue", "ValueError: two lines"),
            ("needy:queue", "a_module_nobody_has"),
            ("shop:broken_factory", "RuntimeError: no settings"),
            ("shop:unbound", "no database"),
        ],
    )
    def test_each_wrong_app_is_said_in_one_line(self, shop: Path, app: str, words: str) -> None:
        assert_one_line(pgqueue(shop, "--app", app, "status"), words)

    def test_an_app_that_enqueues_on_import_is_told_how_to_get_the_tables(
        self, shop: Path, empty_database_url: str
    ) -> None:
        ended = pgqueue(shop, "--app", "hasty:queue", "upgrade", database_url=empty_database_url)

        assert_one_line(ended, "`pgqueue --url URL upgrade`", 'under `if __name__ == "__main__":`')

    def test_verbose_shows_where_an_app_has_failed(self, shop: Path) -> None:
        ended = pgqueue(shop, "-v", "--app", "exploding:queue", "status")

        assert ended.returncode != 0
        assert "exploding.py" in ended.stderr

    def test_no_app_names_the_option_and_the_variable(self, shop: Path) -> None:
        assert_one_line(
            pgqueue(shop, "worker"), "--app module:queue", "PGQUEUE_APP", "[tool.pgqueue]"
        )

    def test_an_app_without_tasks_runs_nothing(self, shop: Path, database_url: str) -> None:
        ended = pgqueue(shop, "--app", "without_tasks", "worker", database_url=database_url)

        assert_one_line(ended, "registers no tasks")


class TestApp:
    @pytest.mark.parametrize("app", ["shop:queue", "shop:nested.jobs", "shop:make_queue", "single"])
    def test_an_app_is_found(self, shop: Path, database_url: str, app: str) -> None:
        ended = pgqueue(shop, "--app", app, "status", database_url=database_url)

        assert (ended.returncode, ended.stderr) == (0, "")

    def test_an_app_may_be_named_after_the_command_and_by_a_variable(
        self, shop: Path, database_url: str
    ) -> None:
        after = pgqueue(shop, "status", "--app", "shop:queue", database_url=database_url)
        by_variable = pgqueue(shop, "status", database_url=database_url, PGQUEUE_APP="shop:queue")

        assert (after.returncode, by_variable.returncode) == (0, 0)

    def test_pyproject_names_the_app_and_the_variable_takes_precedence(
        self, shop: Path, database_url: str
    ) -> None:
        (shop / "pyproject.toml").write_text('[tool.pgqueue]\napp = "shop:queue"\n')

        by_project = pgqueue(shop, "worker", "--until-empty", database_url=database_url)
        by_variable = pgqueue(shop, "status", database_url=database_url, PGQUEUE_APP="no_such")
        by_option = pgqueue(
            shop, "status", "--app", "shop:queue", database_url=database_url, PGQUEUE_APP="no_such"
        )

        assert (by_project.returncode, by_option.returncode) == (0, 0)
        assert_one_line(by_variable, "There is no module 'no_such'")

    @pytest.mark.parametrize(
        ("project", "words"),
        [
            ('[tool.pgqueue]\napp = "no_such:queue"', "app in [tool.pgqueue]: There is no module"),
            ("[tool.pgqueue]\napp = 7", "app in [tool.pgqueue] is 7; write a text"),
            ('[tool.pgqueue]\napps = "shop"', "[tool.pgqueue] has one key, app"),
            ('tool.pgqueue = "shop"', "[tool.pgqueue] has one key, app"),
            ("[tool.pgqueue", "pyproject.toml cannot be read"),
        ],
    )
    def test_a_wrong_app_in_pyproject_is_named(
        self, shop: Path, database_url: str, project: str, words: str
    ) -> None:
        (shop / "pyproject.toml").write_text(project)

        named = pgqueue(shop, "status")
        by_url = pgqueue(shop, "status", "--url", database_url)

        assert_one_line(named, "pyproject.toml", words)
        assert by_url.returncode == 0

    def test_an_app_that_fails_at_import_is_named_by_its_own_line(self, shop: Path) -> None:
        (shop / "unset.py").write_text('import os\n\nos.environ["NO_SUCH_VARIABLE"]\n')

        ended = pgqueue(shop, "--app", "unset:queue", "status")

        assert_one_line(ended, "KeyError: 'NO_SUCH_VARIABLE'", f"(in {shop / 'unset.py'}:3; ")

    def test_an_unbound_app_takes_the_database_of_the_variable(
        self, shop: Path, database_url: str
    ) -> None:
        ended = pgqueue(shop, "--app", "shop:unbound", "status", PGQUEUE_URL=database_url)

        assert ended.returncode == 0

    def test_an_app_keeps_its_own_database_whatever_the_variable_says(
        self, shop: Path, database_url: str
    ) -> None:
        elsewhere = "postgresql://nobody@127.0.0.1:1/nowhere"

        ended = pgqueue(
            shop, "--app", "shop:queue", "status", database_url=database_url, PGQUEUE_URL=elsewhere
        )

        assert ended.returncode == 0


class TestWrongUrl:
    @pytest.mark.parametrize(
        ("url", "words"),
        [
            ("nonsense", "postgresql://user@host/database"),
            ("postgresql://me:secret@localhost:port/shop", "postgresql://user@host/database"),
            ("mysql://me@localhost/shop", "not mysql"),
            ("postgresql+nodriver://me@127.0.0.1:1/shop", "No connection"),
            ("postgresql://me@127.0.0.1:1/shop", "No connection"),
        ],
    )
    def test_a_wrong_url_is_said_in_one_line(self, shop: Path, url: str, words: str) -> None:
        assert_one_line(pgqueue(shop, "--url", url, "status"), words)

    def test_a_missing_url_is_asked_for(self, shop: Path) -> None:
        assert_one_line(pgqueue(shop, "status"), "--url postgresql://", "--app")


class TestWrongOptions:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["frobnicate"],
            ["--frob", "worker"],
            ["worker", "--concurrency", "0"],
            ["worker", "--grace", "nan"],
            ["worker", "--queues", " , "],
            ["worker", "--queues", "mail=-1"],
            ["worker", "--queues", "mail=3=1"],
            ["worker", "--queues", "mail=3,default"],
            ["worker", "--age-after", "0.5"],
            ["demo", "--limit", "1"],
            ["jobs", "--tag", "\udcff"],
            ["cancel", "--unique-key", "\udcff"],
            ["revision", "no/such/directory"],
        ],
    )
    def test_wrong_options_are_said_in_one_line(self, engine: Engine, arguments: list[str]) -> None:
        queue = PgQueue(engine)
        queue.task(name="add")(lambda: None)

        assert_one_line(command(queue, *arguments))


class TestWorker:
    def test_until_empty_runs_what_is_due(
        self, shop: Path, engine: Engine, database_url: str
    ) -> None:
        enqueue(engine, shop, "add", *((n, n) for n in range(20)))

        ended = pgqueue(
            shop, "--app", "shop:queue", "worker", "--until-empty",
            database_url=database_url,
        )  # fmt: skip

        assert ended.returncode == 0
        assert ended.stdout == "20 succeeded\n"
        with Session(engine) as session:
            results = session.scalars(select(Job.result).order_by(Job.id)).all()
            assert results == [2 * n for n in range(20)]

    def test_a_worker_ends_at_its_start_when_a_mapper_cannot_be_configured(
        self, shop: Path, engine: Engine, database_url: str
    ) -> None:
        enqueue(engine, shop, "add", (1, 2))

        ended = pgqueue(shop, "--app", "unmapped:queue", "worker", database_url=database_url)

        assert ended.returncode == 1
        error = ended.stderr.splitlines()[-1]
        assert error.startswith("Error: ")
        assert "'Receipt" in error or "Receipt(receipts)" in error
        assert "relationship(Job)" in error
        assert "Traceback" not in ended.stderr
        with Session(engine) as session:
            assert session.scalars(select(Job.attempts)).all() == [0]

    @pytest.mark.journey
    def test_a_worker_tells_once_that_it_waits_and_for_what(
        self, shop: Path, database_url: str
    ) -> None:
        url = make_url(database_url).set(database="nowhere")
        waits: list[str] = []

        with running_worker(shop, url.render_as_string(hide_password=False), "-v") as worker:
            assert worker.stderr is not None
            while len(waits) < 4:
                line = worker.stderr.readline()
                assert line, "the worker has ended"
                waits += [line] if "waiting for the database" in line else []

        assert [" WARNING " in line for line in waits] == [True, False, False, False]
        assert 'database "nowhere" does not exist' in waits[0]

    def test_a_worker_serves_only_the_queues_it_is_told(
        self, shop: Path, engine: Engine, database_url: str
    ) -> None:
        enqueue(engine, shop, "add", (1, 2))

        ended = pgqueue(
            shop, "--app", "shop:queue", "worker", "--queues", "mail, other", "--until-empty",
            database_url=database_url,
        )  # fmt: skip

        assert ended.stdout == "nothing to do\n"

    def test_a_worker_serves_queues_by_weights_and_lets_jobs_age(
        self, shop: Path, engine: Engine, database_url: str
    ) -> None:
        enqueue(engine, shop, "add", (1, 2))

        ended = pgqueue(
            shop, "--app", "shop:queue", "worker", "--queues", "mail=3, default = 1",
            "--age-after", "600", "--until-empty",
            database_url=database_url,
        )  # fmt: skip

        assert ended.stdout == "1 succeeded\n"

    @pytest.mark.journey
    def test_a_worker_ends_with_0_after_sigterm_and_loses_nothing(
        self, shop: Path, queue: PgQueue, engine: Engine, database_url: str
    ) -> None:
        gate = shop / "gate"
        enqueue(engine, shop, "wait_for_file", *[(str(gate),)] * 6)

        with running_worker(shop, database_url, "--concurrency", "2") as worker:
            wait_until(running(engine, 2))
            worker.send_signal(signal.SIGTERM)
            gate.touch()
            _, log = worker.communicate(timeout=PATIENCE)

        assert worker.returncode == 0, log
        with Session(engine) as session:
            found = {(job.status, job.attempts) for job in session.scalars(select(Job))}
            assert found <= {("pending", 0), ("succeeded", 1)}
            assert ("succeeded", 1) in found
            assert queue.check(session) == []
        assert _workers(engine) == 0

    @pytest.mark.parametrize(
        ("task", "arguments"),
        [
            ("never_end", (True,)),
            ("never_end", (False,)),
            ("never_end_in_pool", ()),
            ("never_end_in_thread", ()),
        ],
    )
    @pytest.mark.journey
    def test_a_worker_ends_soon_although_a_handler_does_not_and_gives_its_job_back(
        self,
        shop: Path,
        queue: PgQueue,
        engine: Engine,
        database_url: str,
        task: str,
        arguments: tuple[Any, ...],
    ) -> None:
        enqueue(engine, shop, task, arguments)

        with running_worker(shop, database_url, "--grace", "0.2") as worker:
            wait_until(running(engine, 1))
            worker.send_signal(signal.SIGTERM)
            worker.communicate(timeout=PATIENCE)

        assert worker.returncode == 3
        with Session(engine) as session:
            assert session.scalars(select(JobAttempt.outcome)).all() == ["interrupted"]
            assert session.scalars(select(Job.status)).all() == ["pending"]
            assert queue.check(session) == []

    @pytest.mark.journey
    def test_a_third_signal_does_not_end_the_process_before_the_attempts_are_settled(
        self, shop: Path, engine: Engine, database_url: str
    ) -> None:
        enqueue(engine, shop, "never_end", (True,))

        with running_worker(shop, database_url, "--grace", "600") as worker:
            wait_until(running(engine, 1))
            assert worker.stderr is not None
            with engine.connect() as holder:
                holder.execute(text("LOCK TABLE pgqueue.leases"))
                worker.send_signal(signal.SIGINT)
                next(line for line in worker.stderr if "stopping" in line)
                worker.send_signal(signal.SIGINT)
                next(line for line in worker.stderr if "has stopped" in line)
                worker.send_signal(signal.SIGINT)
                worker.communicate(timeout=PATIENCE)

        assert worker.returncode == 3


def _workers(engine: Engine) -> int:
    with Session(engine) as session:
        return session.scalars(select(func.count()).select_from(WorkerProcess)).one()


def test_a_connection_limit_below_the_need_is_named(engine: Engine) -> None:
    role = f"limited_{uuid4().hex[:8]}"
    with engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN CONNECTION LIMIT 0 PASSWORD 'secret'"))
    url = engine.url.set(username=role, password="secret").render_as_string(hide_password=False)
    try:
        ended = CliRunner().invoke(main, ["--url", url, "status"])
    finally:
        with engine.begin() as connection:
            connection.execute(text(f"DROP ROLE {role}"))

    assert ended.exit_code == 1
    assert "raise the CONNECTION LIMIT of the role or the database" in ended.output
