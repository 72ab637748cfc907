"""What has become of the jobs of all cases, after one run of a worker."""

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from bad_input_jobs import KNOWN_LATER, RELEASED
from bad_input_kinds import Damaged, Ending
from sqlalchemy import Row, func, or_, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from pgqueue import (
    Job,
    JobAttempt,
    Lease,
    MessageQueue,
    PgQueue,
    Task,
    Violation,
    Worker,
)
from pgqueue.cli.doctor import remedy_for

TIMEOUT = 60
SET_ARGS = "UPDATE pgqueue.jobs SET args = CAST(:args AS jsonb) WHERE id = :id"

WAITS = func.extract("epoch", Job.run_at - func.clock_timestamp()).label("seconds_to_wait")
COLUMNS = (Job.id, Job.status, Job.outcome, Job.attempts, Job.result, Job.last_error, WAITS)
"""Not all of them: some of the times that we write are none that Python has."""

C = TypeVar("C", Damaged, Ending)


@dataclass
class Seen:
    """The job of a case, with its copies, and the good job beside it."""

    id: int
    neighbour_id: int
    neighbour: str | None = None
    jobs: list[Row[Any]] = field(default_factory=list)
    attempts: list[JobAttempt] = field(default_factory=list)
    refused: str = ""
    messages: int = 0
    leases: int = 0
    broken: set[str] = field(default_factory=set)
    """The rules that the check finds broken once a worker has run."""
    still_broken: set[str] = field(default_factory=set)
    """Those it finds once somebody has done what the doctor says."""
    log: str = ""


Sights = dict[C, Seen]


def behave(n: int = 0) -> int:
    return n


def run_damaged(queue: PgQueue, cases: Iterable[Damaged]) -> "Sights[Damaged]":
    """Damage a job for each case, run all, mend what the check finds, and run what comes back."""
    task = queue.task(name="damaged.take")(behave)
    seen = {case: _enqueue(queue, task, (1,)) for case in cases}
    _damage(queue, seen, late=False)
    _work(queue)
    _damage(queue, seen, late=True)
    violations = _check(queue)
    for one in seen.values():
        one.broken = _rules_broken_by(one, violations)
    _mend(queue, violations)
    queue.task(name=KNOWN_LATER)(behave)
    _work(queue)
    return _read(queue, seen)


def run_endings(queue: PgQueue, cases: Iterable[Ending]) -> "Sights[Ending]":
    """Run a task for each case, each of which goes wrong in its own way."""
    RELEASED.clear()
    seen: Sights[Ending] = {}
    for number, case in enumerate(cases):
        task = queue.task(name=f"ending.{number}", **case.options)(case.handler)
        seen[case] = _enqueue(queue, task, case.args)
    with _noting_the_log() as lines:
        try:
            _work(queue)
        finally:
            RELEASED.set()
            _wait_for_the_stuck()
    for number, one in enumerate(seen.values()):
        one.log = "\n".join(line for line in lines if f"ending.{number}:" in line)
    return _read(queue, seen)


def _enqueue(queue: PgQueue, task: Task[..., Any], args: tuple[Any, ...]) -> Seen:
    """A job of the case and a good one behind it."""
    good = queue.task(name="neighbour")(behave)
    with queue.session() as session, session.begin():
        return Seen(task.enqueue(session, *args).id, good.enqueue(session, 7).id)


def _work(queue: PgQueue) -> None:
    Worker(queue, concurrency=8, grace=timedelta(0)).run_until_empty(timeout=TIMEOUT)


def _wait_for_the_stuck() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("pgqueue"):
            thread.join(TIMEOUT)


def _damage(queue: PgQueue, seen: "Sights[Damaged]", *, late: bool) -> None:
    for case, one in seen.items():
        if case.late != late:
            continue
        try:
            with queue.session() as session, session.begin():
                _change(session, case, one.id)
        except IntegrityError as error:
            one.refused = str(error.orig)


def _change(session: Session, case: Damaged, id: int) -> None:
    if case.args:
        session.execute(text(SET_ARGS), {"args": case.args, "id": id})
    for statement in case.change.split("; ") if case.change else ():
        session.execute(text(statement), {"id": id})


def _check(queue: PgQueue) -> list[Violation]:
    with queue.session() as session:
        return queue.check(session)


def _rules_broken_by(one: Seen, violations: list[Violation]) -> set[str]:
    return {each.rule for each in violations if each.job_id in (one.id, one.neighbour_id)}


def _mend(queue: PgQueue, violations: list[Violation]) -> None:
    """Do what the doctor says."""
    for violation in violations:
        for step in remedy_for(violation):
            with queue.session() as session, session.begin():
                match step.split():
                    case ["pgqueue", verb, job_id]:
                        getattr(queue, verb)(session, int(job_id))
                    case _:
                        session.execute(text(step))


@contextmanager
def _noting_the_log() -> Iterator[list[str]]:
    lines: list[str] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Noting()
    logging.getLogger("pgqueue").addHandler(handler)
    yield lines
    logging.getLogger("pgqueue").removeHandler(handler)


def _read(queue: PgQueue, seen: "Sights[C]") -> "Sights[C]":
    violations = _check(queue)
    with queue.session() as session:
        for one in seen.values():
            one.still_broken = _rules_broken_by(one, violations)
            _look_up(session, one)
    return seen


def _look_up(session: Session, one: Seen) -> None:
    mine = or_(Job.id == one.id, Job.meta["copy_of"].as_integer() == one.id)
    one.jobs = list(session.execute(select(*COLUMNS).where(mine)))
    of_it = select(JobAttempt).where(JobAttempt.job_id == one.id)
    one.attempts = list(session.scalars(of_it))
    one.neighbour = session.scalar(select(Job.outcome).where(Job.id == one.neighbour_id))
    ids = [one.id, one.neighbour_id, *(job.id for job in one.jobs)]
    one.messages, one.leases = (
        session.query(table).where(table.target_id.in_(ids)).count()
        for table in (MessageQueue, Lease)
    )
