"""An operator in Python: what is done, and what the log says of it."""

import asyncio
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine

from pgqueue import (
    ArgumentsError,
    Job,
    JobNotFound,
    JobStatus,
    Limit,
    Operator,
    OptionError,
    PgQueue,
    Selection,
)
from pgqueue.repository.operator_actions import LogEntry, OperatorActions

HOUR = timedelta(hours=1)


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    queue = PgQueue(engine)

    @queue.task(name="send", limit=Limit(5, by="to"), secret_args=["token"])
    def send(to: str, token: str = "") -> None: ...

    return queue


def logged(queue: PgQueue) -> list[LogEntry]:
    """The oldest first."""
    with queue.session() as session:
        return OperatorActions(session).newest(limit=99)[::-1]


def jobs(queue: PgQueue) -> list[Job]:
    with queue.session() as session:
        return session.query(Job).order_by(Job.id).all()


def test_many_jobs_are_cancelled_requeued_changed_and_made_due(queue: PgQueue) -> None:
    for to in ("ada", "bob"):
        queue.tasks["send"].options(delay=HOUR).delay(to)
    ada = queue.operate("ada", reason="wrong template")

    cancelled = ada.cancel(Selection(task="send"))
    requeued = ada.requeue(Selection.from_line("task:send status:cancelled"), spread=HOUR)
    changed = ada.change(Selection(queue="default"), priority=9, delay=HOUR)
    due = ada.run_now(Selection([2]))

    assert [one.changed for one in (cancelled, requeued, changed, due)] == [2, 2, 2, 1]
    assert cancelled.counts == {"cancelled": 2}
    assert repr(requeued) == "<requeue: 2 changed, 0 skipped>"
    assert [job.priority for job in jobs(queue)] == [9, 9]
    about = [(one.actor, one.action, one.reason, one.jobs) for one in logged(queue)]
    assert about == [
        ("ada", name, "wrong template", number)
        for name, number in (("cancel", 2), ("requeue", 2), ("change", 2), ("run_now", 1))
    ]
    assert logged(queue)[0].target == {"filter": {"task": "send", "statuses": UNFINISHED}}


UNFINISHED = ["blocked", "pending", "running"]


def test_what_is_left_is_told_with_the_reason(queue: PgQueue) -> None:
    job_id = queue.tasks["send"].delay("ada").id

    outcome = queue.operate("ada").requeue(Selection([job_id, 4711]))

    unchanged, not_found = map(str, outcome.left)
    assert unchanged == f"{job_id}: unchanged, because its status is blocked"
    assert not_found.startswith("4711: not found, because job 4711 does not exist")


def test_the_other_actions_are_logged_with_their_targets(queue: PgQueue) -> None:
    with queue.session() as session, session.begin():
        queue.schedules.add(session, queue.tasks["send"], every=HOUR, name="night", args=("ada",))
    ada = queue.operate("ada")

    ada.pause_queue("mail")
    ada.resume_queue("mail")
    ada.pause_task("send")
    ada.resume_task("send")
    assert ada.pause_key("send:to", "bob") == ada.resume_key("send:to", "bob")
    assert ada.set_limit("send:to", 2) == ("send:to", 2)
    ada.pause_schedule("night")
    ada.resume_schedule("night")
    job_id = ada.trigger_schedule("night")
    ada.remove_schedule("night")
    assert not ada.quiet(uuid4())
    assert not ada.mute_error(7, "send", hours=1)
    job = ada.enqueue(queue.tasks["send"], {"to": "eve"})

    found = [(one.action, one.target) for one in logged(queue)]
    assert found == [
        ("pause_queue", {"queue": "mail"}),
        ("resume_queue", {"queue": "mail"}),
        ("pause_task", {"task": "send"}),
        ("resume_task", {"task": "send"}),
        ("pause_key", {"key": 'send:to ["bob"]'}),
        ("resume_key", {"key": 'send:to ["bob"]'}),
        ("set_limit", {"limit": "send:to"}),
        ("pause_schedule", {"schedule": "night"}),
        ("resume_schedule", {"schedule": "night"}),
        ("trigger_schedule", {"schedule": "night"}),
        ("remove_schedule", {"schedule": "night"}),
        ("enqueue", {"task": "send"}),
    ]
    assert [one.first_ids for one in logged(queue) if one.jobs] == [[job_id], [job.id]]
    assert (job.status, job.is_new) == (JobStatus.BLOCKED, True)


def test_the_newest_failed_job_of_an_error_is_tried(queue: PgQueue) -> None:
    ids = [queue.tasks["send"].delay("ada").id for _ in range(2)]
    queue.operate("ada").cancel(Selection(ids))

    assert queue.operate("ada").try_one(Selection(task="send")) is None


def test_coroutines_do_the_same(queue: PgQueue) -> None:
    job_id = queue.tasks["send"].delay("ada").id

    outcome = asyncio.run(queue.operate_async("ada").cancel(Selection([job_id])))

    assert outcome.changed == 1
    assert [one.action for one in logged(queue)] == ["cancel"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ({"ids": [1], "task": "send"}, "ids and conditions are given"),
        ({"status": "lost"}, "status is .'lost'.; give one or several of"),
        ({"colour": "red"}, "there is no condition 'colour'"),
        ({"task": 7}, "Selection: task must be a str, not int$"),
        ({"error": "timeout"}, "is no error as `pgqueue failures` prints it"),
        ({"took": 3}, "Selection: took must be a timedelta, not int$"),
        ({"ids": ["x"]}, "id"),
    ],
    ids=str,
)
def test_a_wrong_selection_is_refused(words: dict[str, Any], error: str) -> None:
    with pytest.raises((OptionError, ArgumentsError), match=error):
        Selection(**words)


def test_a_selection_of_everything_is_refused(queue: PgQueue) -> None:
    with pytest.raises(OptionError, match=r"cancel: which jobs[?]"):
        queue.operate("ada").cancel(Selection())
    assert logged(queue) == []


@pytest.mark.parametrize(("actor", "reason"), [("", ""), (7, ""), ("ada", 7)])
def test_an_operator_has_a_name(queue: PgQueue, actor: Any, reason: Any) -> None:
    with pytest.raises(OptionError, match="operate: "):
        queue.operate(actor, reason=reason)


def test_a_job_out_of_scope_is_not_found_and_nothing_is_changed(queue: PgQueue) -> None:
    ids = [queue.tasks["send"].options(queue=name).delay("ada").id for name in ("mail", "sms")]

    with pytest.raises(JobNotFound, match=f"there is no job {ids[1]}"):
        Operator(queue, "ada").cancel(Selection(ids).scoped({"mail"}, None))

    assert [job.status for job in jobs(queue)] == [JobStatus.BLOCKED] * 2
