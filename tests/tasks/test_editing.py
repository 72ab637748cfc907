"""``queue.change``, and ``queue.requeue`` with arguments: values, keys and errors."""

import json
import threading
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import violations, wait_until, waits_for_lock
from pgqueue import (
    ArgumentsError,
    Change,
    DuplicateJob,
    Job,
    JobStatus,
    Limit,
    MessageQueue,
    OptionError,
    PayloadError,
    PgQueue,
    Retry,
    Selection,
    Unique,
    UnknownTask,
    Worker,
)
from pgqueue.tasks.editing import Changes

HOUR = timedelta(hours=1)
seen: list[Any] = []


@pytest.fixture
def queue(engine: Engine) -> Iterator[PgQueue]:
    """A queue with the tasks of this module."""
    queue = PgQueue(engine)

    @queue.task(name="bill", max_attempts=1, retry=Retry.never(), renamed={"customer": "name"})
    def bill(name: str, day: date = date(2000, 1, 1), amount: int = 0) -> None:
        seen.append((name, day, amount))
        if amount < 0:
            raise ValueError(amount)

    @queue.task(name="unique", unique=Unique(by=("n",)))
    def unique(n: int, words: str = "") -> None: ...

    @queue.task(name="monthly", unique=Unique(by=("n",), period=timedelta(days=30)))
    def monthly(n: int) -> None: ...

    @queue.task(name="limited", limit=Limit(1, by="tenant"))
    def limited(tenant: int, words: str = "") -> None:
        seen.append(words)

    seen.clear()
    yield queue
    assert violations(engine) == []


def change(queue: PgQueue, job_id: int, /, **values: Any) -> Change:
    with queue.session() as session, session.begin():
        return queue.change(session, job_id, **values)


def requeue(queue: PgQueue, job_id: int, **args: Any) -> Change:
    with queue.session() as session, session.begin():
        return queue.requeue(session, job_id, args=args)


def job(queue: PgQueue, job_id: int) -> Job:
    with Session(queue.engine) as session:
        return session.get_one(Job, job_id)


def status(queue: PgQueue, job_id: int) -> JobStatus:
    with Session(queue.engine) as session:
        return session.get_one(Job, job_id).status


def run(queue: PgQueue) -> None:
    Worker(queue).run_until_empty(timeout=60)


def test_what_cannot_be_changed_is_said_in_words(queue: PgQueue) -> None:
    one = queue.tasks["bill"].delay("x")

    with pytest.raises(OptionError, match=f"change of job {one.id}: task cannot be changed, only"):
        change(queue, one.id, task="vip")


