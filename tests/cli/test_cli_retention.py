"""``pgqueue prune``, ``run-now``, ``enqueue``, ``pause`` and ``resume``."""

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from shop_rig import assert_one_line, enqueue, pgqueue, write_shop
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from pgqueue import Job, MessageQueue, QueueSettings

APP = ("--app", "shop:queue")
OLD = """
    INSERT INTO pgqueue.jobs (task, outcome, created_at, finished_at, attempts)
    SELECT task, 'succeeded', 'epoch', 'epoch', 1
    FROM unnest(ARRAY['shop.add', 'shop.add', 'lost.task']) AS task
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return write_shop(tmp_path)


class TestPrune:
    def test_a_dry_run_counts_what_the_next_run_deletes(
        self, engine: Engine, database_url: str, shop: Path
    ) -> None:
        with engine.begin() as connection:
            connection.execute(text(OLD))

        def prune(*options: str) -> str:
            ended = pgqueue(shop, *APP, "prune", *options, database_url=database_url)
            assert ended.returncode == 0, ended.stderr
            return ended.stdout

        counted = json.loads(prune("--dry-run", "--json"))
        assert counted == {
            "due": 2,
            "jobs": [{"task": "shop.add", "outcome": "succeeded", "jobs": 2}],
        }
        assert prune("--dry-run").split()[-3:] == ["shop.add", "succeeded", "2"]
        assert prune() == "Deleted 2 jobs.\n"
        assert prune("--dry-run") == "No job to delete.\n"
        assert json.loads(prune("--json")) == {"deleted": 0, "refused": []}
        with Session(engine) as session:
            assert [job.task for job in session.query(Job)] == ["lost.task"]

    def test_a_job_that_stays_is_named(self, engine: Engine, database_url: str, shop: Path) -> None:
        with engine.begin() as connection:
            connection.execute(text(OLD))
            connection.execute(
                text(
                    "CREATE TABLE a "
                    "(job bigint PRIMARY KEY REFERENCES pgqueue.jobs ON DELETE CASCADE)"
                )
            )
            connection.execute(text("CREATE TABLE b (job bigint REFERENCES a)"))
            for table in "ab":
                connection.execute(text(f"INSERT INTO {table} SELECT min(id) FROM pgqueue.jobs"))

        ended = pgqueue(shop, *APP, "prune", database_url=database_url)

        assert (ended.returncode, ended.stdout) == (0, "Deleted 1 jobs.\n")
        assert "1 jobs stay although their time is over, job 1 first" in ended.stderr

    def test_it_needs_the_rules_of_an_app(self, database_url: str, shop: Path) -> None:
        ended = pgqueue(shop, "prune", database_url=database_url)

        assert_one_line(ended, "needs your application")


def test_doctor_counts_the_ended_jobs_that_no_rule_deletes(
    engine: Engine, database_url: str, shop: Path
) -> None:
    with engine.begin() as connection:
        connection.execute(text(OLD))

    ended = pgqueue(shop, *APP, "doctor", "--json", database_url=database_url)

    findings = {one["subject"]: one for one in json.loads(ended.stdout)["findings"]}
    assert findings["retention"]["level"] == "warning"
    assert "1 ended jobs belong to tasks" in findings["retention"]["detail"]
    assert "lost.task (1)" in findings["retention"]["detail"]


class TestRunNow:
    def test_the_waiting_jobs_of_a_task_are_due_now(
        self, engine: Engine, database_url: str, shop: Path
    ) -> None:
        enqueue(engine, shop, "add", (1, 2), (3, 4), (5, 6))
        enqueue(engine, shop, "wait_for_file", ("x",))
        with engine.begin() as connection:
            for table in ("jobs", "message_queue"):
                id = "id" if table == "jobs" else "target_id"
                connection.execute(
                    text(
                        f"UPDATE pgqueue.{table} SET run_at = '9999-01-01' WHERE {id} IN (1, 2, 4)"
                    )
                )

        def run_now(*options: str) -> tuple[int, str]:
            ended = pgqueue(shop, "run-now", *APP, *options, database_url=database_url)
            return ended.returncode, ended.stdout or ended.stderr

        code, said = run_now("--task", "shop.add")
        assert (code, "This would run now 2 waiting jobs; to confirm, add --yes" in said) == (
            2,
            True,
        )
        assert run_now("--task", "shop.add", "--yes") == (0, "2 due now\n")
        assert run_now("4", "3") == (0, "4: due now\n3: unchanged, because it is due already\n")
        assert run_now("--task", "shop.add", "--yes") == (0, "No job fits.\n")
        code, said = run_now("77")
        assert (code, "77: not found" in said) == (1, True)
        code, said = run_now()
        assert (code, "Give their ids, or say --task" in said) == (2, True)
        with Session(engine) as session:
            assert max(session.scalars(session.query(MessageQueue.run_at).statement)).year < 9999


ENDED_AT_COMMIT = """
    CREATE FUNCTION end_job() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        UPDATE pgqueue.jobs SET outcome = 'succeeded', finished_at = clock_timestamp()
        WHERE id = NEW.id;
        RETURN NULL;
    END $$;
    CREATE CONSTRAINT TRIGGER end_job AFTER INSERT ON pgqueue.jobs
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION end_job()
"""
"""As if a worker had run the job at once."""


class TestEnqueue:
    def test_the_arguments_are_those_of_the_task(
        self, engine: Engine, database_url: str, shop: Path
    ) -> None:
        ended = pgqueue(
            shop,
            *(*APP, "enqueue", "shop.post", "--args", '{"to": "ada"}', "--priority", "0"),
            *("--delay", "60", "--unique-key", "k", "--json"),
            database_url=database_url,
        )

        assert ended.returncode == 0, ended.stderr
        printed = json.loads(ended.stdout)
        assert printed == {
            "id": 1,
            "task": "shop.post",
            "queue": "mail",
            "status": "pending",
            "is_new": True,
        }
        with Session(engine) as session:
            job = session.get_one(Job, 1)
            assert (job.args, job.priority, job.unique_key) == ({"to": "ada"}, 0, "k")
            assert job.run_at > job.created_at

    def test_a_job_that_holds_the_key_already_is_told(
        self, engine: Engine, database_url: str, shop: Path
    ) -> None:
        def again(*options: str) -> CompletedProcess[str]:
            words = (*APP, "enqueue", "shop.post", "--args", '{"to": "ada"}', "--unique-key", "k")
            return pgqueue(shop, *words, *options, database_url=database_url)

        assert again().stderr == ""
        ended = again()
        assert (ended.returncode, ended.stdout) == (0, "Job 1 of task shop.post is pending.\n")
        assert ended.stderr == "This job held the unique key already; no job was added.\n"
        assert json.loads(again("--json").stdout)["is_new"] is False

    def test_the_status_is_that_of_the_enqueue_however_soon_a_worker_is(
        self, engine: Engine, database_url: str, shop: Path
    ) -> None:
        with engine.begin() as connection:
            connection.execute(text(ENDED_AT_COMMIT))

        words = (*APP, "enqueue", "shop.post", "--args", '{"to": "ada"}')
        ended = pgqueue(shop, *words, database_url=database_url)

        assert ended.stdout == "Job 1 of task shop.post is pending.\n"

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["shop.nothing_like_it"], ["no task 'shop.nothing_like_it'", "shop.add"]),
            (["shop.add", "--args", "{"], ["--args is not JSON"]),
            (["shop.add", "--args", "[1, 2]"], ["give the arguments by name"]),
            (["shop.add", "--args", '{"a": 1}'], ["shop.add", "'b'"]),
            (["shop.add", "--args", '{"a": 1, "b": "x"}'], ["shop.add: argument b", "int"]),
            (["shop.add", "--args", '{"a": 1, "b": 2, "c": 3}'], ["shop.add", "'c'"]),
        ],
    )
    def test_a_wrong_call_is_one_line(
        self,
        engine: Engine,
        database_url: str,
        shop: Path,
        arguments: list[str],
        words: list[str],
    ) -> None:
        ended = pgqueue(shop, *APP, "enqueue", *arguments, database_url=database_url)

        assert_one_line(ended, *words)
        with Session(engine) as session:
            assert session.query(Job).count() == 0


def test_queues_are_paused_and_resumed(engine: Engine, database_url: str, shop: Path) -> None:
    def paused() -> list[str]:
        with Session(engine) as session:
            rows = session.query(QueueSettings).where(QueueSettings.paused_at.is_not(None))
            return sorted(row.name for row in rows)

    ended = pgqueue(shop, *APP, "pause", "mail", "male", database_url=database_url)
    assert (ended.returncode, ended.stdout) == (0, "mail: paused\nmale: paused\n")
    assert ended.stderr == "No task of the app uses queue male. Is the name misspelt?\n"
    assert paused() == ["mail", "male"]

    ended = pgqueue(shop, *APP, "resume", "male", "--json", database_url=database_url)
    assert json.loads(ended.stdout) == {
        "queues": ["male"],
        "tasks": [],
        "keys": [],
        "is_paused": False,
    }
    assert paused() == ["mail"]


def test_tasks_are_paused_and_resumed(database_url: str, shop: Path) -> None:
    def run(*words: str) -> CompletedProcess[str]:
        return pgqueue(shop, *APP, *words, database_url=database_url)

    ended = run("pause", "--task", "shop.add", "--task", "shop.ad")
    assert (ended.returncode, ended.stdout) == (0, "shop.add: paused\nshop.ad: paused\n")
    assert ended.stderr == "The app has no task shop.ad. Is the name misspelt?\n"
    assert json.loads(run("status", "--json").stdout)["paused_tasks"] == ["shop.ad", "shop.add"]
    assert "Paused tasks: shop.ad, shop.add." in run("status").stdout

    ended = run("resume", "--task", "shop.add", "mail", "--json")
    said = {"queues": ["mail"], "tasks": ["shop.add"], "keys": [], "is_paused": False}
    assert json.loads(ended.stdout) == said
    assert json.loads(run("status", "--json").stdout)["paused_tasks"] == ["shop.ad"]

    ended = run("pause")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "name a queue, a task with --task, or a key with --limit, --key" in ended.stderr
