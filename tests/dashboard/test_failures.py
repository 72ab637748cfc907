"""Failures by their error: what is shown, try one, mute; and what a user with a scope sees."""

from datetime import UTC, datetime, timedelta

import pytest
from broken_shop import Shop
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session
from visitor import Visitor, words_of

from chaos.interleavings.logical_workers import execute
from pgqueue import JobStatus
from pgqueue.dashboard import RIGHTS
from pgqueue.repository.conditions import JobFilter
from pgqueue.repository.failures import FailedGroups
from pgqueue.repository.operator_actions import OperatorActions
from pgqueue.tables import ErrorGroup


@pytest.fixture
def shop(engine: Engine) -> Shop:
    return Shop(engine)


def page_of(shop: Shop, **more: object) -> str:
    words = "".join(f"&{name}={value}" for name, value in more.items())
    return f"/failures/{shop.fingerprint}?task=send{words}"


def test_without_errors_the_page_says_so(shop: Shop) -> None:
    assert "No errors in this time" in Visitor(shop.queue).text("/failures")


def test_errors_of_one_kind_are_one_line(shop: Shop) -> None:
    shop.fail(3)

    words = Visitor(shop.queue).text("/failures?span=1h")

    assert "ConnectionError : no mail server for ada send 3 " in words
    assert "Try one Requeue…" in words


def test_the_error_of_the_most_jobs_may_come_first(shop: Shop) -> None:
    many, one = shop.fail(3), shop.fail(1)
    execute(
        shop.engine,
        "INSERT INTO pgqueue.error_groups SELECT 7, task, 'PoisonError', place, 1, first_at,"
        " last_at + interval '1 min', '', :job, 'x' FROM pgqueue.error_groups",
        job=one[0],
    )
    execute(
        shop.engine, "UPDATE pgqueue.dead_letters SET fingerprint = 7 WHERE job_id = :id", id=one[0]
    )

    newest = Visitor(shop.queue).text("/failures")
    most = Visitor(shop.queue).text("/failures?order=jobs")

    assert len(many) == 3
    assert newest.index("PoisonError") < newest.index("ConnectionError")
    assert most.index("ConnectionError") < most.index("PoisonError")


def test_an_error_has_its_failures_by_the_hour(shop: Shop) -> None:
    ids = shop.fail(4)
    execute(
        shop.engine,
        "UPDATE pgqueue.dead_letters SET finished_at = finished_at - interval '150 min'"
        " WHERE job_id = :id",
        id=ids[0],
    )
    execute(
        shop.engine,
        "UPDATE pgqueue.dead_letters SET finished_at = finished_at - interval '25 h'"
        " WHERE job_id = :id",
        id=ids[1],
    )
    with shop.queue.session() as session:
        rows = FailedGroups(session)
        [trend] = rows.trends(
            JobFilter(), rows.newest(JobFilter(), limit=9, is_limited=False)
        ).values()

    assert (trend[-3], trend[-1], sum(trend)) == (1, 2, 3)
    assert "jobs that have failed in each hour" in Visitor(shop.queue).get("/failures").text


def test_the_traceback_stays_when_all_jobs_are_requeued(shop: Shop) -> None:
    shop.fail()
    address = page_of(shop)
    ann = Visitor(shop.queue)
    ann.post("/actions/requeue", {"action": "requeue", "q": "status:failed"})

    assert "in send" in ann.text(address)
    execute(shop.engine, "DELETE FROM pgqueue.jobs")
    assert "None is stored." in ann.text(address)


def test_errors_older_than_the_span_are_left_out(shop: Shop) -> None:
    shop.fail()
    execute(shop.engine, "UPDATE pgqueue.error_groups SET last_at = last_at - interval '2 h'")

    ann = Visitor(shop.queue)

    assert "ConnectionError" not in ann.text("/failures?span=1h")
    assert "ConnectionError" in ann.text("/failures?span=24h")
    assert ann.get("/failures?span=2h").status_code == 400


def test_a_group_has_its_message_traceback_and_jobs(shop: Shop) -> None:
    ids = shop.fail(2)

    page = Visitor(shop.queue).get(page_of(shop)).text

    words = words_of(page)
    assert "no mail server for ada" in words
    assert "in send" in words, "a line of the traceback"
    assert all(f'name="id" value="{id}"' in page for id in ids)
    assert "pgqueue requeue --where 'status:failed task:send error:" in words


def test_a_traceback_needs_its_right(shop: Shop) -> None:
    shop.fail()

    words = Visitor(shop.queue, rights={"view"}).text(page_of(shop))

    assert "It needs the right view_results" in words
    assert "Traceback (most recent" not in words
    assert "Try one" not in words


