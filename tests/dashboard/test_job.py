"""The page of one job: every state, what each right shows, and the buttons."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from uuid import uuid4

import pytest
from sqlalchemy import Engine, create_engine, select, text
from sqlalchemy.orm import Session
from visitor import SECRET, Visitor

from chaos.interleavings.logical_workers import LogicalWorker, execute
from pgqueue import Cancel, Job, JobContext, Limit, PgQueue, Retry, Secret, Worker
from pgqueue.dashboard import RIGHTS
from pgqueue.models import OperatorAction
from pgqueue.schema import Roles, grant_statements

CANARY = "canary-73190-of-a-card"
MARKUP = "<script>alert(1)</script>\u202e"


@dataclass
class Address:
    street: str
    number: int


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    queue = PgQueue(engine, secret=SECRET)

    @queue.task(name="post", queue="mail", results="required")
    def post(to: str, copies: int = 1) -> dict[str, int]:
        return {"sent": copies}

    @queue.task(name="pay", max_attempts=2, retry=Retry.constant(timedelta(hours=1)))
    def pay(card: Secret[str], note: str, address: Address | None = None) -> None:
        raise ValueError(f"no money on {card}")

    @queue.task(name="stop")
    def stop() -> None:
        raise Cancel("not wanted")

    @queue.task(name="publish", results="required")
    def publish(ctx: JobContext) -> str:
        ctx.step("render", lambda: "rendered-18")
        approved = ctx.wait_for("approved", 12)
        return f"approved by {approved['by']}"

    @queue.task(name="call", limit=Limit(1, name="bank"))
    def call(ctx: JobContext) -> None:
        ctx.progress(3, 10, MARKUP)

    return queue


def run(queue: PgQueue) -> None:
    Worker(queue, ["mail", "default"]).run_until_empty(timeout=60)


def actions(engine: Engine) -> list[OperatorAction]:
    with Session(engine) as session:
        return list(session.scalars(select(OperatorAction).order_by(OperatorAction.id)))


def job(engine: Engine, job_id: int) -> Job:
    with Session(engine) as session:
        return session.get_one(Job, job_id)


def scheduled(queue: PgQueue) -> None:
    queue.tasks["post"].options(delay=timedelta(hours=1)).delay("ada")


def succeeded(queue: PgQueue) -> None:
    queue.tasks["post"].options(tags=["vip"], meta={"trace": MARKUP}).delay("ada", 7)
    run(queue)


def retried(queue: PgQueue) -> None:
    queue.tasks["pay"].delay(CANARY, "n")
    run(queue)


def cancelled(queue: PgQueue) -> None:
    queue.tasks["stop"].delay()
    run(queue)


def blocked(queue: PgQueue) -> None:
    queue.tasks["call"].delay()


STATES: dict[Callable[[PgQueue], None], list[str]] = {
    scheduled: ["scheduled", "is due at", "pgqueue run-now 1", "Run now", "Cancel", "Edit"],
    succeeded: ["succeeded", '{"sent": 7}', "vip", "attempt 1: succeeded", "Copy as new"],
    retried: ["retrying", "is retried at", "no money on ***", "attempt 1 failed", "Run now"],
    cancelled: ["cancelled", "by its handler", "not wanted", "Requeue"],
    blocked: ["blocked", "no live worker serves queue default", "Limit bank", "not declared"],
}


@pytest.mark.parametrize("arrange", STATES, ids=lambda arrange: arrange.__name__)
def test_the_page_says_the_state_and_what_can_be_done(
    queue: PgQueue, arrange: Callable[[PgQueue], None]
) -> None:
    arrange(queue)

    words = Visitor(queue).text("/jobs/1")

    assert [word for word in STATES[arrange] if word not in words] == [], words


def test_a_running_job_refreshes_its_state_and_an_ended_one_does_not(
    queue: PgQueue, engine: Engine, worker: LogicalWorker
) -> None:
    @queue.task(name="fork", executor="process")
    def fork() -> None: ...

    fork.delay()
    with engine.begin() as connection:
        connection.execute(text("UPDATE pgqueue.message_queue SET task = 'tests.task'"))
    worker.claim()
    visitor = Visitor(queue)

    running = visitor.get("/jobs/1").text
    assert "runs on" in running
    assert "hx-get" in running
    assert "/jobs/1/kill" in running
    assert visitor.post("/jobs/1/kill").status_code == 303
    assert "the kill of its handler was requested" in visitor.text("/jobs/1")

    succeeded(queue)
    assert "hx-get" not in visitor.get("/jobs/2").text


def test_a_job_that_does_not_exist_is_not_found(queue: PgQueue) -> None:
    assert Visitor(queue).get("/jobs/4711").status_code == 404


def test_text_of_a_job_is_no_markup_and_shows_its_control_characters(queue: PgQueue) -> None:
    queue.tasks["post"].options(meta={"a": MARKUP}, tags=["<b>"]).delay(MARKUP)

    html = Visitor(queue).get("/jobs/1").text

    assert "<script>alert" not in html
    assert "\u202e" not in html
    assert "&lt;b&gt;" in html


@pytest.mark.parametrize(
    ("right", "words"),
    [
        ("view_arguments", "n-of-the-note"),
        ("view_results", "Traceback (most"),
        ("view_results", "sent"),
        ("view_results", "rendered-18"),
        ("signals", "Send the signal approved 12"),
    ],
)
def test_what_needs_a_right_is_not_sent_without_it(queue: PgQueue, right: str, words: str) -> None:
    queue.tasks["pay"].delay(CANARY, "n-of-the-note")
    queue.tasks["post"].delay("ada")
    queue.tasks["publish"].delay()
    run(queue)

    def pages(rights: frozenset[str]) -> str:
        visitor = Visitor(queue, rights=rights)
        return "".join(visitor.get(f"/jobs/{id}").text for id in (1, 2, 3))

    assert words in pages(RIGHTS)
    assert words not in pages(RIGHTS - {right})


def test_arguments_of_a_task_that_the_application_has_not_are_hidden(
    queue: PgQueue, engine: Engine
) -> None:
    queue.tasks["pay"].delay(CANARY, "of the note")

    other = PgQueue(engine, secret=SECRET)
    html = Visitor(other).get("/jobs/1").text

    assert "of the note" not in html
    assert "no task of this name" in html
    assert "/jobs/1/edit" not in html
    assert Visitor(other).get("/jobs/1/edit").status_code == 409


def test_the_role_of_a_dashboard_reads_no_arguments(queue: PgQueue, engine: Engine) -> None:
    queue.tasks["pay"].delay(CANARY, "of the note")
    run(queue)
    role = f"viewer_{uuid4().hex[:8]}"
    execute(engine, f"CREATE ROLE {role}")
    for statement in grant_statements(Roles(dashboard=role)):
        execute(engine, statement)
    viewing = create_engine(engine.url, connect_args={"options": f"-c role={role}"})
    queue.bind(viewing)

    visitor = Visitor(queue)
    words = visitor.text("/jobs/1")
    refused = [visitor.get(one).status_code for one in ADDRESSES[1:3]]

    viewing.dispose()
    execute(engine, f"DROP OWNED BY {role}")
    execute(engine, f"DROP ROLE {role}")
    assert "is retried at" in words
    assert "(not readable by this role)" in words
    assert "of the note" not in words
    assert ("Edit" in words, "Copy as new" in words) == (False, False)
    assert refused == [403, 403]


ADDRESSES = ["/jobs/1", "/jobs/1/edit", "/tasks/pay/enqueue?copy=1", "/live"]


def test_a_secret_is_in_no_response(queue: PgQueue, engine: Engine) -> None:
    """Also where another argument, an error or a refusal quotes it."""
    queue.tasks["pay"].delay(CANARY, f"pays with {CANARY}")
    run(queue)
    visitor = Visitor(queue)

    found = [visitor.get(address).text for address in ADDRESSES]
    wrong = {"arg.card": json.dumps([CANARY]), "arg.note": "7", "copy": "1"}
    found += [
        visitor.post(address, wrong).text for address in ("/jobs/1/change", "/tasks/pay/enqueue")
    ]
    assert visitor.post("/tasks/pay/enqueue", {"copy": "1"}).status_code == 303
    found += [visitor.get("/jobs/2").text, visitor.get("/jobs/2/edit").text]

    assert [html for html in found if CANARY in html] == []
    assert job(engine, 2).args == job(engine, 1).args
    assert CANARY not in str([vars(one) for one in actions(engine)])


def test_the_code_for_a_test_leaves_secrets_out(queue: PgQueue) -> None:
    queue.tasks["pay"].delay(CANARY, "of the note", Address("Elm", 7))
    queue.tasks["pay"].delay("it's-secret", 'say "hello" to it\'s-secret', Address("Elm", 7))

    words = Visitor(queue).text("/jobs/1")

    assert "pay.enqueue( session, card=..., note=..., address=" in Visitor(queue).text("/jobs/2")

    code = "pay.enqueue( session, card=..., note='of the note', address=Address(street='Elm', numb"
    assert code in words


def test_the_batch_the_schedule_and_the_follow_up_of_a_job_are_named(queue: PgQueue) -> None:
    queue.task(name="tell")(lambda job_id: None)
    risky = queue.task(name="risky", on_failed=queue.tasks["tell"])(lambda: None)
    about = {"schedule": {"name": "nightly", "tick": None}}
    with queue.session() as session, session.begin(), queue.batch(session, name="letters"):
        risky.options(meta=about).enqueue(session)

    visitor = Visitor(queue)
    words, html = visitor.text("/jobs/1"), visitor.get("/jobs/1").text

    links = ("/batches/1", "/schedules", "/tasks/risky", "/tasks/tell", "/queues")
    assert [link for link in links if f'href="{link}"' not in html] == []
    assert "Batch letters 1" in words
    assert "Schedule nightly" in words
    assert "If it fails tell" in words


def test_a_job_names_what_stands_before_and_after_it(queue: PgQueue) -> None:
    note = queue.task(name="note", queue="mail")(lambda n: None)
    with queue.session() as session, session.begin(), queue.workflow(session) as flow:
        first = flow.add(note.job(1))
        flow.add(note.job(2), after=first)

    assert "Followed by note 2 blocked" in Visitor(queue).text("/jobs/1")
    assert "Waits for note 1 pending" in Visitor(queue).text("/jobs/2")
    assert 'href="/jobs/2"' in Visitor(queue).get("/jobs/1").text
    assert "Followed by" not in Visitor(queue, queues={"mail"}).text("/jobs/1")


def test_a_workflow_that_has_ended_is_started_again_from_a_job(queue: PgQueue) -> None:
    note = queue.task(name="note", queue="mail")(lambda n: None)
    with queue.session() as session, session.begin(), queue.workflow(session) as flow:
        flow.add(note.job(2), after=flow.add(note.job(1)))
    ann, button = Visitor(queue), "Restart the workflow from here"
    before = ann.text("/jobs/2")
    Worker(queue).run_until_empty(timeout=60)

    answer = ann.post("/jobs/2/restart")

    assert button not in before
    assert button in ann.text("/jobs/2")
    assert "/batches/2" in answer.headers["Location"]
    assert "Unfinished 1" in ann.text("/batches/2")
    assert button not in Visitor(queue, queues={"mail"}).text("/jobs/2")
    assert Visitor(queue, queues={"mail"}).post("/jobs/2/restart").status_code == 403


def test_what_is_to_come_has_not_happened(queue: PgQueue) -> None:
    scheduled(queue)

    page = Visitor(queue).text("/jobs/1")

    happened = page.partition("What has happened")[2].partition("Arguments")[0]
    assert ("enqueued" in happened, " due " in happened) == (True, False)


def test_attempts_after_a_requeue_are_told_from_those_before(queue: PgQueue) -> None:
    is_broken = True

    @queue.task(name="often", queue="mail", max_attempts=1)
    def often() -> None:
        if is_broken:
            raise ValueError

    job_id = often.delay().id
    run(queue)
    is_broken = False
    visitor = Visitor(queue)
    visitor.post(f"/jobs/{job_id}/requeue")
    waiting = visitor.text(f"/jobs/{job_id}")
    run(queue)
    done = visitor.text(f"/jobs/{job_id}")

    assert [page.count("requeued, with all its attempts again") for page in (waiting, done)] == [
        1,
        1,
    ]
    assert (
        done.index("attempt 1: failed") < done.index("requeued, with") < done.index("attempt 1: s")
    )
    assert "Attempts 1 of 1 since it was requeued" in done


def test_an_attempt_and_its_job_end_at_one_time(queue: PgQueue, engine: Engine) -> None:
    cancelled(queue)
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE pgqueue.job_attempts SET finished_at = finished_at + interval '1 hour'")
        )

    assert "1.0 h" not in Visitor(queue).text("/jobs/1")


def test_a_button_changes_one_job_and_logs_it(queue: PgQueue, engine: Engine) -> None:
    cancelled(queue)
    visitor = Visitor(queue, user="eve")

    response = visitor.post("/jobs/1/requeue", {"reason": "mended"})
    assert (response.status_code, job(engine, 1).status) == (303, "pending")
    assert "Job 1: requeued" in visitor.text(response.headers["Location"])
    assert visitor.post("/jobs/1/cancel").status_code == 303

    assert job(engine, 1).status == "cancelled"
    logged = [(one.actor, one.action, one.target, one.reason) for one in actions(engine)]
    assert logged == [
        ("eve", "requeue", {"jobs": [1]}, "mended"),
        ("eve", "cancel", {"jobs": [1]}, ""),
    ]
    assert [one.first_ids for one in actions(engine)] == [[1], [1]]


def test_a_job_that_waits_for_an_approval_is_approved_on_its_page(
    queue: PgQueue, engine: Engine
) -> None:
    publication = queue.tasks["publish"].delay()
    run(queue)
    address, form = f"/jobs/{publication.id}", {"step": "wait for approved 12"}
    ann = Visitor(queue)
    page = ann.text(address)
    assert "Send the signal approved 12" in page

    refused = ann.post(f"{address}/signal", {**form, "payload": "{by: ann}"})
    other = ann.post(f"{address}/signal", {"step": "wait for paid 12"})
    assert (refused.status_code, other.status_code) == (400, 409)
    assert actions(engine) == []

    ann.post(f"{address}/signal", {**form, "payload": '{"by": "ann"}', "reason": "it is true"})
    run(queue)
    again = ann.post(f"{address}/signal", form)

    assert "approved by ann" in ann.text(address)
    assert again.status_code == 409
    [action] = actions(engine)
    assert (action.action, action.target) == ("signal", {"signal": "approved 12"})


def test_run_now_makes_a_scheduled_job_due(queue: PgQueue, engine: Engine) -> None:
    scheduled(queue)
    late = job(engine, 1).run_at

    assert Visitor(queue).post("/jobs/1/run-now").status_code == 303

    assert job(engine, 1).run_at < late


@pytest.mark.parametrize("action", ["requeue", "run-now", "kill"])
def test_an_action_that_a_worker_has_outrun_says_so_and_is_not_logged(
    queue: PgQueue, engine: Engine, action: str
) -> None:
    succeeded(queue)

    response = Visitor(queue).post(f"/jobs/1/{action}")

    assert response.status_code == 409
    assert "nothing was changed: job 1: unchanged, because its status is succeeded" in response.text
    assert actions(engine) == []


def test_a_kill_of_a_handler_in_a_thread_is_refused(
    queue: PgQueue, engine: Engine, worker: LogicalWorker
) -> None:
    scheduled(queue)
    queue.tasks["post"].options(queue="default").delay("ada")
    with engine.begin() as connection:
        connection.execute(text("UPDATE pgqueue.message_queue SET task = 'tests.task'"))
    worker.claim()

    assert "/jobs/2/kill" not in Visitor(queue).get("/jobs/2").text
    assert Visitor(queue).post("/jobs/2/kill").status_code == 409
    assert job(engine, 2).cancel_requested_at is None


def test_live_has_the_newest_jobs_first(queue: PgQueue) -> None:
    assert "There are no jobs." in Visitor(queue).text("/live")
    retried(queue)
    scheduled(queue)

    words = Visitor(queue).text("/live")

    assert words.index("post") < words.index("pay")
    assert "no money on ***" in words
