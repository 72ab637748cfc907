"""The minutes of queues: what is counted, and what is computed of it."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Connection, Engine, text

from chaos.interleavings.logical_workers import (
    committed,
    enqueue,
    execute,
    stored,
    waiting,
    workers_at,
)
from pgqueue.repository.queue_minutes import QueueFlow, QueueMinutes
from pgqueue.tables import QueueMinute

MINUTE = timedelta(minutes=1)


def write(
    connection: Connection, *, ago: int, queue: str = "q", started: int = 0, **counts: int
) -> None:
    """A row of a minute that began so many whole minutes ago; counted if it has counts."""
    names = ("waiting", "due", "blocked", "running")
    values = ", ".join(str(counts.get(name, 0)) if counts else "NULL" for name in names)
    connection.execute(
        text(
            "INSERT INTO pgqueue.queue_minutes (at, queue, counted_at, waiting, due, blocked,"
            " running, started) SELECT at, :queue, CASE WHEN :is_counted THEN at END,"
            f" {values}, :started"  # numbers of this test
            " FROM (SELECT date_trunc('minute', now()) - :ago * interval '1 minute' AS at) AS m"
        ),
        {"ago": ago, "queue": queue, "started": started, "is_counted": bool(counts)},
    )


def test_the_unfinished_jobs_of_all_queues_are_counted(engine: Engine) -> None:
    with workers_at(engine, 1) as [worker]:
        for _ in range(3):
            enqueue(engine)
        worker.claim(limit=1)
        execute(
            engine,
            "UPDATE pgqueue.message_queue SET run_at = clock_timestamp() + age"
            " FROM (VALUES (interval '1 hour'), (interval '-90 seconds')) AS given (age),"
            " (SELECT min(target_id) AS one FROM pgqueue.message_queue) AS least"
            " WHERE (target_id = one) = (age < interval '0')",
        )
        execute(
            engine,
            "INSERT INTO pgqueue.waiting_messages (limit_keys, queue, priority, run_at, task,"
            " target_id) SELECT 'k', 'narrow', 5, clock_timestamp() + later, 't', 99"
            " FROM (VALUES (interval '0'), ('1 hour'), ('2 hours')) AS given (later)",
        )

        committed(engine, lambda connection: QueueMinutes(connection).count())

        with engine.begin() as connection:
            latest = QueueMinutes(connection).latest()
    assert latest is not None
    assert latest.queues["narrow"] == (2, 0, 1, 0, None)  # two start later
    usual = latest.queues["default"]
    assert (usual.waiting, usual.due, usual.blocked, usual.running) == (2, 1, 0, 1)
    assert usual.oldest_due is not None
    assert usual.oldest_due >= timedelta(seconds=90)
    assert timedelta(0) <= latest.age < timedelta(minutes=10)


def test_a_queue_that_has_become_empty_is_counted_for_a_while(connection: Connection) -> None:
    write(connection, ago=3, queue="emptied", due=1, waiting=1)
    write(connection, ago=30, queue="forgotten", due=1, waiting=1)
    write(connection, ago=3, queue="quick", started=4)

    QueueMinutes(connection).count()

    latest = QueueMinutes(connection).latest()
    assert latest is not None
    assert latest.queues == dict.fromkeys(("emptied", "quick"), (0, 0, 0, 0, None))


def test_a_count_without_jobs_is_a_count(connection: Connection) -> None:
    before = QueueMinutes(connection).latest()
    QueueMinutes(connection).count()
    latest = QueueMinutes(connection).latest()

    assert before is None
    assert latest is not None
    assert latest.queues == {}


def test_a_count_replaces_the_one_before_and_keeps_the_claims_of_the_minute(
    connection: Connection,
) -> None:
    minutes = QueueMinutes(connection)
    now = connection.scalar(text("SELECT extract(epoch FROM now())"))
    assert now is not None
    minutes.add_started([{"minute": int(now // 60), "queue": "q", "started": 2}])
    minutes.count()
    minutes.add_started([{"minute": int(now // 60), "queue": "q", "started": 3}])

    [row] = connection.execute(
        text("SELECT sum(started), max(counted_at) IS NOT NULL FROM pgqueue.queue_minutes")
    )
    assert tuple(row) == (5, True)


def test_what_goes_in_is_what_was_claimed_and_the_growth_of_the_backlog(
    connection: Connection,
) -> None:
    write(connection, ago=6, due=100, blocked=20, waiting=500, started=1000)
    write(connection, ago=4, due=7, waiting=7, started=30)
    write(connection, ago=2, due=40, blocked=10, waiting=900, started=50)
    write(connection, ago=0, due=9999, waiting=9999, started=9999)  # not a whole minute yet
    write(connection, ago=2, queue="new", due=8, waiting=8, started=4)
    write(connection, ago=6, queue="cancelled", due=90, waiting=90)
    write(connection, ago=2, queue="cancelled", started=8)
    write(connection, ago=3, queue="", due=0)  # as each count writes it

    flows = QueueMinutes(connection).flows()

    # 80 jobs claimed in four minutes, while the backlog has shrunk from 120 to 50.
    assert flows["q"] == QueueFlow(in_per_minute=2.5, out_per_minute=20.0)
    assert flows.keys() == {"q", "new", "cancelled"}
    assert flows["new"] == QueueFlow(in_per_minute=3.0, out_per_minute=1.0)
    assert flows["cancelled"] == QueueFlow(in_per_minute=0.0, out_per_minute=2.0)


def test_one_counted_minute_tells_nothing_of_what_goes_in_and_out(connection: Connection) -> None:
    write(connection, ago=4, due=7, waiting=7, started=30)
    write(connection, ago=3, started=30)

    assert QueueMinutes(connection).flows() == {}


@pytest.mark.parametrize(
    ("flow", "backlog", "empty_in"),
    [
        (QueueFlow(10, 30), 100, timedelta(minutes=5)),
        (QueueFlow(30, 30), 100, None),
        (QueueFlow(40, 30), 100, None),
        (QueueFlow(40, 30), 0, timedelta(0)),
    ],
)
def test_a_backlog_that_shrinks_is_empty_at_some_time(
    flow: QueueFlow, backlog: int, empty_in: timedelta | None
) -> None:
    assert flow.empty_in(backlog) == empty_in


def test_a_chart_has_every_part_of_its_time(connection: Connection) -> None:
    write(connection, ago=0, due=5, waiting=5, started=1)
    write(connection, ago=0, queue="other", due=2, waiting=3, started=1)
    write(connection, ago=1, due=6, waiting=6, started=10)
    write(connection, ago=90, due=999, waiting=999)
    minutes = QueueMinutes(connection)

    by_minute = minutes.series(timedelta(hours=1), MINUTE)
    alone = minutes.series(timedelta(hours=1), MINUTE, ["other", "gone"])
    by_tens = minutes.series(timedelta(hours=1), 10 * MINUTE)

    assert (len(by_minute), len(by_tens)) == (60, 6)
    assert [(one.waiting, one.due, one.started) for one in by_minute if one.started] == [
        (6, 6, 10),
        (8, 7, 2),
    ]
    assert by_minute[-1].at - by_minute[0].at == 59 * MINUTE
    assert by_minute[-1].at <= datetime.now(UTC)
    assert sum(one.waiting for one in alone) == 3
    assert sum(one.started for one in by_tens) == 12


def test_two_workers_that_add_in_other_orders_do_not_deadlock(engine: Engine) -> None:
    a, b = ({"minute": 29_000_000, "queue": name, "started": 1} for name in "ab")
    with engine.connect() as one, engine.connect() as other:
        QueueMinutes(one).add_started([a])

        def add_both() -> None:
            QueueMinutes(other).add_started([b, a])
            other.commit()

        with waiting(engine, other, add_both):
            QueueMinutes(one).add_started([b])
            one.commit()

    assert [row.started for row in stored(engine, QueueMinute)] == [2, 2]


def test_a_count_of_the_future_hides_none_of_now(engine: Engine) -> None:
    with engine.begin() as connection:
        write(connection, ago=-180, waiting=999)
        write(connection, ago=0, waiting=1)
        counted = QueueMinutes(connection).latest()

    assert counted is not None
    assert counted.queues["q"].waiting == 1


def test_minutes_whose_time_is_over_are_deleted(engine: Engine) -> None:
    def write_and_prune(connection: Connection) -> None:
        write(connection, ago=6 * 24 * 60)
        write(connection, ago=8 * 24 * 60)
        assert not QueueMinutes(connection).prune()

    committed(engine, write_and_prune)

    assert len(stored(engine, QueueMinute)) == 1


def test_old_minutes_are_folded_into_rows_with_the_largest_numbers(engine: Engine) -> None:
    # Each minute of an hour two days ago, and ten of four hours ago; the numbers grow.
    execute(
        engine,
        "INSERT INTO pgqueue.queue_minutes (at, queue, counted_at, waiting, due, blocked, running,"
        " oldest_due_s, started) SELECT at, 'q', at, n, 2, 60 - n, 0, NULLIF(n % 7, 0), 1"
        " FROM (SELECT date_trunc('hour', now(), 'UTC') - age + n * interval '1 minute' AS at, n"
        " FROM generate_series(0, 59) AS n, (VALUES (interval '2 days'), ('4 hours')) AS old (age)"
        " ) AS minute WHERE n < 10 OR at < now() - interval '1 day'",
    )
    execute(
        engine,
        "INSERT INTO pgqueue.queue_minutes (at, queue, started) SELECT max(at), 'other', 7"
        " FROM pgqueue.queue_minutes WHERE at < now() - interval '1 day'",
    )

    for _ in range(2):  # folded rows stay as they are
        committed(engine, lambda connection: QueueMinutes(connection).prune())

    other, hour, ten = sorted(stored(engine, QueueMinute), key=lambda row: (row.at, row.queue))
    assert (hour.waiting, hour.due, hour.blocked, hour.oldest_due_s) == (59, 2, 60, 6)
    assert (hour.started, hour.counted_at) == (60, hour.at + 59 * MINUTE)
    assert (other.queue, other.at, other.waiting, other.started) == ("other", hour.at, None, 7)
    assert (ten.waiting, ten.blocked, ten.started) == (9, 60, 10)
