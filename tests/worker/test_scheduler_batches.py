"""Workers end batches: once each, in time, and across kills."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import batch_tasks
import pytest
from sqlalchemy import text
from worker_rig import Rig, promised

from pgqueue import Worker

pytestmark = pytest.mark.journey

WAITING_ENDS = (
    "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)"
    " WHERE NOT granted AND relation = CAST('pgqueue.batches' AS regclass)"
    " AND application_name LIKE '% timers'"
)
MODULES: dict[str, Any] = {"modules": ["batch_tasks"], "poll_interval": 0.2}


@pytest.fixture
def rig(database_url: str, tmp_path: Path) -> Iterator[Rig]:
    with Rig(database_url, tmp_path) as rig:
        yield rig


def add_batch(rig: Rig, *, jobs: int = 1, left: int = 0) -> int:
    with rig.session() as session, session.begin():
        with rig.queue.batch(session, on_success=batch_tasks.told) as batch:
            batch_tasks.piece.enqueue_many(session, [(batch.id, left)] * jobs)
        return batch.id


def callbacks(rig: Rig) -> list[int]:
    """The batches whose callbacks are in the tables."""
    statement = "SELECT CAST(args->>'batch_id' AS bigint) FROM pgqueue.jobs WHERE task LIKE '%told'"
    return sorted(row[0] for row in rig.rows(statement))


def until_all_told(rig: Rig, *batches: int) -> None:
    rig.until(lambda: {note["batch"] for note in rig.notes("told")} >= set(batches), what="told")


@pytest.mark.timed
def test_a_batch_ends_within_three_seconds_of_its_last_job(rig: Rig) -> None:
    rig.start(**MODULES)

    batch = add_batch(rig, jobs=20)
    until_all_told(rig, batch)

    late = rig.scalar(
        "SELECT extract(epoch FROM (SELECT ended_at FROM pgqueue.batches) - max(finished_at))"
        " FROM pgqueue.jobs WHERE task LIKE '%piece'"
    )
    assert late < promised(3)


def test_a_worker_that_is_killed_while_it_ends_a_batch_leaves_it_to_another(rig: Rig) -> None:
    dying = rig.start(**MODULES)
    batch = add_batch(rig)
    with rig.engine.begin() as blocking:
        # An end locks its batch, inserts the callback, and waits here.
        blocking.execute(text("LOCK TABLE pgqueue.batches IN SHARE MODE"))
        rig.until(lambda: rig.scalar(WAITING_ENDS), what="it ends the batch")
        dying.kill()
        assert callbacks(rig) == []
    rig.start(**MODULES)
    until_all_told(rig, batch)
    rig.until_ended()

    assert callbacks(rig) == [batch]


def test_a_killed_job_leaves_its_batch_open_until_it_has_run_again(rig: Rig) -> None:
    first = rig.start(**MODULES)
    with (
        rig.session() as session,
        session.begin(),
        rig.queue.batch(session, on_success=batch_tasks.told) as batch,
    ):
        job = batch_tasks.gated.enqueue(session, batch.id, "go").id
    rig.until_started(job)
    first.kill()
    rig.start(**MODULES)
    rig.until(lambda: len(rig.notes("start", job=job)) == 2, what="it starts again")
    assert callbacks(rig) == []

    rig.open("go")
    until_all_told(rig, batch.id)

    assert callbacks(rig) == [batch.id]
    assert rig.scalar("SELECT total FROM pgqueue.batches") == 2  # the first addition was undone


def test_a_worker_that_ends_when_no_job_is_left_runs_the_callback_first(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHAOS_DIRECTORY", str(rig.directory))
    batch = add_batch(rig, jobs=3, left=1)

    counts = Worker(rig.queue).run_until_empty(timeout=60)

    assert counts["succeeded"] == 10
    assert callbacks(rig) == [batch]
