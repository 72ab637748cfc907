"""Actions on jobs from pages: on selected ones, and on all that match, in several requests."""

import re
from datetime import timedelta
from typing import Any

import pytest
from broken_shop import Shop
from sqlalchemy import Engine
from visitor import Visitor, words_of

from chaos.interleavings.logical_workers import execute
from pgqueue import JobStatus
from pgqueue.dashboard import RIGHTS
from pgqueue.dashboard.pages import actions
from pgqueue.operations import Operator, Selection, engine, selection
from pgqueue.repository.operator_actions import LogEntry, OperatorActions

FAILED = "status:failed"
ALL = {"action": "requeue", "q": FAILED}


@pytest.fixture
def shop(engine: Engine) -> Shop:
    return Shop(engine)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request goes on for as long as it takes, unless a test says otherwise."""
    monkeypatch.setattr(actions, "LONGEST_WORK", 600)


def logged(shop: Shop) -> list[LogEntry]:
    with shop.queue.session() as session:
        return OperatorActions(session).newest(limit=99)


class TestSelected:
    def test_selected_jobs_are_changed_and_logged(self, shop: Shop) -> None:
        first, second, third = shop.fail(3)

        fields = {"action": "requeue", "id": [third, first], "reason": "mended"}
        response = Visitor(shop.queue).post("/actions/requeue", fields)

        assert response.status_code == 303
        assert shop.statuses()[second] is JobStatus.FAILED
        assert [id for id, status in shop.statuses().items() if status is JobStatus.PENDING] == [
            first,
            third,
        ]
        [action] = logged(shop)
        assert (action.actor, action.action, action.reason) == ("ann", "requeue", "mended")
        assert (action.target, action.jobs) == ({"jobs": [first, third]}, 2)
        assert action.finished_at is not None

    def test_a_selected_job_that_is_left_is_told_and_logged(self, shop: Shop) -> None:
        [failed] = shop.fail()
        [waiting] = shop.enqueue()
        ann = Visitor(shop.queue)

        both = ann.post("/actions/requeue", {"action": "requeue", "id": [failed, waiting]})
        again = ann.post("/actions/requeue", {"action": "requeue", "id": [failed, waiting]})

        told = words_of(ann.get(both.headers["Location"].replace("/?", "/you?")).text)
        assert f"1 job requeued, 1 skipped, such as {waiting}: unchanged, because" in told
        assert again.status_code == 409
        assert "its status is pending" in again.text
        assert [(one.jobs, one.skipped) for one in logged(shop)] == [(0, 2), (1, 1)]

    @pytest.mark.parametrize(
        ("right", "action"), [("requeue", "cancel"), ("cancel", "requeue"), ("requeue", "drop")]
    )
    def test_each_action_on_selected_jobs_needs_its_own_right(
        self, shop: Shop, right: str, action: str
    ) -> None:
        [id] = shop.fail()
        visitor = Visitor(shop.queue, rights={"view", right})

        response = visitor.post(f"/actions/{right}", {"action": action, "id": id})

        assert response.status_code == 400
        assert shop.statuses() == {id: JobStatus.FAILED}


class TestAllThatMatch:
    def test_a_preview_counts_them_and_says_what_will_be_skipped(self, shop: Shop) -> None:
        ids = shop.fail(12)
        execute(shop.engine, "UPDATE pgqueue.jobs SET unique_key = 'k' WHERE id = :id", id=ids[0])
        shop.queue.tasks["send"].options(unique_key="k").delay("eve")
        ann = Visitor(shop.queue)

        page = ann.get("/actions/preview", query_string=ALL)

        words = words_of(page.text)
        assert "Requeue 12 jobs?" in words
        assert "1 of them will be skipped: another unfinished job has their unique key" in words
        assert page.text.count("<tr>") == 11, "the heading, and ten of them"
        assert f'name="q" value="{FAILED}"' in page.text

    def test_many_are_spread_unless_the_user_says_now(self, shop: Shop) -> None:
        shop.fail(101)

        page = Visitor(shop.queue).get("/actions/preview", query_string=ALL).text

        assert '<option value="5" selected>over 5 minutes, 21 a minute</option>' in page
        assert "--spread 5m" in page

    def test_many_are_counted_up_to_a_number(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(selection, "MOST_COUNTED", 2)
        monkeypatch.setattr(actions, "MOST_COUNTED", 2)
        shop.fail(3)

        assert "Requeue 2+ jobs?" in Visitor(shop.queue).text(f"/actions/preview?q={FAILED}")

    def test_all_that_match_are_changed_and_the_log_says_so(self, shop: Shop) -> None:
        shop.fail(150)
        shop.enqueue()
        ann = Visitor(shop.queue)

        response = ann.post("/actions/requeue", {**ALL, "spread": "20", "reason": "mended"})

        [action] = logged(shop)
        assert (action.jobs, action.skipped) == (150, 0)
        assert action.options == {"spread_s": 1200.0, "of": 150}
        assert response.headers["Location"].startswith(f"/log/{action.id}?message=")
        told = ann.text(response.headers["Location"].partition("?")[0])
        end = action.at + timedelta(minutes=20)
        assert f"150 jobs requeued, spread over 20 min: due from {action.at:%H:%M:%S}" in told
        assert f"to {end:%H:%M:%S} UTC" in told

    def test_a_request_works_for_a_time_and_its_form_goes_on(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(actions, "LONGEST_WORK", 0)
        monkeypatch.setattr(engine, "PORTION", 100)
        shop.fail(250)
        ann = Visitor(shop.queue)

        first = ann.post("/actions/requeue", {**ALL, "of": "250"})
        second = ann.post("/actions/requeue", going(first.text))
        third = ann.post("/actions/requeue", going(second.text))
        last = ann.post("/actions/requeue", going(third.text))

        told = [words_of(page.text) for page in (first, second, third)]
        assert [f"{done} of 250" in words for done, words in zip((100, 200, 250), told)] == [
            True
        ] * 3
        assert all("as long as this page is open" in words for words in told)
        assert 'hx-trigger="load"' in first.text
        assert last.status_code == 303
        [action] = logged(shop)
        assert (action.jobs, action.skipped) == (250, 0)
        assert action.finished_at is not None

    def test_another_user_goes_on_with_it_from_the_log(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(actions, "LONGEST_WORK", 0)
        monkeypatch.setattr(engine, "PORTION", 100)
        shop.fail(150)
        Visitor(shop.queue).post("/actions/requeue", ALL)
        monkeypatch.setattr(actions, "LONGEST_WORK", 600)
        bob = Visitor(shop.queue, user="bob")

        page = bob.get("/log?unfinished=yes")
        shown = bob.get("/log/1")
        response = bob.post("/actions/requeue", going(page.text))

        assert "hx-trigger" not in shown.text, "to look at it does not go on with it"
        assert response.status_code == 303
        assert [(one.actor, one.action, one.jobs) for one in logged(shop)] == [
            ("bob", "continue", 0),
            ("ann", "requeue", 150),
        ]

    @pytest.mark.parametrize("scope", [{"queues": {"sms"}}, {"tags": {"for-ada"}}], ids=str)
    def test_an_action_is_not_continued_by_another_user_with_a_scope_nor_with_another_scope(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch, scope: Any
    ) -> None:
        monkeypatch.setattr(actions, "LONGEST_WORK", 0)
        monkeypatch.setattr(engine, "PORTION", 100)
        shop.fail(150, queue="mail")
        begun = Visitor(shop.queue, queues={"mail"}).post("/actions/requeue", ALL)

        refused = Visitor(shop.queue, **scope).post("/actions/requeue", going(begun.text))
        wider = Visitor(shop.queue, queues={"mail", "sms"})
        eve = Visitor(shop.queue, user="eve", queues={"mail"})

        assert refused.status_code == 403
        assert eve.post("/actions/requeue", going(begun.text)).status_code == 404
        assert [action.jobs for action in logged(shop)] == [100]
        assert wider.post("/actions/requeue", going(begun.text)).status_code == 200

    def test_a_user_with_a_scope_changes_only_jobs_in_it(self, shop: Shop) -> None:
        shop.fail(2, queue="mail")
        [other] = shop.fail(queue="other")
        visitor = Visitor(shop.queue, queues={"mail"})

        shown = visitor.text(f"/actions/preview?q={FAILED}")
        visitor.post("/actions/requeue", ALL)

        assert "Requeue 2 jobs?" in shown
        assert [action.jobs for action in logged(shop)] == [2]
        assert shop.statuses()[other] is JobStatus.FAILED

    def test_who_goes_on_with_an_action_of_another_is_in_the_log_once(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(actions, "LONGEST_WORK", 0)
        monkeypatch.setattr(engine, "PORTION", 100)
        shop.fail(350)
        Visitor(shop.queue).post("/actions/requeue", ALL)
        dora = Visitor(shop.queue, user="dora")

        for _ in range(3):
            dora.post("/actions/requeue", {"go_on": 1, "reason": "ann has gone home"})

        second, first = logged(shop)
        assert (first.actor, first.jobs) == ("ann", 350)
        assert (second.actor, second.action, second.target) == ("dora", "continue", {"action": 1})
        assert second.reason == "ann has gone home"

    def test_to_go_on_needs_the_right_of_the_action(self, shop: Shop) -> None:
        shop.fail()
        Operator(shop.queue, "ann").start("cancel", Selection(queue="default"))
        visitor = Visitor(shop.queue, rights={"view", "requeue"})

        assert visitor.post("/actions/requeue", {"go_on": 1}).status_code == 403

    def test_a_wrong_filter_is_refused(self, shop: Shop) -> None:
        [id] = shop.fail()
        ann = Visitor(shop.queue)

        for line in ("", "7", "colour:red", "status:lost", "x" * 1001):
            shown = ann.get("/actions/preview", query_string={"q": line})
            done = ann.post("/actions/requeue", {"action": "requeue", "q": line})

            assert (shown.status_code, done.status_code) == (400, 400), line
        assert shop.statuses() == {id: JobStatus.FAILED}

    def test_a_filter_by_what_the_user_may_not_see_is_refused(self, shop: Shop) -> None:
        [id] = shop.fail()

        for line, rights in (
            ("task:send arg.to:ada", {"view", "requeue"}),
            ("task:send arg.token:7", RIGHTS),
            ("arg.to:ada", RIGHTS),
            ("task:other arg.to:ada", RIGHTS),
        ):
            visitor = Visitor(shop.queue, rights)
            shown = visitor.get("/actions/preview", query_string={"q": line})
            visitor.post("/actions/requeue", {"action": "requeue", "q": line})

            assert shown.status_code in (400, 403), line
        assert shop.statuses() == {id: JobStatus.FAILED}

    def test_a_filter_by_an_argument_that_the_user_sees_is_not(self, shop: Shop) -> None:
        shop.fail(to="ada")
        shop.fail(to="bob")

        page = Visitor(shop.queue).text("/actions/preview?q=task:send arg.to:ada")

        assert "Requeue 1 job?" in page


def test_waiting_jobs_are_cancelled_and_made_due(shop: Shop) -> None:
    [first, second] = shop.enqueue(2)
    ann = Visitor(shop.queue)

    ann.post("/actions/cancel", {"action": "cancel", "id": first})
    execute(shop.engine, "UPDATE pgqueue.message_queue SET run_at = run_at + interval '1 h'")
    execute(
        shop.engine,
        "UPDATE pgqueue.jobs SET run_at = run_at + interval '1 h' WHERE id = :id",
        id=second,
    )
    ann.post("/actions/requeue", {"action": "run_now", "q": "task:send"})
    ann.post("/actions/cancel", {"action": "cancel", "q": "task:send"})

    assert [(one.action, one.jobs) for one in logged(shop)] == [
        ("cancel", 1),
        ("run_now", 1),
        ("cancel", 1),
    ]
    assert set(shop.statuses().values()) == {JobStatus.CANCELLED}


def going(page: str) -> dict[str, str]:
    """The field of the form that goes on."""
    found = re.search(r'name="go_on" value="(\d+)"', page)
    assert found is not None, words_of(page)
    return {"go_on": found[1]}
