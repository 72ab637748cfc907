"""The ledger counts and forgets what is settled, and tells when the next suspect may start."""

import pytest

from pgqueue.outcomes import Succeeded
from pgqueue.repository.claim import Claimed
from pgqueue.repository.rescue import Rescued
from pgqueue.worker.attempt_counts import AttemptCounts
from pgqueue.worker.attempt_events import AttemptEvents
from pgqueue.worker.ledger import STALE, Ledger
from pgqueue.worker.server_clock import ServerClock
from pgqueue.worker.wake_up import WakeUp


def claimed(number: int, *, crashes: int = 0) -> Claimed:
    run_at = f"2026-01-01 00:00:{number:02}+00"
    return Claimed(5, run_at, number, number, "q", "t", "{}", 1, 1, crashes)


@pytest.mark.parametrize("how", ["all succeeded", "one was too late", "stale"])
@pytest.mark.parametrize("crashes", [0, 1])
def test_the_claimer_is_told_when_a_suspect_is_settled(how: str, crashes: int) -> None:
    told: list[str] = []
    claimer = WakeUp()
    claimer.connect(lambda _behind: told.append(how))
    ledger = Ledger(work_may_be_there=claimer)
    suspect = claimed(1, crashes=crashes)
    ledger.claimed([suspect, claimed(2)])

    if how == "all succeeded":
        ledger.succeeded([(suspect, Succeeded()), (claimed(2), Succeeded())])
    elif how == "one was too late":
        ledger.settled([(suspect, Succeeded())], {2: None})
    else:
        ledger.stale(suspect)

    assert told == [how] * crashes
    assert suspect.message_id not in ledger.in_flight


@pytest.mark.parametrize("listens", [False, True])
def test_successes_are_counted_once_whether_or_not_somebody_listens(listens: bool) -> None:
    statistics = AttemptCounts(ServerClock())
    told: list[str] = []
    events = AttemptEvents([lambda ended: told.append(ended.outcome)], ServerClock())
    ledger = Ledger(statistics=statistics, events=events if listens else None)

    ledger.succeeded([(claimed(1), Succeeded()), (claimed(2), Succeeded())])

    ledger.stale(claimed(3))
    events.start()
    events.finish(seconds=60)

    assert ledger.counts == {"succeeded": 2, STALE: 1}
    assert ledger.ended() == 2
    assert [row["succeeded"] for row in statistics.take().minutes()] == [2]
    assert told == ["succeeded", "succeeded"] * listens


def test_those_that_look_at_batches_are_told_of_each_end_of_a_job_in_one() -> None:
    told: list[int] = []
    ledger = Ledger()
    ledger.on_ended = told.extend
    in_batch = [claimed(number)._replace(meta='{"pgqueue.batch": 7}') for number in range(4)]
    other = claimed(9)._replace(meta='{"trace": "pgqueue"}')

    ledger.succeeded([(in_batch[0], Succeeded()), (other, Succeeded())])
    ledger.settled([(in_batch[1], Succeeded())], {1: "cancelled"})
    ledger.stale(in_batch[2])
    ledger.rescued([Rescued(3, "failed", "t", "q", 1, 1, in_batch[3].meta)])
    ledger.rescued([Rescued(8, "failed", "t", "q", 1, 1, None)])

    assert told == [-7] * 4


@pytest.mark.parametrize("meta", ['"pgqueue.batch"', '{"pgqueue.batch": "x"}', '{"pgqueue.batch"'])
def test_a_meta_that_names_no_batch_stops_no_settle(meta: str) -> None:
    told: list[int] = []
    ledger = Ledger()
    ledger.on_ended = told.extend

    ledger.succeeded([(claimed(1)._replace(meta=meta), Succeeded())])

    assert told == []
