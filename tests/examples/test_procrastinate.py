"""The adapter of Procrastinate's API, without Procrastinate's tests: `make procrastinate`."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
from documents import ROOT
from sqlalchemy import make_url

from examples.procrastinate import App, Blueprint, JobContext, PsycopgConnector, RetryDecision
from examples.procrastinate.exceptions import (
    AlreadyEnqueued,
    JobAborted,
    TaskNotFound,
    UnboundTaskError,
)
from examples.procrastinate.jobs import Job, Status
from examples.procrastinate.retry import BaseRetryStrategy

pytestmark = pytest.mark.journey


@pytest.fixture
def app(database_url: str) -> Iterator[App]:
    url = make_url(database_url)
    given = {"host": url.query.get("host") or url.host, "port": url.port, "user": url.username}
    parameters: dict[str, Any] = {name: str(value) for name, value in given.items() if value}
    with App(connector=PsycopgConnector(dbname=str(url.database), **parameters)) as app:
        yield app


def run(app: App, **options: Any) -> None:
    app.run_worker(wait=False, install_signal_handlers=False, **options)


def test_jobs_with_one_lock_run_one_after_the_other_by_priority(app: App) -> None:
    ran: list[str] = []
    meeting = Barrier(2)

    @app.task(queue="ledger", name="book")
    def book(entry: str) -> None:
        with pytest.raises(BrokenBarrierError):
            meeting.wait(0.2)
        meeting.reset()
        ran.append(entry)

    for entry, priority in (("low", 1), ("high", 7), ("middle", 4)):
        book.configure(lock="account 7", priority=priority).defer(entry=entry)
    run(app, concurrency=3)

    assert ran == ["high", "middle", "low"]


def test_jobs_with_different_locks_or_none_run_at_once(app: App) -> None:
    meeting = Barrier(3)

    @app.task(name="book")
    def book() -> None:
        meeting.wait(60)

    ids = [book.configure(lock=lock).defer() for lock in ("a", "b", None)]
    run(app, concurrency=3)

    assert {app.job_manager.get_job_status(id) for id in ids} == {Status.SUCCEEDED}


def test_a_queueing_lock_is_free_once_its_job_has_started(app: App) -> None:
    @app.task(name="report", queueing_lock="report")
    def report(again: bool) -> None:
        if again:
            report.defer(again=False)

    report.defer(again=True)
    with pytest.raises(AlreadyEnqueued, match="'report'"):
        report.configure(queue="another").defer(again=True)
    run(app)

    assert [job.status for job in app.job_manager.list_jobs()] == [Status.SUCCEEDED] * 2


def test_a_strategy_moves_a_retried_job(app: App) -> None:
    seen: list[tuple[int, str]] = []

    class Move(BaseRetryStrategy):
        def get_retry_decision(self, *, exception: BaseException, job: Job) -> RetryDecision | None:
            return RetryDecision(queue="slow", priority=1) if job.attempts == 0 else None

    @app.task(name="call", retry=Move(), pass_context=True)
    def call(context: JobContext) -> None:
        seen.append((context.job.attempts, context.job.queue))
        raise ConnectionError

    id = call.defer()
    run(app)

    assert seen == [(0, "default"), (1, "slow")]
    assert app.job_manager.get_job_status(id) == Status.FAILED


def test_a_job_that_waits_is_cancelled_and_one_that_runs_aborted(app: App) -> None:
    manager = app.job_manager
    said: list[bool] = []

    @app.task(name="wait", pass_context=True)
    async def wait(context: JobContext) -> None:
        assert context.job.id is not None
        said.append(await manager.cancel_job_by_id_async(context.job.id))
        said.append(await manager.cancel_job_by_id_async(context.job.id, abort=True))
        await asyncio.sleep(60)

    @app.task(name="go_on", pass_context=True)
    def go_on(context: JobContext) -> None:
        assert context.job.id is not None
        manager.cancel_job_by_id(context.job.id, abort=True)

    @app.task(name="give_up")
    def give_up() -> None:
        raise JobAborted

    running = [task.defer() for task in (wait, go_on, give_up)]
    waiting = wait.configure(priority=-1).defer()
    assert manager.cancel_job_by_id(waiting)
    run(app)

    assert said == [False, True]
    assert {manager.get_job_status(id) for id in running} == {Status.ABORTED}
    assert manager.get_job_status(waiting) == Status.CANCELLED


def test_a_periodic_task_gets_the_time_of_its_tick(app: App) -> None:
    ticks: list[tuple[int, str, int]] = []

    @app.periodic(cron="* * * * * *", periodic_id="a", task_kwargs={"word": "tick"}, priority=3)
    @app.task(name="tick", pass_context=True)
    async def tick(context: JobContext, timestamp: int, word: str) -> None:
        ticks.append((timestamp, word, context.job.priority))
        if len(ticks) > 1 and app.worker is not None:
            app.worker.stop()

    app.run_worker(install_signal_handlers=False)

    (first, word, priority), (second, *_), *_ = ticks
    assert (word, priority) == ("tick", 3)
    assert second > first > 0


def test_a_cron_expression_with_other_seconds_is_refused(app: App) -> None:
    @app.periodic(cron="0 3 * * * 30")
    @app.task(name="tick")
    def tick(timestamp: int) -> None: ...

    with pytest.raises(ValueError, match="sixth field of '0 3"):
        tick.defer(timestamp=1)


def test_a_job_of_a_task_that_no_worker_has_waits(app: App) -> None:
    with pytest.raises(TaskNotFound):
        app.configure_task("elsewhere", allow_unknown=False)
    id = app.configure_task("elsewhere", schedule_in={"hours": 1}).defer(a=1)

    [job] = app.job_manager.list_jobs(task="elsewhere")
    assert (job.id, job.status, job.task_kwargs) == (id, Status.TODO, {"a": 1})
    assert job.scheduled_at is not None


def test_a_job_that_was_deferred_without_its_code_is_retried_as_its_task_says(app: App) -> None:
    elsewhere = App(connector=app.connector)
    ran: list[int] = []

    @elsewhere.task(name="elsewhere", retry=1)
    def flaky(number: int) -> None:
        ran.append(number)
        if len(ran) == 1:
            raise ConnectionError

    app.configure_task("elsewhere").defer(number=7)
    with elsewhere:
        run(elsewhere)

    assert ran == [7, 7]


def test_a_task_of_a_blueprint_needs_an_application(app: App) -> None:
    blueprint = Blueprint()

    @blueprint.task(name="greet")
    def greet() -> None: ...

    with pytest.raises(UnboundTaskError):
        greet.defer()
    app.add_tasks_from(blueprint, namespace="mail")
    greet.defer()

    assert [job.task_name for job in app.job_manager.list_jobs()] == ["mail:greet"]


@pytest.mark.parametrize(
    ("checkout", "code", "words"),
    [
        ("", 0, "acceptance tests are skipped: make procrastinate CHECKOUT="),
        ("/nowhere", 2, "/nowhere has no folder tests/acceptance"),
    ],
)
def test_without_a_checkout_the_target_says_so(checkout: str, code: int, words: str) -> None:
    recipe = re.search(
        r"^procrastinate: .*\n\t@\$\(BIN\)/(.+)$", (ROOT / "Makefile").read_text(), re.M
    )
    assert recipe is not None
    assert recipe[1] == 'python -m examples.procrastinate.run "$(CHECKOUT)" $(ARGS)'

    done = subprocess.run(
        [sys.executable, "-m", "examples.procrastinate.run", checkout],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == code
    assert words in done.stdout
