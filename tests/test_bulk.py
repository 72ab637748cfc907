"""Actions on many jobs: portions, interruptions, two processes at once."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Any, get_type_hints

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import enqueue, enqueue_many, execute, wait_until
from chaos.workers import FORKS
from pgqueue import Job, JobStatus, Limit, MessageQueue, PgQueue, bulk
from pgqueue.errors import OptionError
from pgqueue.models import WaitingMessage
from pgqueue.repository.listing import JobFilter
from pgqueue.repository.operator_actions import Action, OperatorActions

FAILED = frozenset([JobStatus.FAILED])
CANCELLED = JobFilter(statuses=frozenset([JobStatus.CANCELLED]))
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


def begun(queue: PgQueue, action: str, which: JobFilter = CANCELLED, **more: Any) -> Action:
    with begin(queue) as session:
        new = bulk.action_on_filter(session, action, which, actor="ada", **more)
        return OperatorActions(session).add(new)


def run(queue: PgQueue, action: Action, *, stop_after: int = 9999) -> Action:
    """Do what is left; stops after so many portions, as a process that is killed does."""
    portions = bulk.run(partial(begin, queue), action, bulk.act_of(queue, action.action))
    for number, _ in enumerate(portions, 1):
        if number == stop_after:
            break
    with begin(queue) as session:
        found = OperatorActions(session).one(action.id or 0)
    assert found is not None
    return found


def statuses(queue: PgQueue) -> list[JobStatus]:
    with queue.session() as session:
        return [job.status for job in session.query(Job).order_by(Job.id)]


def messages(queue: PgQueue) -> int:
    with queue.session() as session:
        return session.query(MessageQueue).count()


class TestPortions:
    def test_all_that_match_are_changed_and_counted(self, queue: PgQueue) -> None:
        ids = cancelled(queue, 205)

        found = run(queue, begun(queue, "requeue"))

        assert (found.jobs, found.skipped, found.cursor) == (205, 0, ids[-1])
        assert found.first_ids == ids[:20]
        assert found.finished_at is not None
        assert messages(queue) == 205

    def test_another_process_goes_on_where_one_has_stopped(self, queue: PgQueue) -> None:
        cancelled(queue, 205)

        stopped = run(queue, begun(queue, "requeue"), stop_after=1)
        found = run(queue, stopped)

        assert (stopped.jobs, stopped.finished_at) == (100, None)
        assert (found.jobs, found.skipped, messages(queue)) == (205, 0, 205)
        assert found.finished_at is not None

    def test_jobs_that_fail_after_it_began_are_left(self, queue: PgQueue) -> None:
        cancelled(queue, 2)
        action = begun(queue, "requeue")
        cancelled(queue, 1)

        assert run(queue, action).jobs == 2
        assert statuses(queue)[-1] is JobStatus.CANCELLED

    def test_a_finished_action_changes_nothing_more(self, queue: PgQueue) -> None:
        ids = cancelled(queue, 2)
        action = begun(queue, "requeue")
        run(queue, action)
        with begin(queue) as session:
            queue.cancel(session, ids[1])

        found = run(queue, action)  # as by a process that has the state of its beginning

        assert (found.jobs, found.skipped) == (2, 0)
        assert statuses(queue)[1] is JobStatus.CANCELLED

    def test_a_job_that_has_moved_on_is_skipped_with_the_reason(self, queue: PgQueue) -> None:
        ids = cancelled(queue, 2)
        action = begun(queue, "requeue")
        with begin(queue) as session:
            queue.requeue(session, ids[0])

        with begin(queue) as session:
            moved, results = bulk.step(session, action, ids, bulk.act_of(queue, "requeue"))

        assert (moved.jobs, moved.skipped) == (1, 1)
        assert [str(one) for one in results] == [
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

        found = run(queue, begun(queue, "requeue"))

        assert (found.jobs, found.skipped) == (1, 1)

    def test_a_job_that_stays_locked_is_skipped_with_the_reason(self, queue: PgQueue) -> None:
        ids = cancelled(queue, 5)
        action = begun(queue, "requeue")
        lock = text("SELECT FROM pgqueue.jobs WHERE id = ANY(:ids) FOR UPDATE")

        @contextmanager
        def impatient() -> Iterator[Session]:
            with begin(queue) as session:
                session.execute(text("SET LOCAL lock_timeout = '50ms'"))
                yield session

        with begin(queue) as session:
            session.execute(lock, {"ids": ids[1:3]})
            portions = list(bulk.run(impatient, action, bulk.act_of(queue, "requeue")))

        told = [str(one) for _, results in portions for one in results]
        assert told == [
            f"{ids[0]}: requeued",
            *(f"{id}: locked, because another transaction has locked it" for id in ids[1:3]),
            *(f"{id}: requeued" for id in ids[3:]),
        ]
        assert (portions[-1][0].jobs, portions[-1][0].skipped) == (3, 2)

    def test_jobs_are_put_back_by_one_statement_each_with_its_message(self, queue: PgQueue) -> None:
        limited = queue.task(limit=Limit(1), name="limited")(lambda: None)
        plain = queue.task(name="plain")(lambda: None)
        with begin(queue) as session:
            ids = [task.enqueue(session).id for task in (plain, limited, plain, limited)]
            queue.cancel_where(session, queue="default")
            new = bulk.action_on_ids(session, "requeue", ids, actor="ada", spread=HOUR)
        sent: list[str] = []

        with begin(queue) as session:
            event.listen(queue.engine, "before_cursor_execute", lambda *each: sent.append(each[2]))
            act = bulk.act_of(queue, "requeue")
            _, results = bulk.step(session, new, ids, act, at_once=True)

        assert [one.change for one in results] == ["requeued"] * 4
        changes = [each for each in sent if "UPDATE pgqueue.jobs" in each]
        assert len(changes) == 2  # of jobs without and with limits
        with queue.session() as session:
            jobs = session.query(Job).order_by(Job.id).all()
            waiting = {row.target_id for row in session.query(WaitingMessage)}
            due = {row.target_id for row in session.query(MessageQueue)}
            assert (due, waiting) == ({ids[0], ids[2]}, {ids[1], ids[3]})
            assert [(job.run_at - new.at) / HOUR for job in jobs[1:]] == [0.25, 0.5, 0.75]
            assert queue.check(session) == []

    def test_a_requeue_that_waits_for_a_job_has_locked_no_later_one(self, queue: PgQueue) -> None:
        ids = cancelled(queue, 3)
        action = begun(queue, "requeue")
        lock = text("SELECT FROM pgqueue.jobs WHERE id = :id FOR UPDATE NOWAIT")

        with ThreadPoolExecutor(1) as thread:
            with begin(queue) as session:
                session.execute(lock, {"id": ids[1]})
                done = thread.submit(run, queue, action)
                wait_until(lambda: is_any_waiting(queue))
                session.execute(lock, {"id": ids[2]})
            assert done.result().jobs == 3

    def test_a_search_without_an_index_goes_on_where_it_has_stopped(
        self, queue: PgQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bulk, "WINDOW", 4)
        ids = cancelled(queue, 10)
        execute(
            queue.engine,
            "UPDATE pgqueue.jobs SET last_error = 'no mail' WHERE id >= :id",
            id=ids[8],
        )
        which = replace(CANCELLED, text="mail")

        stopped = run(queue, begun(queue, "requeue", which), stop_after=1)
        found = run(queue, stopped)

        assert (stopped.jobs, stopped.cursor, stopped.finished_at) == (0, ids[3], None)
        assert (found.jobs, found.skipped, messages(queue)) == (2, 0, 2)
        assert found.finished_at is not None

    def test_a_search_without_an_index_ends_at_the_last_job_of_the_action(
        self, queue: PgQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However many jobs come later: they are neither searched for ever nor changed."""
        monkeypatch.setattr(bulk, "WINDOW", 4)
        first = cancelled(queue, 4)
        action = begun(queue, "requeue", replace(CANCELLED, text="mail"))
        later = cancelled(queue, 12)
        execute(queue.engine, "UPDATE pgqueue.jobs SET last_error = 'no mail'")

        found = run(queue, action, stop_after=20)

        assert (found.finished_at is not None, found.jobs) == (True, len(first))
        assert statuses(queue)[-len(later) :] == [JobStatus.CANCELLED] * len(later)

    def test_named_jobs_are_changed_in_the_order_of_their_ids(self, queue: PgQueue) -> None:
        ids = cancelled(queue, 3)
        with begin(queue) as session:
            new = bulk.action_on_ids(session, "requeue", [ids[2], ids[0]], actor="ada")
            action = OperatorActions(session).add(new)

        stopped = run(queue, action, stop_after=1)

        assert (stopped.jobs, stopped.target) == (2, {"jobs": [ids[0], ids[2]]})
        assert run(queue, stopped).finished_at is not None

    def test_without_a_row_in_the_log_they_are_changed_all_the_same(self, queue: PgQueue) -> None:
        cancelled(queue, 150)
        with begin(queue) as session:
            action = bulk.action_on_filter(session, "requeue", CANCELLED, actor="ada")

        portions = list(bulk.run(partial(begin, queue), action, bulk.act_of(queue, "requeue")))

        assert [len(results) for _, results in portions] == [100, 50]
        assert portions[-1][0].jobs == messages(queue) == 150


