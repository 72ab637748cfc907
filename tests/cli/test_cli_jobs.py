"""Looking at jobs and changing them from a shell."""

import json
import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from shop_rig import (
    assert_one_line,
    enqueue,
    pgqueue,
    running,
    running_worker,
    wait_until,
    write_shop,
)
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from pgqueue import Job, JobContext, JobStatus, PgQueue, Retry, Secret, Worker

EVIL = "\x1b[2J\x1b]0;mine\x07\u202e<b>"


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return write_shop(tmp_path)


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    """A queue with a task that fails and one that does not."""
    queue = PgQueue(engine)

    @queue.task(name="mail.fail", queue="mail", max_attempts=2, retry=Retry.constant(timedelta(0)))
    def fail(words: str) -> None:
        raise ValueError(words)

    @queue.task(name="add")
    def add(a: int) -> int:
        return a

    return queue


def enqueue_all(queue: PgQueue, name: str, arguments: Sequence[Any]) -> list[int]:
    with queue.session() as session, session.begin():
        return queue.tasks[name].enqueue_many(session, [(one,) for one in arguments])


def failed(queue: PgQueue, *words: str) -> list[int]:
    """Jobs that have failed for good."""
    ids = enqueue_all(queue, "mail.fail", words)
    Worker(queue, ["mail"]).run_until_empty(timeout=60)
    return ids


def statuses(engine: Engine) -> dict[int, JobStatus]:
    with Session(engine) as session:
        return {job.id: job.status for job in session.scalars(select(Job))}


def listed(shop: Path, database_url: str, *options: str) -> list[int]:
    ended = pgqueue(shop, "--url", database_url, "jobs", "list", "--json", *options)
    assert ended.returncode == 0, ended.stderr
    return [job["id"] for job in json.loads(ended.stdout)["jobs"]]


class TestList:
    def test_is_the_newest_first_and_by_pages(
        self, shop: Path, queue: PgQueue, database_url: str
    ) -> None:
        ids = enqueue_all(queue, "add", range(5))

        first = pgqueue(shop, "--url", database_url, "jobs", "--json", "--limit", "2")
        page = json.loads(first.stdout)
        rest = listed(shop, database_url, "--before", str(page["next_before"]))

        assert [job["id"] for job in page["jobs"]] == ids[:2:-1]
        assert rest == ids[2::-1]
        assert listed(shop, database_url, "--after", str(ids[3])) == ids[4:]

    def test_is_told_where_jobs_stand_which_task_and_which_queue(
        self, shop: Path, queue: PgQueue, database_url: str
    ) -> None:
        [dead] = failed(queue, "no")
        [waiting] = enqueue_all(queue, "add", [1])

        assert listed(shop, database_url, "--status", "failed") == [dead]
        assert listed(shop, database_url, "--status", "pending") == [waiting]
        both = listed(shop, database_url, "--status", "failed", "--status", "pending")
        assert both == [waiting, dead]
        assert listed(shop, database_url, "--queue", "mail") == [dead]
        assert listed(shop, database_url, "--task", "add") == [waiting]
        assert listed(shop, database_url, "--status", "failed", "--task", "add") == []

    def test_is_told_which_tag(self, shop: Path, queue: PgQueue, database_url: str) -> None:
        task = queue.tasks["add"]
        tagged = task.options(tags=["a", "b"]).delay(1).id
        task.options(tags=["b"]).delay(1)
        task.delay(1)

        assert listed(shop, database_url, "--tag", "a") == [tagged]
        assert listed(shop, database_url, "--tag", "a", "--status", "pending") == [tagged]
        assert listed(shop, database_url, "--tag", "a", "--status", "failed") == []

    def test_is_a_table_for_a_reader_and_names_the_next_page(
        self, shop: Path, queue: PgQueue, database_url: str
    ) -> None:
        [_, second] = failed(queue, "no", "not at all\nsecond line")

        ended = pgqueue(shop, "--url", database_url, "jobs", "--limit", "1")

        heading, line = ended.stdout.splitlines()
        assert heading.split()[:4] == ["id", "status", "task", "queue"]
        assert line.split()[:5] == [str(second), "failed", "mail.fail", "mail", "2/2"]
        assert line.endswith("not at all")
        assert f"--before {second}" in ended.stderr

    def test_of_nothing_says_so(self, shop: Path, database_url: str) -> None:
        assert pgqueue(shop, "--url", database_url, "jobs").stdout == "No job fits.\n"