def test_jobs_come_in_pages(shop: Shop) -> None:
    ids = shop.fail(60)
    ann = Visitor(shop.queue)

    first = ann.get(page_of(shop)).text
    second = ann.get(page_of(shop, before=ids[10])).text

    assert (first.count('name="id"'), second.count('name="id"')) == (50, 10)
    assert f"before={ids[10]}" in first


def test_one_is_tried_and_its_result_is_shown_in_place(shop: Shop) -> None:
    first, newest = shop.fail(2)
    ann = Visitor(shop.queue)

    fingerprint = shop.fingerprint
    response = ann.post(f"/failures/{fingerprint}/try", {"task": "send"})
    address = response.headers["Location"]
    waits = ann.get(address).text
    shop.work()
    failed = ann.text(address)
    ann.post(f"/failures/{fingerprint}/try", {"task": "send"})
    shop.is_broken = False
    shop.work()
    done = ann.get(address).text

    assert f"tried={newest}" in address
    assert "It waits for a worker" in words_of(waits)
    assert "Failed now 1 job " in words_of(waits)
    assert 'id="failure" hx-get' in waits, "all of the page refreshes itself"
    assert "failed again" in failed
    assert "succeeded now" in words_of(done)
    assert "Requeue the others" in words_of(done)
    assert shop.statuses() == {first: JobStatus.FAILED, newest: JobStatus.SUCCEEDED}
    with shop.queue.session() as session:
        log = OperatorActions(session).newest(limit=9)
    assert [(one.action, one.target) for one in log] == [("requeue", {"jobs": [newest]})] * 2


def test_without_a_failed_job_none_is_tried(shop: Shop) -> None:
    [id] = shop.fail()
    fingerprint = shop.fingerprint
    ann = Visitor(shop.queue)
    ann.post("/actions/requeue", {"action": "requeue", "id": id})

    response = ann.post(f"/failures/{fingerprint}/try", {"task": "send"})

    assert response.status_code == 409


def test_an_error_is_muted_for_a_day_and_unmuted(shop: Shop) -> None:
    shop.fail()
    ann = Visitor(shop.queue)
    address = f"/failures/{shop.fingerprint}/mute"

    ann.post(address, {"task": "send", "hours": 24})
    muted = ann.text("/failures")
    [until] = muted_until(shop)
    ann.post(address, {"task": "send", "hours": 0})

    assert "muted" in muted
    assert until is not None
    assert until - datetime.now(UTC) > timedelta(hours=23)
    assert "muted" not in ann.text("/failures")
    with shop.queue.session() as session:
        [_, first] = OperatorActions(session).newest(limit=9)
    assert (first.action, first.options, first.target["task"]) == (
        "mute_error",
        {"hours": 24},
        "send",
    )
    assert ann.post(address, {"task": "other"}).status_code == 404


def test_each_page_has_the_number_of_errors(shop: Shop) -> None:
    [id] = shop.fail()
    ann = Visitor(shop.queue)
    assert "Failures 1 Jobs" in ann.text("/you")
    assert "Failures Jobs" in Visitor(shop.queue, queues={"mail"}).text("/you")

    ann.post(f"/failures/{shop.fingerprint}/mute", {"task": "send", "hours": 24})
    assert "Failures Jobs" in ann.text("/you")

    ann.post(f"/failures/{shop.fingerprint}/mute", {"task": "send", "hours": 0})
    ann.post(f"/jobs/{id}/requeue")
    assert "Failures Jobs" in ann.text("/you")


def muted_until(shop: Shop) -> list[datetime | None]:
    with Session(shop.engine) as session:
        return list(session.scalars(select(ErrorGroup.muted_until)))


class TestScope:
    def test_a_user_sees_the_jobs_of_the_own_queue_only(self, shop: Shop) -> None:
        shop.fail(2, to="own-marker", queue="mail")
        [other] = shop.fail(to="foreign-marker", queue="other")
        visitor = Visitor(shop.queue, RIGHTS, queues={"mail"})

        pages = [
            visitor.get(address).text
            for address in ("/failures", page_of(shop), page_of(shop, tried=other))
        ]

        assert all("own-marker" in page for page in pages)
        assert not [page for page in pages if "foreign-marker" in page]
        assert "send 2 " in words_of(pages[0])
        assert "Try one: job" not in words_of(pages[2])

    def test_only_the_own_jobs_are_tried(self, shop: Shop) -> None:
        shop.fail(queue="other")
        visitor = Visitor(shop.queue, RIGHTS, queues={"mail"})

        response = visitor.post(f"/failures/{shop.fingerprint}/try", {"task": "send"})

        assert response.status_code == 409
        assert set(shop.statuses().values()) == {JobStatus.FAILED}
