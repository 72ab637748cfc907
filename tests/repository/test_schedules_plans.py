"""The statements of schedules reach their rows by the index, however many schedules there are."""

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from sqlalchemy import Engine, create_engine, make_url, text

from chaos.plans import AUTO_EXPLAIN, plans_of, prepare_at_once
from pgqueue.database.settings import TIMERS
from pgqueue.repository.schedules import Moved, ScheduleRows
from pgqueue.repository.workers import Workers
from pgqueue.rules.ticks import Firing
from pgqueue.testing.databases import fresh_database

MANY = """
    INSERT INTO pgqueue.schedules (name, task, cron, next_at)
    SELECT 's' || n, 'tests.task', '0 3 * * *', clock_timestamp() + (n - 500) * interval '1 minute'
    FROM generate_series(1, 10000) AS n
"""
TASKS = "{tests.task}"
BY_TICK = {"Index Scan schedules_next_tick", "Index Only Scan schedules_next_tick"}


@pytest.fixture(scope="module")
def many(server_url: str, template_url: str) -> Iterator[Engine]:
    with fresh_database(server_url, template_url=template_url) as url:
        settings = {**TIMERS, **AUTO_EXPLAIN}
        options = " ".join(
            f"-c {name}={value}".replace(", ", ",") for name, value in settings.items()
        )
        engine = create_engine(make_url(url).update_query_dict({"options": options}))
        with engine.begin() as connection:
            connection.execute(text(MANY))
        yield prepare_at_once(engine)
        engine.dispose()


def test_the_due_ones_are_read_in_order_without_a_sort(many: Engine) -> None:
    with many.connect() as connection, plans_of(connection) as plans:
        found = ScheduleRows(connection).due(TASKS, after=None, limit=100)
        connection.rollback()

    assert len(found) == 100
    assert plans.only.scans_of("schedules") <= BY_TICK
    assert not plans.only.has_sort


def test_the_next_tick_is_one_probe(many: Engine) -> None:
    with many.connect() as connection, plans_of(connection) as plans:
        seconds = ScheduleRows(connection).seconds_to_next(TASKS)
        connection.rollback()

    assert seconds is not None
    assert plans.only.scans_of("schedules") <= BY_TICK
    assert plans.only.buffers < 20


def test_the_notices_of_a_worker_read_one_schedule(many: Engine) -> None:
    with many.connect() as connection, plans_of(connection) as plans:
        Workers(connection).notices(running=[], search=False, scheduled=TASKS)
        connection.rollback()

    assert plans.only.scans_of("schedules") <= BY_TICK
    assert not plans.only.has_sort


def test_schedules_are_moved_by_name(many: Engine) -> None:
    now = datetime.now(UTC)
    moved = [Moved(f"s{n}", Firing((), now, None), None) for n in range(1, 101)]
    with many.connect() as connection, plans_of(connection) as plans:
        ScheduleRows(connection).move(moved)
        connection.rollback()

    assert plans.only.scans_of("schedules") == {"Index Scan schedules_pkey"}