class TestShow:
    def test_tells_the_progress_of_a_handler(
        self, shop: Path, queue: PgQueue, engine: Engine, database_url: str
    ) -> None:
        @queue.task(name="report")
        def report(ctx: JobContext) -> None:
            ctx.progress(3, 10, "pages")

        id = report.delay().id
        Worker(queue).run_until_empty(timeout=60)

        shown = pgqueue(shop, "--url", database_url, "jobs", "show", str(id))
        told = json.loads(
            pgqueue(shop, "--url", database_url, "jobs", "show", str(id), "--json").stdout
        )

        assert re.search(r"progress +3 of 10: pages", shown.stdout)
        assert told["progress"] == {"done": 3, "total": 10, "note": "pages"}

    def test_says_that_its_queue_and_its_task_are_paused(
        self, shop: Path, queue: PgQueue, database_url: str
    ) -> None:
        [id] = enqueue_all(queue, "mail.fail", ["no"])

        def shown(*options: str) -> str:
            return pgqueue(shop, "--url", database_url, "jobs", str(id), *options).stdout

        def is_paused() -> tuple[bool, bool]:
            found = json.loads(shown("--json"))
            return found["is_queue_paused"], found["is_task_paused"]

        assert (is_paused(), "paused" in shown()) == ((False, False), False)
        with queue.session() as session, session.begin():
            queue.pause(session, "mail")
            queue.pause_task(session, "mail.fail")
        assert is_paused() == (True, True)
        assert "paused        queue mail: pgqueue resume mail" in shown()
        assert "paused        task mail.fail: pgqueue resume --task mail.fail" in shown()

    def test_tells_every_attempt_with_its_error(
        self, shop: Path, queue: PgQueue, database_url: str
    ) -> None:
        [id] = failed(queue, "no such address")

        command = ["--url", database_url, "jobs", "show", str(id), "--show-arguments"]
        ended = pgqueue(shop, *command)

        assert (ended.returncode, ended.stderr) == (0, "")
        assert f"Job {id}  mail.fail  failed" in ended.stdout
        assert '{"words": "no such address"}' in ended.stdout
        assert "Attempt 1  failed" in ended.stdout
        assert "Attempt 2  failed" in ended.stdout
        assert ended.stdout.count("ValueError: no such address") == 2
        assert ended.stdout.count("Traceback (most recent call last)") == 1, "the same both times"
        assert "(with the traceback of attempt 1)" in ended.stdout
        assert "test_cli_jobs.py" in ended.stdout

    def test_of_a_success_tells_an_earlier_error_as_that_of_its_attempt(
        self, shop: Path, queue: PgQueue, database_url: str
    ) -> None:
        tries = iter([True, False])

        @queue.task(name="mail.stumble", retry=Retry.constant(timedelta(0)))
        def stumble() -> None:
            if next(tries):
                raise ValueError("not yet")

        id = stumble.delay().id
        assert Worker(queue).run_until_empty(timeout=60)["succeeded"] == 1

        show = pgqueue(shop, "--url", database_url, "jobs", str(id)).stdout
        listed = pgqueue(shop, "--url", database_url, "jobs").stdout

        assert "not yet" not in listed
        job, _, attempt = show.partition("Attempt 1  failed")
        assert "not yet" not in job
        assert "ValueError: not yet" in attempt

    def test_as_json_has_the_same_with_iso_times(
        self, shop: Path, queue: PgQueue, database_url: str
    ) -> None:
        [id] = failed(queue, "no such address")

        command = ["--url", database_url, "jobs", str(id), "--show-arguments", "--json"]
        job = json.loads(pgqueue(shop, *command).stdout)

        assert (job["id"], job["status"], job["attempts"]) == (id, "failed", 2)
        assert job["args"] == {"words": "no such address"}
        assert datetime.fromisoformat(job["created_at"]).tzinfo is not None
        errors = {(one["outcome"], one["error_type"]) for one in job["failed_attempts"]}
        assert errors == {("failed", "ValueError")}
        assert job["running_on"] is None

    @pytest.mark.parametrize("has_app", [False, True])
    def test_hides_the_arguments_and_result_of_a_task_that_the_app_has_not(
        self, shop: Path, queue: PgQueue, database_url: str, has_app: bool
    ) -> None:
        @queue.task(name="echo")
        def echo(card: Secret[list[int]], words: str) -> str:
            return f"{card} {words}"

        id = echo.delay([73190], "spoken").id
        Worker(queue).run_until_empty()
        where = ["--app", "shop:queue"] if has_app else ["--url", database_url]
        command = [*where, "jobs", str(id)]

        plain = pgqueue(shop, *command, database_url=database_url)
        told = pgqueue(shop, *command, "--json", database_url=database_url)

        document = json.loads(told.stdout)

        assert "arguments and its result are hidden" in plain.stderr
        assert "73190" not in plain.stdout + json.dumps(document)
        assert "spoken" not in plain.stdout + json.dumps(document)
        assert document["args"] == {"card": "***", "words": "***"}
        assert document["result"] == "***"

    def test_names_the_worker_that_runs_it(
        self, shop: Path, engine: Engine, database_url: str
    ) -> None:
        enqueue(engine, shop, "wait_for_file", (str(shop / "gate"),))
        [id] = statuses(engine)

        with running_worker(shop, database_url) as worker:
            wait_until(running(engine, 1))
            ended = pgqueue(shop, "--url", database_url, "jobs", str(id), "--json")
            plain = pgqueue(shop, "--url", database_url, "jobs", str(id))
            (shop / "gate").touch()

        assert json.loads(ended.stdout)["running_on"]["pid"] == worker.pid
        assert f":{worker.pid} (worker " in plain.stdout

    def test_of_a_missing_job_is_one_line(self, shop: Path, database_url: str) -> None:
        ended = pgqueue(shop, "--url", database_url, "jobs", "show", "4711", "--json")

        assert_one_line(ended, "job 4711 does not exist")
        assert (ended.returncode, ended.stdout) == (1, "")

    @pytest.mark.parametrize("command", [["jobs"], ["jobs", "show", "ID"]])
    def test_obeys_no_escape_sequence_in_the_words_of_a_job(
        self, shop: Path, queue: PgQueue, database_url: str, command: list[str]
    ) -> None:
        [id] = failed(queue, EVIL)

        words = [str(id) if word == "ID" else word for word in command]
        ended = pgqueue(shop, "--url", database_url, *words)

        assert ended.returncode == 0
        assert "\\x1b[2J\\x1b]0;mine\\x07\\u202e<b>" in ended.stdout
        assert not {"\x1b", "\x07", "\u202e"} & set(ended.stdout)


