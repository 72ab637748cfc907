"""The life of jobs, against a model of it: whatever the order of events, nothing is lost, nothing
is done twice, and ``queue.check`` finds nothing."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import Engine, create_engine, select, text
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import (
    ERROR,
    LogicalWorker,
    declare_dead,
    enqueue,
    rescue,
    violations,
    worker_settings,
)
from pgqueue import DuplicateJob, Job, PgQueue
from pgqueue.outcomes import (
    Cancelled,
    Exhausted,
    Failed,
    Interrupted,
    Outcome,
    Released,
    Retried,
    Snoozed,
    Succeeded,
)
from pgqueue.repository.claim import Claimed
from pgqueue.repository.jobs import Change
from pgqueue.repository.settle import Attempts

TABLES = ("jobs", "message_queue", "leases", "job_attempts", "dead_letters", "workers")
KEYS = st.sampled_from([None, None, None, "a", "b"])
OUTCOMES: st.SearchStrategy[Outcome] = st.sampled_from(
    [
        Succeeded(),
        Succeeded({"total": 3}),
        Retried(timedelta(0), ERROR),
        Retried(None, ERROR),
        Failed(ERROR),
        Cancelled("enough"),
        Snoozed(timedelta(0)),
        Interrupted(max_interruptions=30_000),
        Released(),
    ]
)


@dataclass
class JobModel:
    """What must be true of one job."""

    id: int
    key: str | None
    max_attempts: int
    outcome: str | None = None
    cancel_requested: bool = False
    lease: tuple[Any, int, int] | None = None
    """Worker, message and attempt of the lease that is committed."""
    locked_by: "Transaction | None" = None
    """The open transaction that holds a message of the job."""
    settled_in: "Transaction | None" = None
    has_leftovers: bool = False
    """Ended while a transaction held its message: a claim drops it later."""
    starts: int = 0
    completions: int = 0

    @property
    def holds_key(self) -> bool:
        """A job that is asked to stop gives up its key: it can only end as cancelled."""
        return self.outcome is None and not self.cancel_requested

    def begin_again(self) -> None:
        self.outcome, self.lease, self.cancel_requested = None, None, False
        self.has_leftovers = False
        self.starts = self.completions = 0


@dataclass(eq=False)
class Transaction:
    """T: what one claimer has claimed and settled in its own transaction, but not committed."""

    running: list[Claimed] = field(default_factory=list)
    settled: list[tuple[Claimed, Outcome, str | None]] = field(default_factory=list)


@dataclass(eq=False)
class Actor:
    """A logical worker, and what it remembers."""

    worker: LogicalWorker
    is_dead: bool = False
    claimed: list[Claimed] = field(default_factory=list)
    started: set[tuple[int, int]] = field(default_factory=set)
    transaction: Transaction | None = None


def when(condition: Callable[["Life"], Any]) -> Callable[[Any], Any]:
    """A rule that is only tried when there is something for it to do."""
    return precondition(lambda life: bool(condition(life)))


class Life(RuleBasedStateMachine):
    def __init__(self, engine: Engine, operator: Engine) -> None:
        super().__init__()
        self.engine, self.operator = engine, operator
        self.queue = PgQueue()
        self.jobs: dict[int, JobModel] = {}
        self.zombies: list[tuple[Actor, Claimed]] = []
        self.all_actors: list[Actor] = []
        with operator.begin() as connection:
            for table in TABLES:
                connection.execute(text(f"DELETE FROM pgqueue.{table}"))
        self.lessees = [self._new_actor(), self._new_actor()]
        self.holders = [self._new_actor(), self._new_actor()]

    # The application

    @rule(key=KEYS, max_attempts=st.integers(1, 3))
    def enqueue(self, key: str | None, max_attempts: int) -> None:
        holder = self._holder_of(key)
        if holder is not None and holder.settled_in is not None:
            return  # it would wait for that transaction
        with self.operator.begin() as connection:
            id = enqueue(connection, key=key, max_attempts=max_attempts)
        if holder is not None:
            assert id == holder.id
            return
        assert id not in self.jobs
        self.jobs[id] = JobModel(id, key, max_attempts)

    @when(lambda life: life.free_jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.free_jobs))
        with self.operator.begin() as connection:
            change = self.queue.cancel(connection, job.id)
        if job.outcome is not None:
            assert change is Change.UNCHANGED
        elif job.lease is not None:
            assert change is Change.CANCEL_REQUESTED
            job.cancel_requested = True
        else:
            assert change is Change.CANCELLED
            job.outcome = "cancelled"
            job.has_leftovers = job.locked_by is not None

    @when(lambda life: life.ended_jobs)
    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.ended_jobs))
        holder = self._holder_of(job.key)
        if holder is not None and holder.settled_in is not None:
            return  # it would wait for that transaction
        change: Change | None = None
        with self.operator.begin() as connection:
            try:
                change = self.queue.requeue(connection, job.id)
            except DuplicateJob:
                assert connection.scalar(text("SELECT 1")) == 1
        if job.outcome == "succeeded" or job.locked_by is not None:
            assert change is Change.UNCHANGED
        elif change is Change.UNCHANGED:
            # Its old message is being dropped by a claim that is not committed yet.
            assert job.has_leftovers
            assert self.open_transactions
        elif holder is not None:
            assert change is None
        else:
            assert change is Change.REQUEUED
            job.begin_again()

    @when(lambda life: life.ended_jobs)
    @rule(data=st.data())
    def delete_an_ended_job(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.ended_jobs))
        if job.locked_by is not None or job.has_leftovers:
            return  # the next claim drops what is left of it
        with Session(self.operator) as session, session.begin():
            session.delete(session.get_one(Job, job.id))
        del self.jobs[job.id]

    # Workers

    @rule(data=st.data(), limit=st.integers(1, 3), ahead=st.booleans())
    def claim(self, data: st.DataObject, limit: int, ahead: bool) -> None:
        actor = data.draw(st.sampled_from(self.lessees))
        claimed = actor.worker.claim(limit, ahead=ahead)
        assert len(claimed) <= limit
        assert not (claimed and actor.is_dead)
        for one in claimed:
            job = self.jobs[one.job_id]
            assert job.outcome is None
            assert job.locked_by is None
            assert job.lease is None
            assert not (ahead and (one.crashes or job.max_attempts == 1))
            job.lease = (actor.worker.id, one.message_id, one.attempt)
            actor.claimed.append(one)

    @when(lambda life: life.claimers)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        actor = data.draw(st.sampled_from(self.claimers))
        for one in actor.claimed:
            if one.attempt <= one.max_attempts:
                self._start(actor, one)

    @when(lambda life: life.claimers)
    @rule(data=st.data(), outcome=OUTCOMES)
    def settle(self, data: st.DataObject, outcome: Outcome) -> None:
        actor = data.draw(st.sampled_from(self.claimers))
        claimed = data.draw(st.sampled_from(actor.claimed))
        actor.claimed.remove(claimed)
        outcome = self._possible(actor, claimed, outcome)
        current = self._is_current(actor, claimed)
        settled = Attempts(actor.worker.line, actor.worker.id).settle([(claimed, outcome)])
        assert bool(settled) == current
        for job_outcome in settled.values():
            self._settled(claimed, outcome, job_outcome)

    @when(lambda life: life.claimers)
    @rule(data=st.data())
    def settle_all_succeeded(self, data: st.DataObject) -> None:
        actor = data.draw(st.sampled_from(self.claimers))
        fine = [one for one in actor.claimed if one.attempt <= one.max_attempts]
        actor.claimed = [one for one in actor.claimed if one not in fine]
        for one in fine:
            self._start(actor, one)
        expected = [one for one in fine if self._is_current(actor, one)]
        settled = Attempts(actor.worker.line, actor.worker.id).settle_succeeded(fine)
        all_of_them = dict.fromkeys((one.job_id for one in fine), "succeeded")
        endings = all_of_them if settled is None else settled
        assert endings.keys() == {one.job_id for one in expected}
        for one in expected:
            self._settled(one, Succeeded(), endings[one.job_id])

    # Claims in a transaction of the caller's

    @when(lambda life: life.idle_holders)
    @rule(data=st.data(), limit=st.integers(1, 2))
    def hold(self, data: st.DataObject, limit: int) -> None:
        actor = data.draw(st.sampled_from(self.idle_holders))
        claimed = actor.worker.claim_in_transaction(limit)
        assert not (claimed and actor.is_dead)
        if not claimed:
            actor.worker.transaction.commit()
            return
        actor.transaction = Transaction(running=claimed)
        for one in claimed:
            job = self.jobs[one.job_id]
            assert job.outcome is None
            assert job.lease is None
            assert job.locked_by is None
            job.locked_by = actor.transaction

    @when(lambda life: life.runners)
    @rule(data=st.data(), outcome=OUTCOMES)
    def settle_in_transaction(self, data: st.DataObject, outcome: Outcome) -> None:
        actor, transaction = data.draw(st.sampled_from(self.runners))
        claimed = transaction.running.pop(0)
        outcome = self._possible(actor, claimed, outcome)
        attempts = actor.worker.attempts_in_transaction
        if outcome == Succeeded():
            settled = attempts.settle_one_success(claimed)
        else:
            settled = attempts.settle([(claimed, outcome)])
        assert bool(settled) == (self.jobs[claimed.job_id].outcome is None)
        if not settled:  # it was cancelled meanwhile
            self._roll_back(actor, transaction)
            return
        transaction.settled.append((claimed, outcome, settled[claimed.job_id]))
        self.jobs[claimed.job_id].settled_in = transaction

    @when(lambda life: life.committers)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        actor, transaction = data.draw(st.sampled_from(self.committers))
        actor.worker.transaction.commit()
        actor.transaction = None
        for claimed, outcome, ending in transaction.settled:
            job = self.jobs[claimed.job_id]
            job.starts += claimed.attempt <= job.max_attempts and not isinstance(outcome, Released)
            self._settled(claimed, outcome, ending)
        self._unlock(transaction)

    @when(lambda life: life.open_transactions)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        actor, transaction = data.draw(st.sampled_from(self.open_transactions))
        self._roll_back(actor, transaction)

    # Death

    @rule(data=st.data())
    def freeze(self, data: st.DataObject) -> None:
        """Declare a worker dead that goes on working: its late settles are zombies' too."""
        actor = data.draw(st.sampled_from(self.lessees + self.holders))
        if not actor.is_dead:
            declare_dead(self.operator, actor.worker)
            actor.is_dead = True

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        runtime = data.draw(st.sampled_from([self.lessees, self.holders]))
        actor = data.draw(st.sampled_from(runtime))
        runtime[runtime.index(actor)] = self._crash(actor)

    @when(lambda life: life.all_actors)
    @rule()
    def rescue(self) -> None:
        dead = {actor.worker.id for actor in self.all_actors if actor.is_dead}
        orphans = [
            job for job in self.jobs.values() if job.lease is not None and job.lease[0] in dead
        ]
        rescued = rescue(self.operator)
        assert rescued.keys() == {job.id for job in orphans if job.outcome is None}
        for job in orphans:
            assert job.lease is not None
            attempt, job.lease = job.lease[2], None
            if job.outcome is not None:
                continue
            if job.cancel_requested:
                self._ended(job, "cancelled")
            elif attempt >= job.max_attempts:
                self._ended(job, "failed")
            assert rescued[job.id] == job.outcome

    @when(lambda life: life.zombies)
    @rule(data=st.data(), outcome=OUTCOMES)
    def a_zombie_settles(self, data: st.DataObject, outcome: Outcome) -> None:
        """On a new connection, long after: accepted only if nobody else has acted since."""
        zombie = data.draw(st.sampled_from(self.zombies))
        actor, claimed = zombie
        job = self.jobs.get(claimed.job_id)
        if job is not None and job.settled_in is not None:
            return  # it would wait for that transaction
        self.zombies.remove(zombie)
        outcome = self._possible(actor, claimed, outcome)
        current = self._is_current(actor, claimed)
        with self.engine.connect() as connection:
            attempts = Attempts(connection, actor.worker.id)
            accepted = bool(attempts.settle([(claimed, outcome)]))
            assert accepted == current
            (connection.commit if accepted else connection.rollback)()
        if accepted:
            with self.operator.connect() as connection:
                ending = connection.scalar(select(Job.outcome).where(Job.id == claimed.job_id))
            self._settled(claimed, outcome, ending)

    # What must always hold

    @invariant()
    def check_finds_nothing(self) -> None:
        assert violations(self.operator) == []

    @invariant()
    def the_jobs_are_as_the_model_says(self) -> None:
        with self.operator.connect() as connection:
            rows = connection.execute(
                text("SELECT id, outcome, cancel_requested_at IS NOT NULL FROM pgqueue.jobs")
            ).all()
            leases = connection.execute(
                text("SELECT target_id, worker_id, message_id, attempt FROM pgqueue.leases")
            ).all()
        assert {row[0]: row[1] for row in rows} == {j.id: j.outcome for j in self.jobs.values()}
        unfinished = {job.id for job in self.jobs.values() if job.outcome is None}
        assert {row[0]: tuple(row[1:]) for row in leases if row[0] in unfinished} == {
            job.id: job.lease for job in self.jobs.values() if job.lease and job.id in unfinished
        }

    @invariant()
    def no_job_starts_too_often_or_ends_twice(self) -> None:
        for job in self.jobs.values():
            assert job.starts <= job.max_attempts
            assert job.completions <= 1

    @invariant()
    def a_unique_key_has_one_unfinished_holder(self) -> None:
        keys = Counter(job.key for job in self.jobs.values() if job.key and job.holds_key)
        assert all(count == 1 for count in keys.values())

    def teardown(self) -> None:
        """Everybody dies; one new worker finds and ends every job that is left."""
        for actor in self.all_actors:
            if actor.transaction is not None:
                actor.worker.transaction.rollback()
                self._unlock(actor.transaction)
        living = [actor.worker for actor in self.all_actors if not actor.is_dead]
        declare_dead(self.operator, *living)
        rescue(self.operator)
        last = LogicalWorker(self.engine)
        for _ in range(1000):
            claimed = last.claim(10)
            if not claimed:
                break
            for one in claimed:
                exhausted = one.attempt > one.max_attempts
                assert last.settle(one, Exhausted() if exhausted else Succeeded())
        for actor in self.all_actors:
            actor.worker.close()
        last.close()
        with self.operator.connect() as connection:
            left = text("SELECT count(*) FROM pgqueue.jobs WHERE outcome IS NULL")
            assert connection.scalar(left) == 0
        assert violations(self.operator) == []

    # Who and what the rules may be about

    @property
    def free_jobs(self) -> list[JobModel]:
        """Jobs on whose rows no open transaction has a lock: a call would wait for it."""
        return [job for job in self.jobs.values() if job.settled_in is None]

    @property
    def ended_jobs(self) -> list[JobModel]:
        return [job for job in self.free_jobs if job.outcome is not None]

    @property
    def claimers(self) -> list[Actor]:
        return [actor for actor in self.lessees if actor.claimed]

    @property
    def idle_holders(self) -> list[Actor]:
        return [actor for actor in self.holders if actor.transaction is None]

    @property
    def open_transactions(self) -> list[tuple[Actor, Transaction]]:
        return [(one, one.transaction) for one in self.holders if one.transaction is not None]

    @property
    def committers(self) -> list[tuple[Actor, Transaction]]:
        return [(one, open) for one, open in self.open_transactions if not open.running]

    @property
    def runners(self) -> list[tuple[Actor, Transaction]]:
        return [(one, open) for one, open in self.open_transactions if open.running]

    # The model's own bookkeeping

    def _new_actor(self) -> Actor:
        actor = Actor(LogicalWorker(self.engine))
        self.all_actors.append(actor)
        return actor

    def _holder_of(self, key: str | None) -> JobModel | None:
        of_key = (job for job in self.jobs.values() if key and job.key == key)
        return next((job for job in of_key if job.holds_key), None)

    def _is_current(self, actor: Actor, claimed: Claimed) -> bool:
        job = self.jobs.get(claimed.job_id)
        mine = (actor.worker.id, claimed.message_id, claimed.attempt)
        return job is not None and job.lease == mine and job.outcome is None

    def _start(self, actor: Actor, claimed: Claimed) -> None:
        attempt = (claimed.message_id, claimed.attempt)
        job = self.jobs.get(claimed.job_id)
        if attempt not in actor.started:
            actor.started.add(attempt)
            if job is not None and self._is_current(actor, claimed):
                job.starts += 1

    def _possible(self, actor: Actor, claimed: Claimed, outcome: Outcome) -> Outcome:
        """What a worker may say of an attempt: not started, exhausted, or one of the others."""
        if claimed.attempt > claimed.max_attempts:
            return Exhausted()
        if isinstance(outcome, Released):
            if (claimed.message_id, claimed.attempt) not in actor.started:
                return outcome
            outcome = Retried(None, ERROR)
        self._start(actor, claimed)
        return outcome

    def _settled(self, claimed: Claimed, outcome: Outcome, ending: str | None) -> None:
        job = self.jobs[claimed.job_id]
        assert job.outcome is None
        job.lease = None
        if isinstance(outcome, Snoozed | Interrupted):
            job.starts -= 1
        used_up = claimed.attempt >= job.max_attempts
        if job.cancel_requested or isinstance(outcome, Cancelled):
            assert ending == "cancelled"
        elif isinstance(outcome, Succeeded):
            assert ending == "succeeded"
        elif isinstance(outcome, Failed | Exhausted) or (isinstance(outcome, Retried) and used_up):
            assert ending == "failed"
        else:
            assert ending is None
        if ending is not None:
            self._ended(job, ending)

    def _ended(self, job: JobModel, ending: str) -> None:
        job.outcome = ending
        job.completions += 1

    def _crash(self, actor: Actor) -> Actor:
        self.zombies += [(actor, claimed) for claimed in actor.claimed]
        transaction = actor.transaction
        if transaction is not None:
            attempts = [claimed for claimed, _, _ in transaction.settled] + transaction.running
            self.zombies += [(actor, claimed) for claimed in attempts]
        actor.worker.crash(self.operator)
        if transaction is not None:
            self._unlock(transaction)
            actor.transaction = None
        if not actor.is_dead:
            declare_dead(self.operator, actor.worker)
        actor.is_dead, actor.claimed = True, []
        return self._new_actor()

    def _roll_back(self, actor: Actor, transaction: Transaction) -> None:
        actor.worker.transaction.rollback()
        self._unlock(transaction)
        actor.transaction = None

    def _unlock(self, transaction: Transaction) -> None:
        for job in self.jobs.values():
            if job.locked_by is transaction:
                job.locked_by = None
            if job.settled_in is transaction:
                job.settled_in = None


