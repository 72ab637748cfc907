"""What an enqueue does that finds a limit full: wait, be refused, or cancel the older job."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import key_contest
import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session
from worker_rig import running, wait_until

from pgqueue import (
    DuplicateJob,
    Job,
    JobContext,
    JobStatus,
    Limit,
    OptionError,
    PgQueue,
    Unique,
    Worker,
)

CLIENTS = 6


class Builds:
    """A task in each of the forms that the page about limits names."""

    def __init__(self, engine: Engine) -> None:
        self.queue = PgQueue(engine)
        self.gate = threading.Event()
        self.started: list[int] = []
        self.locks: dict[int, threading.Lock] = defaultdict(threading.Lock)
        self.overlaps: list[int] = []
        one = Limit(1, by="page")
        self.cancels = self.queue.task(
            name="cancels", limit=one, unique=Unique(by="page", on_conflict="cancel")
        )(self._build)
        self.newest_waits = self.queue.task(
            name="newest_waits",
            limit=one,
            unique=Unique(by="page", until="started", on_conflict="cancel"),
        )(self._build)
        self.oldest_waits = self.queue.task(
            name="oldest_waits", limit=one, unique=Unique(by="page", until="started")
        )(self._build)

    def _build(self, ctx: JobContext, page: int, number: int = 0) -> None:
        """Ends when the gate is open, or when the job is cancelled."""
        if not self.locks[page].acquire(blocking=False):
            self.overlaps.append(page)
            return
        self.started.append(number)
        while not self.gate.wait(0.01):
            if ctx.is_cancelled():
                break
        self.locks[page].release()


@pytest.fixture
def builds(engine: Engine) -> Iterator[Builds]:
    builds = Builds(engine)
    yield builds
    with Session(engine) as session:
        assert builds.queue.check(session) == []


def outcomes(session: Session) -> list[str | None]:
    session.expire_all()
    return list(session.scalars(select(Job.outcome).order_by(Job.id)))


def test_a_waiting_holder_is_cancelled_and_a_new_job_has_its_key(
    builds: Builds, session: Session
) -> None:
    first = builds.cancels.enqueue(session, 7, 1)
    second = builds.cancels.enqueue(session, 7, 2)
    other = builds.cancels.enqueue(session, 8)

    session.refresh(first)
    assert (first.status, first.held_unique_key) == (JobStatus.CANCELLED, None)
    assert (second.is_new, second.status, second.args["number"]) == (True, JobStatus.BLOCKED, 2)
    assert builds.cancels.options(on_duplicate="return").enqueue(session, 7).id == second.id
    assert other.is_new


def test_nothing_is_cancelled_if_the_transaction_is_rolled_back(
    builds: Builds, session: Session
) -> None:
    first = builds.cancels.enqueue(session, 7)
    session.commit()
    builds.cancels.enqueue(session, 7)
    session.rollback()

    assert (first.status, first.held_unique_key) == (JobStatus.BLOCKED, first.unique_key)


def test_a_running_holder_is_asked_to_stop_and_the_new_job_starts_after_it(
    builds: Builds, session: Session
) -> None:
    builds.cancels.enqueue(session, 7, 1)
    session.commit()
    with running(Worker(builds.queue)):
        wait_until(lambda: builds.started == [1])
        builds.cancels.enqueue(session, 7, 2)
        session.commit()
        wait_until(lambda: builds.started == [1, 2])
        builds.gate.set()
        wait_until(lambda: outcomes(session) == ["cancelled", "succeeded"])

    assert builds.overlaps == []


def test_of_many_rows_of_one_key_the_last_is_enqueued(builds: Builds, session: Session) -> None:
    old = builds.cancels.enqueue_many(session, [(page, 0) for page in range(3)])

    ids = builds.cancels.enqueue_many(session, [(1, 1), (9, 1), (2, 1), (1, 2)])

    assert ids[0] == ids[3]
    assert session.get_one(Job, ids[0]).args["number"] == 2
    assert not {*ids} & {*old}
    assert outcomes(session) == [None, "cancelled", "cancelled", None, None, None]


def test_one_runs_and_the_newest_waits(builds: Builds, session: Session) -> None:
    with running(Worker(builds.queue)):
        builds.newest_waits.delay(7, 1)
        wait_until(lambda: builds.started == [1])
        for number in (2, 3, 4):
            builds.newest_waits.delay(7, number)
        builds.gate.set()
        wait_until(lambda: None not in outcomes(session))

    assert outcomes(session) == ["succeeded", "cancelled", "cancelled", "succeeded"]
    assert builds.started == [1, 4]


def test_one_runs_and_the_oldest_waits(builds: Builds, session: Session) -> None:
    with running(Worker(builds.queue)):
        builds.oldest_waits.delay(7, 1)
        wait_until(lambda: builds.started == [1])
        jobs = [builds.oldest_waits.delay(7, number) for number in (2, 3, 4)]
        builds.gate.set()
        wait_until(lambda: None not in outcomes(session))

    assert [job.is_new for job in jobs] == [True, False, False]
    assert builds.started == [1, 2]


@pytest.mark.parametrize("form", ["cancels", "newest_waits"])
def test_the_newest_of_each_key_is_done_while_clients_enqueue_and_workers_run(
    builds: Builds, session: Session, form: str
) -> None:
    task = getattr(builds, form)
    builds.gate.set()

    def enqueue(client: int) -> None:
        for number in range(20):
            task.delay(number % 2, client)

    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(running(Worker(builds.queue)))
        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(enqueue, range(CLIENTS)))
        newest = [task.delay(page, 99).id for page in range(2)]
        wait_until(lambda: None not in outcomes(session))

    assert [session.get_one(Job, job_id).outcome for job_id in newest] == ["succeeded"] * 2
    assert set(outcomes(session)) <= {"succeeded", "cancelled"}
    assert builds.overlaps == []
    assert session.query(Job).count() == CLIENTS * 20 + 2


@pytest.mark.parametrize(("until", "many"), [("finished", True), ("started", False)])
def test_of_eight_clients_that_cancel_one_key_the_last_job_is_left(
    session: Session, database_url: str, until: str, many: bool
) -> None:
    seen = key_contest.compete(database_url, until, "cancel", many)

    ids = [each for one in seen for each in one]
    left = set(session.scalars(select(Job.id).where(Job.outcome.is_(None))))
    assert len(ids) == len(set(ids)) == key_contest.CLIENTS * key_contest.ROUNDS * (1 + many)
    assert len(left) == 1 + many
    assert session.execute(text("SELECT * FROM pgqueue.invariant_violations")).all() == []


def test_a_holder_that_is_not_cancelled_refuses_the_new_job(
    builds: Builds, session: Session
) -> None:
    cancels = Unique(key="k", on_conflict="cancel")

    @builds.queue.task(name="other", unique=Unique(key="k"))
    def other() -> None: ...

    @builds.queue.task(
        name="fails", max_attempts=1, unique=Unique(until="succeeded", on_conflict="cancel")
    )
    def fails() -> None:
        raise ValueError

    @builds.queue.task(name="itself", max_attempts=1, unique=Unique(on_conflict="cancel"))
    def itself() -> None:
        itself.delay()

    held, failed, run = other.delay(), fails.delay(), itself.delay()
    assert Worker(builds.queue).run_until_empty(timeout=60)["failed"] == 2

    error = session.get_one(Job, run.id).last_error
    assert "which is running this code, holds the unique key" in str(error)
    with pytest.raises(DuplicateJob, match=f"job {failed.id} .* has ended, .* not cancelled"):
        fails.enqueue(session)
    held = other.enqueue(session)
    with pytest.raises(DuplicateJob, match=f"job {held.id} .* is of another task"):
        builds.cancels.options(unique=cancels).enqueue(session, 7)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"across": "queues"}, "across='queues' and on_conflict='cancel' are given"),
        ({"at_most": timedelta(1)}, "moves none; omit at_most"),
    ],
)
def test_what_a_cancel_cannot_do_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Unique(on_conflict="cancel", **given)


def test_an_enqueue_that_cannot_cancel_is_refused(builds: Builds, session: Session) -> None:
    with pytest.raises(OptionError, match="cannot change another job"):
        builds.cancels.job(7)
    with pytest.raises(OptionError, match="changes no job on another node"):
        builds.cancels.options(node=7)
    Worker(builds.queue).run_until_empty()
    with pytest.raises(OptionError, match="may change another job"):
        builds.queue.enqueue_by_name(session, "cancels", {"page": 7})


def enqueue_at_most(session: Session, most: int, page: int, builds: Builds) -> Job | None:
    """The recipe of the page about limits."""
    for place in range(most):
        task = builds.cancels.options(unique=Unique(key=f"build {page} {place}"))
        job = task.enqueue(session, page)
        if job.is_new:
            return job
    return None


def test_of_many_clients_as_many_enqueue_as_there_are_places(
    builds: Builds, session: Session
) -> None:
    together = threading.Barrier(CLIENTS)

    def enqueue(_: int) -> bool:
        with builds.queue.session() as own, own.begin():
            together.wait(60)
            return enqueue_at_most(own, 3, 7, builds) is not None

    with ThreadPoolExecutor(CLIENTS) as clients:
        assert sorted(clients.map(enqueue, range(CLIENTS))) == [False] * 3 + [True] * 3
    builds.gate.set()
    assert Worker(builds.queue).run_until_empty() == {"succeeded": 3}
    assert enqueue_at_most(session, 3, 7, builds) is not None
