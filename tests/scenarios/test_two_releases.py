"""A deployment: workers of two releases run at once, and web processes of both enqueue."""

from pathlib import Path

import pytest
from worker_rig import Rig

from pgqueue import PgQueue
from pgqueue.repository.health import Health

pytestmark = pytest.mark.journey

TASKS = ("plain", "transactional", "on_the_loop", "in_a_process")


def enqueue(rig: Rig, arguments: dict[str, str]) -> list[int]:
    """Enqueue one job of each task, as a web process with these parameters does."""
    web = PgQueue(rig.engine)

    def one(name: str) -> None: ...

    def two(name: str, title: str) -> None: ...

    jobs = []
    with web.session() as session, session.begin():
        for each in TASKS:
            task = web.task(name=f"releases.{each}", max_attempts=1)(
                two if "title" in arguments else one
            )
            jobs.append(task.enqueue(session, **arguments).id)
    return jobs


def met(rig: Rig) -> int:
    return int(rig.scalar("SELECT count(*) FROM pgqueue.unreadable_jobs"))


@pytest.mark.parametrize(
    ("arguments", "too_soon", "right", "reason"),
    [
        ({"name": "Ada", "title": "Dr."}, "release_one", "release_two", "name 'title'"),
        ({"name": "Ada"}, "release_two", "release_one", "have no 'title'"),
    ],
    ids=["the web first", "the workers first"],
)
def test_a_job_waits_for_a_worker_of_its_release(
    database_url: str,
    tmp_path: Path,
    arguments: dict[str, str],
    too_soon: str,
    right: str,
    reason: str,
) -> None:
    with Rig(database_url, tmp_path) as rig:
        other = rig.start(modules=[too_soon])
        jobs = enqueue(rig, arguments)
        rig.until(lambda: met(rig) == len(jobs), what="the other release has met all jobs")
        assert {rig.outcome(job) for job in jobs} == {None}
        assert sum(map(rig.attempts, jobs)) == 0
        with rig.session() as session:
            found = Health(session).unreadable()
        assert [(each.task, each.jobs) for each in found] == [
            (f"releases.{name}", 1) for name in sorted(TASKS)
        ]
        assert all(reason in each.reason for each in found)

        rig.start(modules=[right])
        late = enqueue(rig, arguments)
        assert other.terminate() == 0
        rig.until_ended(*jobs, *late)

        assert rig.outcomes() == {"succeeded": 2 * len(TASKS)}
        assert {rig.attempts(job) for job in (*jobs, *late)} == {1}
        assert {note["release"] for note in rig.notes("start")} == {int(right == "release_two") + 1}
        assert rig.bad_attempts() == []
        logged = other.log.read_text().count("its jobs wait for a worker that can read them")
        assert logged == len(TASKS)
        with rig.session() as session:
            assert Health(session).unreadable() == []
        assert rig.check() == []
