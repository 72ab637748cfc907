"""The page of queues and limits: what waits, who holds places, and what can be changed."""

import pytest
from sqlalchemy import Engine, text
from visitor import SECRET, Visitor

from chaos.interleavings.logical_workers import execute, stored
from pgqueue import Limit, PgQueue
from pgqueue.dashboard import RIGHTS
from pgqueue.repository.admit import Admissions
from pgqueue.repository.limits import Limits
from pgqueue.repository.queue_minutes import QueueMinutes
from pgqueue.rules.limits import name_of
from pgqueue.tables import OperatorAction, QueueSettings


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    queue = PgQueue(engine, secret=SECRET)
    queue.task(name="send", queue="mail")(lambda: None)
    queue.task(name="bill", queue="secret-tenant")(lambda: None)
    queue.task(name="pay", queue="bank", limit=Limit(2, by="account", name="accounts"))(
        lambda account: None
    )
    return queue


def count(engine: Engine) -> None:
    with engine.begin() as connection:
        QueueMinutes(connection).count()


def test_an_operator_reads_what_waits_where(queue: PgQueue, engine: Engine) -> None:
    queue.tasks["send"].delay()
    count(engine)
    execute(
        engine,
        "INSERT INTO pgqueue.queue_minutes (at, queue, counted_at, waiting, due, blocked, running,"
        " started) SELECT date_trunc('minute', now()) - ago * interval '1 minute', 'mail', now(),"
        " due, due, 0, 0, 240 FROM (VALUES (6, 121), (2, 1)) AS minute (ago, due)",
    )

    words = Visitor(queue).text("/queues")

    assert "mail 1 0 0 0" in words  # due, blocked, later, running
    assert "30 60 2.0 s none Pause" in words  # in, out, empty in, workers
    assert "Counted" in words


def test_a_queue_is_paused_and_resumed_and_both_are_logged(queue: PgQueue, engine: Engine) -> None:
    visitor = Visitor(queue)

    paused = visitor.post("/queues/pause", {"queue": "mail", "back": "/queues"})
    words = visitor.text(paused.location)

    assert "paused queue mail" in words
    assert "mail paused" in words
    visitor.post("/queues/resume", {"queue": "mail"})
    [settings] = stored(engine, QueueSettings)
    assert settings.paused_at is None
    assert [(one.actor, one.action, one.target) for one in stored(engine, OperatorAction)] == [
        ("ann", "pause_queue", {"queue": "mail"}),
        ("ann", "resume_queue", {"queue": "mail"}),
    ]


def test_all_queues_are_paused_and_resumed(queue: PgQueue) -> None:
    visitor = Visitor(queue)

    visitor.post("/queues/pause", {"queue": "*"})
    words = visitor.text("/queues")

    assert "All queues are paused since" in words
    assert "Resume all queues" in words
    assert "queue * is paused since" in visitor.text("/")
    assert "Resume all" not in Visitor(queue, queues={"mail"}).text("/queues")
    assert Visitor(queue, queues={"mail"}).post("/queues/resume", {"queue": "*"}).status_code == 404
    visitor.post("/queues/resume", {"queue": "*"})
    assert "Pause all queues" in visitor.text("/queues")


def test_a_user_of_some_tags_sees_no_numbers_of_whole_queues(
    queue: PgQueue, engine: Engine
) -> None:
    queue.tasks["bill"].delay()
    count(engine)

    words = Visitor(queue, tags={"vip"}).text("/queues")

    assert "counted by queue, not by tag" in words
    assert "secret-tenant" not in words


@pytest.fixture
def holding(queue: PgQueue, engine: Engine) -> PgQueue:
    """Account 7 holds a place, and another job of it waits."""
    with engine.begin() as connection:
        Limits(connection).declare(queue.limited.limits.values())
    for _ in range(2):
        queue.tasks["pay"].delay(7)
    with engine.begin() as connection:
        Admissions(connection).admit([1], notify=False)
    return queue


def test_a_limit_shows_the_jobs_that_hold_its_places(holding: PgQueue) -> None:
    words = Visitor(holding).text("/queues")

    assert "accounts 2 at once for each key 1 1 #1 pay" in words


