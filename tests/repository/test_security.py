"""What others write, send or name does nothing but what it says."""

import ast
import re
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, select, text
from sqlalchemy.orm import Session
from worker_rig import running

import pgqueue
from chaos.interleavings.logical_workers import violations
from chaos.workers import PATIENCE
from pgqueue import Job, JobStatus, PgQueue, SchemaMissing, Worker
from pgqueue.repository.tables import CHANNEL
from pgqueue.worker.claimer import PAUSE
from pgqueue.worker.claiming.sleep import FALSE_ALARMS

PACKAGE = Path(pgqueue.__file__).parent

IMPORT_WITH_SCHEMAS = """
import os, sys
for name in sys.argv[1:]:
    os.environ["PGQUEUE_SCHEMA"] = name
    try:
        import pgqueue.models.base
        print("imported")
    except ValueError as error:
        print(error)
"""

HOSTILE_TASKS = ["os.system", "builtins.eval", "subprocess:run", "__import__('os').abort", "x\ny"]


AS_IF_ENQUEUED = text(
    """
    WITH job AS (INSERT INTO pgqueue.jobs (task) VALUES (:task)
                 RETURNING queue, priority, run_at, id, task)
    INSERT INTO pgqueue.message_queue (queue, priority, run_at, target_id, task)
    SELECT * FROM job
    """
)


@pytest.fixture
def queue(database_url: str) -> Iterator[PgQueue]:
    queue = PgQueue(database_url)
    yield queue
    queue.engine.dispose()


class TestNamesOfTasks:
    def test_a_name_in_a_row_is_never_imported(
        self, queue: PgQueue, session: Session, tmp_path: Path
    ) -> None:
        proof = tmp_path / "proof"
        ran: list[int] = []
        queue.task(name="known")(lambda: ran.append(1))
        # As whoever may write the tables would enqueue it, with a queue that knows the name.
        rogue = PgQueue(queue.engine)
        rogue.task(name="victim")(lambda command: None).delay(f"touch {proof}")
        for name in HOSTILE_TASKS:
            session.execute(AS_IF_ENQUEUED, {"task": name})
        session.commit()
        modules = set(sys.modules)

        queue.tasks["known"].delay()
        Worker(queue, concurrency=1).run_until_empty(timeout=PATIENCE)

        stand = {job.task: job.status for job in session.scalars(select(Job))}
        assert ran == [1]
        assert stand == {
            "known": JobStatus.SUCCEEDED,
            **dict.fromkeys(["victim", *HOSTILE_TASKS], JobStatus.PENDING),
        }
        assert not proof.exists()
        assert not {name for name in set(sys.modules) - modules if "builtins" in name}
        assert violations(queue.engine) == []


class TestIdentifiers:
    def test_a_hostile_schema_is_refused_at_import(self) -> None:
        hostile = ['a"b', "a'; DROP TABLE jobs; --", "public", "pg_temp", "A", "a-b", "", "a" * 64]

        done = subprocess.run(
            [sys.executable, "-c", IMPORT_WITH_SCHEMAS, *hostile], capture_output=True, text=True
        )

        refused = [
            f"PGQUEUE_SCHEMA={name!r} is not a schema name pgqueue accepts" for name in hostile
        ]
        told = done.stdout.splitlines()
        assert [line[: len(words)] for line, words in zip(told, refused, strict=True)] == refused

    def test_no_text_of_a_user_is_in_the_channel(self) -> None:
        assert re.fullmatch(r"pgqueue_[0-9a-f]{8}", CHANNEL)

    def test_a_hostile_queue_name_in_a_row_is_data(self, queue: PgQueue, session: Session) -> None:
        hostile = """m'"; DROP TABLE pgqueue.jobs; --"""
        done: list[int] = []
        task = queue.task(name="t")(lambda n: done.append(n))
        task.delay(1)
        insert = "INSERT INTO pgqueue.queues (name, paused_at) VALUES (:name, now())"
        session.execute(text(insert), {"name": hostile})
        session.execute(text("UPDATE pgqueue.jobs SET queue = :q"), {"q": hostile})
        session.execute(text("UPDATE pgqueue.message_queue SET queue = :q"), {"q": hostile})
        session.commit()
        task.delay(2)

        Worker(queue, concurrency=1).run_until_empty(timeout=PATIENCE)

        assert done == [2]
        assert {count.queue for count in queue.counts(session)} == {hostile, "default"}
        assert queue.check(session) == []


