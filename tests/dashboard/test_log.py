"""The log of operators as pages."""

import re
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from visitor import SECRET, Visitor

from pgqueue import PgQueue
from pgqueue.operations import Selection
from pgqueue.operations.actions import ACTIONS
from pgqueue.repository.conditions import JobFilter
from pgqueue.repository.error_groups import ErrorGroups, in_hex
from pgqueue.repository.operator_actions import LogEntry, OperatorActions

ROOT = Path(__file__).parents[2]


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine, secret=SECRET)


def add(queue: PgQueue, actor: str, action: str, **more: Any) -> None:
    with queue.session() as session, session.begin():
        OperatorActions(session).add(LogEntry(actor=actor, action=action, **more))


def test_the_newest_come_first_and_are_chosen(queue: PgQueue) -> None:
    add(queue, "ann", "pause_queue", target={"queue": "mail"}, reason="calm")
    add(queue, "bob", "requeue", target={"filter": {"statuses": ["failed"]}}, jobs=4211)
    ann = Visitor(queue)

    words = ann.text("/log")

    assert words.index("bob requeue status:failed 4,211") < words.index("ann pause queue")
    assert "ann pause queue queue mail calm" in words
    assert "requeue status:" not in ann.text("/log?actor=ann")
    assert "queue mail" not in ann.text("/log?action=requeue")
    assert "No action" in ann.text("/log?unfinished=yes")


def test_one_job_is_named_as_one(queue: PgQueue) -> None:
    add(queue, "ann", "requeue", target={"jobs": [7]})
    add(queue, "ann", "cancel", target={"jobs": [8, 9]})

    words = Visitor(queue).text("/log")

    assert "requeue job 7" in words
    assert "cancel jobs 8, 9" in words


def test_the_actions_to_choose_from_are_those_that_there_are(queue: PgQueue) -> None:
    page = Visitor(queue).get("/log?action=of_later_code").text

    choices = re.findall(r'<option value="(\w+)"', page.partition('name="action"')[2])
    assert {*choices} - {"no", "yes"} == {*ACTIONS, "of_later_code"}


def test_how_it_was_done_is_in_words_and_an_error_has_its_name(queue: PgQueue) -> None:
    spread = {"spread_s": 1200.0, "of": 4211}
    by_error = {"filter": {"statuses": ["failed"], "error": 7}}
    add(queue, "ann", "requeue", target=by_error, options=spread)
    add(queue, "ann", "mute_error", target={"error": in_hex(7), "task": "send"})
    with queue.session() as session, session.begin():
        row = {"fingerprint": 7, "task": "send", "error_type": "SMTPError", "place": "send"}
        row |= {"attempts": 1, "at": 1e9, "job_id": 1, "message": ""}
        ErrorGroups(session).add([row], version="")
    ann = Visitor(queue)

    assert ann.text("/log").count("(SMTPError)") == 2
    entry = ann.text("/log/1")
    assert "error:0000000000000007 (SMTPError)" in entry
    assert "Options 4,211 jobs spread over 20 min" in entry
    assert "error:0000000000000007 (SMTPError)" in ann.text(
        "/actions/preview?q=error:0000000000000007"
    )


def test_older_ones_are_on_the_next_page(queue: PgQueue) -> None:
    for number in range(52):
        add(queue, "ann", "pause_queue", target={"queue": f"q{number}-"})

    first = Visitor(queue).get("/log")
    second = Visitor(queue).text("/log?before=3")

    assert "before=3" in first.text
    assert ("q51-" in first.text, "q1-" in first.text) == (True, False)
    assert ("q1-" in second, "q2-" in second) == (True, False)


def test_one_shows_all_of_it(queue: PgQueue) -> None:
    words = {"capacity": 3}, {"capacity": 0}
    add(queue, "ann", "set_limit", target={"limit": "bank"}, before=words[0], after=words[1])
    ann = Visitor(queue)

    shown = ann.text("/log/1")

    assert "limit bank" in shown
    assert "Before capacity: 3 After capacity: 0" in shown
    assert ann.get("/log/2").status_code == 404


@pytest.mark.parametrize(
    ("words", "is_offered"),
    [
        ({"action": "requeue", "target": {"filter": {"statuses": ["failed"]}}}, True),
        ({"action": "requeue", "target": {"jobs": [9]}, "options": {"args": ["to"]}}, False),
        ({"action": "change", "target": {"jobs": [9]}}, False),
        ({"action": "requeue", "target": {"task": "send"}}, False),
    ],
)
def test_unfinished_ones_are_offered_where_the_log_says_how_to_go_on(
    queue: PgQueue, words: dict[str, Any], is_offered: bool
) -> None:
    add(queue, "ann", last_id=9, **words)

    for address in ("/log?unfinished=yes", "/log/1"):
        assert ('name="go_on" value="1"' in Visitor(queue).get(address).text) is is_offered
        poor = Visitor(queue, rights={"view"}).get(address)
        assert 'name="go_on"' not in poor.text


def test_a_user_with_a_scope_sees_the_own_actions(queue: PgQueue) -> None:
    add(queue, "ann", "pause_queue", target={"queue": "foreign-marker"})
    add(queue, "eve", "requeue", target={"jobs": [7]})
    eve = Visitor(queue, user="eve", queues={"mail"})

    assert "foreign-marker" not in eve.text("/log?actor=ann")
    assert "requeue" in eve.text("/log")
    assert eve.get("/log/1").status_code == 404
    assert eve.get("/log/2").status_code == 200


def test_the_arguments_of_a_filter_need_their_right(queue: PgQueue) -> None:
    which = JobFilter(task="send", args=(("to", "zoe"),))
    add(queue, "bob", "requeue", target=Selection.of(which).target)

    for address in ("/log", "/log/1"):
        assert "task:send arg.to:zoe" in Visitor(queue).text(address)
        seen = Visitor(queue, {"view"}).text(address)
        assert "task:send and some arguments" in seen
        assert "zoe" not in seen
