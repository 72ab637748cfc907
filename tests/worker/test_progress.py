"""What a handler reports of its progress: seen while it runs, and never in its way."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import process_tasks
import pytest
from sqlalchemy import Engine, create_engine, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from worker_rig import Rig, endings, wait_until

from pgqueue import ArgumentsError, Job, JobContext, PgQueue, Worker

Read = Callable[[int], Any]


@pytest.fixture
def read(database_url: str) -> Iterator[Read]:
    """Reads the progress of a job on a connection that no handler uses."""
    engine = create_engine(database_url)

    def read(job_id: int) -> Any:
        with Session(engine) as session:
            return session.scalar(select(Job.progress).where(Job.id == job_id))

    yield read
    engine.dispose()


def told(done: float, total: float | None = None, note: str | None = None) -> dict[str, Any]:
    return {"done": done, "total": total, "note": note}


@pytest.mark.parametrize("kind", ["plain", "session", "async", "async_session"])
def test_progress_is_visible_while_the_handler_runs(engine: Engine, read: Read, kind: str) -> None:
    queue = PgQueue(engine)

    def work(ctx: JobContext) -> None:
        ctx.progress(1, 2, "half")
        wait_until(lambda: read(ctx.job_id) == told(1, 2, "half"))
        for done in range(1000):
            ctx.progress(done)
        ctx.progress(2, 2)

    @queue.task(name="plain")
    def plain(ctx: JobContext) -> None:
        work(ctx)

    @queue.task(name="session")
    def with_session(session: Session, ctx: JobContext) -> None:
        session.execute(text("SELECT 1"))
        work(ctx)

    @queue.task(name="async")
    async def on_loop(ctx: JobContext) -> None:
        work(ctx)

    @queue.task(name="async_session")
    async def on_loop_with_session(session: AsyncSession, ctx: JobContext) -> None:
        await session.execute(text("SELECT 1"))
        work(ctx)

    job_id = queue.tasks[kind].delay().id

    assert endings(Worker(queue)) == {"succeeded": 1}
    assert read(job_id) == told(2, 2)


@pytest.mark.journey
def test_a_child_process_reports_to_its_worker(
    database_url: str, tmp_path: Path, read: Read
) -> None:
    with Rig(database_url, tmp_path) as rig:
        with rig.session() as session, session.begin():
            job_id = process_tasks.report.enqueue(session, 3).id
        rig.start(modules=["process_tasks"])

        wait_until(lambda: read(job_id) == told(0, 3, "begun"), what="the first report")
        rig.open("report")
        wait_until(lambda: read(job_id) == told(3, 3), what="the last report")


def test_a_locked_row_holds_up_no_report_and_the_last_one_is_written_later(
    engine: Engine, read: Read
) -> None:
    queue = PgQueue(engine)
    free = threading.Event()

    @queue.task(name="tests.locked")
    def locked(ctx: JobContext) -> None:
        with Session(engine) as session, session.begin():
            session.execute(select(Job.id).where(Job.id == ctx.job_id).with_for_update())
            ctx.progress(1)
            other.delay()
            assert free.wait(60), "another job's progress is written meanwhile"
            assert read(ctx.job_id) is None

    @queue.task(name="tests.other")
    def other(ctx: JobContext) -> None:
        ctx.progress(7)
        wait_until(lambda: read(ctx.job_id) == told(7))
        free.set()

    job_id = locked.delay().id

    assert endings(Worker(queue, concurrency=2)) == {"succeeded": 2}
    assert read(job_id) == told(1)


def test_at_repeatable_read_progress_waits_for_the_transaction(
    database_url: str, read: Read
) -> None:
    engine = create_engine(database_url, isolation_level="REPEATABLE READ")
    queue = PgQueue(engine)
    begun, seen = threading.Event(), threading.Event()
    runs: list[int] = []

    @queue.task(name="tests.snapshot")
    def snapshot(session: Session, ctx: JobContext) -> None:
        runs.append(ctx.attempt)
        session.execute(select(Job.id)).all()
        ctx.progress(1)
        begun.set()
        assert seen.wait(60)

    @queue.task(name="tests.other")
    def other(ctx: JobContext) -> None:
        assert begun.wait(60)
        ctx.progress(7)
        wait_until(lambda: read(ctx.job_id) == told(7))
        seen.set()

    job_id = snapshot.delay().id
    other.delay()

    assert endings(Worker(queue, concurrency=2)) == {"succeeded": 2}
    assert runs == [1], "its settle has met no row changed by its own progress"
    assert read(job_id) == told(1)
    engine.dispose()


def test_a_worker_without_reports_has_no_thread_for_them(engine: Engine) -> None:
    queue = PgQueue(engine)
    names, before = set[str](), threading.enumerate()

    @queue.task(name="tests.silent")
    def silent(ctx: JobContext) -> None:
        names.update(thread.name for thread in threading.enumerate() if thread not in before)

    silent.delay()

    assert endings(Worker(queue)) == {"succeeded": 1}
    assert "pgqueue-heartbeat" in names
    assert "pgqueue-progress" not in names


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ((-1,), "done of its progress is -1; give a number from 0"),
        (("3",), "done of its progress is '3'"),
        ((True,), "done of its progress is True"),
        ((float("nan"),), "done of its progress is nan"),
        ((10**400,), "done of its progress is 1000"),
        ((1, -2), "total of its progress is -2"),
        ((1, 2, 3), "the note of its progress is int; give a str or None"),
    ],
)
def test_a_report_that_is_none_is_refused(report: Any, words: str) -> None:
    context = JobContext(5, 1, 1, "default", "tests.task")

    with pytest.raises(ArgumentsError, match=f"job 5 tests.task: {words}"):
        context.progress(*report)


def test_a_long_note_is_cut_and_secrets_in_it_are_masked(engine: Engine, read: Read) -> None:
    queue = PgQueue(engine)

    @queue.task(name="tests.secret", secret_args=("token",))
    def secret(ctx: JobContext, token: str) -> None:
        ctx.progress(1, note=f"with {token}" + "x" * 1000)

    job_id = secret.delay("hunter2hunter2").id
    assert endings(Worker(queue)) == {"succeeded": 1}

    note = read(job_id)["note"]
    assert "hunter2" not in note
    assert len(note) <= 500
