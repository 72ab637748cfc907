"""What commands write to the log of operators, and how it is shown."""

import getpass
import json
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from shop_rig import command
from sqlalchemy import Engine, create_engine, make_url, text

from chaos.interleavings.logical_workers import committed, execute
from pgqueue import Limit, PgQueue, Secret, Worker
from pgqueue.schema import grant
from pgqueue.tables import WorkerProcess

WORKER = UUID("6f9619ff-8b86-d011-b42d-00c04fc964ff")


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    queue = PgQueue(engine)

    @queue.task(name="send")
    def send(to: str, token: Secret[str] = "") -> None: ...

    queue.task(name="pay", limit=Limit(2, by="account", name="bank"))(lambda account: None)
    return queue


def log(queue: PgQueue, *words: str) -> list[dict[str, Any]]:
    found = json.loads(command(queue, "log", *words, "--json").stdout)["log"]
    assert isinstance(found, list)
    return found


def waiting(queue: PgQueue, number: int = 1) -> list[int]:
    send = queue.tasks["send"].options(delay=timedelta(hours=1))
    with queue.session() as session, session.begin():
        return send.enqueue_many(session, [("ada",)] * number)


class TestWhatIsWritten:
    @pytest.mark.parametrize(
        ("words", "action", "target"),
        [
            ("cancel 1", "cancel", {"jobs": [1]}),
            ("cancel 1 --kill", "kill", {"jobs": [1]}),
            ("run-now 1", "run_now", {"jobs": [1]}),
            ("change 1 --priority 0", "change", {"jobs": [1]}),
            (
                "cancel --task send --yes",
                "cancel",
                {"filter": {"statuses": ["blocked", "pending", "running"], "task": "send"}},
            ),
            ("pause mail", "pause_queue", {"queue": "mail"}),
            ("resume mail", "resume_queue", {"queue": "mail"}),
            ("pause *", "pause_queue", {"queue": "*"}),
            ("pause --task send", "pause_task", {"task": "send"}),
            ("pause --limit bank --key 7", "pause_key", {"key": "bank [7]"}),
            ("set-limit bank 5", "set_limit", {"limit": "bank"}),
            ("schedules pause night", "pause_schedule", {"schedule": "night"}),
            ("schedules resume night", "resume_schedule", {"schedule": "night"}),
            ("schedules trigger night", "trigger_schedule", {"schedule": "night"}),
            ("schedules remove night", "remove_schedule", {"schedule": "night"}),
            (f"quiet {WORKER}", "quiet", {"worker": str(WORKER)}),
            (f"unquiet {WORKER}", "unquiet", {"worker": str(WORKER)}),
            ("signal paid 7 [1]", "signal", {"signal": "paid 7"}),
        ],
    )
    def test_each_command_writes_who_did_what_and_why(
        self, queue: PgQueue, engine: Engine, words: str, action: str, target: dict[str, Any]
    ) -> None:
        waiting(queue)
        with queue.session() as session, session.begin():
            process = {"hostname": "here", "pid": 1, "backend_pid": 1, "queues": ["mail"]}
            session.add(WorkerProcess(id=WORKER, slots=4, **process))
            every = timedelta(hours=1)
            queue.schedules.add(
                session, queue.tasks["send"], every=every, name="night", args=("ada",)
            )

        ended = command(queue, *words.split(), "--reason", "the bank is down")

        assert ended.returncode == 0, ended.stderr
        [found] = log(queue)
        assert (found["action"], found["target"]) == (action, target)
        assert (found["reason"], found["actor"]) == (
            "the bank is down",
            f"{getpass.getuser()}@{socket.gethostname()}",
        )
        assert found["jobs"] == (1 if set(target) & {"jobs", "filter"} or "trigger" in words else 0)
        assert found["finished_at"] is not None

    def test_a_restart_is_logged_with_its_new_workflow(self, queue: PgQueue) -> None:
        with queue.session() as session, session.begin(), queue.workflow(session) as flow:
            job_id = flow.add(queue.tasks["send"].job("bob")).id
        with queue.session() as session, session.begin():
            queue.cancel(session, job_id)
        Worker(queue).run_until_empty(timeout=60)

        ended = command(queue, "restart", str(job_id))

        assert ended.stdout == "started as workflow 2; pgqueue jobs --batch 2 lists its jobs\n"
        [found] = log(queue)
        assert (found["action"], found["target"]) == ("restart_workflow", {"workflow": "2"})
        assert (found["jobs"], found["first_ids"]) == (1, [job_id])

    def test_pgqueue_actor_names_another_actor(
        self, queue: PgQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PGQUEUE_ACTOR", "deploy-bot")
        command(queue, "pause", "mail")

        assert log(queue)[0]["actor"] == "deploy-bot"

    def test_a_limit_is_logged_with_its_capacity_before_and_after(self, queue: PgQueue) -> None:
        command(queue, "set-limit", "bank", "5")
        command(queue, "set-limit", "bank", "0", "--key", "7")

        changes = [(one["before"], one["after"]) for one in log(queue)]
        assert changes[0] == ({"capacity": 5}, {"capacity": 0})
        assert changes[1][1] == {"capacity": 5}

    def test_of_new_arguments_only_the_names_are_logged(self, queue: PgQueue) -> None:
        waiting(queue)
        command(queue, "change", "1", "--args", '{"token": "c4n4ry"}', "--priority", "1")

        [found] = log(queue)
        assert found["options"] == {"args": ["token"], "priority": 1}

    def test_a_requeue_is_spread_and_logged(self, queue: PgQueue, engine: Engine) -> None:
        waiting(queue, 3)
        command(queue, "cancel", "1", "2", "3")
        words = ("--status", "cancelled", "--yes", "--spread", "30m")

        ended = command(queue, "requeue", *words)

        assert ended.stdout == "3 requeued\n"
        with engine.connect() as connection:
            span = "SELECT max(run_at) - min(run_at) FROM pgqueue.message_queue"
            assert connection.scalar(text(span)) > timedelta(minutes=19)
        assert log(queue)[0]["options"] == {"spread_s": 1800.0, "of": 3}


@pytest.fixture
def worker_role(engine: Engine, queue: PgQueue) -> Iterator[PgQueue]:
    """The queue as a role that may run commands and not write the log."""
    name = f"worker_{uuid4().hex[:10]}"
    execute(engine, f"CREATE ROLE {name} LOGIN PASSWORD 'x'")
    committed(engine, lambda connection: grant(worker=name, connection=connection))
    own = create_engine(make_url(engine.url).set(username=name, password="x"))
    yield PgQueue(own)
    own.dispose()
    execute(engine, f"DROP OWNED BY {name}")
    execute(engine, f"DROP ROLE {name}")


def test_a_role_that_may_not_write_the_log_runs_commands_and_is_told(
    queue: PgQueue, worker_role: PgQueue
) -> None:
    waiting(queue, 2)

    ended = command(worker_role, "cancel", "--task", "send", "--yes")

    assert (ended.returncode, ended.stdout) == (0, "2 cancelled\n")
    assert (
        ended.stderr == "This role may not write the log of operators: the action is not logged.\n"
    )
    assert log(queue) == []


class TestList:
    def test_the_log_shows_the_newest_actions_first_with_their_targets(
        self, queue: PgQueue
    ) -> None:
        waiting(queue, 2)
        command(queue, "pause", "mail", "--reason", "calm")
        command(queue, "run-now", "--task", "send", "--older-than", "0", "--yes")

        lines = command(queue, "log").stdout.splitlines()

        assert len(lines) == 3
        assert "status:blocked status:pending task:send created:<20" in lines[1]
        assert "queue mail" in lines[2]
        assert lines[2].endswith("calm")

    def test_filters_select_from_the_log(
        self, queue: PgQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        command(queue, "pause", "mail")
        monkeypatch.setenv("PGQUEUE_ACTOR", "bot")
        command(queue, "pause", "mail")
        command(queue, "resume", "mail")

        def ids(*words: str) -> list[int]:
            return [one["id"] for one in log(queue, *words)]

        assert ids("--actor", "bot") == [3, 2]
        assert ids("--action", "pause_queue") == [2, 1]
        assert ids("--before", "3", "--limit", "1") == [2]
        assert ids("--unfinished") == []
