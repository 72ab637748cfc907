"""An operator in Python: what is done, and what the log says of it."""

import asyncio
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from pgqueue import (
    Job,
    JobNotFound,
    JobStatus,
    Limit,
    Operator,
    OptionError,
    PgQueue,
    Retry,
    Selection,
    Worker,
)
from pgqueue.repository.operator_actions import LogEntry, OperatorActions
from pgqueue.tasks.editing import Changes

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
    assert not ada.unquiet(uuid4())
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


def failed(queue: PgQueue, number: int, **options: Any) -> list[int]:
    """Jobs that have failed."""
    fail = queue.task(name="fail", max_attempts=1, retry=Retry.never())(lambda: 1 / 0)
    ids = [fail.options(**options).delay().id for _ in range(number)]
    Worker(queue).run_until_empty(timeout=60)
    return ids


def test_the_newest_failed_job_is_tried(queue: PgQueue) -> None:
    ids = failed(queue, 3)
    queue.operate("ada").cancel(Selection(task="send"))
    ada = queue.operate("ada")

    newest = ada.try_one(Selection(task="fail"))
    second = ada.try_one(Selection(ids[:2]))

    assert [str(one.last) for one in (newest, second) if one] == [
        f"{ids[2]}: requeued",
        f"{ids[1]}: requeued",
    ]
    assert ada.try_one(Selection(task="send")) is None
    with pytest.raises(OptionError, match="try_one: which jobs"):
        ada.try_one(Selection())
    with pytest.raises(OptionError, match="argument token is secret"):
        ada.try_one(Selection(task="send", args={"token": "c4n4ry"}))


def test_of_a_job_that_cannot_be_tried_the_reason_is_told(queue: PgQueue) -> None:
    [job_id] = failed(queue, 1, unique_key="k")
    queue.tasks["fail"].options(unique_key="k").delay()

    outcome = queue.operate("ada").try_one(Selection(task="fail"))

    assert outcome is not None
    assert outcome.changed == 0
    assert str(outcome.last).startswith(f"{job_id}: key taken, because job {job_id + 1}")


def test_those_of_a_limit_are_spread_over_the_whole_time(queue: PgQueue) -> None:
    for _ in range(4):
        queue.tasks["send"].delay("ada")
    ada = queue.operate("ada")
    ada.cancel(Selection(task="send"))

    outcome = ada.start("requeue", Selection(task="send"), spread=2 * HOUR, limit=2).finish()

    assert outcome.entry.options == {"spread_s": 7200.0, "of": 2, "limit": 2}
    first, second = (job.run_at for job in jobs(queue)[:2])
    assert HOUR - timedelta(minutes=1) < second - first <= HOUR


def test_no_job_at_all_is_no_error(queue: PgQueue) -> None:
    assert queue.operate("ada").requeue(Selection([])).counts == {}
    assert queue.operate("ada").requeue(Selection(task="send")).changed == 0


@pytest.mark.parametrize(
    ("action", "words", "error"),
    [
        ("requeue", {"jobs": [5]}, "the jobs are list; give a Selection"),
        ("requeue", {"jobs": Selection([5]), "spread": 20}, "spread is 20; give a timedelta"),
        ("requeue", {"jobs": Selection([5]), "spread": -HOUR}, "give a timedelta from 0"),
        ("change", {"jobs": Selection([5])}, "nothing to change is given"),
        ("start", {"action": "drop", "jobs": Selection([5])}, "no action 'drop' on jobs"),
        ("start", {"action": "change", "jobs": Selection([5])}, "nothing to change is given"),
        ("mute_error", {"error": "red", "task": "send", "hours": 1}, "'red' is no error"),
        ("mute_error", {"error": 7, "task": "send", "hours": -1}, "hours"),
        ("go_on", {"action_id": 4711}, "there is no action 4711"),
        ("requeue", {"jobs": Selection([5]), "spread": timedelta.max}, "spread is"),
        ("start", {"action": "cancel", "jobs": Selection([5]), "limit": 0}, "limit"),
        ("run_now", {"jobs": Selection.from_line("status:due")}, "not due yet; these are due"),
    ],
)
def test_wrong_values_are_refused(
    queue: PgQueue, action: str, words: dict[str, Any], error: str
) -> None:
    with pytest.raises(OptionError, match=error):
        getattr(queue.operate("ada"), action)(**words)
    assert logged(queue) == []


def test_an_error_shows_no_arguments(queue: PgQueue, engine: Engine) -> None:
    job_id = queue.tasks["send"].delay("ada").id
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS"
                " $$ BEGIN RAISE EXCEPTION 'no'; END $$"
            )
        )
        connection.execute(
            text(
                "CREATE TRIGGER refuse BEFORE UPDATE ON pgqueue.jobs"
                " FOR EACH ROW EXECUTE FUNCTION public.refuse()"
            )
        )

    with pytest.raises(DBAPIError) as raised:
        queue.operate("ada").change(Selection([job_id]), args={"token": "c4n4ry"})

    assert "c4n4ry" not in str(raised.value)


def test_a_task_that_the_application_does_not_have_is_not_moved(
    queue: PgQueue, engine: Engine
) -> None:
    queue.tasks["send"].delay("ada")
    other = PgQueue(engine)
    other.task(name="plain")(lambda: None)

    outcome = other.operate("ada").change(Selection(task="send"), queue="mail")

    assert outcome.counts == {"refused": 1}


def test_an_action_that_cannot_be_continued_says_why(queue: PgQueue) -> None:
    job_id = queue.tasks["send"].delay("ada").id
    ada = queue.operate("ada")
    ada.cancel(Selection([job_id]))
    ada.pause_queue("mail")
    changes = Changes(args={"to": "bob"}, are_args_stored=True)
    ada.start("requeue", Selection([job_id]), changes=changes)

    whys = ["is finished", "is finished", "gives jobs new arguments"]
    for action, why in zip(logged(queue), whys, strict=True):
        with pytest.raises(OptionError, match=f"action {action.id} {why}"):
            ada.go_on(action.id or 0)


def test_coroutines_do_the_same(queue: PgQueue) -> None:
    job_id = queue.tasks["send"].delay("ada").id

    outcome = asyncio.run(queue.operate_async("ada").cancel(Selection([job_id])))

    assert outcome.changed == 1
    assert [one.action for one in logged(queue)] == ["cancel"]


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


def test_a_limited_user_is_not_told_which_job_holds_a_key(queue: PgQueue) -> None:
    pay = queue.task(name="pay")(lambda: None).options(unique_key="one")
    tagged = pay.options(tags=["shop"]).delay().id
    queue.operate("ada").cancel(Selection([tagged]))
    holder = pay.delay().id

    limited, jobs = Operator(queue, "ada", is_limited=True), Selection([tagged])
    begun = limited.start("requeue", jobs.scoped(None, {"shop"})).entry.id
    assert begun is not None
    for told in (limited.requeue(jobs.scoped(None, {"shop"})), limited.go_on(begun).finish()):
        assert [one.reason for one in told.left] == ["another job of its queue has its unique key"]
    told = Operator(queue, "ada").requeue(jobs)
    assert [one.reason for one in told.left] == [f"job {holder} of its queue has its unique key"]