class TestActions:
    def test_cancel_ends_those_that_wait_at_once_and_asks_the_others(self, queue: PgQueue) -> None:
        queue.task(name="limited", limit=Limit(1))(lambda: None).delay()
        ids = enqueue_many(queue.engine, 3)
        execute(
            queue.engine,
            "WITH gone AS (DELETE FROM pgqueue.message_queue WHERE target_id = :id RETURNING *)"
            " INSERT INTO pgqueue.leases (target_id, message_id, attempt, worker_id, started_at)"
            " SELECT target_id, id, 1, gen_random_uuid(), now() FROM gone",
            id=ids[1],
        )

        found = run(queue, begun(queue, "cancel", JobFilter()))

        assert (found.jobs, found.skipped) == (4, 0)
        ended = [JobStatus.CANCELLED] * 2
        assert statuses(queue) == [*ended, JobStatus.RUNNING, JobStatus.CANCELLED]
        with queue.session() as session:
            assert session.get_one(Job, ids[1]).cancel_requested_at is not None

    def test_cancel_reads_some_of_many_that_wait_at_once(
        self, queue: PgQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bulk, "MOST_WAITING", 2)
        enqueue_many(queue.engine, 5)

        found = run(queue, begun(queue, "cancel", JobFilter()))

        assert (found.jobs, found.skipped, found.cursor) == (5, 0, None)

    def test_run_now_finds_only_jobs_that_are_not_due(self, queue: PgQueue) -> None:
        enqueue_many(queue.engine, 2)
        execute(queue.engine, "UPDATE pgqueue.message_queue SET run_at = now() + '1h'::interval")
        execute(
            queue.engine,
            "UPDATE pgqueue.jobs SET run_at = m.run_at FROM "
            "pgqueue.message_queue m WHERE target_id = jobs.id",
        )
        enqueue_many(queue.engine, 1)

        assert run(queue, begun(queue, "run_now", JobFilter())).jobs == 2

    def test_a_kill_of_a_handler_in_the_worker_is_skipped(self, queue: PgQueue) -> None:
        queue.task(name="tests.task")(lambda: None)
        [job_id] = enqueue_many(queue.engine, 1)
        execute(
            queue.engine,
            "WITH gone AS (DELETE FROM pgqueue.message_queue RETURNING *)"
            " INSERT INTO pgqueue.leases (target_id, message_id, attempt, worker_id, started_at)"
            " SELECT target_id, id, 1, gen_random_uuid(), now() FROM gone",
        )

        found = run(queue, begun(queue, "kill", JobFilter()))

        assert (found.jobs, found.skipped) == (0, 1)
        with queue.session() as session:
            assert session.get_one(Job, job_id).cancel_requested_at is None

    def test_it_is_refused_for_jobs_that_it_is_not_for(self, queue: PgQueue) -> None:
        with pytest.raises(OptionError, match="requeue is for jobs that are failed or cancelled"):
            begun(queue, "requeue", JobFilter(statuses=frozenset([JobStatus.SUCCEEDED])))


