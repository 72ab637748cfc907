"""Handlers in child processes: whatever they do, they cost their own attempt and nothing else.

A worker in the test's own process forks its children, so that tasks may be defined in a test.
"""

import ctypes
import logging
import mmap
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import Any

import process_tasks
import pytest
from sqlalchemy import Engine, create_engine, select, text
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from worker_rig import Rig, endings, promised, running, wait_until

from pgqueue import (
    AttemptEnded,
    Cancel,
    Change,
    Discard,
    Job,
    JobAttempt,
    JobContext,
    LeaseLost,
    OptionError,
    PgQueue,
    Retry,
    Snooze,
    Worker,
    WorkerBroken,
)

GIBIBYTE = 2**30
SOON = timedelta(seconds=0.3)
AT_ONCE = Retry.constant(timedelta(0))


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


def in_child(queue: PgQueue, handler: Callable[..., Any], **options: Any) -> Any:
    settings = {"executor": "process", "max_attempts": 1, "retry": AT_ONCE, **options}
    return queue.task(**{"name": handler.__name__, **settings})(handler)


def job_of(queue: PgQueue, job_id: int) -> Job:
    with queue.session() as session:
        return session.get_one(Job, job_id)


def result(queue: PgQueue, job_id: int) -> Any:
    return job_of(queue, job_id).result


def bad_attempts(queue: PgQueue, job_id: int) -> list[str]:
    with queue.session() as session:
        of_job = select(JobAttempt).where(JobAttempt.job_id == job_id).order_by(JobAttempt.attempt)
        return [str(attempt.outcome) for attempt in session.scalars(of_job)]


def is_leased(queue: PgQueue, job_id: int) -> bool:
    with queue.session() as session:
        found = text("SELECT EXISTS (SELECT FROM pgqueue.leases WHERE target_id = :job)")
        return bool(session.scalar(found, {"job": job_id}))


def is_gone(pid: int) -> bool:
    """Whether a process has ended; if nobody waits for it, its entry may stay."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


@contextmanager
def working(worker: Worker) -> Iterator[None]:
    """Run a worker in a thread; its end is awaited, and its error is raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            worker.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join(60)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_one_child_serves_all_tasks_of_a_slot_in_turn(queue: PgQueue) -> None:
    def first() -> list[int]:
        return [os.getpid(), os.getpgid(0), os.getppid()]

    def second() -> list[int]:
        return first()

    tasks = in_child(queue, first), in_child(queue, second)
    jobs = [task.delay().id for task in tasks * 2]

    assert endings(Worker(queue, concurrency=1)) == {"succeeded": 4}

    [(pid, group, parent)] = {tuple(result(queue, job)) for job in jobs}
    assert pid == group
    assert os.getpid() not in (pid, parent)
    assert not any(Path(f"/proc/{each}").exists() for each in (pid, parent))


def test_a_child_is_replaced_after_so_many_jobs(queue: PgQueue) -> None:
    task = in_child(queue, os.getpid, name="pid")
    jobs = [task.delay().id for _ in range(5)]

    endings(Worker(queue, concurrency=1, max_jobs_per_child=2))

    jobs_of = Counter(result(queue, job) for job in jobs)
    assert sorted(jobs_of.values()) == [1, 2, 2]


def test_the_start_of_a_child_is_no_time_of_its_handler(queue: PgQueue) -> None:
    ended: dict[int, AttemptEnded] = {}

    @queue.on_attempt_end
    def note(event: AttemptEnded) -> None:
        ended[event.job_id] = event

    second = in_child(queue, os.getpid, name="pid")
    is_old = "SELECT clock_timestamp() - started_at > interval '1 s' FROM pgqueue.leases"

    def stop_the_server() -> int:
        """So that no child is forked until a second after the claim of the next job."""
        os.kill(os.getppid(), signal.SIGSTOP)
        try:
            job: int = second.delay().id
            with queue.session() as session:
                of_job = text(f"{is_old} WHERE target_id = :job")
                wait_until(lambda: session.scalar(of_job, {"job": job}), what="the job is claimed")
        finally:
            os.kill(os.getppid(), signal.SIGCONT)
        return job

    first = in_child(queue, stop_the_server).delay().id

    assert endings(Worker(queue, concurrency=2)) == {"succeeded": 2}

    waited = ended[result(queue, first)].waited
    assert waited is not None
    assert waited > timedelta(seconds=0.9)