class TestPriorityAndTime:
    def test_an_edited_priority_changes_and_the_time_stays(self, queue: PgQueue) -> None:
        later, first = (queue.tasks["bill"].delay(name) for name in ("later", "first"))

        assert change(queue, first.id, priority=0) is Change.CHANGED
        assert change(queue, first.id, priority=0) is Change.UNCHANGED

        assert job(queue, first.id).run_at == first.run_at
        with Session(queue.engine) as session:
            jobs = session.scalars(select(Job.id).order_by(Job.priority, Job.run_at))
            assert jobs.all() == [first.id, later.id]
        run(queue)
        assert [name for name, *_ in seen] == ["first", "later"]

    def test_an_edited_delay_counts_from_now_and_a_time_in_the_past_means_now(
        self, queue: PgQueue
    ) -> None:
        one = queue.tasks["bill"].delay("x")

        assert change(queue, one.id, delay=HOUR) is Change.CHANGED
        assert job(queue, one.id).run_at > one.run_at + HOUR
        assert change(queue, one.id, run_at=datetime(2001, 1, 1, tzinfo=UTC)) is Change.CHANGED
        assert one.run_at < job(queue, one.id).run_at < one.run_at + HOUR

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({}, "nothing to change"),
            ({"priority": 10}, "priority is 10; give a whole number from 0 to 9"),
            ({"delay": -HOUR}, "delay is"),
            ({"run_at": datetime(2030, 1, 1)}, "give a datetime with a time zone"),
            ({"run_at": datetime(2030, 1, 1, tzinfo=UTC), "delay": HOUR}, "give one of them"),
        ],
    )
    def test_wrong_values_of_an_edit_are_refused(
        self, queue: PgQueue, values: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(OptionError, match=words):
            change(queue, 1, **values)


class TestArguments:
    def test_some_arguments_change_and_the_others_stay(self, queue: PgQueue) -> None:
        one = queue.tasks["bill"].delay("x", amount=7)

        assert change(queue, one.id, args={"day": date(2026, 2, 3)}) is Change.CHANGED

        assert job(queue, one.id).args == {"name": "x", "amount": 7, "day": "2026-02-03"}
        assert change(queue, one.id, args={"day": date(2026, 2, 3)}) is Change.UNCHANGED
        run(queue)
        assert seen == [("x", date(2026, 2, 3), 7)]

    @pytest.mark.parametrize(
        ("args", "error", "words"),
        [
            ({"nam": "y"}, ArgumentsError, "task bill: it has no argument 'nam'"),
            ({"amount": "7"}, ArgumentsError, "task bill: argument amount"),
            ({"name": "\0"}, PayloadError, "task bill: argument name"),
            ({"name": "y" * 2_000_000}, PayloadError, "over the limit of"),
            ([("name", "y")], ArgumentsError, "args is list"),
        ],
    )
    def test_wrong_arguments_are_refused_as_at_an_enqueue(
        self, queue: PgQueue, args: Any, error: type[Exception], words: str
    ) -> None:
        one = queue.tasks["bill"].delay("x")

        with pytest.raises(error, match=words):
            change(queue, one.id, args=args)

        assert job(queue, one.id).args == {"name": "x"}

    def test_an_argument_that_no_worker_can_read_is_repaired(self, queue: PgQueue) -> None:
        with queue.session() as session, session.begin():
            stored = {"customer": "x", "amount": "seven"}
            one = queue.tasks["bill"].enqueue(session, "x")
            one.args = stored
            job_id = one.id

        assert change(queue, job_id, args={"amount": 7}) is Change.CHANGED

        assert job(queue, job_id).args == {"name": "x", "amount": 7}

    def test_an_argument_that_is_stored_under_its_old_name_is_replaced(
        self, queue: PgQueue
    ) -> None:
        with queue.session() as session, session.begin():
            one = queue.tasks["bill"].enqueue(session, "x")
            one.args = {"customer": "x"}
            job_id = one.id

        assert change(queue, job_id, args={"name": "y"}) is Change.CHANGED

        assert job(queue, job_id).args == {"name": "y"}

    def test_only_an_application_with_the_task_changes_arguments(self, queue: PgQueue) -> None:
        one = queue.tasks["bill"].delay("x")
        other = PgQueue(queue.engine)

        with pytest.raises(UnknownTask, match="no task 'bill'"):
            change(other, one.id, args={"name": "y"})
        assert change(other, one.id, priority=1) is Change.CHANGED

    def test_a_claim_that_began_before_runs_the_new_arguments(self, queue: PgQueue) -> None:
        """The job's message is another, so that nobody holds the old arguments."""
        one = queue.tasks["bill"].delay("x")

        with queue.session() as session, session.begin():
            queue.change(session, one.id, args={"name": "y"})
            run(queue)  # finds no message that it may have
            assert seen == []
        run(queue)

        assert [name for name, *_ in seen] == ["y"]


class TestUniqueKeys:
    def test_a_key_made_of_the_arguments_is_made_anew(self, queue: PgQueue) -> None:
        task = queue.tasks["unique"]
        one = task.delay(1)

        assert change(queue, one.id, args={"n": 2}) is Change.CHANGED

        assert task.delay(1).is_new
        assert task.delay(2).id == one.id

    def test_a_key_that_is_taken_leaves_job_and_transaction_as_they_were(
        self, queue: PgQueue
    ) -> None:
        task = queue.tasks["unique"]
        one, two = task.delay(1), task.delay(2)

        with queue.session() as session, session.begin():
            with pytest.raises(DuplicateJob, match=f"job {two.id} of its queue") as caught:
                queue.change(session, one.id, args={"n": 2})
            queue.change(session, one.id, args={"words": "kept"})

        assert caught.value.holder == two.id
        assert job(queue, one.id).args == {"n": 1, "words": "kept"}
        assert task.delay(1).id == one.id

    def test_a_key_that_the_enqueue_gave_stays(self, queue: PgQueue) -> None:
        task = queue.tasks["unique"].options(unique_key="mine")
        one = task.delay(1)

        change(queue, one.id, args={"n": 2})

        assert job(queue, one.id).unique_key == "mine"
        assert task.delay(3).id == one.id

    def test_a_key_stays_in_its_period(self, queue: PgQueue) -> None:
        task = queue.tasks["monthly"]
        one = task.delay(1)

        change(queue, one.id, args={"n": 2})

        assert task.delay(2).id == one.id
        assert task.delay(1).is_new

    def test_an_edit_waits_for_another_transaction_that_takes_the_key(self, queue: PgQueue) -> None:
        task = queue.tasks["unique"]
        one = task.delay(1)
        changes: list[Change] = []
        with queue.session() as other, queue.engine.connect() as operator:
            task.enqueue(other, 2)
            pid = operator.scalar(text("SELECT pg_backend_pid()"))

            def change_it() -> None:
                changes.append(queue.change(operator, one.id, args={"n": 2}))
                operator.commit()

            thread = threading.Thread(target=change_it)
            thread.start()
            wait_until(lambda: waits_for_lock(queue.engine, pid))
            other.rollback()
            thread.join()

        assert changes == [Change.CHANGED]
        assert task.delay(2).id == one.id


class TestLimits:
    def test_a_job_that_waits_for_room_changes_too(self, queue: PgQueue) -> None:
        one = queue.tasks["limited"].delay(1)

        assert change(queue, one.id, args={"words": "new"}) is Change.CHANGED
        assert change(queue, one.id, priority=1, delay=HOUR) is Change.CHANGED
        assert status(queue, one.id) is JobStatus.BLOCKED
        assert change(queue, one.id, delay=timedelta(0)) is Change.CHANGED

        run(queue)
        assert seen == ["new"]

    def test_an_argument_by_which_it_counts_cannot_change(self, queue: PgQueue) -> None:
        one = queue.tasks["limited"].delay(1)

        with pytest.raises(ArgumentsError, match=f"job {one.id} counts in a limit"):
            change(queue, one.id, args={"tenant": 2})


class TestRequeue:
    def test_a_failed_job_begins_again_with_other_arguments_and_its_history(
        self, queue: PgQueue
    ) -> None:
        one = queue.tasks["bill"].delay("x", amount=-1)
        run(queue)
        assert status(queue, one.id) is JobStatus.FAILED

        assert requeue(queue, one.id, amount=1) is Change.REQUEUED
        run(queue)

        assert [amount for *_, amount in seen] == [-1, 1]
        with Session(queue.engine) as session:
            ended = session.get_one(Job, one.id)
            assert ended.status is JobStatus.SUCCEEDED
            assert [attempt.error for attempt in ended.failed_attempts] == ["-1"]

    def test_a_requeue_with_wrong_arguments_leaves_the_job_failed(self, queue: PgQueue) -> None:
        one = queue.tasks["bill"].delay("x", amount=-1)
        run(queue)

        with pytest.raises(ArgumentsError, match="it has no argument 'amont'"):
            requeue(queue, one.id, amont=1)

        assert status(queue, one.id) is JobStatus.FAILED

    def test_a_requeued_job_has_the_unique_key_of_its_new_arguments(self, queue: PgQueue) -> None:
        task = queue.tasks["unique"]
        one = task.delay(1)
        with queue.session() as session, session.begin():
            queue.cancel(session, one.id)
        two = task.delay(1)

        with pytest.raises(DuplicateJob, match=f"job {two.id}"):
            requeue(queue, one.id, words="new")
        assert job(queue, one.id).args == {"n": 1}
        assert requeue(queue, one.id, n=3) is Change.REQUEUED

        assert task.delay(3).id == one.id

    def test_a_job_that_waits_keeps_its_arguments(self, queue: PgQueue) -> None:
        one = queue.tasks["bill"].delay("x")

        assert requeue(queue, one.id, name="y") is Change.UNCHANGED

        assert job(queue, one.id).args == {"name": "x"}


class TestMove:
    def test_a_moved_job_runs_in_its_new_queue_with_its_attempts(self, queue: PgQueue) -> None:
        job_id = queue.tasks["bill"].delay("ada").id

        assert change(queue, job_id, queue="urgent") is Change.CHANGED

        Worker(queue, queues=["urgent"]).run_until_empty(timeout=60)
        assert (job(queue, job_id).queue, status(queue, job_id)) == ("urgent", "succeeded")

    def test_a_move_to_its_own_queue_is_no_change(self, queue: PgQueue) -> None:
        job_id = queue.tasks["bill"].delay("ada").id

        assert change(queue, job_id, queue="default") is Change.UNCHANGED

    def test_a_moved_job_that_waits_for_a_limit_of_its_task_keeps_it(self, queue: PgQueue) -> None:
        job_id = queue.tasks["limited"].delay(1).id
        before = job(queue, job_id).limit_keys

        assert change(queue, job_id, queue="urgent") is Change.CHANGED

        assert (job(queue, job_id).queue, job(queue, job_id).limit_keys) == ("urgent", before)
        Worker(queue, queues=["urgent"]).run_until_empty(timeout=60)
        assert status(queue, job_id) == "succeeded"

    @pytest.mark.parametrize(("first", "second"), [("narrow", "default"), ("default", "narrow")])
    def test_no_job_is_moved_out_of_a_queue_with_limits_nor_into_one(
        self, engine: Engine, first: str, second: str
    ) -> None:
        queue = PgQueue(engine, queue_limits={"narrow": Limit(1)})
        plain = queue.task(name="plain")(lambda: None)
        job_id = plain.options(queue=first).delay().id
        ada = queue.operate("ada")

        with pytest.raises(OptionError, match="queue narrow has limits; cancel it, and enqueue"):
            change(queue, job_id, queue=second)
        outcome = ada.change(Selection(task="plain"), queue=second)

        assert (outcome.changed, outcome.counts) == (0, {"refused": 1})
        assert job(queue, job_id).queue == first

    def test_no_job_is_moved_where_another_job_has_its_key(self, queue: PgQueue) -> None:
        unique = queue.tasks["unique"]
        first = unique.options(queue="urgent").delay(7).id
        second = unique.delay(7).id

        with pytest.raises(DuplicateJob, match=f"job {first} of its queue"):
            change(queue, second, queue="urgent")
        outcome = queue.operate("ada").change(Selection(queue="default"), queue="urgent")

        assert outcome.counts == {"key_taken": 1}
        assert job(queue, second).queue == "default"

    def test_many_jobs_are_moved_with_their_keys_and_limits(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        for name in ("bill", "unique", "limited"):
            queue.tasks[name].delay(*(("ada",) if name == "bill" else (1,)))

        outcome = queue.operate("ada").change(Selection(queue="default"), queue="urgent")

        assert (outcome.changed, outcome.skipped) == (3, 0)
        with Session(engine) as session:
            assert set(session.scalars(select(Job.queue))) == {"urgent"}

    def test_a_move_without_the_app_is_refused(self, queue: PgQueue, engine: Engine) -> None:
        queue.tasks["bill"].delay("ada")

        outcome = PgQueue(engine).operate("ada").change(Selection(task="bill"), queue="urgent")

        assert outcome.counts == {"refused": 1}


def job_of(queue: PgQueue, job_id: int) -> Job:
    with queue.session() as session:
        return session.get_one(Job, job_id)


def test_attempts_timeout_tags_and_meta_of_a_waiting_job_change(queue: PgQueue) -> None:
    task = queue.tasks["bill"].options(meta={"a": 1, "b": 2}, tags=["x"], delay=HOUR)
    job = task.delay("ada")

    new = {"max_attempts": 3, "timeout": timedelta(seconds=9), "tags": ["y", "y"], "meta": {"b": 3}}
    assert change(queue, job.id, **new) is Change.CHANGED
    assert change(queue, job.id, **new) is Change.UNCHANGED

    changed = job_of(queue, job.id)
    assert (changed.max_attempts, changed.tags) == (3, ["y"])
    assert changed.meta == {"a": 1, "b": 3, "pgqueue.timeout": 9.0}
    assert change(queue, job.id, tags=[]) is Change.CHANGED
    assert job_of(queue, job.id).tags is None


@pytest.mark.parametrize("most", [1, 2])
def test_a_job_with_one_attempt_is_claimed_into_a_free_slot_only(queue: PgQueue, most: int) -> None:
    job = queue.tasks["bill"].options(max_attempts=3 - most, delay=HOUR).delay("ada")

    change(queue, job.id, max_attempts=most)

    with queue.session() as session:
        [message] = session.query(MessageQueue).all()
        assert message.alone is (most == 1)


def test_a_job_gets_no_fewer_attempts_than_it_has_used_up(queue: PgQueue) -> None:
    retry = Retry.constant(HOUR)
    job = queue.tasks["bill"].options(max_attempts=3, retry=retry).delay("ada", amount=-1)
    Worker(queue).run_until_empty(timeout=60)

    with pytest.raises(OptionError, match=r"has used up 1 attempts; give .* at least 2"):
        change(queue, job.id, max_attempts=1)
    assert change(queue, job.id, max_attempts=2) is Change.CHANGED


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_attempts": 0}, "max_attempts is 0"),
        ({"timeout": 5}, "timeout is 5; give a timedelta"),
        ({"tags": "mail"}, "give a list"),
        ({"meta": {"pgqueue.timeout": 1}}, "are reserved"),
        ({"meta": {"a": "x" * 17_000}}, "bytes as JSON"),
    ],
)
def test_what_no_enqueue_takes_no_change_takes(
    queue: PgQueue, values: dict[str, Any], words: str
) -> None:
    job = queue.tasks["bill"].options(delay=HOUR).delay("ada")

    with pytest.raises(OptionError, match=words):
        change(queue, job.id, **values)


def test_an_interrupted_change_is_continued_with_the_same_values(queue: PgQueue) -> None:
    changes = Changes(
        queue="mail",
        max_attempts=3,
        timeout=timedelta(seconds=9),
        tags=["a"],
        meta={"b": 1},
        run_at=datetime(2040, 1, 1, tzinfo=UTC),
    )

    assert Changes.from_log(json.loads(json.dumps(changes.for_log))) == changes
