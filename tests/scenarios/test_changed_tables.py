"""Tables change while workers run."""

from pathlib import Path

import pytest
import worker_tasks
from worker_rig import Rig

pytestmark = pytest.mark.journey

CHANGES = 8


def test_a_change_of_the_tables_and_a_running_worker_never_wait_for_each_other(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        with rig.session() as session:
            worker_tasks.pay.options(max_attempts=1).enqueue_many(session, [(0,)] * 800)
            session.commit()
        worker = rig.start(concurrency=8)
        rig.until(lambda: rig.effects() > 20)

        with rig.raw() as connection:
            # Longer than a handler's transaction holds its locks.
            connection.exec_driver_sql("SET lock_timeout = '3s'")
            for number in range(CHANGES):
                connection.exec_driver_sql(f"ALTER TABLE pgqueue.jobs ADD COLUMN c{number} text")

        rig.until_ended(seconds=60)
        assert worker.terminate() == 0
        assert rig.outcomes() == {"succeeded": 800}
        assert rig.each_success_has_one_effect()
        assert rig.check() == []