@pytest.fixture
def workers_engine(database_url: str) -> Iterator[Engine]:
    engine = worker_settings(database_url)
    yield engine
    engine.dispose()


@pytest.fixture
def operators_engine(database_url: str) -> Iterator[Engine]:
    engine = create_engine(database_url, connect_args={"options": "-c lock_timeout=60s"})
    yield engine
    engine.dispose()


CAREFULLY = settings(
    max_examples=6,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
AT_LENGTH = settings(CAREFULLY, max_examples=1500, stateful_step_count=80, derandomize=False)


@pytest.mark.timeout(600)  # to shrink what fails takes longer than to find it
def test_whatever_happens_to_jobs_nothing_is_lost_and_nothing_is_done_twice(
    workers_engine: Engine, operators_engine: Engine
) -> None:
    live(workers_engine, operators_engine, CAREFULLY)


@pytest.mark.battery
@pytest.mark.timeout(3600)
def test_nothing_is_lost_in_many_thousand_histories(
    workers_engine: Engine, operators_engine: Engine
) -> None:
    live(workers_engine, operators_engine, AT_LENGTH)


def live(workers_engine: Engine, operators_engine: Engine, how: settings) -> None:
    class LifeHere(Life):
        def __init__(self) -> None:
            super().__init__(workers_engine, operators_engine)

    run_state_machine_as_test(LifeHere, settings=how)
