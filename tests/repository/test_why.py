"""Why a job does not run: one sentence for each state that a job can be in."""

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import (
    ERROR,
    TASK,
    LogicalWorker,
    declare_dead,
    enqueue,
    enqueue_many,
    execute,
    workers_at,
)
from pgqueue import Cancel, Job, JobContext, JobsFailed, Limit, PgQueue, Worker
from pgqueue.outcomes import (
    AttemptEnd,
    Cancelled,
    ErrorReport,
    Expired,
    Failed,
    Outcome,
    Retried,
    Snoozed,
    Succeeded,
    Unreadable,
)
from pgqueue.repository.admit import Admissions
from pgqueue.repository.enqueue import Enqueues, NewJob
from pgqueue.repository.jobs import Jobs
from pgqueue.repository.limits import Limits
from pgqueue.repository.listing import Listing
from pgqueue.repository.workers import Workers
from pgqueue.rules.limits import LARGEST_CAPACITY, FairLimit
from pgqueue.views.why import why
from pgqueue.views.words import Kind, Name, Reason

HOUR = timedelta(hours=1)
queue = PgQueue()
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+00:00"
Arrange = Callable[[Engine, LogicalWorker], int]
CASES: list[tuple[Arrange, str, str | None]] = []


def case(words: str, remedy: str | None = None) -> Callable[[Arrange], Arrange]:
    """The sentence, as a pattern, about the job whose id the function returns."""

    def add(arrange: Arrange) -> Arrange:
        CASES.append((arrange, words, remedy))
        return arrange

    return add


def reasons(engine: Engine, job_id: int, *known_tasks: str) -> list[Reason]:
    with Session(engine) as session:
        return why(Listing(session).job(job_id), known_tasks)


def run(engine: Engine, worker: LogicalWorker, outcome: Outcome, **options: Any) -> int:
    """Enqueue a job, and run one attempt of it."""
    enqueue(engine, **options)
    return worker.run_next(outcome).job_id


def declare(engine: Engine, *limits: Limit) -> None:
    with engine.begin() as connection:
        Limits(connection).declare(limits)


def put(engine: Engine, keys: str, count: int, *, admitted: int = 0) -> list[int]:
    """Enqueue jobs under limits, and admit some of them."""
    new = NewJob(task=TASK, queue="default", priority=5, max_attempts=10, notify=False)
    with engine.begin() as connection:
        jobs = [
            Enqueues(connection).enqueue(new, "{}", unique_key=None, limit_keys=keys).id
            for _ in range(count)
        ]
        Admissions(connection).admit(jobs[:admitted], notify=False)
    return jobs


@case(rf"succeeded at {TIME} in attempt 1 of 10")
def succeeded(engine: Engine, worker: LogicalWorker) -> int:
    return run(engine, worker, Succeeded())


@case(rf"failed at {TIME}: attempt 1 of 1 ended as failed: ValueError: planned", "requeue 1")
def failed(engine: Engine, worker: LogicalWorker) -> int:
    return run(engine, worker, Failed(ERROR), max_attempts=1)


@case(rf"was cancelled at {TIME} by its handler, in attempt 1 of 10: no longer", "requeue 1")
def cancelled_by_its_handler(engine: Engine, worker: LogicalWorker) -> int:
    return run(engine, worker, Cancelled("no longer"))


@case(rf"was cancelled at {TIME} while it ran, as requested at {TIME}", "requeue 1")
def cancelled_while_it_ran(engine: Engine, worker: LogicalWorker) -> int:
    claimed = worker.claim_new(engine)
    with engine.begin() as connection:
        Jobs(connection).cancel(claimed.job_id)
    assert worker.settle(claimed, Succeeded())
    return claimed.job_id


@case(rf"was cancelled at {TIME} while it waited", "requeue 1")
def cancelled_while_it_waited(engine: Engine, worker: LogicalWorker) -> int:
    job_id = enqueue(engine)
    with engine.begin() as connection:
        Jobs(connection).cancel(job_id)
    return job_id


@case(rf"was cancelled at {TIME} while it waited: too late", "requeue 1")
def expired(engine: Engine, worker: LogicalWorker) -> int:
    return run(engine, worker, Expired("too late"))


@case(rf"runs on here:1 \(worker .*\), attempt 1 of 10 since {TIME}")
def running(engine: Engine, worker: LogicalWorker) -> int:
    return worker.claim_new(engine).job_id


@case(rf"was claimed ahead by here:1 .* at {TIME}: the 1 slots of the worker have jobs that it .*")
def claimed_ahead(engine: Engine, worker: LogicalWorker) -> int:
    enqueue_many(engine, 2)
    return worker.claim(2)[1].job_id


