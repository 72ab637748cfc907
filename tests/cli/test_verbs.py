"""The commands that change jobs, schedules and workers: each verb, by ids and by a filter."""

import json
from dataclasses import fields
from datetime import timedelta
from typing import Any
from uuid import uuid4

import click
import pytest
from shop_rig import assert_one_line, command
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session

from pgqueue import Job, JobStatus, Limit, PgQueue, Secret, Selection, Unique, Worker
from pgqueue.cli import main
from pgqueue.cli.commands import loaded
from pgqueue.repository.conditions import JobFilter
from pgqueue.tables import WorkerProcess

AN_HOUR_AGO = "created_at = created_at - interval '1 hour'"


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    queue = PgQueue(engine)

    @queue.task(name="send", max_attempts=1)
    def send(to: str, token: Secret[str] = "", copies: int = 1) -> None:
        if not to:
            raise ValueError("nobody")

    queue.task(name="limited", limit=Limit(1))(lambda n: None)
    queue.task(name="index", unique=Unique(by=("page",)))(lambda page: None)
    return queue


def failed(queue: PgQueue, number: int = 1) -> list[int]:
    """Jobs that have failed for good."""
    with queue.session() as session, session.begin():
        ids = queue.tasks["send"].enqueue_many(session, [("",)] * number)
    Worker(queue).run_until_empty(timeout=60)
    return ids


def waiting(queue: PgQueue, *names: str, **options: Any) -> list[int]:
    return [queue.tasks["send"].options(**options).delay(name).id for name in names]


def statuses(engine: Engine) -> dict[int, JobStatus]:
    with Session(engine) as session:
        return {job.id: job.status for job in session.scalars(select(Job))}


def stored(engine: Engine) -> list[tuple[int, dict[str, Any]]]:
    with Session(engine) as session:
        return [(job.priority, job.args) for job in session.scalars(select(Job).order_by(Job.id))]


class TestByIds:
    def test_each_job_is_told_with_its_change_and_its_reason(self, queue: PgQueue) -> None:
        [dead], [alive] = failed(queue), waiting(queue, "ada")

        ended = command(queue, "requeue", str(dead), str(alive), "4711")
        document = command(queue, "cancel", str(alive), str(alive), "4711", "--json")

        assert ended.returncode == document.returncode == 1
        assert ended.stdout.splitlines() == [
            f"{dead}: requeued",
            f"{alive}: unchanged, because its status is pending",
        ]
        missing = (
            "job 4711 does not exist: it was never committed, or has been deleted; look the id up "
            "in pgqueue.jobs"
        )
        assert ended.stderr == f"4711: not found, because {missing}\n"
        assert json.loads(document.stdout) == {
            "jobs": [
                {"id": alive, "change": "cancelled", "reason": None, "copy_id": None},
                {"id": 4711, "change": "not_found", "reason": missing, "copy_id": None},
            ],
            "counts": {"cancelled": 1, "not_found": 1},
        }

    @pytest.mark.parametrize(
        ("words", "change", "again"),
        [
            (["run-now"], "due now", "it is due already"),
            (["cancel"], "cancelled", "its status is cancelled"),
            (
                ["change", "--priority", "0"],
                "changed",
                "it has these values already, or a worker is about to start it",
            ),
        ],
    )
    def test_a_verb_that_is_given_twice_leaves_the_job(
        self, queue: PgQueue, words: list[str], change: str, again: str
    ) -> None:
        [id] = waiting(queue, "ada", delay=timedelta(hours=1))

        first, second = (command(queue, *words, str(id)) for _ in range(2))

        assert (first.returncode, first.stdout) == (0, f"{id}: {change}\n")
        assert (second.returncode, second.stdout) == (0, f"{id}: unchanged, because {again}\n")


