"""The minutes of tasks: workers add to the same rows, and wait for each other in one order."""

import time
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Engine, text

from chaos.interleavings.logical_workers import committed, stored, waiting
from pgqueue.repository.task_minutes import ENDED, TaskMinutes
from pgqueue.tables import TaskMinute

HOUR = timedelta(hours=1)
NOW = int(time.time() // 60)


def minute(task: str, *, ago: int = 0, **numbers: Any) -> dict[str, Any]:
    nothing = {**dict.fromkeys(ENDED, 0), "ran": [], "waited": []}
    return {"minute": NOW - ago, "task": task, **nothing, **numbers}


def add(engine: Engine, *rows: dict[str, Any]) -> None:
    committed(engine, lambda connection: TaskMinutes(connection).add(rows))


def test_what_two_workers_add_to_a_minute_is_summed(engine: Engine) -> None:
    add(engine, minute("a", succeeded=2, ran=[1, 2], waited=[3]), minute("b", failed=1))
    add(engine, minute("a", succeeded=3, retried=1, ran=[1, 1, 1]))

    first, second = stored(engine, TaskMinute)

    assert (first.succeeded, first.retried, first.ran, first.waited) == (5, 1, [2, 3, 1], [3])
    assert (second.task, second.failed, second.ran) == ("b", 1, [])
    assert first.at == second.at
    assert first.at.timestamp() == NOW * 60


def test_two_workers_with_the_same_rows_in_other_orders_do_not_deadlock(engine: Engine) -> None:
    with engine.connect() as one, engine.connect() as other:
        TaskMinutes(one).add([minute("a", succeeded=1)])

        def add_both() -> None:
            TaskMinutes(other).add([minute("b", succeeded=1), minute("a", succeeded=1)])
            other.commit()

        with waiting(engine, other, add_both):
            TaskMinutes(one).add([minute("b", succeeded=1)])
            one.commit()

    assert [row.succeeded for row in stored(engine, TaskMinute)] == [2, 2]


def test_the_statistics_of_a_time_are_those_of_its_minutes(connection: Connection) -> None:
    minutes = TaskMinutes(connection)
    minutes.add(
        [
            minute("a", ago=1, succeeded=94, ran=[0, 0, 0, 0, 94], waited=[100]),
            minute("a", ago=2, failed=2, retried=3, cancelled=4, other=5, ran=[0, 0, 6]),
            minute("a", ago=90, succeeded=1000),
            minute("b", ago=1, succeeded=1),
        ]
    )

    first, second = minutes.since(HOUR)
    [alone] = minutes.since(HOUR, "b")

    assert (first.task, first.ended) == ("a", 108)
    assert (first.succeeded, first.failed, first.retried) == (94, 2, 3)
    assert (first.cancelled, first.other) == (4, 5)
    assert first.run_p50 is not None
    assert timedelta(milliseconds=8) < first.run_p50 < timedelta(milliseconds=16)
    assert first.wait_p95 == timedelta(milliseconds=0.95)
    assert (first.ran, first.waited) == ([0, 0, 6, 0, 94], [100, 0, 0, 0, 0])
    assert first.time_used == timedelta(milliseconds=6 * 3 + 94 * 12)
    assert second == alone
    assert (alone.ended, alone.run_p50, alone.wait_p50) == (1, None, None)


def test_a_chart_has_every_part_of_its_time(connection: Connection) -> None:
    minutes = TaskMinutes(connection)
    minutes.add(
        [
            minute("a", succeeded=5, failed=1),
            minute("b", succeeded=7, retried=2),
            minute("a", ago=1, succeeded=3),
            minute("a", ago=90, succeeded=1000),
        ]
    )

    by_minute = minutes.series(HOUR, timedelta(minutes=1))
    by_tens = minutes.series(HOUR, timedelta(minutes=10), "a")

    assert (len(by_minute), len(by_tens)) == (60, 6)
    assert [one[1:] for one in by_minute if one.succeeded] == [(3, 0, 0, 0, 0), (12, 1, 2, 0, 0)]
    assert [sum(column) for column in list(zip(*by_tens, strict=True))[1:]] == [8, 1, 0, 0, 0]


def test_old_minutes_are_folded_into_tens_and_hours(engine: Engine) -> None:
    # The hour that has ended two days before this one began, and ten minutes of four hours ago.
    hour, ten = NOW % 60 + 2 * 24 * 60 + 60, NOW % 10 + 4 * 60 + 10
    olds = (*range(hour - 59, hour + 1), *range(ten - 9, ten + 1))
    add(engine, *(minute("a", ago=ago, succeeded=1, ran=[0, 1], waited=[2]) for ago in olds))
    add(engine, minute("a", ago=hour - 9, failed=3, ran=[1, 0, 0, 4]))
    add(engine, minute("b", ago=hour - 59, retried=1), minute("a", ago=60, succeeded=5))

    def prune(connection: Connection) -> None:
        assert not TaskMinutes(connection).prune()

    def written_by(connection: Connection) -> set[str]:
        return set(connection.scalars(text("SELECT xmin::text FROM pgqueue.task_minutes")))

    committed(engine, prune)
    with engine.connect() as connection:
        before = written_by(connection)
    committed(engine, prune)
    with engine.connect() as connection:
        assert written_by(connection) == before, "the rows of tens and hours are not written again"

    rows = stored(engine, TaskMinute)
    found = {(row.task, NOW - int(row.at.timestamp()) // 60): row for row in rows}
    of_hour, of_ten, of_b, alone = (
        found[key] for key in [("a", hour), ("a", ten), ("b", hour), ("a", 60)]
    )
    assert (of_hour.succeeded, of_hour.failed, of_b.retried, alone.succeeded) == (60, 3, 1, 5)
    assert (of_hour.ran, of_hour.waited) == ([1, 60, 0, 4], [120])
    assert (of_ten.succeeded, of_ten.ran, of_ten.waited) == (10, [0, 10], [20])
    assert len(found) == 4