class TestRequeue:
    def test_says_what_happened_to_each(
        self, shop: Path, queue: PgQueue, engine: Engine, database_url: str
    ) -> None:
        [dead] = failed(queue, "no")
        [waiting] = enqueue_all(queue, "add", [1])

        ended = pgqueue(shop, "--url", database_url, "requeue", str(dead), str(waiting), "4711")

        assert ended.returncode == 1
        assert f"{dead}: requeued\n" in ended.stdout
        assert f"{waiting}: unchanged, because its status is pending\n" in ended.stdout
        assert ended.stderr.startswith("4711: not found")
        assert statuses(engine)[dead] == JobStatus.PENDING

    def test_of_many_asks_nobody_without_a_terminal(
        self, shop: Path, queue: PgQueue, engine: Engine, database_url: str
    ) -> None:
        failed(queue, "no", "never")

        ended = pgqueue(shop, "--url", database_url, "requeue", "--status", "failed")

        assert_one_line(ended, "requeue 2 failed jobs", "--yes")
        assert ended.returncode == 2
        assert set(statuses(engine).values()) == {JobStatus.FAILED}

    def test_of_many_changes_those_that_fit_and_counts_them(
        self, shop: Path, queue: PgQueue, engine: Engine, database_url: str
    ) -> None:
        ids = failed(queue, *map(str, range(230)))

        ended = pgqueue(
            shop, "--url", database_url, "requeue", "--status", "failed", "--task", "mail.fail",
            "--limit", "210", "--yes", "--json",
        )  # fmt: skip

        assert json.loads(ended.stdout) == {"matched": 210, "counts": {"requeued": 210}}
        found = statuses(engine)
        assert [found[id] for id in ids] == [JobStatus.PENDING] * 210 + [JobStatus.FAILED] * 20

    def test_leaves_a_job_whose_key_is_taken(
        self, shop: Path, queue: PgQueue, engine: Engine, database_url: str
    ) -> None:
        task = queue.tasks["mail.fail"]
        with queue.session() as session, session.begin():
            dead = task.options(unique_key="k").enqueue(session, "no").id
        Worker(queue, ["mail"]).run_until_empty(timeout=60)
        with queue.session() as session, session.begin():
            holder = task.options(unique_key="k").enqueue(session, "again").id

        ended = pgqueue(shop, "--url", database_url, "requeue", str(dead), "--json")

        [found] = json.loads(ended.stdout)["jobs"]
        assert (ended.returncode, found["change"]) == (1, "key_taken")
        assert f"job {holder} of its queue" in found["reason"]
        assert statuses(engine)[dead] == JobStatus.FAILED


