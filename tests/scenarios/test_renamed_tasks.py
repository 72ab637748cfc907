"""Tasks and parameters that were renamed: jobs enqueued before run under the new names."""

import logging
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from worker_rig import endings

from pgqueue import Job, JobStatus, PgQueue, Secret, TaskDefinitionError, Worker
from pgqueue.models import UnreadableJob


def test_a_job_of_a_renamed_task_is_run_by_the_new_one(engine: Engine) -> None:
    before, after = PgQueue(engine), PgQueue(engine)
    seen: list[int] = []

    @before.task(name="shop.bill")
    def bill(customer: int) -> None: ...

    @after.task(name="shop.invoice", aliases=["shop.bill"], renamed={"customer": "customer_id"})
    def invoice(customer_id: int) -> None:
        seen.append(customer_id)

    bill.delay(1)
    invoice.delay(2)

    assert endings(Worker(after)) == {"succeeded": 2}
    assert sorted(seen) == [1, 2]


def test_an_error_quotes_no_secret_that_a_job_has_under_an_old_name(engine: Engine) -> None:
    before, after = PgQueue(engine), PgQueue(engine)

    @before.task(name="login", max_attempts=1)
    def login_before(token: str) -> None: ...

    @after.task(name="login", renamed={"token": "api_token"})
    def login(api_token: Secret[str]) -> None:
        raise ValueError(f"refused: {api_token}")

    job = login_before.delay("c4n4ry")

    assert endings(Worker(after)) == {"failed": 1}
    with Session(engine) as session:
        assert session.get_one(Job, job.id).last_error == "refused: ***"


def test_a_job_with_the_old_and_the_new_name_of_a_parameter_waits(engine: Engine) -> None:
    before, after = PgQueue(engine), PgQueue(engine)

    @before.task(name="bill")
    def bill_before(customer: int, customer_id: int) -> None: ...

    @after.task(name="bill", renamed={"customer": "customer_id"})
    def bill(customer_id: int) -> None: ...

    bill_before.delay(1, 2)

    assert endings(Worker(after)) == {"unreadable": 1}


def test_names_of_two_tasks_do_not_collide() -> None:
    queue = PgQueue()

    def old() -> None: ...

    def new() -> None: ...

    queue.task(name="old")(old)
    with pytest.raises(TaskDefinitionError, match="task old is registered already"):
        queue.task(name="new", aliases=["old"])(new)
    assert sorted(queue.tasks) == ["old"]
    queue.task(name="new", aliases=["older"])(new)
    with pytest.raises(TaskDefinitionError, match="task older is registered already"):
        queue.task(name="older")(old)
    queue.task(name="new", aliases=["older"])(new)  # its module was reloaded


class Speed(StrEnum):
    SLOW = "slow"


class NewSpeed(StrEnum):
    SLOW = "slow"
    FAST = "fast"


@dataclass
class Address:
    street: str


@dataclass
class NewAddress:
    street: str
    floor: int


@pytest.mark.parametrize(
    ("new", "old", "value"),
    [
        (NewSpeed, Speed, NewSpeed.FAST),
        (NewSpeed | None, Speed | None, NewSpeed.FAST),
        (NewAddress, Address, NewAddress("Main St", 3)),
        (Address, NewAddress, Address("Main St")),
    ],
)
def test_a_value_that_only_another_version_of_a_type_has_waits(
    engine: Engine, new: Any, old: Any, value: Any
) -> None:
    def of(annotation: Any) -> Any:
        def send(what: Any) -> None: ...

        send.__annotations__["what"] = annotation
        return send

    web, worker = PgQueue(engine), PgQueue(engine)
    worker.task(name="send")(of(old))
    web.task(name="send")(of(new)).delay(value)

    assert endings(Worker(worker)) == {"unreadable": 1}
    assert endings(Worker(web)) == {}
    with Session(engine) as session:
        job = session.query(Job).one()
        assert (job.status, job.attempts) == (JobStatus.PENDING, 0)
        assert session.query(UnreadableJob).count() == 1


def test_why_jobs_wait_is_logged_once_and_how_long_is_an_option(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    web, worker = PgQueue(engine), PgQueue(engine)

    @web.task(name="once")
    def once(added: int) -> None: ...

    @worker.task(name="once")
    def once_before() -> None: ...

    @web.task(name="impatient")
    def impatient(added: int) -> None: ...

    @worker.task(name="impatient", max_unreadable=timedelta(0))
    def impatient_before() -> None: ...

    for number in range(3):
        once.delay(number)
    failed = impatient.delay(1)

    with caplog.at_level(logging.WARNING, logger="pgqueue"):
        assert endings(Worker(worker)) == {"unreadable": 3, "failed": 1}

    waiting = [line for line in caplog.messages if "task once: " in line]
    assert len(waiting) == 1
    with Session(engine) as session:
        error = session.get_one(Job, failed.id).last_error
    assert error is not None
    assert "name 'added', which the task does not take" in error
