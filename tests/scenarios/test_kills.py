"""kill -9: nothing is lost, nothing counts twice, and it does not take long."""

import random
import time
from pathlib import Path

import pytest
import worker_tasks
from worker_rig import Rig, WorkerProgram, promised

pytestmark = pytest.mark.journey


@pytest.mark.timed
def test_a_killed_workers_job_is_claimable_again_within_two_seconds(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        killed = rig.start(poll_interval=0.1)
        with rig.session() as session:
            job = worker_tasks.wait.enqueue(session, "go").id
            session.commit()
        rig.until_started(job)
        rig.start(poll_interval=0.1)
        beat = "SELECT heartbeat_at FROM pgqueue.workers WHERE pid = :pid"
        last = rig.scalar(beat, pid=killed.pid)
        rig.until(lambda: rig.scalar(beat, pid=killed.pid) != last, what="it beats")

        killed.kill()  # right after a beat: the worst moment
        began = time.monotonic()
        claimable = "SELECT count(*) = 0 FROM pgqueue.leases WHERE target_id = :job AND attempt = 1"
        rig.until(lambda: rig.scalar(claimable, job=job), what="its job is claimable")
        took = time.monotonic() - began
        rig.until_started(job, attempt=2)

        rig.open("go")
        rig.until_ended(job)
        print(f"recovered in {took:.3f} s")
        assert took < promised(2)
        assert rig.bad_attempts(job) == ["crashed"]
        assert (rig.outcome(job), rig.attempts(job)) == ("succeeded", 2)
        assert rig.check() == []


@pytest.mark.battery  # as a chaos scenario
def test_effects_are_those_of_succeeded_jobs_whatever_is_killed(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        _enqueue(rig, 400)

        kills = _kill_while_they_work(rig, processes=3, kills=6, seed=7)

        rig.until_ended(seconds=60)
        assert kills == 6
        assert rig.outcomes() == {"succeeded": 400}
        assert rig.each_success_has_one_effect()
        assert rig.most_starts() == 1
        assert rig.check() == []


@pytest.mark.battery
@pytest.mark.timeout(600)
def test_effects_are_those_of_succeeded_jobs_after_fifty_kills(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        _enqueue(rig, 5000)

        kills = _kill_while_they_work(rig, processes=8, kills=50, seed=11)

        rig.until_ended(seconds=300)
        assert kills == 50
        assert rig.outcomes() == {"succeeded": 5000}
        assert rig.each_success_has_one_effect()
        assert rig.most_starts() == 1
        assert rig.check() == []


def _enqueue(rig: Rig, count: int) -> None:
    """Half of them sync and half async, ten milliseconds each."""
    with rig.session() as session:
        endless = worker_tasks.pay.options(max_attempts=1000)
        endless.enqueue_many(session, [(10,)] * (count // 2))
        worker_tasks.pay_async.options(max_attempts=1000).enqueue_many(
            session, [(10,)] * (count // 2)
        )
        session.commit()


def _kill_while_they_work(rig: Rig, *, processes: int, kills: int, seed: int) -> int:
    """Kill a worker each time some more jobs have ended, and start another; how many were."""
    dice = random.Random(seed)
    total = rig.unfinished()
    options = {"concurrency": 2, "poll_interval": 0.2}
    alive: list[WorkerProgram] = [rig.start(waits=False, **options) for _ in range(processes)]
    done = 0
    for number in range(kills):
        left = total - (number + 1) * total // (kills + 2)
        rig.until(lambda left=left: rig.unfinished() <= left, seconds=60)  # type: ignore[misc]
        victim = alive.pop(dice.randrange(len(alive)))
        done += victim.is_running
        victim.kill()
        alive.append(rig.start(waits=False, **options))
    return done