@case(r"its worker here:1 .* is dead: any other worker gives the job back .*", "worker")
def worker_is_dead(engine: Engine, worker: LogicalWorker) -> int:
    claimed = worker.claim_new(engine)
    declare_dead(engine, worker)
    return claimed.job_id


@case(r"its worker here:1 .* has sent no heartbeat for 2 min: if it stays .*", "worker")
def worker_is_silent(engine: Engine, worker: LogicalWorker) -> int:
    claimed = worker.claim_new(engine)
    execute(engine, "UPDATE pgqueue.workers SET heartbeat_at = now() - interval '90 s'")
    return claimed.job_id


@case(rf"its cancellation was requested at {TIME}: it ends as .*", "cancel --kill 1")
def cancel_requested(engine: Engine, worker: LogicalWorker) -> int:
    claimed = worker.claim_new(engine)
    with engine.begin() as connection:
        Jobs(connection).cancel(claimed.job_id)
    return claimed.job_id


@case(rf"the kill of its handler was requested at {TIME}")
def kill_requested(engine: Engine, worker: LogicalWorker) -> int:
    claimed = worker.claim_new(engine)
    execute(engine, "UPDATE pgqueue.jobs SET kill_requested_at = now()")
    return claimed.job_id


@case(rf"is due at {TIME}, in 1\.0 h", "run-now 1")
def scheduled(engine: Engine, worker: LogicalWorker) -> int:
    return enqueue(engine, delay=HOUR)


@case(rf"is retried at {TIME}, in .*: attempt 1 of 10 ended as timeout: Valu.*", "run-now 1")
def retried_later(engine: Engine, worker: LogicalWorker) -> int:
    return run(engine, worker, Retried(HOUR, ERROR, AttemptEnd.TIMEOUT))


@case(rf"is retried at {TIME}, in .* in queue retries: attempt 1 of 10 ended as .*", "run-now 1")
def retried_elsewhere(engine: Engine, worker: LogicalWorker) -> int:
    return run(engine, worker, Retried(HOUR, ERROR, queue="retries"))


@case(rf"is due at {TIME}, in .*: it was snoozed 1 times", "run-now 1")
def snoozed(engine: Engine, worker: LogicalWorker) -> int:
    return run(engine, worker, Snoozed(HOUR))


@case(rf"all queues are paused since {TIME}", r"resume '\*'")
def all_queues_are_paused(engine: Engine, worker: LogicalWorker) -> int:
    with Session(engine) as session, session.begin():
        queue.pause(session, "*")
    return enqueue(engine)


@case(rf"its queue default is paused since {TIME}", "resume default")
def queue_is_paused(engine: Engine, worker: LogicalWorker) -> int:
    with Session(engine) as session, session.begin():
        queue.pause(session, "default")
    return enqueue(engine)


@case(rf"its task tests\.task is paused since {TIME}", "resume --task tests.task")
def task_is_paused(engine: Engine, worker: LogicalWorker) -> int:
    with Session(engine) as session, session.begin():
        queue.pause_task(session, TASK)
    return enqueue(engine)


@case(r"no live worker serves queue mail", "worker --queues mail")
def nobody_serves_its_queue(engine: Engine, worker: LogicalWorker) -> int:
    return enqueue(engine, queue="mail")


@case(r"no live worker serves queue default; live workers that are quiet: 1", "worker --.*")
def its_workers_are_quiet(engine: Engine, worker: LogicalWorker) -> int:
    with engine.begin() as connection:
        assert Workers(connection).make_quiet(worker.id)
    return enqueue(engine)


@case(rf"since {TIME} no worker could read the arguments: no parameter x", "change 1 --args JSON")
def unreadable(engine: Engine, worker: LogicalWorker) -> int:
    error = ErrorReport("PayloadError", "no parameter x", "")
    job_id = run(engine, worker, Unreadable(error, HOUR))
    execute(engine, "UPDATE pgqueue.message_queue SET run_at = now() - interval '1 hour'")
    execute(engine, "UPDATE pgqueue.jobs SET run_at = (SELECT run_at FROM pgqueue.message_queue)")
    return job_id


@case(r"the slots of the only live worker of queue default are busy, and 2 due jobs are before it")
def all_slots_are_busy(engine: Engine, worker: LogicalWorker) -> int:
    worker.claim_new(engine)
    return enqueue_many(engine, 3)[2]


@case(r"a free worker claims it within moments, and 1 due jobs are before it")
def it_is_next(engine: Engine, worker: LogicalWorker) -> int:
    return enqueue_many(engine, 2)[1]


@case(r"its limit bank \[7\] is full: 2 of 2 places are held by job 1, job 2", "set-limit bank .*")
def its_limit_is_full(engine: Engine, worker: LogicalWorker) -> int:
    declare(engine, Limit(2, by="account", name="bank"))
    return put(engine, "bank [7]", 3, admitted=2)[2]