def test_a_place_that_its_job_has_left_is_neither_counted_nor_shown(
    holding: PgQueue, engine: Engine
) -> None:
    execute(engine, "DELETE FROM pgqueue.message_queue")  # and no admission has met the place yet

    words = Visitor(holding).text("/queues")

    assert "accounts 2 at once for each key 0 1 \u2013" in words


def test_a_job_that_takes_turns_is_shown_once(queue: PgQueue, engine: Engine) -> None:
    fair = queue.task(name="send_to", fair_by="account")(lambda account: None)
    with engine.begin() as connection:
        Limits(connection).declare(queue.limited.limits.values())
    fair.delay(7)
    with engine.begin() as connection:
        keys, job_id = connection.execute(
            text("SELECT limit_keys, target_id FROM pgqueue.waiting_messages")
        ).one()
        Admissions(connection).admit([job_id], notify=False)
        Admissions(connection).add_places([(name_of(keys), job_id)])

    words = Visitor(queue).text("/queues")

    assert "in turns for each key 1 0 #1 send_to Change" in words


def test_many_jobs_that_wait_for_a_limit_are_not_all_counted(
    holding: PgQueue, engine: Engine
) -> None:
    def wait(key: str, jobs: int) -> str:
        execute(
            engine,
            "INSERT INTO pgqueue.waiting_messages (limit_keys, queue, priority, run_at, task,"
            " target_id) SELECT :key, 'bank', 5, now(), 'pay', n FROM generate_series(1, :jobs)"
            " AS n",
            key=key,
            jobs=jobs,
        )
        words: str = Visitor(holding).text("/queues")
        return words

    assert "for each key 1 5 " in wait("accounts 8", 4)  # one place is held, another job waits
    assert "for each key 1 1,005+ " in wait("accounts 9", 1001)


def test_the_capacity_of_a_limit_is_changed_and_logged(holding: PgQueue, engine: Engine) -> None:
    visitor = Visitor(holding)
    form = visitor.text("/queues?limit=accounts")

    changed = visitor.post("/queues/limit", {"limit": "accounts", "capacity": "5"})
    visitor.post("/queues/pause-key", {"limit": "accounts", "key": "7"})
    words = visitor.text("/queues")
    visitor.post("/queues/resume-key", {"limit": "accounts", "key": "[7]"})
    visitor.post("/queues/limit", {"limit": "accounts", "capacity": ""})

    assert "Empty: as in the code, 2 at once." in form
    assert changed.status_code == 303
    assert "accounts 5 at once for each key; in the code 2 at once" in words
    assert "accounts [7] paused; in the code" in words
    assert [(one.action, one.before, one.after) for one in stored(engine, OperatorAction)] == [
        ("set_limit", {"capacity": 2}, {"capacity": 5}),
        ("pause_key", None, None),
        ("resume_key", None, None),
        ("set_limit", {"capacity": 5}, {"capacity": 2}),
    ]


@pytest.mark.parametrize(
    ("address", "form", "status", "words"),
    [
        ("limit", {"limit": "unknown", "capacity": "1"}, 409, "there is no such limit"),
        ("limit", {"limit": "accounts", "capacity": "x"}, 400, "give a whole number"),
        ("pause-key", {"limit": "accounts"}, 400, "which key?"),
        ("pause", {"queue": ""}, 409, "queue"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(
    queue: PgQueue, engine: Engine, address: str, form: dict[str, str], status: int, words: str
) -> None:
    refused = Visitor(queue).post(f"/queues/{address}", form)

    assert refused.status_code == status
    assert words in refused.text
    assert stored(engine, OperatorAction) == []


def test_the_keys_of_limits_are_arguments_that_need_a_right(holding: PgQueue) -> None:
    visitor = Visitor(holding)
    visitor.post("/queues/pause-key", {"limit": "accounts", "key": "4711"})

    words = Visitor(holding, rights=RIGHTS - {"view_arguments", "limits"}).get("/queues").text

    assert "accounts" in words
    assert "4711" not in words


def test_a_queue_without_jobs_says_what_makes_one(engine: Engine) -> None:
    words = Visitor(PgQueue(engine, secret=SECRET)).text("/queues")

    assert "No queue has jobs." in words
    assert "No worker has counted the jobs yet" in words
    assert "No worker has declared a limit." in words
