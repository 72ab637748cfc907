"""``on_success``: a job that succeeds enqueues another, in the commit that records it."""

from datetime import date, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session
from worker_rig import PATIENCE

from pgqueue import Cancel, Job, JobContext, PgQueue, Retry, TaskDefinitionError, Worker

AT_ONCE = Retry.constant(timedelta(0))


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


@pytest.fixture
def told(queue: PgQueue) -> list[Any]:
    return []


@pytest.fixture
def tell(queue: PgQueue, told: list[Any]) -> Any:
    @queue.task(name="tell", priority=2, max_attempts=3)
    def tell(job_id: int, result: date | None) -> None:
        told.append((job_id, result))

    return tell


def run(queue: PgQueue) -> dict[str, int]:
    return Worker(queue).run_until_empty(timeout=PATIENCE)


@pytest.mark.parametrize("kind", ["plain", "transactional", "process", "finish", "async"])
@pytest.mark.parametrize("result", [date(2030, 1, 31), None])
def test_it_gets_the_id_and_the_result(
    queue: PgQueue, told: list[Any], tell: Any, kind: str, result: date | None
) -> None:
    def plain() -> date | None:
        return result

    def transactional(session: Session) -> date | None:
        return result

    def finish(ctx: JobContext) -> None:
        with ctx.finish(result):
            pass

    async def coroutine() -> date | None:
        return result

    functions: dict[str, Any] = {
        "transactional": transactional,
        "finish": finish,
        "async": coroutine,
    }
    options: dict[str, Any] = {"executor": "process"} if kind == "process" else {}
    task: Any = queue.task(name="t", on_success=tell, **options)(functions.get(kind, plain))
    job = task.delay()

    run(queue)

    assert told == [(job.id, result)]
    with queue.session() as session:
        follow_up = session.scalars(select(Job).where(Job.task == "tell")).one()
        assert (follow_up.priority, follow_up.max_attempts, follow_up.meta) == (2, 3, {})
        assert queue.check(session) == []


def test_it_follows_success_only(queue: PgQueue, told: list[Any], tell: Any) -> None:
    @queue.task(name="t", max_attempts=2, retry=AT_ONCE, on_success=tell)
    def end(how: str) -> Any:
        if how == "raise":
            raise ValueError
        return Cancel("no") if how == "cancel" else None

    for how in ("raise", "cancel"):
        end.delay(how)

    assert run(queue) == {"retried": 1, "failed": 1, "cancelled": 1}
    assert told == []


def test_it_may_take_the_id_alone(queue: PgQueue) -> None:
    ids: list[int] = []

    @queue.task(name="note")
    def note(job_id: int, is_loud: bool = False) -> None:
        ids.append(job_id)

    job = queue.task(name="t", on_success=note)(lambda: 7).delay()
    run(queue)

    assert ids == [job.id]


def test_it_follows_a_job_that_is_not_kept(queue: PgQueue, told: list[Any], tell: Any) -> None:
    options: dict[str, Any] = {"on_success": tell, "keep": timedelta(0)}
    job = queue.task(name="t", **options)(lambda: None).delay()

    run(queue)

    assert told == [(job.id, None)]


def test_a_success_and_a_failure_have_their_own(queue: PgQueue) -> None:
    seen: list[str] = []
    good = queue.task(name="good")(lambda job_id: seen.append("good"))
    bad = queue.task(name="bad")(lambda job_id: seen.append("bad"))

    @queue.task(name="t", max_attempts=1, on_success=good, on_failed=bad)
    def end(is_good: bool) -> None:
        if not is_good:
            raise ValueError

    end.delay(True)
    run(queue)
    end.delay(False)
    run(queue)

    assert seen == ["good", "bad"]


def test_what_cannot_follow_is_refused(queue: PgQueue, tell: Any) -> None:
    nothing: Any = queue.task(name="nothing")(lambda: None)
    more: Any = queue.task(name="more")(lambda job_id, result, more: None)
    unfit: list[tuple[Any, str]] = [
        (print, "give another task of this queue"),
        (nothing, "with the id of the job"),
        (more, "with the id of the job, and its result by name"),
        (tell.options(delay=timedelta(seconds=1)), "no delay"),
    ]
    for task, reason in unfit:
        with pytest.raises(TaskDefinitionError, match=f"task one: on_success .*{reason}"):
            queue.task(name="one", on_success=task)(lambda: None)