@case(r"its limit api permits 60 starts in 1 h, the next in (1 min|\d\d s)")
def its_rate_is_used_up(engine: Engine, worker: LogicalWorker) -> int:
    declare(engine, Limit(60, per=HOUR, name="api"))
    full = "INSERT INTO pgqueue.limit_buckets VALUES ('api', now() + interval '60 s')"
    execute(engine, full)
    return put(engine, "api", 1)[0]


@case(r"waits for its turn among the keys of its limit fair \[1\], and before it .* job 1")
def it_waits_for_its_turn(engine: Engine, worker: LogicalWorker) -> int:
    declare(engine, FairLimit(LARGEST_CAPACITY, by="key", name="fair"))
    return put(engine, "fair [1]", 2)[1]


@case(r"its limit bank runs its jobs in order, first job 1")
def it_is_behind_another_in_order(engine: Engine, worker: LogicalWorker) -> int:
    declare(engine, Limit(1, order="strict", name="bank"))
    return put(engine, "bank", 2)[1]


@case(r"waits for the end of batch 1")
def its_batch_is_open(engine: Engine, worker: LogicalWorker) -> int:
    queue = PgQueue(engine)
    told = queue.task(name="tests.told")(lambda batch_id: None)
    with queue.session() as session, session.begin():
        with queue.batch(session, on_failure=told):
            pass
        return session.scalars(select(Job.id).where(Job.task == "tests.told")).one()


def three_in_a_row(engine: Engine) -> tuple[PgQueue, list[int]]:
    """A workflow that has ended: the first job has failed, the second was skipped, and the third,
    which handles the failure of another, was not needed."""
    queue = PgQueue(engine)

    @queue.task(name="tests.fail", max_attempts=1)
    def fail() -> None:
        raise ValueError("no such part")

    other = queue.task(name="tests.other")(lambda: None)
    with queue.session() as session, session.begin(), queue.workflow(session) as flow:
        first = flow.add(fail.job())
        second = flow.add(other.job(), after=first)
        third = flow.add(other.job(), after=flow.add(other.job()), when="failed")
        ids = [first.id, second.id, third.id]
    Worker(queue, concurrency=1).run_until_empty(timeout=60)
    return queue, ids


@case(rf"was cancelled at {TIME} while it waited.*skipped: job 1 has failed", "requeue 1")
def it_was_skipped(engine: Engine, worker: LogicalWorker) -> int:
    return three_in_a_row(engine)[1][1]


@case(rf"was cancelled at {TIME} while it waited.*skipped: not needed")
def it_was_not_needed(engine: Engine, worker: LogicalWorker) -> int:
    return three_in_a_row(engine)[1][2]


@case(r"waits until a worker has looked at the jobs before it, up to two seconds")
def it_was_started_again(engine: Engine, worker: LogicalWorker) -> int:
    queue, ids = three_in_a_row(engine)
    with queue.session() as session, session.begin():
        before = session.scalars(select(Job.id)).all()
        queue.restart_workflow(session, ids[0])
        return min(session.scalars(select(Job.id).where(Job.id.not_in(before))))


@case(rf"waits for the signal paid 7 until {TIME}", "signal paid 7")
def it_waits_for_a_signal(engine: Engine, worker: LogicalWorker) -> int:
    queue = PgQueue(engine)

    def ship(ctx: JobContext) -> None:
        ctx.wait_for("paid", 7, timeout=HOUR)

    job_id = queue.task(name="tests.ship")(ship).delay().id
    assert Worker(queue, concurrency=1).run_until_empty() == {"snoozed": 1}
    return job_id


@case(r"waits for the signal approved", "signal approved")
def it_waits_for_a_signal_without_end(engine: Engine, worker: LogicalWorker) -> int:
    queue = PgQueue(engine)

    def publish(ctx: JobContext) -> None:
        ctx.wait_for("approved")

    job_id = queue.task(name="tests.publish")(publish).delay().id
    assert Worker(queue, concurrency=1).run_until_empty() == {"snoozed": 1}
    return job_id


@case(r"waits for the end of batch 1")
def it_gathers(engine: Engine, worker: LogicalWorker) -> int:
    queue = PgQueue(engine)
    part = queue.task(name="tests.part")(lambda: None)

    def whole(ctx: JobContext) -> None:
        ctx.gather("parts", [part.options(delay=HOUR).job()])

    job_id = queue.task(name="tests.whole")(whole).delay().id
    assert Worker(queue, concurrency=1).run_until_empty() == {"snoozed": 1}
    return job_id