def test_a_handler_that_kills_its_process_costs_its_own_attempts_and_nothing_else(
    queue: PgQueue, tmp_path: Path
) -> None:
    def die(how: str, gate: str) -> None:
        match how:
            case "was killed by SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            case "ended with exit code 7":
                os._exit(7)
            case "ended with exit code 0":
                os._exit(0)
            case "was killed by SIGABRT":
                signal.signal(signal.SIGABRT, signal.SIG_DFL)
                os.abort()
            case "ended with exit code 1":
                os.closerange(3, 64)
            case "ended with exit code 8":  # the copy keeps the connection to the worker
                if os.fork() == 0:
                    os.setsid()
                    wait_until(Path(gate).exists)
                    os._exit(0)
                os._exit(8)

    ways = [f"was killed by SIG{name}" for name in ("KILL", "ABRT")]
    ways += [f"ended with exit code {code}" for code in (7, 0, 1, 8)]
    task, other = in_child(queue, die), in_child(queue, os.getpid, name="other")
    gate = tmp_path / "gate"
    jobs = {how: task.delay(how, str(gate)).id for how in ways}
    twice = task.options(max_attempts=2).delay(ways[0], str(gate)).id
    neighbours = [other.delay().id for _ in range(3)]

    endings(Worker(queue, concurrency=2))
    gate.touch()

    for how, job in jobs.items():
        assert job_of(queue, job).last_error == f"the handler's process {how}"
        assert bad_attempts(queue, job) == ["crashed"]
    assert bad_attempts(queue, twice) == ["crashed"] * 2
    assert all(job_of(queue, job).outcome == "succeeded" for job in neighbours)


def test_a_timeout_ends_whatever_the_handler_does(queue: PgQueue, tmp_path: Path) -> None:
    """More of them than there are slots: threads that do not return would end the worker."""

    def overrun(where: str, pids: str) -> None:
        Path(pids, str(os.getpid())).touch()
        match where:
            case "C loop":  # holds the GIL: no other thread of the process runs
                ctypes.PyDLL(None).usleep(60_000_000)
            case "socket":
                left, _right = socket.socketpair()
                left.recv(1)
            case "program":
                program = subprocess.Popen(["sleep", "60"])
                Path(pids, str(program.pid)).touch()
                program.wait()
            case "signals":
                for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
                    signal.signal(number, signal.SIG_IGN)
                time.sleep(60)

    task = in_child(queue, overrun, timeout=SOON)
    places = ("C loop", "socket", "program", "signals")
    jobs = [task.delay(place, str(tmp_path)).id for place in places]

    assert endings(Worker(queue, concurrency=2)) == {"failed": 4}

    for job in jobs:
        assert bad_attempts(queue, job) == ["timeout"]
        assert "longer than 0:00:00.3" in (job_of(queue, job).last_error or "")
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 5
    wait_until(lambda: all(map(is_gone, pids)), what="the handlers and the program are gone")


def test_memory_is_limited_while_a_handler_of_the_task_runs(queue: PgQueue) -> None:
    """In sizes beside which that of a process, which nobody knows beforehand, is nothing."""

    def reserve(gibibytes: int) -> int:
        size, flags = gibibytes * GIBIBYTE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            return len(mmap.mmap(-1, size, flags=flags, prot=mmap.PROT_READ)) // GIBIBYTE
        except OSError as error:
            raise MemoryError from error

    limited = in_child(queue, reserve, memory_limit=64 * GIBIBYTE)
    unlimited = in_child(queue, reserve, name="unlimited")
    cramped = in_child(queue, reserve, name="cramped", memory_limit=16 * 2**20)
    jobs = [limited.delay(32), unlimited.delay(65), limited.delay(65), limited.delay(33)]
    too_small = cramped.delay(1).id

    endings(Worker(queue, concurrency=1))

    fits, elsewhere, fits_not, fits_again = (job_of(queue, job.id) for job in jobs)
    assert (fits.result, elsewhere.result, fits_again.result) == (32, 65, 33)
    assert bad_attempts(queue, fits_not.id) == ["failed"]
    assert "raise it well above that" in (job_of(queue, too_small).last_error or "")