class TestByFilter:
    def test_nobody_is_asked_without_a_terminal(self, queue: PgQueue, engine: Engine) -> None:
        failed(queue, 2)
        waiting(queue, "ada", delay=timedelta(hours=1))

        assert_one_line(
            command(queue, "requeue", "--status", "failed"),
            "This would requeue 2 failed jobs; to confirm, add --yes",
        )
        assert_one_line(
            command(queue, "run-now", "--task", "send"), "This would run now 1 waiting jobs"
        )
        assert JobStatus.FAILED in statuses(engine).values()

    def test_jobs_of_a_filter_are_changed_oldest_first_up_to_a_limit(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        ids = failed(queue, 130)
        words = ("--status", "failed", "--task", "send", "--limit", "110", "--yes")

        ended = command(queue, "requeue", *words, "--json")
        rest = command(queue, "requeue", *words)

        assert json.loads(ended.stdout) == {"matched": 110, "counts": {"requeued": 110}}
        assert rest.stdout == "20 requeued\n"
        assert set(statuses(engine).values()) == {JobStatus.PENDING}
        assert len(ids) == 130

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("cancel", "--status", "pending"), "2 cancelled\n"),
            (("cancel", "--status", "blocked"), "2 cancelled\n"),
            (("cancel", "--queue", "default"), "4 cancelled\n"),
            (("cancel", "--limit", "1"), "1 cancelled\n"),
            (("run-now", "--task", "send"), "1 due now\n"),
            (("run-now", "--task", "limited"), "1 due now\n"),
            (("change", "--task", "send", "--priority", "9"), "2 changed\n"),
            (("change", "--before", "2", "--priority", "9"), "1 changed\n"),
            (("change", "--task", "send", "--max-attempts", "9", "--timeout", "5"), "2 changed\n"),
            (("change", "--task", "send", "--tags", "a, b", "--meta", '{"c": 1}'), "2 changed\n"),
            (("change", "--task", "limited", "--delay", "60"), "2 changed\n"),
        ],
    )
    def test_each_verb_finds_the_jobs_that_it_is_for(
        self, queue: PgQueue, words: tuple[str, ...], said: str
    ) -> None:
        waiting(queue, "ada", delay=timedelta(hours=1))
        waiting(queue, "bob")
        queue.tasks["limited"].delay(1)
        queue.tasks["limited"].options(delay=timedelta(hours=1)).delay(2)

        ended = command(queue, *words, "--yes")

        assert (ended.returncode, ended.stdout) == (0, said)

    @pytest.mark.parametrize("verb", ["cancel", "run-now", "change --priority 9", "requeue"])
    def test_each_verb_selects_as_the_list_does(self, queue: PgQueue, verb: str) -> None:
        later: dict[str, Any] = {"delay": timedelta(hours=1)}
        waiting(queue, "ada", **later, tags=["vip"])
        waiting(queue, "ada", **later)
        options = ["--tag", "vip"]
        if verb == "requeue":
            command(queue, "cancel", "1", "2")
            options += ["--status", "cancelled"]

        [job] = json.loads(command(queue, "jobs", *options, "--json").stdout)["jobs"]
        ended = command(queue, *verb.split(), *options, "--yes", "--json")
        again = command(queue, *verb.split(), str(job["id"]), "--json")

        [number] = json.loads(ended.stdout)["counts"].values()
        assert number == 1
        assert json.loads(again.stdout)["counts"] == {"unchanged": 1}, "changed by the first"

    @pytest.mark.parametrize("verb", ["cancel", "try"])
    def test_an_empty_filter_selects_no_job(
        self, queue: PgQueue, engine: Engine, verb: str
    ) -> None:
        """As that of a variable of the shell which is not set."""
        waiting(queue, "ada")

        ended = command(queue, *verb.split(), "--where", " ", *(() if verb == "try" else ["--yes"]))

        assert ended.returncode == (1 if verb == "try" else 2)
        assert "hich jobs?" in ended.stderr
        assert set(statuses(engine).values()) == {JobStatus.PENDING}

    @pytest.mark.parametrize("name", ["jobs list", "cancel", "run-now", "change", "requeue"])
    def test_every_condition_of_the_filter_is_an_option(self, name: str) -> None:
        found: click.Command = main
        for word in name.split():
            assert isinstance(found, click.Group)
            found = loaded(found.commands[word])

        conditions = {field.name for field in fields(JobFilter)}
        in_where = {"text", "args", "created_after", "took", "are_due", "are_retried"}
        of_users = {"queues", "tags"}
        assert conditions - in_where - of_users <= {option.name for option in found.params}
        assert "where" in {option.name for option in found.params}

    def test_a_cancel_tells_how_many_have_ended_and_how_many_were_asked(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        said: list[str] = []

        @queue.task(name="own")
        def own() -> None:
            said.append(command(queue, "cancel", "--queue", "default", "--yes").stdout)

        own.delay()
        waiting(queue, "ada", "bob", delay=timedelta(hours=1))
        Worker(queue).run_until_empty(timeout=60)

        assert said == ["1 cancel requested, 2 cancelled\n"]
        assert set(statuses(engine).values()) == {JobStatus.CANCELLED}

    def test_of_many_jobs_those_whose_new_key_is_taken_are_named(self, queue: PgQueue) -> None:
        for page in (1, 2):
            queue.tasks["index"].delay(page)

        ended = command(queue, "change", "--task", "index", "--args", '{"page": 3}', "--yes")

        assert (ended.returncode, ended.stdout) == (1, "1 changed, 1 key taken\n")
        assert ended.stderr == "2: key taken, because job 1 of its queue has its unique key\n"

    @pytest.mark.parametrize(
        "words",
        [
            ("change", "--task", "sned", "--priority", "1", "--yes"),
            ("requeue", "--status", "failed", "--task", "sned", "--yes"),
            ("jobs", "--task", "sned"),
        ],
    )
    def test_where_no_job_fits_an_unknown_task_is_told(
        self, queue: PgQueue, words: tuple[str, ...]
    ) -> None:
        ended = command(queue, *words)

        assert (ended.returncode, ended.stdout) == (0, "No job fits.\n")
        assert ended.stderr == "The app has no task sned. Is the name misspelt?\n"


class TestNewArguments:
    def test_new_arguments_replace_the_old_ones(self, queue: PgQueue, engine: Engine) -> None:
        waiting(queue, "ada")

        ended = command(queue, "change", "1", "--args", '{"copies": 2}', "--run-at", "2099-01-31Z")

        assert ended.returncode == 2, "not a time"
        time = "2099-01-31T08:00+01:00"
        ended = command(queue, "change", "1", "--args", '{"copies": 2}', "--run-at", time)
        assert ended.stdout == "1: changed\n"
        assert stored(engine) == [(5, {"to": "ada", "copies": 2})]
        with Session(engine) as session:
            assert session.scalars(select(Job.run_at)).one().year == 2099

    def test_without_the_app_new_arguments_are_refused(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        waiting(queue, "ada")

        ended = command(PgQueue(engine), "change", "1", "--args", '{"to": "bob"}')

        assert ended.returncode == 1
        assert "no task 'send' is registered" in ended.stderr

    def test_requeue_takes_new_arguments_too(self, queue: PgQueue, engine: Engine) -> None:
        failed(queue)

        wrong = command(queue, "requeue", "1", "--args", '{"too": "ada"}')
        ended = command(queue, "requeue", "1", "--args", '{"to": "ada", "copies": 2}')

        assert "1: refused, because task send: it has no argument 'too'" in wrong.stderr
        assert ended.stdout == "1: requeued\n"
        assert stored(engine) == [(5, {"to": "ada", "copies": 2})]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("requeue", "Which jobs? Give their ids, or say --status failed"),
        ("cancel", "Which jobs? Give their ids, or say --batch 12"),
        ("requeue --task send", "Which jobs? Give their ids, or say --status failed"),
        ("cancel --batch b", "'b' is not the id of a batch"),
        ("cancel --status failed", "is not one of"),
        ("run-now", "Which jobs? Give their ids, or say --task mail.send"),
        ("requeue 1 --status failed", "Give ids, or say which jobs by options, not both"),
        ("change 1 --task send --priority 1", "not both"),
        ("requeue --status succeeded", "is not one of"),
        ("cancel 0", "'0' is not the id of a job"),
        ("cancel seven", "'seven' is not the id of a job"),
        ("cancel 9223372036854775808", "is not the id of a job"),
        ("change 1", "nothing to change is given"),
        ("change 1 --run-at 2099-01-31", "has no time zone"),
        ("change 1 --run-at soon", "is not a time"),
        ("change 1 --delay -1", "is not between 0 and 86400 seconds"),
        ("change 1 --args [1]", "--args is not a JSON object"),
        ("change 1 --meta [1]", "--meta is not a JSON object"),
        (f"change 1 --args {'[' * 100_000}", "--args is nested too deeply"),
        ("schedules pause", "Missing argument"),
        ("quiet here:1", "give the ids that `pgqueue workers` shows"),
    ],
)
def test_a_wrong_command_line_is_refused(words: str, error: str) -> None:
    assert_one_line(command(PgQueue(), *words.split()), error)


