"""A COMMIT that is cut off: nobody knows at first, and every job still has its effect once."""

from pathlib import Path
from typing import Any

import pytest
import worker_tasks
from worker_rig import Rig

from chaos.proxy import Proxy

pytestmark = pytest.mark.journey

WITH_SESSION: list[Any] = [worker_tasks.pay, worker_tasks.pay_async]
AT_END: list[Any] = [worker_tasks.pay_at_end, worker_tasks.pay_at_end_async]


@pytest.mark.parametrize("task", WITH_SESSION + AT_END)
def test_a_commit_whose_answer_is_lost_counts_and_is_not_repeated(
    database_url: str, tmp_path: Path, task: Any
) -> None:
    with Proxy(database_url) as proxy, Rig(database_url, tmp_path, worker_url=proxy.url) as rig:
        worker = rig.start(concurrency=2)

        proxy.cut(times=3, forwarding=True, after=b"INTO effects")
        with rig.session() as session:
            task.enqueue_many(session, [()] * 20)
            session.commit()

        rig.until_ended()
        rig.until(lambda: rig.scalar("SELECT count(*) FROM pgqueue.leases") == 0)
        assert proxy.cuts == 3
        assert rig.outcomes() == {"succeeded": 20}
        # A cut that meets another statement than COMMIT lets its job run again, as it should.  If
        # the handler begins the transaction itself, such a cut is an error of the handler.
        again = len(rig.notes("start")) - 20
        assert again <= proxy.cuts
        assert len(rig.bad_attempts()) <= (again if task in AT_END else 0)
        assert "its result is not kept" not in worker.log.read_text()
        assert rig.each_success_has_one_effect()
        assert worker.terminate() == 0
        assert rig.check() == []


@pytest.mark.parametrize("task", WITH_SESSION + AT_END)
def test_a_commit_that_never_arrives_is_taken_for_what_it_is_and_its_job_runs_again(
    database_url: str, tmp_path: Path, task: Any
) -> None:
    with Proxy(database_url) as proxy, Rig(database_url, tmp_path, worker_url=proxy.url) as rig:
        worker = rig.start(concurrency=2)

        proxy.cut(times=3, forwarding=False, after=b"INTO effects")
        with rig.session() as session:
            task.enqueue_many(session, [()] * 20)
            session.commit()

        rig.until_ended()
        rig.until(lambda: rig.scalar("SELECT count(*) FROM pgqueue.leases") == 0)
        assert proxy.cuts == 3
        assert rig.outcomes() == {"succeeded": 20}
        assert len(rig.notes("start")) == 23
        assert len(rig.bad_attempts()) == 3
        assert rig.each_success_has_one_effect()
        assert worker.terminate() == 0
        assert rig.check() == []


def test_claims_and_settles_whose_answers_are_lost_lose_no_job(
    database_url: str, tmp_path: Path
) -> None:
    with Proxy(database_url) as proxy, Rig(database_url, tmp_path, worker_url=proxy.url) as rig:
        worker = rig.start(concurrency=2)
        with rig.session() as session:
            worker_tasks.quick.enqueue_many(session, [()] * 300)
            session.commit()

        for answers in range(6):
            proxy.cut(at=b"message_queue" if answers % 2 else b"leases", forwarding=True)
            rig.until(lambda: proxy.is_idle or rig.unfinished() == 0)
            with rig.session() as session:
                worker_tasks.quick.enqueue_many(session, [()] * 50)
                session.commit()

        rig.until_ended(seconds=40)
        rig.until(lambda: rig.scalar("SELECT count(*) FROM pgqueue.leases") == 0)
        assert proxy.cuts >= 4
        assert set(rig.outcomes()) == {"succeeded"}
        assert rig.declared_dead() == 0
        assert worker.terminate() == 0
        assert rig.check() == []
