"""The page of schedules: rules in words, next runs, results, and what can be done."""

from datetime import timedelta

import pytest
from sqlalchemy import Engine
from visitor import SECRET, Visitor

from chaos.interleavings.logical_workers import execute, stored
from pgqueue import Job, PgQueue
from pgqueue.dashboard import RIGHTS
from pgqueue.rules.ticks import ScheduleRule
from pgqueue.tables import OperatorAction


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    queue = PgQueue(engine, secret=SECRET)
    report = queue.task(name="report")(lambda: None)
    with queue.session() as session, session.begin():
        queue.schedules.add(
            session, report, name="daily", cron="0 7 * * 1-5", timezone="Asia/Tokyo"
        )
    return queue


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (ScheduleRule("0 9 * * 1-5", None), "At 09:00 on Monday through Friday"),
        (ScheduleRule("*/5 * * * *", None), "Every fifth minute of every hour"),
        (ScheduleRule(None, timedelta(minutes=90)), "Every 90 min"),
    ],
)
def test_a_rule_is_a_sentence(rule: ScheduleRule, words: str) -> None:
    assert rule.in_words() == words


def test_the_page_shows_the_next_runs_in_the_zone_of_the_schedule(queue: PgQueue) -> None:
    words = Visitor(queue).text("/schedules")

    [state] = queue.schedules.list(queue.session())
    assert "At 07:00 on Monday through Friday 0 7 * * 1-5 Asia/Tokyo" in words
    assert words.count("07:00:00") >= 3
    assert "no tick yet" in words
    assert state.next_at is not None


def test_a_schedule_is_run_paused_and_resumed_and_each_is_logged(
    queue: PgQueue, engine: Engine
) -> None:
    visitor, field = Visitor(queue), {"schedule": "daily", "back": "/schedules"}

    run = visitor.post("/schedules/run", field)
    visitor.post("/schedules/pause", field)
    paused = visitor.text("/schedules")
    visitor.post("/schedules/resume", field)

    [job] = stored(engine, Job)
    assert f"enqueued job {job.id} of schedule daily" in visitor.text(run.location)
    assert "daily paused" in paused
    assert [(one.action, one.target, one.jobs) for one in stored(engine, OperatorAction)] == [
        ("trigger_schedule", {"schedule": "daily"}, 1),
        ("pause_schedule", {"schedule": "daily"}, 0),
        ("resume_schedule", {"schedule": "daily"}, 0),
    ]
    assert visitor.post("/schedules/run", {"schedule": "other"}).status_code == 404


def test_the_last_jobs_of_a_schedule_are_squares(queue: PgQueue, engine: Engine) -> None:
    visitor = Visitor(queue)
    visitor.post("/schedules/run", {"schedule": "daily"})
    queue.tasks["report"].delay()
    visitor.post("/schedules/run", {"schedule": "daily"})
    execute(engine, "UPDATE pgqueue.schedules SET last_job_id = 3, last_tick_at = now()")
    execute(engine, "UPDATE pgqueue.jobs SET outcome = 'failed', finished_at = now() WHERE id = 1")

    html = visitor.get("/schedules").text

    squares = [word for word in ("job 1: failed", "job 2:", "job 3: pending") if word in html]
    assert squares == ["job 1: failed", "job 3: pending"]


def test_only_who_may_change_schedules_does(queue: PgQueue, engine: Engine) -> None:
    visitor = Visitor(queue, RIGHTS - {"schedules"})

    assert (
        "Run now"
        not in visitor.get("/schedules").text.partition("<table")[2].partition("</table")[0]
    )
    for action in ("run", "pause", "resume"):
        assert visitor.post(f"/schedules/{action}", {"schedule": "daily"}).status_code == 403
    assert stored(engine, OperatorAction) == []
