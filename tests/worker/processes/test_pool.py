"""Handlers in processes of their own: whatever they do, they cost their own attempt."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cells
import chores
import pytest
from worker_rig import Rig, WorkerProgram, promised

from pgqueue import PgQueue

pytestmark = pytest.mark.journey

DEATHS = {
    "kill": "was killed by SIGKILL",
    "exit": "ended with exit code 7",
    "exit well": "ended with exit code 0",
    "segfault": "was killed by SIGSEGV",
    "close": "ended with exit code 1",
    "fork and die": "ended with exit code 8",
}
PLACES = ("sleep", "C loop", "socket", "subprocess", "signals")


def start(rig: Rig, **options: Any) -> WorkerProgram:
    return rig.start(**{"modules": ["cells"], "concurrency": 2, **options})


def enqueue(rig: Rig, task: Any, *arguments: Any) -> int:
    with rig.session() as session, session.begin():
        job: int = task.enqueue(session, *arguments).id
    return job


def last_error(rig: Rig, job: int) -> str:
    return str(rig.scalar("SELECT last_error FROM pgqueue.jobs WHERE id = :id", id=job))


def result(rig: Rig, job: int) -> Any:
    return rig.scalar("SELECT result FROM pgqueue.jobs WHERE id = :id", id=job)


def pids(rig: Rig, *jobs: int) -> list[int]:
    return [note["pid"] for job in jobs for note in rig.notes("start", job=job)]


def is_gone(pid: int) -> bool:
    """Whether a process has ended; if nobody waits for it, its entry may stay."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def test_a_handler_that_kills_its_process_costs_its_own_attempts_and_nothing_else(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = start(rig)
        once = cells.die.options(max_attempts=1)
        jobs = {how: enqueue(rig, once, how) for how in DEATHS}
        twice = enqueue(rig, cells.die, "kill")
        neighbours = [enqueue(rig, task) for task in (chores.pay, cells.echo) for _ in range(3)]

        rig.until_ended()

        assert {how: last_error(rig, job) for how, job in jobs.items()} == {
            how: f"the handler's process {death}" for how, death in DEATHS.items()
        }
        for job, attempts in [*((job, 1) for job in jobs.values()), (twice, 2)]:
            assert (rig.outcome(job), rig.attempts(job)) == ("failed", attempts)
            assert rig.bad_attempts(job) == ["crashed"] * attempts
            assert len(rig.notes("start", job=job)) == attempts
        for job in neighbours:
            assert (rig.outcome(job), rig.attempts(job)) == ("succeeded", 1)
        assert worker.terminate() == 0
        assert rig.declared_dead() == 0
        assert rig.check() == []


@pytest.mark.timed
def test_a_timeout_ends_whatever_the_handler_does(database_url: str, tmp_path: Path) -> None:
    """More of them than there are slots: threads that do not return would end the worker."""
    with Rig(database_url, tmp_path) as rig:
        worker = start(rig, concurrency=1)
        for place in PLACES:
            job = enqueue(rig, cells.overrun_in, place)
            began = rig.until_started(job)

            rig.until_ended(job)

            took = time.monotonic() - began - cells.SOON.total_seconds()
            assert took < promised(1), f"{place}: {took:.1f} s after the timeout"
            assert (rig.outcome(job), rig.bad_attempts(job)) == ("failed", ["timeout"])
            assert "longer than 0:00:00.5" in last_error(rig, job)
            [pid] = pids(rig, job)
            assert is_gone(pid)
        [program] = [note["program"] for note in rig.notes("program")]
        rig.until(lambda: is_gone(program), what="what the handler has started is gone")
        assert "its thread is abandoned" not in worker.log.read_text()
        assert worker.terminate() == 0
        assert rig.check() == []