class TestSpread:
    def test_jobs_are_due_one_after_the_other(self, queue: PgQueue) -> None:
        cancelled(queue, 150)

        action = run(queue, begun(queue, "requeue", spread=150 * MINUTE))

        assert action.options == {"spread_s": 9000.0, "of": 150}
        with queue.session() as session:
            times = [job.run_at for job in session.query(Job).order_by(Job.id)]
            assert queue.check(session) == []
        assert times[0] >= action.at
        apart = [after - before for before, after in pairwise(times[1:])]
        assert set(apart) == {MINUTE}
        assert times[-1] == action.at + 149 * MINUTE

    def test_those_under_limits_wait_for_their_time_too(self, queue: PgQueue) -> None:
        limited = queue.task(name="limited", limit=Limit(1))(lambda: None)
        with begin(queue) as session:
            limited.enqueue_many(session, [()] * 2)
            queue.cancel_where(session, queue="default")

        run(queue, begun(queue, "requeue", spread=2 * MINUTE))

        with queue.session() as session:
            first, second = (job.run_at for job in session.query(Job).order_by(Job.id))
            assert queue.check(session) == []
        assert MINUTE - timedelta(seconds=59) < second - first <= MINUTE


class TestTwoAtOnce:
    def test_two_processes_double_nothing(self, queue: PgQueue) -> None:
        cancelled(queue, 300)
        action = begun(queue, "requeue")
        both = threading.Barrier(2)

        def work() -> None:
            own = PgQueue(create_engine(queue.engine.url))
            both.wait(60)
            run(own, action)
            own.engine.dispose()

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

        with begin(queue) as session:
            [found] = OperatorActions(session).newest(limit=9)
        assert (found.jobs, found.skipped) == (300, 0)
        assert messages(queue) == 300

    def test_a_process_that_is_killed_loses_nothing_and_doubles_nothing(
        self, queue: PgQueue
    ) -> None:
        ids = cancelled(queue, 100)
        with begin(queue) as session:
            ids.append(enqueue(session, key="k"))  # from here on one by one
        ids += cancelled(queue, 149)
        action = begun(queue, "requeue", spread=250 * MINUTE)
        url = queue.engine.url.render_as_string(hide_password=False)
        process = FORKS.Process(target=work_alone, args=(url, action.id))

        with begin(queue) as session:
            # In the middle of the second portion, where the process waits for this lock.
            lock = text("SELECT FROM pgqueue.jobs WHERE id = :id FOR UPDATE")
            session.execute(lock, {"id": ids[150]})
            process.start()
            wait_until(lambda: is_any_waiting(queue))
            process.kill()
            process.join(60)
        wait_until(lambda: not is_any_waiting(queue))
        with begin(queue) as session:
            [stopped] = OperatorActions(session).newest(limit=9, unfinished=True)
        found = run(queue, stopped)

        assert (stopped.jobs, stopped.cursor) == (100, ids[99])
        assert (found.jobs, found.skipped, messages(queue)) == (250, 0, 250)
        with queue.session() as session:
            assert queue.check(session) == []
            assert session.get_one(Job, ids[249]).run_at == action.at + 249 * MINUTE


