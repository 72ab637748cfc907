"""enqueued and assert_enqueued: what a test asks about its jobs."""

from datetime import date, timedelta

import pytest
from sqlalchemy.orm import Session

from pgqueue import ArgumentsError, PgQueue, Secret
from pgqueue.testing import assert_blocked, assert_enqueued, enqueued, run_jobs


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


class Import:
    """A workflow: extract, two transforms, load, then the callback."""

    def __init__(self, queue: PgQueue, session: Session) -> None:
        self.extract = queue.task(name="extract")(self.nothing)
        self.transform = queue.task(name="transform")(self.nothing)
        self.load = queue.task(name="load")(self.nothing)
        self.tell = queue.task(name="tell")(self.nothing)
        with queue.workflow(session, on_success=self.tell) as flow:
            self.first = flow.add(self.extract.job(1))
            parts = flow.add_many(self.transform, [(1,), (2,)], after=self.first)
            self.last = flow.add(self.load.job(12), after=[parts, self.first])

    @staticmethod
    def nothing(number: int) -> None: ...


def test_a_blocked_job_is_found_by_what_it_waits_for(queue: PgQueue, session: Session) -> None:
    queue.bind(session.connection())
    flow = Import(queue, session)

    assert assert_blocked(session, flow.load) is flow.last
    assert assert_blocked(session, flow.load, after=flow.first, number=12) is flow.last
    assert assert_blocked(session, flow.load, after=flow.transform) is flow.last
    assert assert_blocked(session, flow.transform, after=flow.extract, number=2).args["number"] == 2
    assert_blocked(session, flow.tell, after=flow.load)
    with pytest.raises(ArgumentsError, match=r"after is 'extract'; give a job or a task"):
        assert_blocked(session, flow.load, after="extract")  # type: ignore[arg-type]


def test_no_job_waits_for_one_that_has_ended(queue: PgQueue, session: Session) -> None:
    queue.bind(session.connection())

    @queue.task(name="note")
    def note(word: str) -> None: ...

    with queue.workflow(session) as flow:
        first = flow.add(note.job("first"))
        later = flow.add(note.options(delay=timedelta(days=1)).job("later"))
        last = flow.add(note.job("last"), after=[first, later])
    run_jobs(session, queue=queue)

    assert assert_blocked(session, note, after=later) is last
    with pytest.raises(AssertionError):
        assert_blocked(session, note, after=first)
    run_jobs(session, queue=queue, until=timedelta(days=2))
    with pytest.raises(AssertionError):
        assert_blocked(session, note)


def test_a_failed_assertion_names_what_waits_for_what(queue: PgQueue, session: Session) -> None:
    queue.bind(session.connection())
    flow = Import(queue, session)
    first, last = flow.first.id, flow.last.id

    with pytest.raises(AssertionError) as caught:
        assert_blocked(session, flow.extract)
    assert str(caught.value).splitlines()[:2] == [
        "no job of extract waits for another job; enqueued were",
        f"  job {first} extract: number=1",
    ]
    with pytest.raises(AssertionError) as caught:
        assert_blocked(session, flow.load, after=flow.tell, number=13)
    assert str(caught.value).splitlines()[:2] == [
        "no job of load with number=13 waits for a job of tell; enqueued were",
        f"  job {last} load: number=12  (wanted number=13)"
        f"  (waits for job {first} extract and 2 more)",
    ]
    with pytest.raises(AssertionError, match=rf"waits for job {last} load; enqueued were"):
        assert_blocked(session, flow.load, after=flow.last)
