"""``pgqueue jobs ID`` and ``pgqueue enqueue``: everything about one job, and a new one."""

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from shop_rig import assert_one_line, command
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from chaos.workers import wait_until
from pgqueue import Job, JobContext, Limit, PgQueue, Retry, Secret, Worker
from pgqueue.tables import BatchJob, WorkerProcess


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    queue = PgQueue(engine)

    @queue.task(name="fail", queue="mail", max_attempts=2, retry=Retry.constant(timedelta(0)))
    def fail(words: str) -> None:
        raise ValueError(words)

    @queue.task(name="post", queue="mail")
    def post(to: str, copies: int = 1) -> None: ...

    return queue


def shown(queue: PgQueue, *words: str) -> str:
    ended = command(queue, "jobs", *words)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def document(queue: PgQueue, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shown(queue, *words, "--json"))
    return found


class TestShow:
    def test_every_attempt_is_told_with_its_error(self, queue: PgQueue) -> None:
        queue.tasks["fail"].delay("no such address")
        Worker(queue).run_until_empty(timeout=60)

        said = shown(queue, "show", "1")
        found = document(queue, "1")

        assert said.startswith("Job 1  fail  failed\n")
        assert '{"words": "no such address"}' in said
        assert re.search(r"attempts +2 of 2", said)
        assert re.findall(r"Attempt \d  failed", said) == ["Attempt 1  failed", "Attempt 2  failed"]
        assert "ended as failed: ValueError: no such address; run pgqueue requeue 1\n" in said
        assert said.count("ValueError: no such address") == 3, "why, and each attempt"
        assert said.count("Traceback (most recent call last)") == 1, "the same both times"
        assert "(with the traceback of attempt 1)" in said
        assert (found["id"], found["status"], found["attempts"]) == (1, "failed", 2)
        assert datetime.fromisoformat(found["created_at"]).tzinfo is not None
        errors = {(one["outcome"], one["error_type"]) for one in found["failed_attempts"]}
        assert errors == {("failed", "ValueError")}
        assert found["running_on"] is None

    def test_an_attempt_names_the_queue_of_its_retry(self, queue: PgQueue) -> None:
        policy = Retry.constant(timedelta(hours=1)).in_queue("retries")
        queue.tasks["fail"].options(retry=policy).delay("no such address")
        Worker(queue).run_until_empty(timeout=60)

        assert "\n  retried in queue retries\n" in shown(queue, "show", "1")
        [attempt] = document(queue, "1")["failed_attempts"]
        assert attempt["moved_to"] == "retries"

    def test_the_last_error_of_a_success_is_only_that_of_its_attempt(self, queue: PgQueue) -> None:
        tries: list[int] = []

        @queue.task(name="second", retry=Retry.constant(timedelta(0)))
        def second() -> None:
            tries.append(1)
            if len(tries) == 1:
                raise ValueError("not yet")

        second.delay()
        Worker(queue).run_until_empty(timeout=60)

        job, _, attempt = shown(queue, "1").partition("Attempt 1  failed")

        assert "not yet" not in job + command(queue, "jobs").stdout
        assert "ValueError: not yet" in attempt

    def test_a_running_job_has_its_progress_and_its_worker(self, queue: PgQueue) -> None:
        seen: list[Any] = []

        @queue.task(name="report")
        def report(ctx: JobContext) -> None:
            ctx.progress(3, 10, "pages")

        @queue.task(name="look")
        def look() -> None:
            # Until then the first job has its lease, and seems to run before this one.
            wait_until(lambda: document(queue, "1")["status"] == "succeeded")
            seen.extend([shown(queue, "2"), document(queue, "2")])

        report.delay()
        look.delay()
        Worker(queue, concurrency=1).run_until_empty(timeout=60)

        assert re.search(r"progress +3 of 10: pages", shown(queue, "1"))
        assert document(queue, "1")["progress"] == {"done": 3, "total": 10, "note": "pages"}
        plain, found = seen
        assert re.search(r"why +runs on \S+:\d+ \(worker \S+\), attempt 1 of 10 since", plain)
        assert found["running_on"]["attempt"] == 1

    def test_the_steps_of_a_handler_are_told_with_their_results(self, queue: PgQueue) -> None:
        @queue.task(name="ship")
        def ship(ctx: JobContext, card: Secret[str]) -> None:
            ctx.step("charge", lambda: {"paid with": card})
            ctx.wait_for("packed", 7)

        ship.delay("4012-8888")
        Worker(queue, concurrency=1).run_until_empty(timeout=60)

        said, found = shown(queue, "1"), document(queue, "1")
        assert "Step charge  step of attempt 1" in said
        assert "Step wait for packed 7  wait of attempt 1" in said
        [waits, charged] = found["steps"]
        assert charged["result"] == {"paid with": "***"}
        assert (waits["signal"], waits["key"], waits["finished_at"]) == ("packed", "7", None)

    def test_what_stands_before_and_after_a_job_is_told(self, queue: PgQueue) -> None:
        note = queue.task(name="note")(lambda n: None)
        with queue.session() as session, session.begin(), queue.workflow(session, "w") as flow:
            rows = flow.add_many(note, [(n,) for n in range(2)], name="rows")
            middle = flow.add(note.job(2), after=rows).id
            flow.add_many(note, [(n,) for n in range(30)], after=middle, when="failed")

        said, found = shown(queue, str(middle)), document(queue, str(middle))

        assert re.search(rf"waits for +batch {rows.id} rows open\n", said)
        follower = re.search(r"followed by +job (\d+) note blocked\n", said)
        assert follower is not None
        assert "…" in said
        assert "when          failed" in shown(queue, follower[1])
        assert found["before"] == [{"id": -rows.id, "name": "rows", "status": "open"}]
        with queue.session() as session:
            in_rows = session.scalars(select(BatchJob.job_id).where(BatchJob.batch_id == rows.id))
            first = shown(queue, str(min(in_rows)))
        assert re.search(rf"followed by +job {middle} note blocked\n", first)

    def test_a_waiting_job_has_its_pauses_and_its_limits(self, queue: PgQueue) -> None:
        rate = Limit(60, per=timedelta(hours=1), by="account", name="api")
        queue.task(name="call", limit=rate)(lambda account: None)
        queue.task(name="pay", limit=Limit(2, by="account", name="bank"))(lambda account: None)
        for task in ("call", "call", "pay"):
            queue.tasks[task].delay(7)
        with queue.session() as session, session.begin():
            queue.pause_task(session, "pay")
            queue.pause(session, "default")
        Worker(queue).run_until_empty(timeout=60)

        said, found = shown(queue, "3"), document(queue, "3")

        assert re.search(
            "why +its queue default is paused since .*; run pgqueue resume default", said
        )
        assert re.search(
            "why +its task pay is paused since .*; run pgqueue resume --task pay", said
        )
        assert "limit         bank [7], 0 of 2 places held\n" in said
        assert (found["is_queue_paused"], found["is_task_paused"]) == (True, True)
        [limit] = found["limits"]
        assert (limit["key"], limit["held"], limit["capacity"]) == ("bank [7]", 0, 2)

        with queue.session() as session, session.begin():
            queue.resume(session, "default")
        Worker(queue).run_until_empty(timeout=60)
        assert "api [7], 60 starts in 1 h, next start in" in shown(queue, "2")
        with queue.session() as session, session.begin():
            queue.set_limit(session, "api", 0)
        assert "api [7], paused" in shown(queue, "2")

    def test_a_waiting_job_whose_queue_no_worker_serves_says_so(
        self, queue: PgQueue, session: Session
    ) -> None:
        """Neither a worker of another queue, nor one that has been silent for a minute."""
        queue.tasks["post"].delay("ada")
        process = {"hostname": "here", "pid": 1, "backend_pid": 1, "slots": 4}
        silent = datetime.now(UTC) - timedelta(seconds=61)
        session.add(WorkerProcess(id=uuid4(), queues=["default"], **process))
        session.add(WorkerProcess(id=uuid4(), queues=["mail"], heartbeat_at=silent, **process))
        session.commit()

        words = "no live worker serves queue mail"
        assert f"why           {words}; run pgqueue worker --queues mail\n" in shown(queue, "1")
        assert document(queue, "1")["why"][0]["words"] == words
        assert document(queue, "1")["is_queue_served"] is False
        assert "no live worker serves queue mail" in command(queue, "doctor").stdout

        session.add(WorkerProcess(id=uuid4(), queues=["mail"], **process))
        session.commit()
        assert words not in shown(queue, "1")
        assert document(queue, "1")["is_queue_served"] is True

    def test_arguments_and_result_of_a_task_that_the_app_has_not_are_hidden(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        @queue.task(name="echo")
        def echo(card: Secret[list[int]], words: str) -> str:
            return f"{card} {words}"

        echo.delay([73190], "spoken")
        Worker(queue).run_until_empty(timeout=60)
        unknown = PgQueue(engine)

        plain = command(unknown, "jobs", "1")
        found = json.loads(command(unknown, "jobs", "1", "--json").stdout)

        assert "arguments and its result are hidden" in plain.stderr
        assert not re.search("73190|spoken", plain.stdout + json.dumps(found))
        assert found["args"] == {"card": "***", "words": "***"}
        assert found["result"] == "***"
        assert "spoken" in shown(unknown, "1", "--show-arguments")
        assert document(queue, "1")["args"] == {"card": "***", "words": "spoken"}

    def test_a_missing_job_is_told_in_one_line(self, queue: PgQueue) -> None:
        ended = command(queue, "jobs", "show", "4711", "--json")

        assert_one_line(ended, "job 4711 does not exist")
        assert (ended.returncode, ended.stdout) == (1, "")

    @pytest.mark.parametrize("words", ["frobnicate", "list --limit 0", "show", "show seven"])
    def test_a_wrong_command_line_is_refused(self, queue: PgQueue, words: str) -> None:
        ended = command(queue, "jobs", *words.split())

        assert_one_line(ended)
        assert ended.returncode == 2


class TestEnqueue:
    def test_the_options_of_an_enqueue_replace_those_of_the_task(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        options = ("--priority", "0", "--delay", "60", "--unique-key", "k", "--json")

        ended = command(queue, "enqueue", "post", "--args", '{"to": "ada"}', *options)

        assert json.loads(ended.stdout) == {
            "id": 1,
            "task": "post",
            "queue": "mail",
            "status": "pending",
            "is_new": True,
        }
        with Session(engine) as session:
            job = session.scalars(select(Job)).one()
            assert (job.args, job.priority, job.unique_key) == ({"to": "ada"}, 0, "k")
            assert job.run_at > job.created_at

    def test_a_job_that_holds_the_key_already_is_told(self, queue: PgQueue) -> None:
        words = ("enqueue", "post", "--args", '{"to": "ada"}', "--unique-key", "k")

        first, second = (command(queue, *words) for _ in range(2))

        assert first.stderr == ""
        assert (second.returncode, second.stdout) == (0, "Job 1 of task post is pending.\n")
        assert second.stderr == "This job held the unique key already; no job was added.\n"
        assert json.loads(command(queue, *words, "--json").stdout)["is_new"] is False

    def test_a_wrong_call_is_one_line(self, queue: PgQueue, engine: Engine) -> None:
        for arguments, words in (
            (["nothing_like_it"], ["no task 'nothing_like_it'", "post"]),
            (["post", "--args", "{"], ["--args is not JSON"]),
            (["post", "--args", "[1, 2]"], ["give the arguments by name"]),
            (["post", "--args", "{}"], ["post", "'to'"]),
            (["post", "--args", '{"to": "a", "copies": "x"}'], ["post: argument copies", "int"]),
            (["post", "--args", '{"to": "a", "c": 3}'], ["post", "'c'"]),
        ):
            assert_one_line(command(queue, "enqueue", *arguments), *words)
        with Session(engine) as session:
            assert session.scalars(select(Job)).all() == []