class TestSchedules:
    @pytest.fixture(autouse=True)
    def schedules(self, queue: PgQueue) -> None:
        send = queue.tasks["send"]
        with queue.session() as session, session.begin():
            for name in ("night", "hourly"):
                every = timedelta(hours=1)
                queue.schedules.add(session, send, every=every, name=name, args=("ada",))

    def test_each_verb_changes_the_schedules_that_are_named(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        def run(*words: str) -> str:
            return command(queue, "schedules", *words).stdout

        assert run("pause", "night", "hourly") == "night: paused\nhourly: paused\n"
        with queue.session() as session:
            assert all(one.paused_at for one in queue.schedules.list(session))
        assert json.loads(run("resume", "night", "--json")) == {
            "schedules": [{"name": "night", "change": "resumed"}]
        }
        [triggered] = json.loads(run("trigger", "hourly", "--json"))["schedules"]
        assert run("remove", "hourly") == "hourly: removed\n"
        assert stored(engine) == [(5, {"to": "ada"})]
        assert triggered == {"name": "hourly", "change": "triggered", "job_id": 1}
        with queue.session() as session:
            assert [one.name for one in queue.schedules.list(session)] == ["night"]

    def test_a_schedule_of_the_code_is_told_to_come_back_after_its_removal(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        with engine.begin() as connection:
            connection.execute(text("UPDATE pgqueue.schedules SET declared_in = 'shop'"))

        reason = "module shop declares it, so the next worker that starts adds it again; pause it"
        ended = command(queue, "schedules", "remove", "night")
        document = command(queue, "schedules", "remove", "hourly", "--json")

        assert ended.stdout == f"night: removed; {reason}\n"
        assert json.loads(document.stdout)["schedules"] == [
            {"name": "hourly", "change": "removed", "reason": reason}
        ]

    @pytest.mark.parametrize("verb", ["pause", "resume", "trigger", "remove"])
    def test_an_unknown_schedule_is_told_and_the_others_are_changed(
        self, queue: PgQueue, verb: str
    ) -> None:
        ended = command(queue, "schedules", verb, "lost", "night")

        assert ended.returncode == 1
        assert "schedule lost does not exist" in ended.stderr
        assert ended.stdout.startswith("night: ")


def test_workers_are_made_quiet_by_id(engine: Engine) -> None:
    first, second, unknown = uuid4(), uuid4(), uuid4()
    with Session(engine) as session, session.begin():
        for id in (first, second):
            process = {"hostname": "here", "pid": 1, "backend_pid": 1, "queues": ["mail"]}
            session.add(WorkerProcess(id=id, slots=4, **process))
    queue = PgQueue(engine)

    told = command(queue, "quiet", str(first), str(unknown))
    document = command(queue, "quiet", "--json", str(unknown), str(second))

    assert (told.returncode, document.returncode) == (1, 1)
    assert told.stdout == f"{first}: quiet\n"
    assert told.stderr == f"{unknown}: no live worker has this id\n"
    workers = json.loads(document.stdout)["workers"]
    assert workers == [
        {"id": str(unknown), "is_live": False, "is_quiet": False},
        {"id": str(second), "is_live": True, "is_quiet": True},
    ]
    assert command(queue, "quiet", str(second)).returncode == 0
    with Session(engine) as session:
        assert session.scalars(select(WorkerProcess.queues)).all() == [[], []]

    told = command(queue, "unquiet", str(second), str(unknown))
    document = command(queue, "unquiet", "--json", str(second))

    assert (told.returncode, document.returncode) == (1, 0)
    assert told.stdout == f"{second}: no longer quiet\n"
    workers = json.loads(document.stdout)["workers"]
    assert workers == [{"id": str(second), "is_live": True, "is_quiet": False}]
    with Session(engine) as session:
        assert session.get_one(WorkerProcess, first).queues == []
        assert session.get_one(WorkerProcess, second).queues == ["mail"]


def test_an_interrupted_action_is_continued(queue: PgQueue) -> None:
    waiting(queue, "ada", "bob", "eve")
    outcome = queue.operate("ada").start("cancel", Selection(task="send"))

    ended = command(queue, "continue", str(outcome.entry.id), "--json")
    again = command(queue, "continue", str(outcome.entry.id))

    assert json.loads(ended.stdout) == {"counts": {"cancelled": 3}}
    assert (again.returncode, "is finished" in again.stderr) == (1, True)


def test_an_error_is_tried_and_muted(queue: PgQueue) -> None:
    ids = failed(queue, 2)
    [error] = json.loads(command(queue, "failures", "--json").stdout)["failures"]
    named = ("--task", error["task"])

    tried = command(queue, "try", "--error", error["fingerprint"])
    muted = command(queue, "mute", error["fingerprint"], *named, "--hours", "2")
    unknown = command(queue, "mute", "0" * 16, *named)

    assert tried.stdout == f"{ids[1]}: requeued\n"
    assert muted.stdout == "muted for 2 hours\n"
    assert (unknown.returncode, "has not failed with this error" in unknown.stderr) == (1, True)


def test_jobs_run_again_and_are_deleted(queue: PgQueue, engine: Engine) -> None:
    [dead], [alive] = failed(queue), waiting(queue, "ada")

    copied = command(queue, "run-again", str(dead), str(alive))
    assert copied.stdout.splitlines() == [
        f"{dead}: copied as job 3",
        f"{alive}: unchanged, because its status is pending",
    ]
    deleted = command(queue, "delete", "--status", "failed", "--task", "send", "--yes")
    assert deleted.stdout == "1 deleted\n"

    assert set(statuses(engine)) == {alive, 3}