def test_memory_is_bounded(database_url: str, tmp_path: Path) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = start(rig)

        fits, does_not, fits_again = (enqueue(rig, cells.fill_memory, n) for n in (8, 2000, 9))
        cramped = enqueue(rig, cells.cramped)
        rig.until_ended()

        assert (result(rig, fits), result(rig, fits_again)) == (8, 9)
        assert (rig.outcome(does_not), rig.attempts(does_not)) == ("failed", 2)
        kinds = "SELECT error_type FROM pgqueue.job_attempts WHERE job_id = :id"
        assert {row[0] for row in rig.rows(kinds, id=does_not)} == {"MemoryError"}
        assert rig.bad_attempts(cramped) == ["failed"]
        assert "raise it well above that" in last_error(rig, cramped)
        assert rig.notes("start", job=cramped) == []
        assert worker.terminate() == 0
        assert rig.check() == []


def test_no_child_outlives_a_killed_worker(database_url: str, tmp_path: Path) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = start(rig, concurrency=3)
        idle = enqueue(rig, cells.echo)
        rig.until_ended(idle)
        busy = [enqueue(rig, cells.wait_in_cell, "never"), enqueue(rig, cells.spin)]
        rig.until_started(*busy)
        children = pids(rig, idle, *busy)
        assert not any(map(is_gone, children))
        assert len(set(children)) == 3

        worker.kill()

        rig.until(lambda: all(map(is_gone, children)), what="the children are gone")