@case(rf"sleeps in its step 'an hour' until {TIME}")
def it_sleeps_after_a_failed_gather(engine: Engine, worker: LogicalWorker) -> int:
    queue = PgQueue(engine)

    @queue.task(name="tests.part")
    def part() -> None:
        raise Cancel("no part")

    @queue.task(name="tests.whole")
    def whole(ctx: JobContext) -> None:
        with suppress(JobsFailed):
            ctx.gather("parts", [part.job()])
        ctx.sleep("an hour", HOUR)

    job_id = whole.delay().id
    ends = Worker(queue, concurrency=1).run_until_empty()
    assert ends == {"snoozed": 2, "cancelled": 1}
    return job_id


@case(rf"sleeps in its step 'a week' until {TIME}")
def it_sleeps(engine: Engine, worker: LogicalWorker) -> int:
    queue = PgQueue(engine)

    def remind(ctx: JobContext) -> None:
        ctx.sleep("a week", timedelta(weeks=1))

    job_id = queue.task(name="tests.remind")(remind).delay().id
    assert Worker(queue, concurrency=1).run_until_empty() == {"snoozed": 1}
    return job_id


@case(r"its limit bank \[7\] is paused", r"resume --limit bank --key '\[7\]'")
def its_key_is_paused(engine: Engine, worker: LogicalWorker) -> int:
    declare(engine, Limit(2, by="account", name="bank"))
    with engine.begin() as connection:
        Limits(connection).set_capacity_of_key("bank", "bank [7]", 0)
    return put(engine, "bank [7]", 1)[0]


@case(r"its limit bank is paused", "set-limit bank --reset")
def its_limit_is_paused(engine: Engine, worker: LogicalWorker) -> int:
    declare(engine, Limit(2, name="bank"))
    with engine.begin() as connection:
        assert Limits(connection).set_capacity("bank", 0)
    return put(engine, "bank", 1)[0]


@case(r"no worker has declared limit bank: start one whose code does")
def nobody_has_declared_its_limit(engine: Engine, worker: LogicalWorker) -> int:
    return put(engine, "bank", 1)[0]


@case(r"a worker admits it to its limits within moments")
def it_is_admitted_next(engine: Engine, worker: LogicalWorker) -> int:
    declare(engine, Limit(2, name="bank"))
    return put(engine, "bank", 1)[0]


@case(r"its limits have room, and before it they admit job 1")
def others_are_admitted_first(engine: Engine, worker: LogicalWorker) -> int:
    declare(engine, Limit(2, name="bank"))
    return put(engine, "bank", 2)[1]


@case(r"has no message, so no worker finds it", "cancel 1; pgqueue requeue 1")
def its_message_is_lost(engine: Engine, worker: LogicalWorker) -> int:
    job_id = enqueue(engine)
    execute(engine, "DELETE FROM pgqueue.message_queue")
    return job_id


@pytest.mark.parametrize(
    ("arrange", "words", "remedy"), CASES, ids=[arrange.__name__ for arrange, _, _ in CASES]
)
def test_the_first_reason_of_each_state_is_a_sentence_with_its_remedy(
    engine: Engine, worker: LogicalWorker, arrange: Arrange, words: str, remedy: str | None
) -> None:
    job_id = arrange(engine, worker)

    reason = reasons(engine, job_id)[0]

    assert re.fullmatch(words, str(reason)), str(reason)
    if remedy is None:
        assert reason.remedy is None
    else:
        assert re.fullmatch(f"pgqueue {remedy}", reason.remedy or ""), reason.remedy


def test_a_task_that_the_application_has_not_is_a_reason(
    engine: Engine, worker: LogicalWorker
) -> None:
    job_id = enqueue(engine)

    assert str(reasons(engine, job_id, "other")[0]).startswith("this application has no task")
    assert "this application" not in str(reasons(engine, job_id, TASK)[0])


def test_all_reasons_are_told_the_first_to_remove_first(
    engine: Engine, worker: LogicalWorker
) -> None:
    declare(engine, Limit(1, name="bank"))
    job_id = put(engine, "bank", 2, admitted=1)[1]
    queue_is_paused(engine, worker)
    task_is_paused(engine, worker)

    found = reasons(engine, job_id)

    assert [str(one).split(" is ")[0] for one in found] == [
        "its queue default",
        "its task tests.task",
        "its limit bank",
    ]


def test_holders_of_a_limit_are_names_to_link_and_at_most_five(
    engine: Engine, worker: LogicalWorker
) -> None:
    declare(engine, Limit(6, name="bank"))
    jobs = put(engine, "bank", 7, admitted=6)

    [reason] = reasons(engine, jobs[6])

    names = [part for part in reason.words if isinstance(part, Name)]
    assert [name.name for name in names if name.kind is Kind.JOB] == [str(id) for id in jobs[:5]]
    assert str(reason).endswith(", ...")


def test_a_worker_with_a_free_slot_makes_a_queue_free(engine: Engine) -> None:
    with workers_at(engine, 2) as [first, _]:
        first.claim_new(engine)

        assert "a free worker" in str(reasons(engine, enqueue(engine))[0])
