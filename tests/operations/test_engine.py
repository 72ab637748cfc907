"""Actions on many jobs: portions, interruptions, two processes at once."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import chain, pairwise
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import enqueue, enqueue_many, execute, wait_until
from chaos.workers import FORKS
from pgqueue import Change, Job, JobStatus, Limit, MessageQueue, PgQueue
from pgqueue.errors import OptionError
from pgqueue.models import WaitingMessage
from pgqueue.operations import ActionRun, Operator, Selection, engine, selection
from pgqueue.operations.actions import ON_JOBS
from pgqueue.repository.conditions import JobFilter
from pgqueue.repository.operator_actions import LogEntry, OperatorActions
from pgqueue.tasks.editing import Changes

CANCELLED = JobFilter(statuses=frozenset([JobStatus.CANCELLED]))
EVERY_QUEUE, OTHER_QUEUE = JobFilter(queue="default"), JobFilter(queue="other")
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


@contextmanager
def begin(queue: PgQueue) -> Iterator[Session]:
    with queue.session() as session, session.begin():
        yield session


def cancelled(queue: PgQueue, number: int) -> list[int]:
    """Jobs that were cancelled."""
    with begin(queue) as session:
        ids = enqueue_many(session, number)
        queue.cancel_where(session, queue="default")
    return ids


def started(
    queue: PgQueue, action: str, which: JobFilter = CANCELLED, ids: Any = None, **more: Any
) -> ActionRun:
    return Operator(queue, "ada").start(action, Selection.of(which, ids), **more)


def run(queue: PgQueue, outcome: ActionRun, *, stop_after: int = 9999) -> LogEntry:
    """Do what is left; stops after so many steps, as a process that is killed does."""
    for number, _ in enumerate(outcome, 1):
        if number == stop_after:
            break
    return logged(queue, outcome.entry.id)


def logged(queue: PgQueue, action_id: int | None) -> LogEntry:
    with begin(queue) as session:
        found = OperatorActions(session).one(action_id or 0)
    assert found is not None
    return found


def going_on(queue: PgQueue, entry: LogEntry) -> ActionRun:
    """Another process that goes on."""
    return Operator(queue, "ada").go_on(entry.id or 0)


def statuses(queue: PgQueue) -> list[JobStatus]:
    with queue.session() as session:
        return [job.status for job in session.query(Job).order_by(Job.id)]


def messages(queue: PgQueue) -> int:
    with queue.session() as session:
        return session.query(MessageQueue).count()


def overtaken(queue: PgQueue, do: Callable[[], object]) -> Operator:
    """An operator whose third transaction, after the first search, waits until this is done."""
    transactions = iter(range(99))

    @contextmanager
    def begin_later() -> Iterator[Session]:
        if next(transactions) == 2:
            do()
        with begin(queue) as session:
            yield session

    return Operator(queue, "ada", begin=begin_later)


def cancel(queue: PgQueue, job_id: int) -> None:
    with begin(queue) as session:
        queue.cancel(session, job_id)


@contextmanager
def locked(queue: PgQueue, job_id: int) -> Iterator[None]:
    with begin(queue) as session:
        session.execute(text("SELECT FROM pgqueue.jobs WHERE id = :id FOR UPDATE"), {"id": job_id})
        yield


class TestPortions:
    def test_all_that_match_are_changed_and_counted(self, queue: PgQueue) -> None:
        ids = cancelled(queue, 205)

        found = run(queue, started(queue, "requeue"))

        assert (found.jobs, found.skipped, found.cursor) == (205, 0, ids[-1])
        assert found.first_ids == ids[:20]
        assert found.finished_at is not None
        assert messages(queue) == 205

    def test_another_process_continues_an_action_where_one_has_stopped(
        self, queue: PgQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engine, "PORTION", 100)
        cancelled(queue, 205)

        stopped = run(queue, started(queue, "requeue"), stop_after=1)
        found = run(queue, going_on(queue, stopped))

        assert (stopped.jobs, stopped.finished_at) == (100, None)
        assert (found.jobs, found.skipped, messages(queue)) == (205, 0, 205)
        assert found.finished_at is not None

    def test_jobs_that_end_after_an_action_began_are_left(self, queue: PgQueue) -> None:
        cancelled(queue, 2)
        outcome = started(queue, "requeue")
        cancelled(queue, 1)

        assert run(queue, outcome).jobs == 2
        assert statuses(queue)[-1] is JobStatus.CANCELLED

    def test_a_finished_action_changes_nothing_more(self, queue: PgQueue) -> None:
        ids = cancelled(queue, 2)
        outcome = started(queue, "requeue")
        other = going_on(queue, outcome.entry)
        run(queue, outcome)
        with begin(queue) as session:
            queue.cancel(session, ids[1])

        found = run(queue, other)  # as by a process that has the state of its beginning

        assert (found.jobs, found.skipped) == (2, 0)
        assert statuses(queue)[1] is JobStatus.CANCELLED
        with pytest.raises(OptionError, match="is finished"):
            going_on(queue, found)

    def test_a_finished_action_says_when_it_has_finished(self, queue: PgQueue) -> None:
        cancelled(queue, 1)

        outcome = started(queue, "requeue").finish()

        ended_at = logged(queue, outcome.entry.id).finished_at
        assert outcome.entry.finished_at == ended_at
        assert ended_at is not None
        assert ended_at > outcome.entry.at

    def test_a_named_job_that_has_moved_on_is_skipped_with_the_reason(self, queue: PgQueue) -> None:
        ids = cancelled(queue, 2)
        outcome = started(queue, "requeue", JobFilter(), ids)
        with begin(queue) as session:
            queue.requeue(session, ids[0])

        results = [str(one) for one in chain.from_iterable(outcome)]

        assert (outcome.changed, outcome.skipped) == (1, 1)
        assert results == [
            f"{ids[0]}: unchanged, because its status is pending",
            f"{ids[1]}: requeued",
        ]

    def test_a_job_whose_key_is_taken_is_skipped_and_the_others_are_changed(
        self, queue: PgQueue
    ) -> None:
        with begin(queue) as session:
            enqueue(session, key="k")
        cancelled(queue, 1)
        with begin(queue) as session:
            enqueue(session, key="k")

        found = run(queue, started(queue, "requeue"))

        assert (found.jobs, found.skipped) == (1, 1)

    def test_a_job_that_stays_locked_is_skipped_with_the_reason(self, queue: PgQueue) -> None:
        ids = cancelled(queue, 5)
        lock = text("SELECT FROM pgqueue.jobs WHERE id = ANY(:ids) FOR UPDATE")

        @contextmanager
        def impatient() -> Iterator[Session]:
            with begin(queue) as session:
                session.execute(text("SET LOCAL lock_timeout = '50ms'"))
                yield session

        outcome = Operator(queue, "ada", begin=impatient).start("requeue", Selection.of(CANCELLED))
        with begin(queue) as session:
            session.execute(lock, {"ids": ids[1:3]})
            results = [str(one) for one in chain.from_iterable(outcome)]

        assert results == [
            *(f"{id}: requeued" for id in (ids[0], *ids[3:])),
            *(f"{id}: locked, because another transaction has locked it" for id in ids[1:3]),
        ]
        assert (outcome.changed, outcome.skipped) == (3, 2)

    def test_jobs_are_put_back_by_one_statement_each_with_its_message(self, queue: PgQueue) -> None:
        limited = queue.task(limit=Limit(1), name="limited")(lambda: None)
        plain = queue.task(name="plain")(lambda: None)
        with begin(queue) as session:
            ids = [task.enqueue(session).id for task in (plain, limited, plain, limited)]
            queue.cancel_where(session, queue="default")
        outcome = started(queue, "requeue", spread=HOUR)
        sent: list[str] = []
        event.listen(queue.engine, "before_cursor_execute", lambda *each: sent.append(each[2]))

        assert run(queue, outcome).jobs == 4

        changes = [each for each in sent if "UPDATE pgqueue.jobs" in each]
        assert len(changes) == 2  # of jobs without and with limits
        with queue.session() as session:
            jobs = session.query(Job).order_by(Job.id).all()
            waiting = {row.target_id for row in session.query(WaitingMessage)}
            due = {row.target_id for row in session.query(MessageQueue)}
            assert (due, waiting) == ({ids[0], ids[2]}, {ids[1], ids[3]})
            at = outcome.entry.at
            assert [(job.run_at - at) / HOUR for job in jobs[1:]] == [0.25, 0.5, 0.75]
            assert queue.check(session) == []

    def test_an_action_that_waits_for_a_job_has_locked_no_other(self, queue: PgQueue) -> None:
        ids = cancelled(queue, 3)
        outcome = started(queue, "requeue", JobFilter(), ids)
        lock = text("SELECT FROM pgqueue.jobs WHERE id = :id FOR UPDATE NOWAIT")

        with ThreadPoolExecutor(1) as thread:
            with begin(queue) as session:
                session.execute(lock, {"id": ids[1]})
                done = thread.submit(run, queue, outcome)
                wait_until(lambda: is_any_waiting(queue))
                session.execute(lock, {"id": ids[0]})
                session.execute(lock, {"id": ids[2]})
            assert done.result().jobs == 3

    def test_a_search_without_an_index_goes_on_where_it_has_stopped(
        self, queue: PgQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(selection, "WINDOW", 4)
        ids = cancelled(queue, 10)
        execute(
            queue.engine,
            "UPDATE pgqueue.jobs SET last_error = 'no mail' WHERE id >= :id",
            id=ids[8],
        )
        which = replace(CANCELLED, text="mail")

        stopped = run(queue, started(queue, "requeue", which), stop_after=1)
        found = run(queue, going_on(queue, stopped))

        assert (stopped.jobs, stopped.cursor, stopped.finished_at) == (0, ids[3], None)
        assert (found.jobs, found.skipped, messages(queue)) == (2, 0, 2)
        assert found.finished_at is not None

    def test_a_search_that_finds_more_than_it_may_return_leaves_no_job_out(
        self, queue: PgQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(selection, "WINDOW", 4)
        monkeypatch.setattr(engine, "READ_AHEAD", 2)
        cancelled(queue, 5)
        execute(queue.engine, "UPDATE pgqueue.jobs SET last_error = 'no mail'")

        assert run(queue, started(queue, "requeue", replace(CANCELLED, text="mail"))).jobs == 5

    def test_a_search_without_an_index_ends_at_the_last_job_of_the_action(
        self, queue: PgQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However many jobs come later: they are neither searched for ever nor changed."""
        monkeypatch.setattr(selection, "WINDOW", 4)
        first = cancelled(queue, 4)
        outcome = started(queue, "requeue", replace(CANCELLED, text="mail"))
        later = cancelled(queue, 12)
        execute(queue.engine, "UPDATE pgqueue.jobs SET last_error = 'no mail'")

        found = run(queue, outcome, stop_after=20)

        assert (found.finished_at is not None, found.jobs) == (True, len(first))
        assert statuses(queue)[-len(later) :] == [JobStatus.CANCELLED] * len(later)

    def test_named_jobs_are_changed_one_by_one_in_the_order_of_their_ids(
        self, queue: PgQueue
    ) -> None:
        ids = cancelled(queue, 3)

        stopped = run(queue, started(queue, "requeue", JobFilter(), ids[::-2]), stop_after=1)

        assert (stopped.jobs, stopped.target) == (1, {"jobs": [ids[0], ids[2]]})
        found = run(queue, going_on(queue, stopped))
        assert (found.jobs, found.skipped) == (2, 0)
        assert found.finished_at is not None

    def test_a_job_that_is_left_is_not_searched_again(
        self, queue: PgQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nor are those of its portion that match still when they have been changed."""
        monkeypatch.setattr(engine, "PORTION", 4)
        monkeypatch.setattr(engine, "READ_AHEAD", 4)
        with begin(queue) as session:
            ids = [enqueue(session, key="k")]
        ids += enqueue_many(queue.engine, 5)

        found = run(queue, started(queue, "change", EVERY_QUEUE, changes=Changes(queue="other")))
        again = run(queue, started(queue, "change", OTHER_QUEUE, changes=Changes(priority=9)))

        assert (found.jobs, found.skipped, found.cursor) == (0, 6, ids[-1])
        assert (again.jobs, again.skipped) == (0, 0)

    def test_of_a_portion_that_was_killed_only_what_is_left_is_changed(
        self, queue: PgQueue
    ) -> None:
        ids = enqueue_many(queue.engine, 5)
        outcome = started(queue, "change", EVERY_QUEUE, changes=Changes(priority=9))
        with locked(queue, ids[1]):
            stopped = run(queue, outcome, stop_after=1)

        found = run(queue, going_on(queue, stopped))

        assert (stopped.jobs, stopped.left_ids) == (4, [ids[1]])
        assert (found.jobs, found.skipped, found.left_ids) == (5, 0, [])

    @pytest.mark.parametrize(
        ("moved", "words"),
        [
            (
                "WITH job AS (UPDATE pgqueue.jobs SET queue = 'other' WHERE id = :id) "
                "UPDATE pgqueue.message_queue SET queue = 'other' WHERE target_id = :id",
                "it does not match any more",
            ),
            ("DELETE FROM pgqueue.message_queue WHERE target_id = :id", "its status is "),
        ],
    )
    def test_a_job_that_has_moved_on_since_it_was_found_is_left(
        self, queue: PgQueue, moved: str, words: str
    ) -> None:
        first, second = enqueue_many(queue.engine, 2)
        which = replace(EVERY_QUEUE, statuses=frozenset([JobStatus.PENDING]))

        def move() -> None:
            if "DELETE" in moved:
                leased(queue, second)
            else:
                execute(queue.engine, moved, id=second)

        ada = overtaken(queue, move)
        outcome = ada.start("change", Selection.of(which), changes=Changes(priority=9))
        results = list(chain.from_iterable(outcome))

        assert [one.id for one in results] == [first, second]
        assert words in str(results[1])

    def test_a_job_that_has_another_error_since_it_was_found_is_not_requeued(
        self, queue: PgQueue
    ) -> None:
        first, second = cancelled(queue, 2)
        change = "UPDATE pgqueue.jobs SET last_error = :error WHERE id >= :id"
        execute(queue.engine, change, error="no mail", id=first)

        ada = overtaken(queue, lambda: execute(queue.engine, change, error="other", id=second))
        outcome = ada.start("requeue", Selection.of(replace(CANCELLED, text="mail"))).finish()

        assert outcome.changed == 1
        assert [str(one) for one in outcome.left] == [
            f"{second}: unchanged, because it does not match any more"
        ]

    def test_a_deadlock_with_another_transaction_is_told_as_a_lock(self, queue: PgQueue) -> None:
        ids = cancelled(queue, 1)
        execute(
            queue.engine,
            "CREATE FUNCTION public.deadlock() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION SQLSTATE '40P01'; END $$",
        )
        execute(
            queue.engine,
            "CREATE TRIGGER deadlock BEFORE UPDATE ON pgqueue.jobs"
            " FOR EACH ROW EXECUTE FUNCTION public.deadlock()",
        )

        outcome = started(queue, "requeue", JobFilter(), ids).finish()

        assert (outcome.counts, outcome.entry.finished_at is None) == ({"locked": 1}, False)

    def test_the_limit_of_an_action_counts_the_jobs_that_were_tried(self, queue: PgQueue) -> None:
        ids = cancelled(queue, 5)

        stopped = run(queue, started(queue, "requeue", limit=3))

        assert (stopped.first_ids, stopped.options) == (ids[:3], {"limit": 3})

    def test_without_the_right_to_write_the_log_jobs_are_changed_all_the_same(
        self, queue: PgQueue
    ) -> None:
        cancelled(queue, 3)
        told: list[str] = []

        @contextmanager
        def as_worker() -> Iterator[Session]:
            with begin(queue) as session:
                session.execute(text("SET LOCAL ROLE " + role))
                yield session

        role = "pgqueue_without_log"
        with dropped_role(queue, role):
            ada = Operator(queue, "ada", begin=as_worker, unlogged=lambda: told.append("unlogged"))
            outcome = ada.start("requeue", Selection.of(CANCELLED)).finish()

        assert (outcome.changed, outcome.entry.id, told) == (3, None, ["unlogged"])
        assert messages(queue) == 3


@pytest.mark.parametrize("event", ["INSERT", "UPDATE"])
def test_nothing_is_changed_if_the_log_cannot_be_written(queue: PgQueue, event: str) -> None:
    ids = cancelled(queue, 2)
    execute(
        queue.engine,
        "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'the log is closed'; END $$",
    )
    execute(
        queue.engine,
        f"CREATE TRIGGER refuse BEFORE {event} ON pgqueue.operator_actions"
        " FOR EACH ROW EXECUTE FUNCTION public.refuse()",
    )
    ada = Operator(queue, "ada")
    actions: list[Callable[[], object]] = [
        lambda: ada.requeue(Selection.of(CANCELLED)),
        lambda: ada.requeue(Selection([ids[0]])),
    ]
    if event == "INSERT":
        actions += [lambda: ada.pause_queue("default"), lambda: ada.pause_task("tests.task")]

    for act in actions:
        with pytest.raises(DBAPIError, match="the log is closed"):
            act()

    assert statuses(queue) == [JobStatus.CANCELLED] * 2
    with queue.session() as session:
        for table in ("queues", "paused_tasks"):
            assert session.execute(text(f"TABLE pgqueue.{table}")).all() == []


@contextmanager
def dropped_role(queue: PgQueue, role: str) -> Iterator[None]:
    """A role that may do all but write the log."""
    execute(queue.engine, f"CREATE ROLE {role}")
    execute(queue.engine, f"GRANT USAGE ON SCHEMA pgqueue TO {role}")
    execute(queue.engine, f"GRANT ALL ON ALL TABLES IN SCHEMA pgqueue TO {role}")
    execute(queue.engine, f"REVOKE INSERT ON pgqueue.operator_actions FROM {role}")
    try:
        yield
    finally:
        execute(queue.engine, f"DROP OWNED BY {role}")
        execute(queue.engine, f"DROP ROLE {role}")


def execute_in(session: Session, statement: str) -> None:
    session.flush()
    session.execute(text(statement))


def leased(queue: PgQueue, job_id: int) -> None:
    """Have a worker claim a job."""
    execute(
        queue.engine,
        "WITH gone AS (DELETE FROM pgqueue.message_queue WHERE target_id = :id RETURNING *)"
        " INSERT INTO pgqueue.leases (target_id, message_id, attempt, worker_id, started_at)"
        " SELECT target_id, id, 1, gen_random_uuid(), now() FROM gone",
        id=job_id,
    )


class TestActions:
    def test_cancel_ends_those_that_wait_at_once_and_asks_the_others(self, queue: PgQueue) -> None:
        queue.task(name="limited", limit=Limit(1))(lambda: None).delay()
        ids = enqueue_many(queue.engine, 3)
        leased(queue, ids[1])

        found = run(queue, started(queue, "cancel", EVERY_QUEUE))

        assert (found.jobs, found.skipped) == (4, 0)
        ended = [JobStatus.CANCELLED] * 2
        assert statuses(queue) == [*ended, JobStatus.RUNNING, JobStatus.CANCELLED]
        with queue.session() as session:
            assert session.get_one(Job, ids[1]).cancel_requested_at is not None

    def test_waiting_jobs_are_found_in_several_reads(
        self, queue: PgQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engine, "READ_AHEAD", 2)
        ids = enqueue_many(queue.engine, 5)

        found = run(queue, started(queue, "cancel", EVERY_QUEUE))

        assert (found.jobs, found.skipped, found.cursor) == (5, 0, ids[-1])

    @pytest.mark.parametrize("name", ["run_now", "change"])
    def test_waiting_jobs_are_moved_by_one_statement_for_each_table(
        self, queue: PgQueue, name: str
    ) -> None:
        limited = queue.task(name="limited", limit=Limit(1))(lambda: None)
        plain = queue.task(name="plain")(lambda: None)
        with begin(queue) as session:
            for task in (plain, limited, plain, limited):
                task.options(delay=HOUR).enqueue(session)
            already = plain.options(priority=9).enqueue(session).id
            execute_in(session, "UPDATE pgqueue.message_queue SET attempt = 2, crashes = 1")
        changes = Changes(priority=9) if name == "change" else None
        outcome = started(queue, name, EVERY_QUEUE, changes=changes)
        sent: list[str] = []
        event.listen(queue.engine, "before_cursor_execute", lambda *each: sent.append(each[2]))

        found = run(queue, outcome)

        assert found.jobs == 4
        changed = [one for one in sent if "UPDATE pgqueue.jobs" in one and "found" in one]
        assert len(changed) == 2
        with queue.session() as session:
            kept = session.query(MessageQueue.attempt, MessageQueue.crashes).all()
            assert kept == [(2, 1)] * 3
            jobs = session.query(Job).filter(Job.id != already).all()
            now = session.scalar(text("SELECT clock_timestamp()"))
            if name == "change":
                assert {job.priority for job in jobs} == {9}
            else:
                assert all(job.run_at <= now for job in jobs)
            assert queue.check(session) == []

    def test_a_change_that_was_interrupted_is_continued(
        self, queue: PgQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engine, "PORTION", 2)
        enqueue_many(queue.engine, 3)
        changes = Changes(priority=9, delay=HOUR)
        outcome = started(queue, "change", EVERY_QUEUE, changes=changes)

        stopped = run(queue, outcome, stop_after=1)
        found = run(queue, going_on(queue, stopped))

        assert (stopped.jobs, found.jobs, found.skipped) == (2, 3, 0)
        with queue.session() as session:
            [same] = session.query(Job.priority, Job.run_at).distinct().all()
        assert same.priority == 9
        assert abs(same.run_at - stopped.at - HOUR) < MINUTE

    def test_run_now_finds_only_jobs_that_are_not_due(self, queue: PgQueue) -> None:
        plain = queue.task(name="plain")(lambda: None)
        with begin(queue) as session:
            plain.options(delay=HOUR).enqueue_many(session, [()] * 2)
        enqueue_many(queue.engine, 1)

        assert run(queue, started(queue, "run_now", EVERY_QUEUE)).jobs == 2

    def test_a_kill_of_a_handler_in_the_worker_is_skipped(self, queue: PgQueue) -> None:
        queue.task(name="tests.task")(lambda: None)
        [job_id] = enqueue_many(queue.engine, 1)
        leased(queue, job_id)

        found = run(queue, started(queue, "kill", EVERY_QUEUE))

        assert (found.jobs, found.skipped) == (0, 1)
        with queue.session() as session:
            assert session.get_one(Job, job_id).cancel_requested_at is None

    @pytest.mark.parametrize(
        ("which", "words"),
        [
            (JobFilter(frozenset([JobStatus.SUCCEEDED])), "is for jobs that are failed or cancel"),
            (JobFilter(), "which jobs[?]"),
        ],
    )
    def test_an_action_is_refused_for_jobs_that_it_is_not_for(
        self, queue: PgQueue, which: JobFilter, words: str
    ) -> None:
        with pytest.raises(OptionError, match=words):
            started(queue, "requeue", which)

    def test_an_action_on_one_job_is_logged_with_what_the_job_was(self, queue: PgQueue) -> None:
        [job_id] = enqueue_many(queue.engine, 1)

        outcome = started(queue, "change", JobFilter(), [job_id], changes=Changes(priority=9))
        found = run(queue, outcome)

        assert found.target == {"jobs": [job_id]}
        assert found.options == {"priority": 9}
        assert found.before == {"status": "pending", "priority": 5}


class TestSpread:
    def test_jobs_of_a_spread_are_due_one_after_the_other(self, queue: PgQueue) -> None:
        cancelled(queue, 150)

        action = run(queue, started(queue, "requeue", spread=150 * MINUTE))

        assert action.options == {"spread_s": 9000.0, "of": 150}
        with queue.session() as session:
            times = [job.run_at for job in session.query(Job).order_by(Job.id)]
            assert queue.check(session) == []
        assert times[0] >= action.at
        apart = [after - before for before, after in pairwise(times[1:])]
        assert set(apart) == {MINUTE}
        assert times[-1] == action.at + 149 * MINUTE

    def test_jobs_under_limits_wait_for_their_time_in_a_spread_too(self, queue: PgQueue) -> None:
        limited = queue.task(name="limited", limit=Limit(1))(lambda: None)
        with begin(queue) as session:
            limited.enqueue_many(session, [()] * 2)
            queue.cancel_where(session, queue="default")

        run(queue, started(queue, "requeue", spread=2 * MINUTE))

        with queue.session() as session:
            first, second = (job.run_at for job in session.query(Job).order_by(Job.id))
            assert queue.check(session) == []
        assert MINUTE - timedelta(seconds=59) < second - first <= MINUTE


class TestTwoAtOnce:
    def test_two_processes_with_one_action_double_nothing(
        self, queue: PgQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engine, "PORTION", 50)
        cancelled(queue, 300)
        action = started(queue, "requeue").entry
        both = threading.Barrier(2)

        def work() -> None:
            own = PgQueue(create_engine(queue.engine.url))
            outcome = going_on(own, action)
            both.wait(60)
            run(own, outcome)
            own.engine.dispose()

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

        found = logged(queue, action.id)
        assert (found.jobs, found.skipped) == (300, 0)
        assert messages(queue) == 300

    def test_two_processes_with_one_action_do_not_exceed_its_limit(self, queue: PgQueue) -> None:
        """Each of them has found other jobs, because one was cancelled between their searches."""
        ids = cancelled(queue, 4)
        with begin(queue) as session:
            queue.requeue(session, ids[1])
        action = started(queue, "requeue", limit=3).entry
        other = going_on(queue, action)

        def overtake() -> None:
            cancel(queue, ids[1])
            with locked(queue, ids[1]):
                run(queue, other, stop_after=1)  # which leaves the locked job for later

        found = run(queue, overtaken(queue, overtake).go_on(action.id or 0))

        assert (found.jobs, sorted(found.first_ids)) == (3, ids[:3])
        assert found.finished_at is not None

    def test_of_named_jobs_each_is_changed_by_one_of_two_processes(self, queue: PgQueue) -> None:
        ids = cancelled(queue, 2)
        action = started(queue, "requeue", JobFilter(), ids).entry
        other = going_on(queue, action)

        outcome = overtaken(queue, lambda: run(queue, other, stop_after=1)).go_on(action.id or 0)
        found = run(queue, outcome)

        assert (found.jobs, found.skipped, outcome.counts) == (2, 0, {"requeued": 1})

    def test_an_action_that_another_process_has_finished_stays_finished(
        self, queue: PgQueue
    ) -> None:
        [job_id] = cancelled(queue, 1)
        action = started(queue, "requeue").entry
        other = going_on(queue, action)

        def overtake() -> None:
            with begin(queue) as session:
                queue.requeue(session, job_id)
            run(queue, other)
            cancel(queue, job_id)

        found = run(queue, overtaken(queue, overtake).go_on(action.id or 0))

        assert (found.jobs, found.finished_at is not None) == (0, True)

    def test_an_action_ends_when_the_jobs_that_another_process_has_left_are_done(
        self, queue: PgQueue
    ) -> None:
        [job_id] = enqueue_many(queue.engine, 1)
        action = started(queue, "requeue").entry
        other = going_on(queue, action)

        def overtake() -> None:  # this process has found no job
            cancel(queue, job_id)
            with locked(queue, job_id):
                run(queue, other, stop_after=1)

        found = run(queue, overtaken(queue, overtake).go_on(action.id or 0))

        assert (found.jobs, found.left_ids, found.finished_at is not None) == (1, [], True)

    def test_a_process_that_is_killed_in_an_action_loses_nothing_and_doubles_nothing(
        self, queue: PgQueue
    ) -> None:
        ids = cancelled(queue, 100)
        with begin(queue) as session:
            ids.append(enqueue(session, key="k"))  # which no statement for many changes
        ids += cancelled(queue, 149)
        action = started(queue, "requeue", spread=250 * MINUTE).entry
        url = queue.engine.url.render_as_string(hide_password=False)
        process = FORKS.Process(target=work_alone, args=(url, action.id))

        with begin(queue) as session:
            # The process waits for this lock when it has changed the others at once.
            lock = text("SELECT FROM pgqueue.jobs WHERE id = :id FOR UPDATE")
            session.execute(lock, {"id": ids[100]})
            process.start()
            wait_until(lambda: is_any_waiting(queue))
            process.kill()
            process.join(60)
        wait_until(lambda: not is_any_waiting(queue))
        stopped = logged(queue, action.id)
        found = run(queue, going_on(queue, stopped))

        assert (stopped.jobs, stopped.cursor, stopped.left_ids) == (249, ids[-1], [ids[100]])
        assert (found.jobs, found.skipped, messages(queue)) == (250, 0, 250)
        with queue.session() as session:
            assert queue.check(session) == []
            assert session.get_one(Job, ids[249]).run_at == action.at + 249 * MINUTE


def work_alone(url: str, action_id: int) -> None:
    queue = PgQueue(url)
    run(queue, going_on(queue, logged(queue, action_id)))


def is_any_waiting(queue: PgQueue) -> bool:
    """Whether another server process waits for a lock."""
    waits = text(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        " AND datname = current_database()"
    )
    with queue.engine.connect() as connection:
        return bool(connection.scalar(waits))


def test_a_requeue_in_the_transaction_of_the_caller_is_one_statement(queue: PgQueue) -> None:
    ids = cancelled(queue, 3)
    sent: list[str] = []
    event.listen(queue.engine, "before_cursor_execute", lambda *each: sent.append(each[2]))

    with begin(queue) as session:
        context = queue.action_context(session.connection())
        counts = engine.within(Selection(status="cancelled"), ON_JOBS["requeue"], context)

    assert counts == {Change.REQUEUED: len(ids)}
    assert len([one for one in sent if "UPDATE pgqueue.jobs" in one]) == 1


class TestPreview:
    def test_a_preview_counts_shows_some_and_says_what_will_be_skipped(
        self, queue: PgQueue
    ) -> None:
        with begin(queue) as session:
            enqueue(session, key="k")
        ids = cancelled(queue, 12)
        with begin(queue) as session:
            enqueue(session, key="k")

        with queue.session() as session:
            found = Selection.of(EVERY_QUEUE).preview(session, ON_JOBS["requeue"])

        assert (found.jobs, found.keys_taken) == (13, 1)
        assert [job.id for job in found.samples] == ids[::-1][:10]


def test_a_span_of_a_filter_is_counted_from_the_beginning_of_the_action(queue: PgQueue) -> None:
    cancelled(queue, 1)
    action = started(queue, "requeue", replace(CANCELLED, created_after=MINUTE)).entry

    since = Selection.from_target(action.target).which.created_after

    assert isinstance(since, datetime)
    assert timedelta(0) <= action.at - MINUTE - since < MINUTE


@pytest.mark.parametrize(
    ("which", "words"),
    [
        (JobFilter(task="pay", args=(("card", "4012"),)), "argument card is secret"),
        (JobFilter(args=(("card", "4012"),)), "needs their task, too"),
        (JobFilter(task="nobody", args=(("card", "4012"),)), "needs their task, too"),
    ],
)
def test_the_log_keeps_no_secret_of_a_filter(queue: PgQueue, which: JobFilter, words: str) -> None:
    @queue.task(name="pay", secret_args=["card"])
    def pay(card: str, to: str) -> None: ...

    with pytest.raises(OptionError, match=words):
        started(queue, "requeue", which)
    started(queue, "requeue", JobFilter(task="pay", args=(("to", "zoe"),)))
