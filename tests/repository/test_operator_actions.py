"""The log of operators: what is written, found again and deleted."""

from dataclasses import replace
from typing import Any

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import enqueue, execute
from pgqueue import JobStatus, PgQueue
from pgqueue.repository.conditions import JobFilter
from pgqueue.repository.listing import Listing
from pgqueue.repository.operator_actions import LogEntry, OperatorActions

ENDED = JobFilter(statuses=frozenset([JobStatus.FAILED, JobStatus.CANCELLED]))


def add(session: Session, actor: str = "ada", action: str = "requeue", **more: Any) -> LogEntry:
    return OperatorActions(session).add(LogEntry(actor=actor, action=action, **more))


def test_an_action_is_read_as_it_was_written(session: Session) -> None:
    documents: dict[str, Any] = {
        "target": {"limit": "bank"},
        "options": {"spread_s": 7.5},
        "before": {"capacity": 3},
        "after": {"capacity": 0},
    }
    done = add(session, reason="the bank is down", jobs=2, first_ids=[7, 8], **documents)
    begun = add(session, last_id=9)
    log = OperatorActions(session)

    log.move(replace(begun, jobs=1, skipped=2, cursor=5, first_ids=[5]), is_finished=False)

    assert (done.id, begun.id) == (1, 2)
    [found, first] = log.newest(limit=9)
    assert first == replace(done, finished_at=first.finished_at)
    assert first.finished_at is not None
    assert found == replace(begun, jobs=1, skipped=2, cursor=5, first_ids=[5])
    assert log.one(2) == found
    assert log.one(3) is None


def test_the_newest_are_chosen_by_actor_action_and_id(session: Session) -> None:
    add(session)
    add(session, actor="bob", action="cancel")
    add(session, actor="bob", last_id=9)
    add(session, actor="bob")

    def ids(**words: Any) -> list[int | None]:
        return [one.id for one in OperatorActions(session).newest(**{"limit": 9, **words})]

    assert ids(actor="bob", action="requeue") == [4, 3]
    assert ids(limit=2) == [4, 3]
    assert ids(before=3) == [2, 1]
    assert ids(unfinished=True) == [3]


def test_old_actions_are_deleted(session: Session) -> None:
    add(session)
    add(session, last_id=9)
    add(session)
    session.execute(text("UPDATE pgqueue.operator_actions SET at = at - interval '89 days'"))
    old = "UPDATE pgqueue.operator_actions SET at = at - interval '2 days' WHERE id < 3"
    session.execute(text(old))

    OperatorActions(session).prune()

    assert [one.id for one in OperatorActions(session).newest(limit=9)] == [3]


def test_keys_are_taken_by_unfinished_jobs_of_the_queue_or_of_all(engine: Engine) -> None:
    across = "pgqueue.across:k"
    queue = PgQueue(engine)
    with queue.session() as session, session.begin():
        for key in ("a", "b", across, None):
            enqueue(session, key=key)
        for job_id in (1, 2, 3, 4):
            queue.cancel(session, job_id)
        enqueue(session, key="a")
        enqueue(session, key="b", queue="other")
        enqueue(session, key=across, queue="other")

    with Session(engine) as session:
        listing = Listing(session)
        assert listing.count(ENDED, limit=3) == 3
        assert listing.count(ENDED) == 4
        assert listing.taken_keys(ENDED, limit=9) == 2
        assert listing.taken_keys(replace(ENDED, after=1), limit=9) == 1


def test_of_some_ids_those_that_match_are_found(engine: Engine) -> None:
    for queue in ("mail", "other", "mail"):
        enqueue(engine, queue=queue)
    execute(engine, "UPDATE pgqueue.jobs SET tags = '[\"vip\"]' WHERE id = 3")

    with Session(engine) as session:
        listing = Listing(session)
        assert listing.matching(JobFilter(queue="mail"), [3, 1, 2, 99]) == [1, 3]
        assert listing.matching(JobFilter(queue="mail", tag="vip"), [3, 1]) == [3]