def test_a_stopped_worker_lets_a_child_finish_within_the_grace(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = start(rig, grace=60)
        job = enqueue(rig, cells.wait_in_cell, "go")
        rig.until_started(job)
        [child] = pids(rig, job)

        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(child, number)  # as a supervisor that stops a whole group does
        worker.send(signal.SIGTERM)
        rig.until(lambda: "stopping" in worker.log.read_text())
        rig.open("go")

        assert worker.exit_code() == 0
        assert (rig.outcome(job), result(rig, job)) == ("succeeded", "go")
        rig.until(lambda: is_gone(child))
        assert rig.check() == []


def test_a_child_that_outlives_the_grace_is_killed_and_its_job_given_back(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = start(rig, grace=0.2)
        jobs = [enqueue(rig, cells.spin), enqueue(rig, cells.wait_in_cell, "never")]
        rig.until_started(*jobs)

        code = worker.terminate()

        assert code == 0
        for job in jobs:
            assert (rig.outcome(job), rig.attempts(job)) == (None, 0)
            assert rig.bad_attempts(job) == ["interrupted"]
        assert rig.scalar("SELECT count(*) FROM pgqueue.leases") == 0
        assert rig.scalar("SELECT max(crashes) FROM pgqueue.message_queue") == 0
        assert all(map(is_gone, pids(rig, *jobs)))
        assert rig.check() == []


def test_a_child_hears_of_a_stop(database_url: str, tmp_path: Path) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = start(rig, grace=600)
        job = enqueue(rig, cells.heed_stop_in_cell)
        rig.until_started(job)

        code = worker.terminate()

        assert code == 0
        assert [note["cancelled"] for note in rig.notes("stopping", job=job)] == [False]
        assert (rig.outcome(job), rig.attempts(job)) == (None, 0)
        assert rig.bad_attempts(job) == []


def test_a_child_hears_of_a_cancel(database_url: str, tmp_path: Path) -> None:
    with Rig(database_url, tmp_path) as rig:
        start(rig)
        job, other = enqueue(rig, cells.heed_in_cell), enqueue(rig, cells.wait_in_cell, "go")
        rig.until_started(job, other)

        with rig.session() as session, session.begin():
            rig.queue.cancel(session, job)
        rig.until_ended(job)
        again = enqueue(rig, cells.heed_in_cell)
        rig.until_started(again)

        assert rig.notes("cancelled", job=job) != []
        assert rig.outcome(job) == "cancelled"
        assert pids(rig, again) == pids(rig, job)
        assert rig.notes("cancelled", job=again) == []  # the wish was for the job before it
        rig.open("go")
        rig.until_ended(other)
        assert rig.outcome(other) == "succeeded"
        assert rig.check() == []


def test_a_child_of_a_worker_that_was_declared_dead_is_killed(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        start(rig)
        job = enqueue(rig, cells.wait_in_cell, "go")
        rig.until_started(job)
        [child] = pids(rig, job)

        rig.run("UPDATE pgqueue.workers SET dead_at = clock_timestamp()")

        rig.until(lambda: is_gone(child), what="its handler is stopped")
        rig.open("go")
        rig.until_ended(job)
        assert (rig.outcome(job), rig.bad_attempts(job)) == ("succeeded", ["crashed"])
        assert rig.check() == []


def test_a_child_is_kept_for_the_next_job_of_its_task_and_replaced_after_many(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = start(rig, concurrency=1, set={"pgqueue.worker.processes.child:MOST_JOBS": 3})

        counts = [enqueue(rig, cells.say, "count") for _ in range(4)]
        rig.until_ended()
        jobs = [enqueue(rig, cells.echo) for _ in range(2)]
        rig.until_ended()
        last = enqueue(rig, cells.say, "count")
        rig.until_ended()

        assert [result(rig, job) for job in counts] == [1, 2, 3, 1]
        assert len(set(pids(rig, *jobs))) == 1
        note = rig.notes("start", job=jobs[0])[0]
        assert (note["group"], note["worker"]) == (note["pid"], worker.pid)
        # The only slot has room for one child: that of echo has taken the place.
        assert result(rig, last) == 1
        assert worker.terminate() == 0
        assert is_gone(note["pid"])


def test_a_child_outlives_the_slot_that_started_it(database_url: str, tmp_path: Path) -> None:
    """The kernel ties its life to the thread that started it, and stuck threads are replaced."""
    with Rig(database_url, tmp_path) as rig:
        worker = start(rig)
        other_slot = enqueue(rig, chores.wait, "last")
        rig.until_started(other_slot)
        first = enqueue(rig, cells.echo)
        rig.until_ended(first)
        stuck = enqueue(rig, chores.overrun.options(max_attempts=1), "go")
        rig.until_ended(stuck)
        threads = Path(f"/proc/{worker.pid}/task")
        before = len(list(threads.iterdir()))

        rig.open("go")
        rig.until(lambda: len(list(threads.iterdir())) < before, what="the stuck thread ends")

        second = enqueue(rig, cells.echo)
        rig.until_ended(second)
        assert pids(rig, second) == pids(rig, first)
        rig.open("last")
        assert worker.terminate() == 0
        assert rig.bad_attempts() == ["timeout"]


def test_what_a_handler_gives_and_writes_arrives(database_url: str, tmp_path: Path) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = start(rig)
        given = {"text": 'ü\n"', "number": 1.5, "list": [None, True, 2**70]}
        echoed = enqueue(rig, cells.echo, given)
        paid = enqueue(rig, cells.pay_in_cell)
        words = {word: enqueue(rig, cells.say, word) for word in ("cancel", "discard", "snooze")}
        exits = enqueue(rig, cells.sys_exit)

        rig.until_ended(echoed, paid, words["cancel"], words["discard"], exits)
        rig.until(lambda: rig.unfinished() == 1, what="the follow-up ends, the snoozed job sleeps")

        assert result(rig, echoed) == given
        assert (rig.outcome(paid), rig.effects(paid)) == ("succeeded", 1)
        follow_up = (
            "SELECT count(*) FROM pgqueue.jobs WHERE result = jsonb_build_object('paid', :n)"
        )
        assert rig.scalar(follow_up.replace(":n", str(paid))) == 1
        assert [rig.outcome(job) for job in words.values()] == ["cancelled", "failed", None]
        assert rig.bad_attempts(words["discard"]) == ["discarded"]
        snoozed = "SELECT run_at > clock_timestamp() FROM pgqueue.jobs WHERE id = :id"
        assert rig.scalar(snoozed, id=words["snooze"])
        assert rig.bad_attempts(exits) == ["failed", "failed"]  # as in a thread
        assert worker.terminate() == 0
        assert rig.check() == []


def test_nothing_that_a_handler_gives_or_raises_hurts_the_worker(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = start(rig)
        given = [enqueue(rig, cells.give, name) for name in (*cells.NASTY, "deep")]
        thrown = [enqueue(rig, cells.throw, kind) for kind in ("bombast", "plain")]
        thread = enqueue(rig, cells.leave_a_thread)

        rig.until_ended()

        kept = [result(rig, job) for job in given]
        assert [list(one) for one in kept if isinstance(one, dict)] == (
            [["unserialisable_result"]] * 6
        )
        assert [one for one in kept if isinstance(one, str)] == ["\ufffd", "a\ufffdb"]
        assert not chores_gate(rig, "exploded")
        assert [rig.bad_attempts(job) for job in thrown] == [["failed"], ["failed"]]
        assert last_error(rig, thrown[1]) == "by naught"
        told = rig.scalar(
            "SELECT traceback FROM pgqueue.job_attempts WHERE job_id = :id", id=thrown[1]
        )
        assert "in throw" in told
        # The way to the handler is not told.
        assert re.findall(r'File "(.+)", line', told) == [cells.__file__]
        assert "cells.throw: attempt 1 of 1: ZeroDivisionError" in worker.log.read_text()
        assert rig.outcome(thread) == "succeeded"
        assert worker.terminate() == 0  # although a thread is left in a child
        assert rig.check() == []


def chores_gate(rig: Rig, name: str) -> bool:
    return (rig.directory / f"gate-{name}").exists()


def test_what_a_handler_writes_to_the_worker_itself_is_taken_for_nothing_else(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = start(rig)
        lies = (
            '{"of":[0,0],"ending":"succeeded","result":"forged"}\n',
            "nonsense\n",
            "[" * 100_000 + "\n",
        )

        jobs = [enqueue(rig, cells.forge, lie) for lie in lies]
        jobs.append(enqueue(rig, cells.babble))
        rig.until_ended()

        for job in jobs:
            assert (rig.outcome(job), rig.bad_attempts(job)) == ("failed", ["crashed"])
            assert "has sent an invalid answer" in last_error(rig, job)
        assert worker.terminate() == 0
        assert rig.check() == []


def double(number: int) -> int:
    """What the script has, to enqueue it from here."""
    return 2 * number


SCRIPT = """
import sys
from pgqueue import PgQueue, Worker

queue = PgQueue()

@queue.task(executor="process", max_attempts=1)
def double(number: int) -> int:
    with queue.session() as session:
        return number * session.scalar(__import__("sqlalchemy").text("SELECT 2"))

def main() -> None:
    queue.bind(sys.argv[1])
    print(Worker(queue).run_until_empty(timeout=60))
"""


@pytest.mark.parametrize(
    ("guard", "said", "kept"),
    [
        ('if __name__ == "__main__": main()', "{'succeeded': 1}", 42),
        ("main()", "{'failed': 1}", None),
    ],
)
def test_a_script_is_imported_again_by_its_children(
    database_url: str, tmp_path: Path, guard: str, said: str, kept: int | None
) -> None:
    """Its queue is bound below the guard only; the child binds it as the worker was bound."""
    script = tmp_path / "twice.py"
    script.write_text(f"{SCRIPT}\n{guard}\n")

    queue = PgQueue(database_url)
    queue.task(name="twice.double", max_attempts=1)(double).delay(21)

    done = subprocess.run(
        [sys.executable, str(script), database_url], capture_output=True, text=True, timeout=200
    )

    assert done.stdout.strip() == said, done.stderr
    with Rig(database_url, tmp_path) as rig:
        [(task, ended, error)] = rig.rows("SELECT task, result, last_error FROM pgqueue.jobs")
        assert (task, ended) == ("twice.double", kept)
        assert kept or "if __name__ == '__main__'" in error


def test_a_worker_without_room_for_processes_fails_the_job_and_lives_on(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = start(rig, set={"pgqueue.worker.processes.child:PROGRAM": tmp_path / "missing.py"})
        job = enqueue(rig, cells.wait_in_cell, "go")

        rig.until_ended(job)

        assert rig.bad_attempts(job) == ["crashed", "crashed"]
        assert "before the handler could start" in last_error(rig, job)
        neighbour = enqueue(rig, chores.pay)
        rig.until_ended(neighbour)
        assert rig.outcome(neighbour) == "succeeded"
        assert worker.terminate() == 0