class TestCancel:
    def test_ends_a_waiting_job_asks_a_running_one_and_leaves_an_ended_one(
        self, shop: Path, queue: PgQueue, engine: Engine, database_url: str
    ) -> None:
        [ended_id] = failed(queue, "no")
        enqueue(engine, shop, "wait_for_file", (str(shop / "gate"),))
        running_id = max(statuses(engine))

        with running_worker(shop, database_url, "--queues", "default"):
            wait_until(running(engine, 1))
            [waiting_id] = enqueue_all(queue, "mail.fail", ["later"])
            ids = [str(id) for id in (waiting_id, running_id, ended_id)]
            ended = pgqueue(shop, "--url", database_url, "cancel", *ids)
            (shop / "gate").touch()

        assert ended.returncode == 0
        assert ended.stdout.splitlines() == [
            f"{waiting_id}: cancelled",
            f"{running_id}: cancel requested",
            f"{ended_id}: unchanged, because its status is failed",
        ]

    def test_of_many_takes_only_what_waits(
        self, shop: Path, queue: PgQueue, engine: Engine, database_url: str
    ) -> None:
        [dead] = failed(queue, "no")
        waiting = enqueue_all(queue, "add", range(3))

        ended = pgqueue(shop, "--url", database_url, "cancel", "--status", "pending", "--yes")

        found = statuses(engine)
        assert ended.stdout == "3 cancelled\n"
        assert found[dead] == JobStatus.FAILED
        assert {found[id] for id in waiting} == {JobStatus.CANCELLED}


class TestWhich:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["requeue"],
            ["cancel", "--task", "add"],
            ["requeue", "1", "--status", "failed"],
            ["requeue", "--status", "succeeded"],
            ["cancel", "0"],
            ["cancel", "seven"],
            ["cancel", "9223372036854775808"],
            ["jobs", "frobnicate"],
            ["jobs", "list", "--limit", "0"],
            ["jobs", "show"],
        ],
    )
    def test_has_to_be_said_clearly(
        self, shop: Path, database_url: str, arguments: list[str]
    ) -> None:
        ended = pgqueue(shop, *arguments, PGQUEUE_URL=database_url)

        assert_one_line(ended)
        assert ended.returncode == 2