JUNK = ["rewind", "", "x" * 200, "{'a': 1}", "'; DROP TABLE pgqueue.jobs; --", "\n\x01"]
FLOOD = text("SELECT pg_notify(:channel, one) FROM unnest(CAST(:payloads AS text[])) AS one")
TRANSACTIONS = 1000
PAYLOADS = 10


def looks(engine: Engine) -> Iterator[list[float]]:
    """When a worker looked at the messages; by listening to all engines, also its private ones."""
    seen: list[float] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "SKIP LOCKED" in statement and "message_queue" in statement:
            seen.append(time.monotonic())

    event.listen(Engine, "before_cursor_execute", note)
    yield seen
    event.remove(Engine, "before_cursor_execute", note)


claims = pytest.fixture(looks)


def test_a_flood_of_notifications_wakes_a_worker_no_more_often_than_is_bounded(
    queue: PgQueue, database_url: str, claims: list[float]
) -> None:
    done = threading.Event()
    task = queue.task(name="t")(lambda: done.set())
    rogue = create_engine(database_url)

    task.delay()
    with running(Worker(queue, concurrency=1, poll_interval=timedelta(seconds=5))):
        assert done.wait(PATIENCE)
        began = time.monotonic()
        flood(rogue)
        seconds = time.monotonic() - began
        during = sum(at >= began for at in claims)
        done.clear()
        task.delay()
        assert done.wait(PATIENCE)

    # One look for the notification, and one behind the frontiers.
    allowed = 2 * (FALSE_ALARMS + 5 + seconds / PAUSE)
    assert during <= allowed
    assert violations(queue.engine) == []
    rogue.dispose()


def flood(engine: Engine) -> None:
    with engine.connect() as connection:
        connection.execute(text("SET synchronous_commit = off"))
        longest = {"channel": CHANNEL, "payloads": ["x" * 7999]}
        connection.execute(FLOOD, longest)
        for number in range(TRANSACTIONS):
            junk = [f"{JUNK[n % len(JUNK)]}{number} {n}" for n in range(PAYLOADS - 1)]
            payloads = {"channel": CHANNEL, "payloads": ["rewind", *junk]}
            connection.execute(FLOOD, payloads)
            connection.commit()


FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "jsonpickle", "yaml"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}
IMPORTS_BY_NAME = {PACKAGE / "cli" / name for name in ("app_loader.py", "commands.py")}
"""The module that --app names, by whoever types the command, and those of the commands, which the
table there names.  No name comes from a row."""
BETWEEN_FORKS = PACKAGE / "worker" / "processes" / "channel.py"
"""Unpickles what a process has sent that the worker has forked; what is stored in a row is in it as
text, as the worker has read it."""


def test_nothing_in_the_package_makes_code_of_data() -> None:
    found = {path: list(code_from_data(path)) for path in PACKAGE.rglob("*.py")}

    assert {path: lines for path, lines in found.items() if lines} == {
        BETWEEN_FORKS: ["import pickle"]
    }


def code_from_data(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Import(names=names):
                forbidden = FORBIDDEN_MODULES & {one.name.partition(".")[0] for one in names}
            case ast.ImportFrom(module=str(module)):
                forbidden = FORBIDDEN_MODULES & {module.partition(".")[0]}
            case ast.Call(func=function, args=[ast.Constant(str())]) if (
                ast.unparse(function) == "import_module"
            ):
                continue
            case ast.Call(func=function, keywords=keywords):
                called = ast.unparse(function)
                forbidden = FORBIDDEN_CALLS & {called}
                if called.endswith("import_module") and path not in IMPORTS_BY_NAME:
                    forbidden = {called}
                forbidden |= {"shell"} & {word.arg for word in keywords}
            case _:
                continue
        if forbidden:
            yield ast.unparse(node)


def test_no_error_of_an_enqueue_quotes_arguments(empty_database_url: str) -> None:
    queue = PgQueue(empty_database_url)
    secret = 73190
    notes: list[str] = []

    @queue.task
    def charge(pin: int) -> None: ...

    def one(session: Session) -> None:
        charge.enqueue(session, secret)

    def many(session: Session) -> None:
        charge.enqueue_many(session, [(secret,)])

    def alone(_session: Session) -> None:
        charge.delay(secret)

    for enqueue in (one, many, alone):
        with queue.session() as session, pytest.raises(SchemaMissing) as raised:
            enqueue(session)
        notes += traceback.format_exception(raised.value)

    assert str(secret) not in "".join(notes)
    assert "parameters hidden" in "".join(notes)
    queue.engine.dispose()