@pytest.mark.parametrize("why", ["its handler leaves a thread", "MemoryError"])
def test_a_child_that_is_not_kept_is_killed(queue: PgQueue, tmp_path: Path, why: str) -> None:
    def resist(pid: str) -> None:
        Path(pid).write_text(str(os.getpid()))
        if why == "MemoryError":
            raise MemoryError
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Thread(target=time.sleep, args=(600,)).start()

    def look(pid: str) -> None:
        wait_until(lambda: is_gone(int(Path(pid).read_text())), what="the first child is gone")

    pid = str(tmp_path / "pid")
    in_child(queue, resist).delay(pid)
    looking = in_child(queue, look).delay(pid).id

    endings(Worker(queue, concurrency=1))

    assert job_of(queue, looking).outcome == "succeeded"


def test_what_a_handler_returns_and_raises_arrives(queue: PgQueue) -> None:
    def answer(what: str, value: dict[str, Any] | None = None) -> Any:
        match what:
            case "cancel":
                return Cancel("enough")
            case "discard":
                raise Discard("not for me")
            case "snooze":
                return Snooze(timedelta(hours=1))
            case "exit":
                sys.exit(3)
            case "error":
                raise ZeroDivisionError("by naught")
            case "unserialisable":
                return object()
        return value

    task = in_child(queue, answer)
    given = {"text": 'ü\n"', "number": 1.5, "list": [None, True, 2**70]}
    echoed = task.delay("echo", given).id
    jobs = {what: task.delay(what).id for what in ("cancel", "discard", "snooze", "exit", "error")}
    unserialisable = task.delay("unserialisable").id

    endings(Worker(queue))

    assert result(queue, echoed) == given
    outcomes = {what: job_of(queue, job).outcome for what, job in jobs.items()}
    assert outcomes == {
        "cancel": "cancelled",
        "discard": "failed",
        "snooze": None,
        "exit": "failed",  # as in a thread
        "error": "failed",
    }
    assert job_of(queue, jobs["error"]).last_error == "by naught"
    assert list(result(queue, unserialisable)) == ["unserialisable_result"]


def test_a_child_has_connections_of_its_own_and_leaves_those_of_its_worker_alone(
    queue: PgQueue, engine: Engine
) -> None:
    sessions = scoped_session(sessionmaker(engine))
    backend = text("SELECT pg_backend_pid()")
    ours = {sessions.scalar(backend)}  # a transaction that is open in this thread
    with engine.connect() as idle:
        ours.add(idle.scalar(backend))

    def read() -> list[int]:
        with queue.session() as session:
            return [session.scalar(backend), sessions.scalar(backend)]

    task = in_child(queue, read)
    first, second = task.delay().id, task.delay().id

    assert endings(Worker(queue, concurrency=1)) == {"succeeded": 2}

    assert not ours & {*result(queue, first), *result(queue, second)}
    assert result(queue, first)[0] == result(queue, second)[0]  # its pool is kept
    assert sessions.scalar(backend) in ours
    sessions.remove()


