"""The forms about one job: change it, enqueue a new one, and enqueue a copy."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any, Literal

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session
from visitor import SECRET, Visitor, words_of
from worker_rig import wait_until

from pgqueue import Cancel, Job, Limit, PgQueue, Secret, Worker
from pgqueue.dashboard import RIGHTS
from pgqueue.models import OperatorAction

CARD = "canary-73190-of-a-card"


@dataclass
class Address:
    street: str
    number: int


def once(card: Secret[str]) -> None: ...


def bill_nobody() -> None: ...


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    queue = PgQueue(engine, secret=SECRET)

    @queue.task(name="post", queue="mail")
    def post(to: str, copies: int = 1, address: Address | None = None) -> None: ...

    @queue.task(name="pay")
    def pay(card: Secret[str], note: str = "") -> None:
        raise Cancel("later")

    @queue.task(name="call", limit=Limit(1, by="account", name="bank"))
    def call(account: int) -> None: ...

    return queue


def somebody_waits(engine: Engine) -> bool:
    waits = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    with engine.connect() as connection:
        return bool(connection.scalar(text(waits)))


def jobs(engine: Engine) -> list[Job]:
    with Session(engine) as session:
        return list(session.scalars(select(Job).order_by(Job.id)))


def actions(engine: Engine) -> list[OperatorAction]:
    with Session(engine) as session:
        return list(session.scalars(select(OperatorAction).order_by(OperatorAction.id)))


def fields(html: str) -> dict[str, str]:
    """The fields of the form, as a browser would send them."""
    form = html.partition("<main")[2]
    inputs = re.findall(r"<input [^>]*>", form)
    values: dict[str, str] = {}
    for tag in inputs:
        attributes = dict(re.findall(r'([\w-]+)="([^"]*)"', tag))
        if "name" in attributes and attributes["name"] != "csrf":
            values[unescape(attributes["name"])] = unescape(attributes.get("value", ""))
    for name, value in re.findall(r'<textarea [^>]*name="([^"]*)"[^>]*>([^<]*)<', form):
        values[unescape(name)] = unescape(value)
    for name, options in re.findall(r'<select [^>]*name="([^"]*)"[^>]*>(.*?)</select>', form, re.S):
        values[name] = re.findall(r'value="([^"]*)" selected', options)[0]
    return values


def sent(visitor: Visitor, form: str, to: str, **changes: str) -> Any:
    """Send a form as it is shown, with some fields changed."""
    page = visitor.get(form)
    assert page.status_code == 200, page.text[-2000:]
    return visitor.post(to, {**fields(page.text), **changes})


def edited(visitor: Visitor, **changes: str) -> Any:
    return sent(visitor, "/jobs/1/edit", "/jobs/1/change", **changes)


def later(queue: PgQueue, task: str, *arguments: Any) -> None:
    queue.tasks[task].options(delay=timedelta(hours=1)).delay(*arguments)


class TestEdit:
    def test_an_edit_changes_what_differs_and_logs_no_values(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        later(queue, "post", "ada", 2)

        response = edited(
            Visitor(queue),
            **{"arg.to": '"bob"', "priority": "1", "run_at": "2100-01-01 12:00", "reason": "moved"},
        )

        assert response.status_code == 303
        [job] = jobs(engine)
        assert (job.args, job.priority) == ({"to": "bob", "copies": 2}, 1)
        assert job.run_at == datetime(2100, 1, 1, 12, tzinfo=UTC)
        [action] = actions(engine)
        assert (action.action, action.reason, action.target) == ("change", "moved", {"jobs": [1]})
        assert action.options == {
            "priority": 1,
            "run_at": "2100-01-01T12:00:00+00:00",
            "args": ["to"],
        }
        assert action.before is not None
        assert action.before["priority"] == 5

    def test_an_edit_changes_attempts_timeout_tags_and_meta(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        options: Any = {"meta": {"a": 1, "b": 2}, "tags": ["x"], "delay": timedelta(hours=1)}
        queue.tasks["post"].options(**options).delay("ada", 2)

        new = {"max_attempts": "7", "timeout": "2.5", "tags": "y, z", "meta": '{"b": 3}'}
        assert edited(Visitor(queue), **new).status_code == 303

        [job] = jobs(engine)
        assert (job.max_attempts, job.tags) == (7, ["y", "z"])
        assert job.meta == {"a": 1, "b": 3, "pgqueue.timeout": 2.5}

    @pytest.mark.parametrize(
        ("field", "value", "words"),
        [
            ("timeout", "soon", "give a number of seconds"),
            ("meta", "{", "meta is not JSON"),
            ("meta", "[]", "meta is list"),
            ("tags", "a" * 101, "a tag has 1 to 100"),
        ],
    )
    def test_a_mistake_in_an_option_is_shown_in_the_form(
        self, queue: PgQueue, field: str, value: str, words: str
    ) -> None:
        later(queue, "post", "ada", 2)

        response = edited(Visitor(queue), **{field: value})

        assert response.status_code == 400
        assert words in unescape(response.text)

    def test_a_form_that_was_not_changed_changes_nothing(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        later(queue, "pay", CARD, f"with {CARD}")
        before = jobs(engine)[0]

        response = edited(Visitor(queue))

        assert response.status_code == 400
        assert "nothing to change is given" in response.text
        after = jobs(engine)[0]
        assert (after.args, after.run_at) == (before.args, before.run_at)

    def test_an_empty_secret_stays_and_a_new_one_is_stored(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        later(queue, "pay", CARD, "a")
        visitor = Visitor(queue)

        assert edited(visitor, **{"arg.note": '"b"'}).status_code == 303
        assert jobs(engine)[0].args == {"card": CARD, "note": "b"}
        assert edited(visitor, **{"arg.card": '"4711-0815"'}).status_code == 303
        assert jobs(engine)[0].args == {"card": "4711-0815", "note": "b"}
        assert "4711-0815" not in str([one.after for one in actions(engine)])

    def test_a_mask_in_a_field_is_not_stored(self, queue: PgQueue, engine: Engine) -> None:
        later(queue, "pay", CARD, f"paid by {CARD}, late")

        refused = edited(Visitor(queue), **{"arg.note": '"paid by ***, early"'})

        assert refused.status_code == 400
        assert "in place of a secret" in refused.text
        assert jobs(engine)[0].args == {"card": CARD, "note": f"paid by {CARD}, late"}

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"arg.to": "7"}, "argument to"),
            ({"arg.to": "ada"}, "is not JSON; a text needs quotes"),
            ({"arg.copies": "NaN"}, "is not JSON"),
            ({"arg.address": '{"street": "Elm"}'}, "argument address"),
            ({"run_at": "soon"}, "is no time"),
        ],
    )
    def test_a_mistake_in_an_edit_is_shown_in_the_form_as_it_was_sent(
        self, queue: PgQueue, engine: Engine, change: dict[str, str], words: str
    ) -> None:
        later(queue, "post", "ada")
        before = jobs(engine)[0]

        response = edited(Visitor(queue), **change)

        assert response.status_code == 400
        assert words in words_of(response.text)
        assert fields(response.text).items() >= change.items()
        assert (jobs(engine)[0].args, jobs(engine)[0].run_at) == (before.args, before.run_at)
        assert actions(engine) == []

    def test_a_cancelled_job_is_requeued_with_other_arguments(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        queue.tasks["pay"].delay(CARD, "a")
        Worker(queue).run_until_empty(timeout=60)

        refused = edited(Visitor(queue, RIGHTS - {"requeue"}), **{"arg.note": '"b"'})
        assert (refused.status_code, jobs(engine)[0].status) == (403, "cancelled")

        response = edited(Visitor(queue), **{"arg.note": '"b"'})

        assert response.status_code == 303
        assert (jobs(engine)[0].status, jobs(engine)[0].args["note"]) == ("pending", "b")
        assert actions(engine)[0].action == "requeue"

    def test_a_form_that_is_older_than_another_change_is_refused(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        later(queue, "post", "ada")
        visitor = Visitor(queue)
        old = fields(visitor.get("/jobs/1/edit").text)
        assert edited(visitor, **{"arg.to": '"bob"'}).status_code == 303

        response = visitor.post("/jobs/1/change", {**old, "priority": "0"})

        assert response.status_code == 409
        assert "has changed meanwhile" in response.text
        assert (jobs(engine)[0].args["to"], jobs(engine)[0].priority) == ("bob", 5)

    def test_of_two_forms_at_the_same_moment_the_second_is_refused(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        later(queue, "post", "ada")
        visitor = Visitor(queue)
        form = fields(visitor.get("/jobs/1/edit").text)
        with ThreadPoolExecutor(1) as other, queue.session() as session:
            queue.change(session, 1, priority=0)
            answer = other.submit(visitor.post, "/jobs/1/change", {**form, "priority": "9"})
            wait_until(lambda: somebody_waits(engine), what="the form waits")
            session.commit()

        assert answer.result().status_code == 409
        assert jobs(engine)[0].priority == 0


class TestEnqueue:
    def test_the_form_to_enqueue_has_a_field_with_the_type_of_each_argument(
        self, queue: PgQueue
    ) -> None:
        words = Visitor(queue).text("/tasks/post/enqueue")

        assert "to: str" in words
        assert "copies: int empty: 1" in words
        assert "Address | None" in words

    def test_the_form_enqueues_with_types_and_options_and_logs_it(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        given = {"arg.to": '"ada"', "arg.address": '{"street": "Elm", "number": 7}'}
        options = {"queue": "slow", "priority": "9", "tags": "a, b", "unique_key": "k"}
        visitor = Visitor(queue)

        response = visitor.post("/tasks/post/enqueue", {**given, **options})

        assert response.headers["Location"].startswith("/jobs/1?")
        [job] = jobs(engine)
        assert job.args == {"to": "ada", "address": {"street": "Elm", "number": 7}}
        assert (job.queue, job.priority, job.tags) == ("slow", 9, ["a", "b"])
        [action] = actions(engine)
        assert (action.action, action.target, action.first_ids) == (
            "enqueue",
            {"task": "post"},
            [1],
        )

        again = visitor.post("/tasks/post/enqueue", {**given, **options})
        assert "holds the unique key already" in visitor.text(again.headers["Location"])
        assert len(jobs(engine)) == len(actions(engine)) == 1

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({}, "missing a required argument: 'to'"),
            ({"arg.to": "[]"}, "argument to"),
            ({"arg.to": '"a"', "priority": "12"}, "give a whole number from 0 to 9"),
            ({"arg.to": '"a"', "queue": "no spaces"}, "queue"),
            ({"arg.to": '"a"', "unique_key": "k", "copy": "7"}, "job 7 does not exist"),
        ],
    )
    def test_a_mistake_enqueues_nothing(
        self, queue: PgQueue, engine: Engine, given: dict[str, str], words: str
    ) -> None:
        response = Visitor(queue).post("/tasks/post/enqueue", given)

        assert response.status_code in (400, 404)
        assert words in words_of(response.text)
        assert jobs(engine) == []

    def test_a_refusal_that_quotes_a_secret_masks_it(self, queue: PgQueue) -> None:
        options: Any = {"unique_key": lambda card: f"once-{card}", "on_duplicate": "raise"}
        queue.task(name="once", **options)(once)
        visitor, given = Visitor(queue), {"arg.card": json.dumps(CARD)}
        assert visitor.post("/tasks/once/enqueue", given).status_code == 303

        response = visitor.post("/tasks/once/enqueue", given)

        assert "holds the unique key 'once-***'" in words_of(response.text)
        assert CARD not in response.text

    def test_only_tasks_of_the_application_can_be_enqueued(self, queue: PgQueue) -> None:
        visitor = Visitor(queue)
        assert visitor.get("/tasks/os.system/enqueue").status_code == 404
        assert visitor.post("/tasks/os.system/enqueue").status_code == 404

    def test_a_copy_is_a_new_job_with_the_arguments_and_the_secret(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        queue.tasks["pay"].options(tags=["vip"], priority=2).delay(CARD, "a")
        Worker(queue).run_until_empty(timeout=60)

        form, to = "/tasks/pay/enqueue?copy=1", "/tasks/pay/enqueue"
        response = sent(Visitor(queue), form, to, **{"arg.note": '"b"'})

        assert response.headers["Location"].startswith("/jobs/2?")
        old, new = jobs(engine)
        assert (old.args, old.status) == ({"card": CARD, "note": "a"}, "cancelled")
        assert (new.args, new.status) == ({"card": CARD, "note": "b"}, "pending")
        assert (new.tags, new.priority) == (["vip"], 2)
        assert actions(engine)[0].options["copy_of"] == 1

    @pytest.mark.parametrize("on_duplicate", ["return", "raise"])
    def test_a_limited_user_is_not_told_which_job_holds_a_key(
        self, queue: PgQueue, engine: Engine, on_duplicate: Literal["return", "raise"]
    ) -> None:
        bill = queue.task(name="bill", on_duplicate=on_duplicate)(bill_nobody)
        holder = bill.options(unique_key="seven").delay()
        visitor = Visitor(queue, tags=["letters"])

        response = visitor.post("/tasks/bill/enqueue", {"unique_key": "seven", "tags": "letters"})

        assert response.status_code == 409
        assert "another job holds the unique key" in response.text
        assert str(holder.id) not in words_of(response.text)
        assert len(jobs(engine)) == 1
        assert not actions(engine)

    def test_a_copy_of_arguments_needs_the_right_to_view_them(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        later(queue, "post", "ada")
        visitor = Visitor(queue, RIGHTS - {"view_arguments"})

        assert visitor.get("/jobs/1/edit").status_code == 403
        assert visitor.post("/jobs/1/change", {"arg.to": '"bob"'}).status_code == 403
        assert visitor.get("/tasks/post/enqueue?copy=1").status_code == 403
        assert visitor.post("/tasks/post/enqueue", {"copy": "1"}).status_code == 403
        assert visitor.get("/tasks/post/enqueue").status_code == 200
        assert [job.args for job in jobs(engine)] == [{"to": "ada"}]

    @pytest.mark.parametrize(
        ("limits", "given", "status"),
        [
            ({"queues": ["mail"]}, {}, 303),
            ({"queues": ["other"]}, {}, 404),
            ({"queues": ["mail"]}, {"queue": "other"}, 404),
            ({"tags": ["letters"]}, {"tags": "letters"}, 303),
            ({"tags": ["letters"]}, {"tags": "parcels"}, 403),
        ],
    )
    def test_a_user_enqueues_only_what_the_user_may_see(
        self,
        queue: PgQueue,
        engine: Engine,
        limits: dict[str, Any],
        given: dict[str, str],
        status: int,
    ) -> None:
        visitor = Visitor(queue, **limits)

        response = visitor.post("/tasks/post/enqueue", {"arg.to": json.dumps("ada"), **given})

        assert response.status_code == status
        assert len(jobs(engine)) == (status == 303)