def work_alone(url: str, action_id: int) -> None:
    queue = PgQueue(url)
    with begin(queue) as session:
        action = OperatorActions(session).one(action_id)
    assert action is not None
    run(queue, action)


def is_any_waiting(queue: PgQueue) -> bool:
    """Whether another server process waits for a lock."""
    waits = text(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        " AND datname = current_database()"
    )
    with queue.engine.connect() as connection:
        return bool(connection.scalar(waits))


class TestPreview:
    def test_it_counts_shows_some_and_says_what_will_be_skipped(self, queue: PgQueue) -> None:
        with begin(queue) as session:
            enqueue(session, key="k")
        ids = cancelled(queue, 12)
        with begin(queue) as session:
            enqueue(session, key="k")

        with queue.session() as session:
            found = bulk.preview(session, "requeue", JobFilter())

        assert (found.jobs, found.keys_taken) == (13, 1)
        assert [job.id for job in found.samples] == ids[::-1][:10]


def test_every_condition_of_a_filter_survives_in_the_log(queue: PgQueue) -> None:
    """Also those that are added later: the values are made of the types of the fields."""
    values: dict[Any, Any] = {
        int | None: 7,
        str | None: "x",
        bool | None: True,
        timedelta | None: timedelta(seconds=1.5),
        datetime | timedelta | None: datetime(2030, 1, 31, tzinfo=UTC),
        tuple[tuple[str, Any], ...]: (("order_id", 42), ("to", ["a", "b"])),
        frozenset[str] | None: frozenset(["a", "b"]),
        frozenset[JobStatus]: FAILED,
    }
    words = {name: values[hint] for name, hint in get_type_hints(JobFilter).items()}
    which = JobFilter(**words)

    cancelled(queue, 9)
    found = bulk.filter_of(begun(queue, "requeue", which))

    assert found == replace(which, statuses=FAILED)


def test_a_span_of_a_filter_is_counted_from_the_beginning_of_the_action(queue: PgQueue) -> None:
    cancelled(queue, 1)
    action = begun(queue, "requeue", replace(CANCELLED, created_after=MINUTE))

    since = bulk.filter_of(action).created_after

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
        bulk.check_arguments(queue, which)
    bulk.check_arguments(queue, JobFilter(task="pay", args=(("to", "zoe"),)))
