"""Firing ticks: once each, with the job in the same commit, and past what cannot be fired."""

import threading
from asyncio import CancelledError
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from time import monotonic
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import OperationalError

from pgqueue import Job, PgQueue, Task, Worker
from pgqueue.repository.tables import array_of
from pgqueue.worker.duties.ticks import Ticks, WriteSchedules

TICKS = "SELECT meta->'schedule'->>'name', meta->'schedule'->>'tick', count(*) FROM pgqueue.jobs"
MINUTE = timedelta(minutes=1)


class Place:
    """A database with an application's schedules, and several workers' hands."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.queue = PgQueue(engine)

        @self.queue.task(name="report")
        def report(n: int = 0) -> None: ...

        self.report = report

    def add(self, name: str, *, late: timedelta = MINUTE, task: Any = None, **given: Any) -> None:
        """Add a schedule whose tick of the minute before, or an earlier one, is due.

        If no tick before it was missed, the next one is a day away: none comes while a test runs.
        """
        with self.queue.session() as session, session.begin():
            every = timedelta(days=1) if late == MINUTE else MINUTE
            given = {"every": every, "args": (1,), **given}
            self.queue.schedules.add(session, task or self.report, name=name, **given)
            session.execute(
                text(
                    "UPDATE pgqueue.schedules SET next_at = date_trunc('minute',"
                    " clock_timestamp() - CAST(:late AS interval)) WHERE name = :name"
                ),
                {"name": name, "late": late},
            )

    def ticks(self) -> Ticks:
        names = array_of(sorted(self.queue.tasks))
        return Ticks(self.queue.tasks, names, self.queue.schedules)

    def fire(self) -> float | None:
        with self.connection() as connection:
            return self.ticks().fire(connection)

    def connection(self) -> Connection:
        return self.engine.connect().execution_options(isolation_level="READ COMMITTED")

    def fired(self) -> Counter[str]:
        """How many ticks of each schedule have a job; no tick may have two."""
        with self.engine.connect() as connection:
            found = connection.execute(text(f"{TICKS} GROUP BY 1, 2")).all()
        assert [row for row in found if row[2] != 1] == []
        return Counter(row[0] for row in found)

    def scalar(self, statement: str) -> Any:
        with self.engine.connect() as connection:
            return connection.execute(text(statement)).scalar()


@pytest.fixture
def place(database_url: str) -> Iterator[Place]:
    engine = create_engine(database_url, pool_size=20)
    yield Place(engine)
    engine.dispose()


def test_a_tick_enqueues_a_job_that_knows_it(place: Place) -> None:
    place.add("mine", every=MINUTE, priority=2)

    seconds = place.fire()

    with place.queue.session() as session:
        job = session.query(Job).one()
        [state] = place.queue.schedules.list(session)
    assert state.last_tick_at is not None
    assert job.meta == {
        "schedule": {"name": "mine", "tick": state.last_tick_at.astimezone(UTC).isoformat()}
    }
    assert (job.task, job.args, job.priority) == ("report", {"n": 1}, 2)
    assert state.last_job_id == job.id
    assert state.next_at == state.last_tick_at + MINUTE
    assert seconds is not None
    assert 0 <= seconds <= 60
    assert Worker(place.queue).run_until_empty() == {"succeeded": 1}


def test_a_tick_is_fired_once_however_many_fire_at_the_same_moment(place: Place) -> None:
    for number in range(60):
        place.add(f"s{number}", late=5 * MINUTE, catch_up=3)
    together = threading.Barrier(8)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with place.connection() as connection:
                ticks = place.ticks()
                for _ in range(3):
                    together.wait(60)
                    ticks.fire(connection)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert failures == []
    fired = place.fired()
    assert len(fired) == 60
    assert set(fired.values()) <= {3, 4}, "four, if a minute begins meanwhile"


def test_a_firing_that_is_rolled_back_leaves_no_job_and_the_tick_due(place: Place) -> None:
    place.add("mine")
    with place.connection() as connection:
        pid = connection.scalar(text("SELECT pg_backend_pid()"))
        connection.rollback()
        place.queue.on_enqueue(lambda task: end_backend(place, pid))

        with pytest.raises(OperationalError):
            place.ticks().fire(connection)
    assert place.fired() == {}
    place.queue.meta_sources.clear()

    place.fire()

    assert place.fired() == {"mine": 1}


def end_backend(place: Place, pid: int) -> dict[str, Any]:
    """What an unplugged server does between the lock and the job."""
    place.scalar(f"SELECT pg_terminate_backend({pid}, 10000)")
    return {}


class TestBadRows:
    """Each is told, stays due, and stops no other."""

    @pytest.mark.parametrize(
        "damage",
        [
            "timezone = 'Mars/Olympus'",
            "every = NULL, cron = 'at noon'",
            """args = '{"other": 1}'""",
            """args = '{"n": "x"}'""",
            "args = '[]'",
            """options = '{"colour": 1}'""",
            """options = '{"priority": 11}'""",
            "options = '[]'",
        ],
    )
    def test_of_every_kind(
        self, place: Place, damage: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        for name in ("a", "bad", "c"):
            place.add(name)
        with place.engine.begin() as connection:
            connection.execute(
                text(
                    f"UPDATE pgqueue.schedules SET {damage} WHERE name = 'bad'".replace(
                        ": ", r"\: "
                    )
                )
            )

        with place.connection() as connection:
            ticks = place.ticks()
            ticks.fire(connection)
            ticks.fire(connection)

        assert place.fired() == {"a": 1, "c": 1}
        told = [one.message for one in caplog.records if one.levelname == "ERROR"]
        assert len(told) == 1, "once, not at each look"
        assert told[0].startswith("schedule bad: its tick of ")

    def test_of_a_task_that_no_worker_here_knows(self, place: Place) -> None:
        other = PgQueue(place.engine)

        @other.task(name="elsewhere")
        def elsewhere() -> None: ...

        place.add("theirs", task=elsewhere, args=())
        place.add("mine")

        seconds = place.fire()

        assert place.fired() == {"mine": 1}
        assert seconds is not None
        assert seconds > 0, "the tick of the others does not keep this worker awake"

    def test_whose_hook_raises(self, place: Place, caplog: pytest.LogCaptureFixture) -> None:
        def hook(task: Any) -> None:
            if task.settings.priority == 7:
                raise LookupError("planned")

        place.queue.on_enqueue(hook)
        for name, priority in (("a", 1), ("bad", 7), ("c", 2)):
            place.add(name, priority=priority)

        place.fire()

        assert place.fired() == {"a": 1, "c": 1}
        assert "LookupError: planned" in caplog.text

    @pytest.mark.parametrize("kind", [SystemExit, CancelledError])
    def test_whose_hook_raises_what_would_end_a_thread(
        self, place: Place, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
    ) -> None:
        def hook(task: Any) -> None:
            if task.settings.priority == 7:
                raise kind("planned")

        place.queue.on_enqueue(hook)
        place.add("bad", priority=7)
        place.add("good")

        place.fire()

        assert place.fired() == {"good": 1}
        assert f"{kind.__name__}: planned" in caplog.text

    def test_whose_hook_hangs(self, place: Place, caplog: pytest.LogCaptureFixture) -> None:
        returned = threading.Event()

        def hook(task: Any) -> None:
            if task.settings.priority == 7:
                returned.wait()

        place.queue.on_enqueue(hook)
        for number in range(3):
            place.add(f"bad{number}", priority=7)
        place.add("good")

        with place.connection() as connection:
            ticks = place.ticks()
            until(lambda: ticks.fire(connection) is not None and place.fired() == {"good": 1})
            until(lambda: ticks.fire(connection) is not None and len(ticks.hanging()) == 3)
            assert "schedule bad0: the application's code" in caplog.text
            returned.set()
            until(lambda: ticks.fire(connection) is not None and len(place.fired()) == 4)

        assert ticks.hanging() == {}

    def test_whose_hook_raises_for_the_second_of_its_ticks(self, place: Place) -> None:
        """Or the job of the first would be enqueued again when the ticks are fired again."""
        calls: list[Any] = []

        def hook(task: Any) -> None:
            calls.append(task)
            if len(calls) == 2:
                raise LookupError("planned")

        place.queue.on_enqueue(hook)
        place.add("mine", late=5 * MINUTE, catch_up=3)

        place.fire()
        assert place.fired() == {}

        place.fire()
        assert place.fired() == {"mine": 3}

    def test_whose_statement_the_server_refuses(
        self, place: Place, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Another transaction holds the unique key and does not end."""
        for name in ("a", "bad", "c"):
            place.add(name, unique_key=name)
        with place.queue.session() as holder, place.connection() as connection:
            place.report.options(unique_key="bad").enqueue(holder, 1)
            connection.exec_driver_sql("SET lock_timeout = '200ms'")
            connection.commit()

            place.ticks().fire(connection)

            assert place.fired() == {"a": 1, "c": 1}
            assert "schedule bad: its tick of" in caplog.text
            holder.rollback()
            place.ticks().fire(connection)
        assert place.fired() == {"a": 1, "bad": 1, "c": 1}

    def test_rest_before_they_are_prepared_again(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pgqueue.worker.rows.FIRST_REST", 3600.0)
        calls: list[Any] = []

        def hook(task: Any) -> None:
            calls.append(task)
            raise LookupError("planned")

        place.queue.on_enqueue(hook)
        place.add("bad")
        ticks = place.ticks()

        with place.connection() as connection:
            for _ in range(2):
                ticks.fire(connection)

        assert len(calls) == 1

    def test_more_than_a_batch_of_them_hold_up_no_other(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pgqueue.worker.duties.ticks.BATCH", 3)
        for number in range(10):
            place.add(f"bad{number}", late=3 * MINUTE)
        with place.engine.begin() as connection:
            connection.execute(text("UPDATE pgqueue.schedules SET timezone = 'Mars/Olympus'"))
        place.add("good")

        place.fire()

        assert place.fired() == {"good": 1}


REFUSES_ONE = """
    CREATE SEQUENCE refusals;
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'refusal %', nextval('refusals'); END $$;
    CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON pgqueue.schedules
    FOR EACH ROW WHEN (NEW.name = 'bad') EXECUTE FUNCTION refuse();
"""


def test_a_schedule_of_the_code_that_the_database_refuses_rests_and_stops_no_other(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pgqueue.worker.rows.FIRST_REST", 3600.0)
    for name in ("a", "bad", "c"):
        place.queue.schedule(every=MINUTE, args=(1,), name=name)(place.report)
    with place.engine.begin() as connection:
        connection.execute(text(REFUSES_ONE))
    duty = WriteSchedules(place.queue.schedules)

    with place.connection() as connection:
        for _ in range(2):
            duty.step(connection)

    with place.queue.session() as session:
        assert {one.name for one in place.queue.schedules.list(session)} == {"a", "c"}
    assert caplog.text.count("schedule bad of the code cannot be written") == 1
    assert place.scalar("SELECT nextval('refusals')") == 2, "it was refused once"


def test_the_health_of_a_worker_names_the_schedule_whose_hook_hangs(place: Place) -> None:
    returned = threading.Event()

    @place.queue.on_enqueue
    def hang(task: Task[..., Any]) -> None:
        returned.wait()

    place.add("slow")
    worker = Worker(place.queue)
    running = threading.Thread(target=worker.run)
    running.start()

    until(lambda: (health := worker.health()) is not None and health.hanging)

    [words] = worker.health().hanging  # type: ignore[union-attr]  # it runs
    assert words.startswith("schedule slow, for ")
    worker.stop()
    running.join(60)
    returned.set()
    assert not running.is_alive()


def until(condition: Any) -> None:
    deadline = monotonic() + 60
    while not condition():
        assert monotonic() < deadline


def test_the_application_runs_in_no_transaction_of_a_tick(place: Place) -> None:
    """Or a slow hook would be cut off with its transaction, and hold the locks of other ticks."""
    seen: list[Any] = []

    def hook(task: Any) -> None:
        with place.engine.begin() as other:
            seen.append(other.scalar(text("SELECT name FROM pgqueue.schedules FOR UPDATE NOWAIT")))
            seen.append(other.scalar(text(STATES)))

    place.queue.on_enqueue(hook)
    place.add("mine")

    place.fire()

    assert seen == ["mine", None]
    assert place.fired() == {"mine": 1}


STATES = (
    "SELECT max(state) FROM pg_stat_activity WHERE datname = current_database()"
    " AND state LIKE 'idle in transaction%'"
)


def test_a_schedule_that_is_changed_while_its_job_is_prepared_is_fired_as_it_is_then(
    place: Place,
) -> None:
    def hook(task: Any) -> None:
        place.queue.meta_sources.clear()
        with place.queue.session() as session, session.begin():
            place.queue.schedules.change(session, "mine", args=(2,))

    place.queue.on_enqueue(hook)
    place.add("mine")

    place.fire()
    assert place.fired() == {}

    place.fire()
    assert place.scalar("SELECT args FROM pgqueue.jobs") == {"n": 2}


class TestOverlap:
    def test_skip_passes_over_the_tick_while_the_job_before_is_unfinished(
        self, place: Place
    ) -> None:
        place.add("mine", overlap="skip")
        place.fire()
        self.becomes_due(place)

        place.fire()

        assert place.fired() == {"mine": 1}
        assert place.scalar("SELECT next_at > clock_timestamp() FROM pgqueue.schedules")
        Worker(place.queue).run_until_empty()
        self.becomes_due(place)
        place.fire()
        assert place.fired() == {"mine": 2}

    def test_wait_fires_once_when_the_job_before_has_ended(self, place: Place) -> None:
        place.add("mine", overlap="wait")
        place.fire()
        self.becomes_due(place)

        assert (place.fire() or 0) <= 0, "it stays due"
        assert place.fired() == {"mine": 1}

        Worker(place.queue).run_until_empty()
        place.fire()
        assert place.fired() == {"mine": 2}

    def test_wait_fires_missed_ticks_one_after_the_other_also_among_several_workers(
        self, place: Place
    ) -> None:
        place.add("mine", overlap="wait", late=10 * MINUTE, catch_up=3)

        for fired in (1, 2, 3):
            fire_together(place, workers=4)
            assert place.fired() == {"mine": fired}
            Worker(place.queue).run_until_empty()

    def becomes_due(self, place: Place) -> None:
        """Let an hour pass: what was fired is an hour older, and the next tick is due."""
        with place.engine.begin() as connection:
            connection.execute(
                text(
                    "UPDATE pgqueue.jobs SET meta = jsonb_set(meta, '{schedule,tick}',"
                    " to_jsonb((meta->'schedule'->>'tick')\\:\\:timestamptz - interval '1 hour'))"
                )
            )
            connection.execute(
                text(
                    "UPDATE pgqueue.schedules SET last_tick_at = last_tick_at - interval '1 hour',"
                    " next_at = date_trunc('minute', clock_timestamp() - interval '1 minute')"
                )
            )


def fire_together(place: Place, *, workers: int) -> None:
    together = threading.Barrier(workers)

    def work() -> None:
        with place.connection() as connection:
            connection.scalar(text("SELECT 1"))
            connection.rollback()
            together.wait(60)
            place.ticks().fire(connection)

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def test_a_clock_of_the_server_that_is_set_back_fires_nothing_twice(place: Place) -> None:
    """After a failover the row may stand in the future of the new server."""
    place.add("mine")
    place.fire()
    with place.engine.begin() as connection:
        connection.execute(
            text(
                "UPDATE pgqueue.schedules SET last_tick_at = last_tick_at + interval '1 hour',"
                " next_at = next_at + interval '1 hour'"
            )
        )

    seconds = place.fire()

    assert place.fired() == {"mine": 1}
    assert seconds is not None
    assert seconds > 3000


def test_a_row_whose_next_tick_is_not_after_the_last_is_refused_by_the_server(
    place: Place,
) -> None:
    place.add("mine")
    place.fire()

    with pytest.raises(Exception, match="schedules_tick"), place.engine.begin() as connection:
        connection.execute(text("UPDATE pgqueue.schedules SET next_at = last_tick_at"))


def test_a_locked_schedule_waits_and_delays_no_other(place: Place) -> None:
    place.add("locked")
    place.add("free")
    with place.connection() as operator:
        operator.execute(text("SELECT FROM pgqueue.schedules WHERE name = 'locked' FOR UPDATE"))
        place.fire()
        assert place.fired() == {"free": 1}
        operator.rollback()

    place.fire()

    assert place.fired() == {"free": 1, "locked": 1}


def test_missed_ticks_are_fired_in_their_order(place: Place) -> None:
    place.add("mine", late=5 * MINUTE, catch_up=3)

    place.fire()

    with place.queue.session() as session:
        jobs = session.query(Job).order_by(Job.id).all()
    ticks = [datetime.fromisoformat((job.meta or {})["schedule"]["tick"]) for job in jobs]
    assert [later - earlier for earlier, later in pairwise(ticks)] == [
        MINUTE,
        MINUTE,
    ]
