"""enqueued and assert_enqueued: what a test asks about its jobs."""

from datetime import date, timedelta

import pytest
from sqlalchemy.orm import Session

from pgqueue import ArgumentsError, PgQueue, Secret
from pgqueue.testing import assert_enqueued, enqueued, run_jobs


@pytest.fixture
def queue() -> PgQueue:
    return PgQueue()


def test_jobs_are_found_by_task_and_by_some_of_their_arguments(
    queue: PgQueue, session: Session
) -> None:
    @queue.task
    def remind(user_id: int, day: date, words: tuple[str, ...] = ("hello",)) -> None: ...

    @queue.task
    def other(user_id: int) -> None: ...

    first = remind.enqueue(session, 7, date(2026, 1, 1))
    session.add(remind.options(delay=timedelta(days=1)).job(8, date(2026, 1, 1), ("bye",)))
    other.enqueue(session, 7)

    assert assert_enqueued(session, remind, user_id=7, day=date(2026, 1, 1)) is first
    assert [job.args["user_id"] for job in enqueued(session, remind)] == [7, 8]
    assert enqueued(session, remind, words=("hello",)) == [first]
    assert [job.task for job in enqueued(session)] == [remind.name, other.name, remind.name]
    assert enqueued(session, remind, day=date(2027, 1, 1)) == []
    with pytest.raises(ArgumentsError, match="has no argument user; it has user_id, day, words"):
        enqueued(session, remind, user=7)


def test_a_failed_assertion_names_what_was_enqueued_instead(
    queue: PgQueue, session: Session, database_url: str
) -> None:
    queue.bind(session.connection())

    @queue.task(name="mail.welcome")
    def welcome(user_id: int, template: str, key: Secret[str]) -> None: ...

    @queue.task(name="mail.goodbye")
    def goodbye(user_id: int) -> None: ...

    with pytest.raises(AssertionError, match=r"no job of mail\.welcome waits; no job at all"):
        assert_enqueued(session, welcome)

    welcome.enqueue(session, 1, "short", "hunter2")
    run_jobs(session, queue=queue)
    goodbye.enqueue(session, 8)
    welcome.enqueue(session, 7, "long", "hunter2")

    with pytest.raises(AssertionError) as caught:
        assert_enqueued(session, welcome, user_id=8, template="long")

    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "no job of mail.welcome with user_id=8, template='long' waits; enqueued were"
    )
    assert lines[1].endswith("user_id=7, template='long', key='***'  (wanted user_id=8)"), lines[1]
    assert lines[2].endswith("(wanted user_id=8, template='long')  (succeeded)"), lines[2]
    assert lines[3].endswith(" mail.goodbye: user_id=8")
    assert "hunter2" not in str(caught.value)
