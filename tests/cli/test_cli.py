"""The command line, as a shell sees it: output, one line of error, exit code."""

import json
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from shop_rig import (
    PATIENCE,
    assert_one_line,
    enqueue,
    pgqueue,
    running,
    running_worker,
    wait_until,
    write_shop,
)
from sqlalchemy import Engine, func, make_url, select, text
from sqlalchemy.orm import Session

from pgqueue import Job, JobAttempt, Lease, MessageQueue, PgQueue, WorkerProcess
from pgqueue.schema import SCHEMA_VERSION


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A directory with an application in it."""
    return write_shop(tmp_path)


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


ROOT = Path(__file__).parents[2]


class TestHelp:
    @pytest.mark.parametrize("command", ["worker", "jobs show"])
    def test_help_of_a_command_has_an_example(self, shop: Path, command: str) -> None:
        ended = pgqueue(shop, *command.split(), "--help")

        assert ended.returncode == 0
        assert "Example:" in ended.stdout

    def test_help_imports_neither_alembic_nor_rich_nor_commands(self, shop: Path) -> None:
        code = (
            "import sys; from pgqueue.cli import main; main(['--help'], standalone_mode=False); "
            "print([name for name in ('alembic', 'rich', 'pgqueue.demo') if name in sys.modules])"
        )

        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

        assert ended.stdout.splitlines()[-1] == "[]"

    def test_help_tells_the_exit_codes(self, shop: Path) -> None:
        help = pgqueue(shop, "--help").stdout

        assert re.findall(r"^ +(\d+)  +\w", help.partition("Exit codes:")[2], re.M) == [
            "0",
            "1",
            "2",
            "3",
            "130",
        ]

    def test_version_is_the_distribution_s(self, shop: Path) -> None:
        assert pgqueue(shop, "--version").stdout.startswith("pgqueue, version 0.")


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
    def test_each_is_said_in_one_line(self, shop: Path, app: str, words: str) -> None:
        assert_one_line(pgqueue(shop, "--app", app, "status"), words)

    def test_one_that_enqueues_on_import_is_told_how_to_get_the_tables(
        self, shop: Path, empty_database_url: str
    ) -> None:
        ended = pgqueue(shop, "--app", "hasty:queue", "upgrade", database_url=empty_database_url)

        assert_one_line(ended, "`pgqueue --url URL upgrade`", 'under `if __name__ == "__main__":`')

    def test_verbose_shows_where_it_happened(self, shop: Path) -> None:
        ended = pgqueue(shop, "-v", "--app", "exploding:queue", "status")

        assert ended.returncode != 0
        assert "exploding.py" in ended.stderr

    def test_no_app_names_the_option_and_the_variable(self, shop: Path) -> None:
        assert_one_line(pgqueue(shop, "worker"), "--app module:queue", "PGQUEUE_APP")

    def test_an_app_without_tasks_runs_nothing(self, shop: Path, database_url: str) -> None:
        ended = pgqueue(shop, "--app", "without_tasks", "worker", database_url=database_url)

        assert_one_line(ended, "registers no tasks")


class TestApp:
    @pytest.mark.parametrize("app", ["shop:queue", "shop:nested.jobs", "shop:make_queue", "single"])
    def test_is_found(self, shop: Path, database_url: str, app: str) -> None:
        ended = pgqueue(shop, "--app", app, "status", database_url=database_url)

        assert (ended.returncode, ended.stderr) == (0, "")

    def test_may_be_named_after_the_command_and_by_a_variable(
        self, shop: Path, database_url: str
    ) -> None:
        after = pgqueue(shop, "status", "--app", "shop:queue", database_url=database_url)
        by_variable = pgqueue(shop, "status", database_url=database_url, PGQUEUE_APP="shop:queue")

        assert (after.returncode, by_variable.returncode) == (0, 0)

    def test_unbound_takes_the_database_of_the_variable(
        self, shop: Path, database_url: str
    ) -> None:
        ended = pgqueue(shop, "--app", "shop:unbound", "status", PGQUEUE_URL=database_url)

        assert ended.returncode == 0

    def test_keeps_its_own_database_whatever_the_variable_says(
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
            ("mysql://me@localhost/shop", "for mysql"),
            ("postgresql://me@127.0.0.1:1/shop", "No connection"),
        ],
    )
    def test_is_said_in_one_line(self, shop: Path, url: str, words: str) -> None:
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
            ["revision", "no/such/directory"],
        ],
    )
    def test_are_said_in_one_line(
        self, shop: Path, database_url: str, arguments: list[str]
    ) -> None:
        ended = pgqueue(shop, *arguments, database_url=database_url, PGQUEUE_APP="shop:queue")

        assert_one_line(ended)


class TestUpgrade:
    def test_makes_the_tables_and_may_be_repeated(
        self, shop: Path, empty_database_url: str
    ) -> None:
        first = pgqueue(shop, "--url", empty_database_url, "upgrade")
        second = pgqueue(shop, "--app", "shop:queue", "upgrade", database_url=empty_database_url)
        status = pgqueue(shop, "--url", empty_database_url, "status")

        assert (first.returncode, second.returncode, status.returncode) == (0, 0, 0)
        assert f"version {SCHEMA_VERSION}" in first.stdout

    @pytest.mark.parametrize("command", ["status", "worker", "requeue 1"])
    def test_is_what_a_missing_schema_asks_for(
        self, shop: Path, empty_database_url: str, command: str
    ) -> None:
        words = ["--app", "shop:queue", *command.split()]
        ended = pgqueue(shop, *words, database_url=empty_database_url)

        assert ended.returncode == 1
        assert "upgrade`" in ended.stderr.splitlines()[-1]
        assert "Traceback" not in ended.stderr


class TestRevision:
    def test_is_written_into_the_host_s_history(self, shop: Path) -> None:
        alembic = [sys.executable, "-m", "alembic", "init", "migrations"]
        subprocess.run(alembic, cwd=shop, check=True, capture_output=True)

        ended = pgqueue(shop, "revision", "-m", "bring the jobs")

        written = next((shop / "migrations" / "versions").glob("*bring_the_jobs.py"))
        assert ended.returncode == 0
        assert f"pgqueue.schema.upgrade(to={SCHEMA_VERSION}" in written.read_text()

    def test_needs_a_history(self, shop: Path) -> None:
        assert_one_line(pgqueue(shop, "revision"), "alembic.ini")

    def test_is_never_written_into_the_history_of_pgqueue_itself(self) -> None:
        versions = ROOT / "alembic" / "versions"
        before = sorted(versions.glob("*.py"))

        ended = pgqueue(ROOT, "revision")

        assert_one_line(ended, "pgqueue's own history")
        assert sorted(versions.glob("*.py")) == before


class TestStatus:
    def test_counts_jobs_by_queue_and_status(
        self, shop: Path, engine: Engine, database_url: str
    ) -> None:
        enqueue(engine, shop, "add", (1, 2), (3, 4))

        ended = pgqueue(shop, "--url", database_url, "status", "--json")

        (found,) = json.loads(ended.stdout)["queues"]
        assert found["name"] == "default"
        assert found["jobs"]["pending"] == 2

    def test_beside_many_jobs_leaves_out_the_succeeded_unless_asked(
        self, shop: Path, engine: Engine, database_url: str
    ) -> None:
        enqueue(engine, shop, "add", (1, 2), (3, 4))
        with engine.begin() as connection:
            ended = "outcome = 'succeeded', finished_at = clock_timestamp()"
            connection.execute(text(f"UPDATE pgqueue.jobs SET {ended} WHERE id = 1"))
            connection.execute(text("DELETE FROM pgqueue.message_queue WHERE target_id = 1"))
            # As a server with as many jobs would have it in its statistics.
            many = "UPDATE pg_class SET reltuples = 1e6 WHERE oid = 'pgqueue.jobs'::regclass"
            connection.execute(text(many))

        short = pgqueue(shop, "--url", database_url, "status", "--json")
        plain = pgqueue(shop, "--url", database_url, "status")
        exact = pgqueue(shop, "--url", database_url, "status", "--exact", "--json")

        (found,) = json.loads(short.stdout)["queues"]
        assert (found["jobs"]["pending"], found["jobs"]["succeeded"]) == (1, None)
        assert found["jobs"]["blocked"] == 0
        assert "About 1,000,000 jobs in all" in plain.stdout
        (found,) = json.loads(exact.stdout)["queues"]
        assert (found["jobs"]["pending"], found["jobs"]["succeeded"]) == (1, 1)

    @pytest.mark.parametrize(("slots", "ahead"), [(2, [1, 0]), (3, [0, 0])])
    def test_says_how_many_of_the_running_are_claimed_ahead(
        self, shop: Path, engine: Engine, database_url: str, slots: int, ahead: list[int]
    ) -> None:
        enqueue(engine, shop, "add", *((n, n) for n in range(4)))
        with Session(engine) as session, session.begin():
            busy, idle = uuid.uuid4(), uuid.uuid4()
            for id in (busy, idle):
                process = {"hostname": "here", "pid": 1, "backend_pid": 1, "queues": ["default"]}
                session.add(WorkerProcess(id=id, slots=slots, **process))
                session.flush()  # in this order
            for job_id in (1, 2, 3):
                message = session.scalars(select(MessageQueue).filter_by(target_id=job_id)).one()
                session.add(
                    Lease(target_id=job_id, message_id=message.id, attempt=1, worker_id=busy)
                )
                session.delete(message)

        plain = pgqueue(shop, "--url", database_url, "status")
        found = json.loads(pgqueue(shop, "--url", database_url, "status", "--json").stdout)

        assert [worker["claimed_ahead"] for worker in found["workers"]] == ahead
        assert found["queues"][0]["jobs"]["running"] == 3
        assert ("The running include 1 claimed ahead" in plain.stdout) is (sum(ahead) > 0)

    def test_shows_a_paused_queue(
        self, shop: Path, queue: PgQueue, session: Session, database_url: str
    ) -> None:
        queue.pause(session, "mail")
        session.commit()

        ended = pgqueue(shop, "--url", database_url, "status")

        assert "mail (paused)" in ended.stdout

    @pytest.mark.journey
    def test_shows_a_worker_with_its_heartbeat(
        self, shop: Path, engine: Engine, database_url: str
    ) -> None:
        with running_worker(shop, database_url, "--concurrency", "3") as worker:
            wait_until(lambda: _workers(engine) == 1)
            ended = pgqueue(shop, "--url", database_url, "status", "--json")
            plain = pgqueue(shop, "--url", database_url, "status")

        (found,) = json.loads(ended.stdout)["workers"]
        assert (found["pid"], found["slots"]) == (worker.pid, 3)
        assert found["heartbeat_age"] < 30
        assert f":{worker.pid} " in plain.stdout


class TestDoctor:
    def test_finds_a_job_without_a_message(
        self, shop: Path, session: Session, database_url: str
    ) -> None:
        session.add(Job(task="shop.add"))
        session.commit()

        ended = pgqueue(shop, "--url", database_url, "doctor", "--json")

        found = json.loads(ended.stdout)
        assert ended.returncode == 1
        assert not found["is_sound"]
        assert "wrong" in {finding["level"] for finding in found["findings"]}

    def test_finds_settings_that_lose_commits(
        self, shop: Path, session: Session, database_url: str
    ) -> None:
        name = session.scalars(text("SELECT current_database()")).one()
        session.execute(text(f"ALTER DATABASE {name} SET synchronous_commit = off"))
        session.commit()

        ended = pgqueue(shop, "--url", database_url, "doctor")

        assert ended.returncode == 1
        assert "wrong    synchronous_commit: off, by the database" in ended.stdout

    def test_finds_that_the_tables_are_missing(self, shop: Path, empty_database_url: str) -> None:
        ended = pgqueue(shop, "--url", empty_database_url, "doctor")

        assert ended.returncode == 1
        assert "wrong    schema" in ended.stdout


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

    def test_ends_at_its_start_when_a_mapper_cannot_be_configured(
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
    def test_tells_once_that_it_waits_and_for_what(self, shop: Path, database_url: str) -> None:
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

    def test_serves_only_the_queues_it_is_told(
        self, shop: Path, engine: Engine, database_url: str
    ) -> None:
        enqueue(engine, shop, "add", (1, 2))

        ended = pgqueue(
            shop, "--app", "shop:queue", "worker", "--queues", "mail, other", "--until-empty",
            database_url=database_url,
        )  # fmt: skip

        assert ended.stdout == "nothing to do\n"

    def test_serves_queues_by_weights_and_lets_jobs_age(
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
    def test_ends_with_0_after_sigterm_and_loses_nothing(
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
    def test_ends_soon_although_a_handler_does_not_and_gives_its_job_back(
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