def test_output_and_log_lines_of_a_child_go_where_those_of_its_worker_go(
    queue: PgQueue, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = logging.FileHandler(tmp_path / "log")
    logger = logging.getLogger("tests.children")
    logger.addHandler(log)
    print("before", end="")

    def speak() -> int:
        print("printed")
        logger.warning("logged")
        return len(os.read(0, 1))

    job = in_child(queue, speak).delay().id

    endings(Worker(queue))
    logger.removeHandler(log)
    log.close()

    assert capfd.readouterr().out == "beforeprinted\n"
    assert (tmp_path / "log").read_text() == "logged\n"
    assert result(queue, job) == 0  # its stdin is empty


def test_a_child_learns_of_a_cancel_and_the_job_after_it_does_not(queue: PgQueue) -> None:
    def cancel_itself(ctx: JobContext) -> bool:
        with queue.session() as session, session.begin():
            queue.cancel(session, ctx.job_id)
        wait_until(ctx.is_cancelled, what="the child reads of the cancel")
        return ctx.is_stopping()

    def look(ctx: JobContext) -> list[Any]:
        return [os.getpid(), ctx.is_cancelled()]

    cancelled = in_child(queue, cancel_itself).delay().id
    after = in_child(queue, look).delay().id

    endings(Worker(queue, concurrency=1))

    assert job_of(queue, cancelled).outcome == "cancelled"
    assert result(queue, after)[1] is False


@pytest.mark.parametrize("asked_before", [False, True])
def test_a_cancel_may_kill_a_running_handler(
    queue: PgQueue, tmp_path: Path, asked_before: bool
) -> None:
    def hang(pid: str) -> None:
        Path(pid).write_text(str(os.getpid()))
        ctypes.PyDLL(None).usleep(600_000_000)

    task = in_child(queue, hang, max_attempts=2)
    pid = tmp_path / "pid"
    job = task.delay(str(pid)).id

    with working(Worker(queue, concurrency=1)):
        wait_until(lambda: pid.exists() and pid.read_text(), what="the handler starts")
        with queue.session() as session, session.begin():
            if asked_before:
                queue.cancel(session, job)
            assert queue.cancel(session, job, kill=True) is Change.CANCEL_REQUESTED
        wait_until(lambda: job_of(queue, job).outcome, what="the job ends")

    assert job_of(queue, job).outcome == "cancelled"
    assert bad_attempts(queue, job) == ["cancelled"]
    wait_until(lambda: is_gone(int(pid.read_text())), what="the child is gone")


def test_a_killed_job_that_is_requeued_is_not_killed_again(queue: PgQueue, tmp_path: Path) -> None:
    def hang_once(ctx: JobContext, gate: str) -> str:
        if not Path(gate).exists():
            Path(gate).touch()
            time.sleep(600)
        with queue.session() as session, session.begin():
            queue.cancel(session, ctx.job_id)
        wait_until(ctx.is_cancelled, what="the child reads of the cancel")
        Path(gate).write_text("heard")
        return "unharmed"

    gate = tmp_path / "gate"
    job = in_child(queue, hang_once).delay(str(gate)).id

    with working(Worker(queue, concurrency=1)):
        wait_until(gate.exists, what="the handler starts")
        with queue.session() as session, session.begin():
            queue.cancel(session, job, kill=True)
        wait_until(lambda: job_of(queue, job).outcome, what="the job ends")
        with queue.session() as session, session.begin():
            queue.requeue(session, job)
        wait_until(lambda: job_of(queue, job).outcome, what="the job ends again")

    assert gate.read_text() == "heard"
    assert bad_attempts(queue, job) == ["cancelled"]


def test_a_running_handler_in_a_thread_cannot_be_killed(queue: PgQueue) -> None:
    refused = []

    @queue.task(name="in_thread")
    def kill_itself(ctx: JobContext) -> None:
        with queue.session() as session, session.begin():
            try:
                queue.cancel(session, ctx.job_id, kill=True)
            except OptionError as error:
                refused.append(str(error))

    running, waiting = kill_itself.delay().id, kill_itself.options(delay=timedelta(1)).delay().id

    assert endings(Worker(queue)) == {"succeeded": 1}  # nothing was changed
    with queue.session() as session, session.begin():
        assert queue.cancel(session, waiting, kill=True) is Change.CANCELLED

    [words] = refused
    assert words.startswith(f"job {running} of task in_thread")
    assert "ctx.is_cancelled()" in words


def test_a_child_that_outlives_the_grace_is_killed_and_its_job_given_back(
    queue: PgQueue, tmp_path: Path
) -> None:
    def stay(started: str) -> None:
        Path(started).write_text(str(os.getpid()))
        ctypes.PyDLL(None).usleep(60_000_000)

    started = tmp_path / "started"
    job = in_child(queue, stay).delay(str(started)).id

    with working(Worker(queue, grace=timedelta(0))):
        wait_until(lambda: started.exists() and started.read_text(), what="the handler starts")

    assert job_of(queue, job).attempts == 0
    assert bad_attempts(queue, job) == ["interrupted"]
    wait_until(lambda: is_gone(int(started.read_text())), what="the child is gone")


def test_a_child_of_a_worker_that_was_declared_dead_is_killed(queue: PgQueue) -> None:
    def declare_dead(ctx: JobContext) -> int:
        if ctx.attempt == 1:
            with queue.session() as session, session.begin():
                session.execute(text("UPDATE pgqueue.workers SET dead_at = clock_timestamp()"))
            time.sleep(300)
        return ctx.attempt

    job = in_child(queue, declare_dead, max_attempts=2).delay().id

    with working(Worker(queue)):
        wait_until(lambda: job_of(queue, job).outcome, what="another attempt ends")

    assert result(queue, job) == 2


def test_the_worker_ends_with_the_server_of_its_children(queue: PgQueue) -> None:
    """It has threads by then, and a process with threads is not forked."""

    def kill_server() -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    job = in_child(queue, kill_server).delay().id

    with pytest.raises(WorkerBroken, match="server of the child processes"):
        Worker(queue).run()

    assert bad_attempts(queue, job) == ["crashed"]


def test_ctx_finish_says_that_it_needs_a_thread(queue: PgQueue) -> None:
    def finish(ctx: JobContext) -> None:
        with ctx.finish():
            pass

    job = in_child(queue, finish).delay().id

    endings(Worker(queue))

    assert "omit executor='process'" in (job_of(queue, job).last_error or "")


def test_what_a_handler_leaves_in_its_process_is_not_there_for_the_next_job(
    queue: PgQueue, tmp_path: Path
) -> None:
    def leave(what: str) -> int:
        match what:
            case "thread":
                threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
            case "timer":
                signal.setitimer(signal.ITIMER_REAL, 600)
            case "limit":
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            case "handler of a signal":
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            case "blocked signal":
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
            case "umask":
                os.umask(0o777)
            case "directory":
                os.chdir(tmp_path)
            case "environment":
                os.environ["LEFT_BY"] = "a handler"
        return os.getpid()

    places = ["thread", "timer", "limit", "umask", "directory", "environment"]
    places += ["handler of a signal", "blocked signal"]
    leaving, next_one = in_child(queue, leave), in_child(queue, os.getpid, name="next")
    jobs = [(leaving.delay(what).id, next_one.delay().id) for what in places]

    assert endings(Worker(queue, concurrency=1)) == {"succeeded": 2 * len(places)}

    kept = [
        what
        for what, (left, after) in zip(places, jobs, strict=True)
        if result(queue, left) == result(queue, after)
    ]
    assert kept == []


def test_a_crash_that_another_job_may_have_caused_is_tried_again_in_a_fresh_child(
    queue: PgQueue, tmp_path: Path
) -> None:
    damage: list[int] = []
    starts = tmp_path / "starts"

    def harm() -> None:
        damage.append(os.getpid())

    def suffer(always: bool) -> list[int]:
        with starts.open("a") as notes:
            notes.write(f"{always} ")
        if damage or always:
            os.kill(os.getpid(), signal.SIGKILL)
        return damage

    harming, suffering = in_child(queue, harm), in_child(queue, suffer)
    jobs = [harming.delay(), suffering.delay(False), harming.delay(), suffering.delay(True)]

    endings(Worker(queue, concurrency=1))

    unharmed, culprit = jobs[1].id, jobs[3].id
    assert result(queue, unharmed) == []
    assert bad_attempts(queue, unharmed) == []
    assert bad_attempts(queue, culprit) == ["crashed"]
    assert starts.read_text().split() == ["False"] * 2 + ["True"] * 2


@pytest.mark.parametrize("why", ["cancel", "stop"])
def test_nothing_is_tried_again_for_a_cancelled_job_or_in_a_worker_that_stops(
    queue: PgQueue, tmp_path: Path, why: str
) -> None:
    starts = tmp_path / "starts"

    def die(ctx: JobContext) -> None:
        with starts.open("a") as notes:
            notes.write("start ")
        wait_until(lambda: ctx.is_cancelled() or ctx.is_stopping(), what="a cancel or a stop")
        os.kill(os.getpid(), signal.SIGKILL)

    in_child(queue, os.getpid, name="earlier").delay()
    job = in_child(queue, die).delay().id

    with working(Worker(queue, concurrency=1)):
        wait_until(starts.exists, what="the handler starts")
        if why == "cancel":
            with queue.session() as session, session.begin():
                queue.cancel(session, job)
            wait_until(lambda: job_of(queue, job).outcome, what="the job ends")

    assert starts.read_text().split() == ["start"]
    assert (job_of(queue, job).outcome, job_of(queue, job).attempts) == {
        "cancel": ("cancelled", 1),
        "stop": (None, 0),
    }[why]


def test_half_a_message_is_waited_for_until_the_timeout(queue: PgQueue) -> None:
    def begin_to_answer() -> None:
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                    os.write(int(number), struct.pack("!I", 100) + b"half")
        time.sleep(600)

    job = in_child(queue, begin_to_answer, timeout=SOON).delay().id

    assert endings(Worker(queue, concurrency=1)) == {"failed": 1}
    assert bad_attempts(queue, job) == ["timeout"]


def test_a_child_that_takes_no_job_is_killed_at_the_timeout(queue: PgQueue) -> None:
    def size(text: str) -> int:
        return len(text)

    first = in_child(queue, os.getpid, name="pid").delay().id
    task = in_child(queue, size, timeout=SOON)

    with working(Worker(queue, concurrency=1)):
        wait_until(lambda: job_of(queue, first).outcome, what="a child is idle")
        os.kill(result(queue, first), signal.SIGSTOP)
        late = task.delay("x" * 250_000).id  # more than the socket holds
        wait_until(lambda: job_of(queue, late).outcome, what="the job ends")

    assert bad_attempts(queue, late) == ["timeout"]


def test_a_context_variable_of_one_job_is_not_set_in_the_next(queue: PgQueue) -> None:
    variable = ContextVar("variable", default="unset")

    def read_and_set() -> list[Any]:
        found = variable.get()
        variable.set("set")
        return [os.getpid(), found]

    task = in_child(queue, read_and_set)
    first, second = task.delay().id, task.delay().id

    endings(Worker(queue, concurrency=1))

    assert result(queue, first) == result(queue, second)


def test_an_answer_that_cannot_be_read_ends_the_attempt_and_its_process(
    queue: PgQueue, tmp_path: Path
) -> None:
    class Unreadable(timedelta):
        def __reduce__(self) -> Any:
            return int, ("no number",)

    class Unsendable(timedelta): ...

    def answer(how: str, pids: str) -> Snooze | Cancel:
        Path(pids, str(os.getpid())).touch()
        match how:
            case "unreadable":
                return Snooze(Unreadable(hours=1))
            case "unsendable":
                return Snooze(Unsendable(hours=1))
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                    os.write(int(number), b"printed into the wrong file")
        time.sleep(600)
        return Cancel()

    task = in_child(queue, answer)
    jobs = {how: task.delay(how, str(tmp_path)).id for how in ("unreadable", "unsendable", "text")}

    with working(Worker(queue, concurrency=1)):
        wait_until(lambda: all(job_of(queue, job).outcome for job in jobs.values()), what="all end")
        unreadable = [int(path.name) for path in tmp_path.iterdir()]
        wait_until(lambda: all(map(is_gone, unreadable)), what="the processes are gone")

    errors = {how: job_of(queue, job).last_error or "" for how, job in jobs.items()}
    assert "cannot be unpickled" in errors["unreadable"]
    assert "cannot be pickled" in errors["unsendable"]
    assert "no message" in errors["text"]
    assert all(bad_attempts(queue, job) == ["failed"] for job in jobs.values())


def test_the_number_of_a_child_that_has_ended_is_not_killed(
    queue: PgQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another program's by then."""
    job = in_child(queue, os.getpid, name="pid").delay().id
    killed: set[int] = set()

    def noting(kill: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def note(pid: int, number: int) -> None:
            killed.add(pid)
            kill(pid, number)

        return note

    with working(Worker(queue, concurrency=1)):
        wait_until(lambda: job_of(queue, job).outcome, what="the job ends")
        pid = result(queue, job)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), what="the child is waited for")
        for name in ("kill", "killpg"):
            monkeypatch.setattr(os, name, noting(getattr(os, name)))

    assert pid not in killed


def test_a_frozen_server_keeps_neither_a_timeout_nor_a_stop(queue: PgQueue) -> None:
    def freeze() -> None:
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(600)

    late = in_child(queue, freeze, timeout=SOON).delay().id
    waiting = in_child(queue, os.getpid, name="pid")

    with working(Worker(queue, concurrency=1, grace=timedelta(0))):
        wait_until(lambda: job_of(queue, late).outcome, what="the timeout is carried out")
        job = waiting.delay().id
        wait_until(lambda: is_leased(queue, job), what="the job waits for a child")
        began = time.monotonic()

    assert time.monotonic() - began < promised(3)
    assert bad_attempts(queue, late) == ["timeout"]
    assert (job_of(queue, job).attempts, bad_attempts(queue, job)) == (0, [])


def test_only_a_job_that_is_cancelled_is_killed(queue: PgQueue) -> None:
    """Older code leaves the request to kill a job when it requeues the job."""

    def run_on(ctx: JobContext) -> str:
        request = text(
            "UPDATE pgqueue.jobs SET kill_requested_at = clock_timestamp() WHERE id = :id"
        )
        with queue.session() as session, session.begin():
            session.execute(request, {"id": ctx.job_id})
        after = in_turn.delay().id  # its cancel is read after the request to kill
        wait_until(lambda: is_leased(queue, after), what="another handler runs")
        with queue.session() as session, session.begin():
            queue.cancel(session, after)
        wait_until(lambda: job_of(queue, after).outcome, what="a later cancel is carried out")
        return "unharmed"

    @queue.task(name="in_turn")
    def in_turn(ctx: JobContext) -> None:
        wait_until(ctx.is_cancelled, what="the handler reads of its cancel")

    job = in_child(queue, run_on).delay().id

    endings(Worker(queue, concurrency=2))

    assert result(queue, job) == "unharmed"


@pytest.mark.journey
def test_no_child_outlives_a_killed_worker(database_url: str, tmp_path: Path) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(modules=["process_tasks"])
        with rig.session() as session, session.begin():
            jobs = [process_tasks.wait_in_process.enqueue(session, "never").id]
            jobs.append(process_tasks.spin.enqueue(session).id)
        rig.until_started(*jobs)
        notes = rig.notes("start")
        pids = {note[name] for note in notes for name in ("pid", "server")}
        assert len(pids) == 3
        assert not any(map(is_gone, pids))

        worker.kill()

        rig.until(lambda: all(map(is_gone, pids)), what="the children and their server are gone")


@pytest.mark.journey
def test_a_signal_to_all_processes_lets_a_handler_finish(database_url: str, tmp_path: Path) -> None:
    """As Ctrl-C in a terminal, and as a supervisor that stops a whole group."""
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(grace=60, modules=["process_tasks"])
        with rig.session() as session, session.begin():
            job = process_tasks.wait_in_process.enqueue(session, "go").id
        rig.until_started(job)
        [note] = rig.notes("start")

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            for name in ("pid", "server"):
                os.kill(note[name], number)
        worker.send(signal.SIGTERM)
        rig.until(lambda: "stopping" in worker.log.read_text())
        rig.open("go")

        assert worker.exit_code() == 0
        assert (rig.outcome(job), rig.attempts(job)) == ("succeeded", 1)
        assert is_gone(note["pid"])
        assert is_gone(note["server"])


SCRIPT = """
import sys
from pgqueue import PgQueue, Worker

queue = PgQueue(sys.argv[1])

@queue.task(executor="process")
def double(number: int) -> int:
    return 2 * number

double.delay(21)
print(Worker(queue).run_until_empty(timeout=60))
"""


@pytest.mark.journey
def test_a_script_without_a_main_guard_enqueues_once(database_url: str, tmp_path: Path) -> None:
    script = tmp_path / "twice.py"
    script.write_text(SCRIPT)

    done = subprocess.run([sys.executable, script, database_url], capture_output=True, text=True)

    assert done.stdout.strip() == "{'succeeded': 1}", done.stderr


def test_a_process_that_a_handler_forks_neither_answers_nor_runs_a_job(queue: PgQueue) -> None:
    def fork(leaves_by: str) -> list[int]:
        child = os.getpid()
        pid = os.fork()
        if pid == 0 and leaves_by == "sys.exit":
            sys.exit(3)
        if pid:
            os.waitpid(pid, 0)
        return [child, os.getpid()]

    task = in_child(queue, fork, timeout=timedelta(seconds=60))
    jobs = [task.delay(how).id for how in ("return", "sys.exit")]

    assert endings(Worker(queue, concurrency=1)) == {"succeeded": 2}
    for job in jobs:
        child, answered = result(queue, job)
        assert child == answered


def test_a_process_that_a_handler_forks_can_be_terminated(queue: PgQueue) -> None:
    """The child itself ignores SIGTERM, which the worker handles; what it forks does not."""

    def fork_and_end() -> int:
        pid = os.fork()
        if not pid:
            signal.pause()
            os._exit(0)
        os.kill(pid, signal.SIGTERM)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    task = in_child(queue, fork_and_end, timeout=timedelta(seconds=60))
    job = task.delay()

    assert endings(Worker(queue)) == {"succeeded": 1}
    assert result(queue, job.id) == -signal.SIGTERM


def test_a_thread_that_a_handler_has_left_reports_nothing_of_the_next_job(queue: PgQueue) -> None:
    left: list[JobContext] = []

    def report(ctx: JobContext, number: int) -> None:
        for each in (*left, ctx):
            each.progress(number, 2, f"of job {each.job_id}")
        left.append(ctx)

    task = in_child(queue, report)
    jobs = [task.delay(number).id for number in (1, 2)]

    assert endings(Worker(queue, concurrency=1)) == {"succeeded": 2}
    notes = [(job_of(queue, job).progress or {})["note"] for job in jobs]
    assert notes == [f"of job {job}" for job in jobs]


def test_a_child_records_steps_of_its_own(queue: PgQueue) -> None:
    def charge(session: Session, amount: int) -> int:
        tells.enqueue(session, amount)
        return os.getpid()

    def handler(ctx: JobContext) -> list[int]:
        first = ctx.step("charge", charge, 7)
        if ctx.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ctx.sleep("a moment", timedelta(milliseconds=1))
        return [first, os.getpid(), *ctx.gather("both", [doubled.job(1), doubled.job(2)])]

    tells = queue.task(name="tells")(lambda amount: amount)
    doubled = queue.task(name="doubled")(lambda number: 2 * number)
    job = in_child(queue, handler, max_attempts=3).delay().id

    with running(Worker(queue, concurrency=2)):
        wait_until(lambda: job_of(queue, job).finished_at is not None)

    charged_by, ended_by, *doubles = result(queue, job)
    assert doubles == [2, 4]
    assert len({charged_by, ended_by, os.getpid()}) == 3
    with queue.session() as session:
        told = session.scalars(select(Job).where(Job.task == "tells")).all()
    assert [one.result for one in told] == [7], "the step has run and enqueued once"


def test_a_child_whose_lease_has_passed_on_records_no_step(queue: PgQueue, tmp_path: Path) -> None:
    runs, go, lost = (tmp_path / name for name in ("runs", "go", "lost"))

    def handler(ctx: JobContext) -> None:
        runs.touch()
        wait_until(go.exists)
        try:
            ctx.step("late", lambda: 1)
        except LeaseLost:
            lost.touch()

    in_child(queue, handler).delay()
    with running(Worker(queue, concurrency=1)):
        wait_until(runs.exists)
        with queue.session() as session, session.begin():
            session.execute(text("UPDATE pgqueue.leases SET attempt = attempt + 1"))
        go.touch()
        wait_until(lost.exists)

    assert lost.exists()
    with queue.session() as session:
        assert session.execute(text("SELECT count(*) FROM pgqueue.job_steps")).scalar() == 0


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_step_has_the_isolation_level_of_the_engine(database_url: str, executor: Any) -> None:
    engine = create_engine(database_url, isolation_level="REPEATABLE READ")
    queue = PgQueue(engine)

    def level(session: Session) -> Any:
        return session.execute(text("SHOW transaction_isolation")).scalar()

    def handler(ctx: JobContext) -> Any:
        return ctx.step("level", level)

    job = in_child(queue, handler, executor=executor).delay().id
    Worker(queue, concurrency=1).run_until_empty(timeout=60)

    assert result(queue, job) == "repeatable read"
    engine.dispose()
