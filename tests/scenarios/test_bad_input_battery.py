"""Each bad input of the list, put in by its own way: nothing is lost, and nothing is stuck."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TypeVar

import pytest
from bad_calls import pay
from bad_calls import queue as shop
from bad_input_cases import CASES
from bad_input_jobs import UNKEPT
from bad_input_kinds import Attempt, Case, Checked, Damaged, Ending, Kept, Refused
from bad_input_runs import Seen, run_damaged, run_endings, run_kept
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from pgqueue import JobStatus, PgQueue
from pgqueue.testing.databases import fresh_database

pytestmark = pytest.mark.journey

K = TypeVar("K", Kept, Damaged, Ending)

PLAIN = (dict, list, str, int, float, bool, type(None))
LONGEST_REFUSAL = 1000
LARGEST_ERROR = 100_000
LONGEST_WAIT = 60
COUNTS = text("""
    SELECT (SELECT count(*) FROM pgqueue.jobs), (SELECT count(*) FROM pgqueue.message_queue),
        (SELECT count(*) FROM pgqueue.leases), (SELECT count(*) FROM pgqueue.dead_letters)
""")


def of_kind(kind: type[K]) -> list[K]:
    return [case for cases in CASES.values() for case in cases if isinstance(case, kind)]


@pytest.fixture(scope="module")
def new_engine(server_url: str, template_url: str) -> Iterator[Callable[[], Engine]]:
    """Makes an engine on a database of its own, with pgqueue's tables."""
    with ExitStack() as stack:

        def make() -> Engine:
            url = stack.enter_context(fresh_database(server_url, template_url=template_url))
            engine = create_engine(url, pool_size=20)
            stack.callback(engine.dispose)
            return engine

        yield make


@pytest.fixture(scope="module")
def doors(new_engine: Callable[[], Engine]) -> Iterator[Engine]:
    engine = new_engine()
    shop.bind(engine)
    yield engine
    shop._sessions = None


@pytest.fixture(scope="module")
def kept(new_engine: Callable[[], Engine]) -> dict[Kept, Seen]:
    return run_kept(PgQueue(new_engine()), of_kind(Kept))


@pytest.fixture(scope="module")
def damaged(new_engine: Callable[[], Engine]) -> dict[Damaged, Seen]:
    return run_damaged(PgQueue(new_engine()), of_kind(Damaged))


@pytest.fixture(scope="module")
def endings(new_engine: Callable[[], Engine]) -> dict[Ending, Seen]:
    return run_endings(PgQueue(new_engine()), of_kind(Ending))


NUMBERED = [
    pytest.param(case, id=f"{number}-{case.way} {case.name:.60}")
    for number, cases in CASES.items()
    for case in cases
]


def test_no_number_of_the_list_is_left_out() -> None:
    assert sorted(CASES) == list(range(1, 106))
    assert all(CASES.values())


@pytest.mark.parametrize("case", NUMBERED)
def test_a_bad_input_loses_nothing(request: pytest.FixtureRequest, case: Case) -> None:
    # Asked for by name: a case by itself makes no run but its own.
    match case:
        case Refused() | Checked():
            give_at_the_doors(request.getfixturevalue("doors"), case)
        case Kept():
            came_out_as_it_went_in(case, request.getfixturevalue("kept")[case])
        case Damaged():
            cost_its_own_job_alone(case, request.getfixturevalue("damaged")[case])
        case Ending():
            ended_with_a_reason(case, request.getfixturevalue("endings")[case])


def give_at_the_doors(engine: Engine, case: Refused | Checked) -> None:
    with Session(engine) as session:
        before = session.execute(COUNTS).one()

        if isinstance(case, Checked):
            case.check(session)
            assert shop.check(session) == []
            session.rollback()
        else:
            for attempt in case.attempts:
                is_refused(session, case, attempt)

        jobs, messages, leases, letters = before
        assert session.execute(COUNTS).one() == before, "nothing was written"
        pay.enqueue(session, "fine")
        assert session.execute(COUNTS).one() == (jobs + 1, messages + 1, leases, letters)
        assert shop.check(session) == []
        session.rollback()


def is_refused(session: Session, case: Refused, attempt: Attempt) -> None:
    with pytest.raises(case.error) as refused:
        attempt(session)

    said = str(refused.value)
    for words in case.said:
        assert re.search(words, said, re.DOTALL), said
    assert len(said) < LONGEST_REFUSAL, "a message is read by people"


def came_out_as_it_went_in(case: Kept, seen: Seen) -> None:
    assert seen.received == [case.value]
    assert type(seen.received[0]) in PLAIN, "and never a class that a payload has named"
    assert [job.outcome for job in seen.jobs] == ["succeeded"]
    nothing_else_is_lost(seen)


def cost_its_own_job_alone(case: Damaged, seen: Seen) -> None:
    assert case.refused in seen.refused
    assert bool(case.refused) == bool(seen.refused), seen.refused
    assert seen.broken == case.found
    assert len(seen.jobs) == case.jobs
    for job in seen.jobs:
        assert (job.outcome, job.result) == (case.outcome, case.result)
        assert case.said in (job.last_error or "")
        assert job.last_error or job.outcome != "failed", "a failure has words"
        assert job.outcome or job.status is JobStatus.PENDING
    assert "antigravity" not in sys.modules, "a task is never imported by its name"
    nothing_else_is_lost(seen)


def ended_with_a_reason(case: Ending, seen: Seen) -> None:
    [job] = seen.jobs

    assert job.outcome == case.outcome
    if case.outcome is None:
        assert job.status is JobStatus.PENDING
        assert job.seconds_to_wait < LONGEST_WAIT
    else:
        assert job.attempts == case.attempts
    if case.result is UNKEPT:
        assert UNKEPT in job.result
    else:
        assert job.result == case.result
    for attempt in seen.attempts:
        told = f"{attempt.error_type}: {attempt.error}\n{attempt.traceback}"
        assert case.said in told
        assert not case.hidden or case.hidden not in told
        assert len(told) < LARGEST_ERROR
    assert bool(seen.attempts) == bool(case.said)
    assert case.logged in seen.log
    nothing_else_is_lost(seen)


def nothing_else_is_lost(seen: Seen) -> None:
    """The good job beside it has run, and nothing is left but the messages of jobs that wait."""
    waiting = [job for job in seen.jobs if job.outcome is None]

    assert seen.neighbour == "succeeded"
    assert (seen.messages, seen.leases) == (len(waiting), 0)
    assert seen.still_broken == set()
