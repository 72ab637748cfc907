"""What the pages say beside locked tables, a lost database, and rows that no code writes."""

import re
import threading

import pytest
from broken_shop import Shop
from sqlalchemy import Engine, text
from visitor import Visitor

from chaos.interleavings.logical_workers import execute
from chaos.workers import wait_until
from pgqueue.dashboard import dashboard
from pgqueue.dashboard.pages import ROUTES
from pgqueue.database.bounded import READ_ONLY
from pgqueue.repository.tables import jobs

TABLES = [table.name for table in jobs.metadata.tables.values()]


@pytest.fixture
def shop(engine: Engine) -> Shop:
    shop = Shop(engine)
    shop.fail(2)
    shop.enqueue()
    return shop


def addresses(shop: Shop) -> list[str]:
    """Those of all pages."""
    values = {"job_id": "1", "batch_id": "1", "action_id": "1", "name": "send"}
    values["fingerprint"] = str(shop.fingerprint)
    rules = [route.rule for route in ROUTES if route.method == "GET"]
    rules = [rule.replace("int(signed=True)", "int") for rule in rules]
    paths = [re.sub(r"<(?:[^:>]*:)?(\w+)>", lambda found: values[found[1]], rule) for rule in rules]
    return [f"{path}?task=send&q=status:failed" for path in paths]


def test_beside_locked_tables_each_page_says_what_it_leaves_out(shop: Shop) -> None:
    pages, ann = addresses(shop), Visitor(shop.queue)
    ann.get("/you")
    with shop.engine.begin() as other:
        locked = ", ".join(f"pgqueue.{name}" for name in TABLES if not name.startswith("schema"))
        other.execute(text(f"LOCK TABLE {locked} IN ACCESS EXCLUSIVE MODE"))
        found = {address: ann.get(address) for address in pages}

    for address, page in found.items():
        words = "is left out" if page.status_code == 200 else "another transaction has locked"
        assert (page.status_code in (200, 503), words in page.text) == (True, True), address


ODD = (
    "UPDATE pgqueue.jobs SET created_at = '2000-01-01Z', tags = '\"x\"', meta = '[]', args = '7'",
    "UPDATE pgqueue.jobs SET queue = E'a/b?c#\\n', task = '..' WHERE outcome IS NULL",
    "UPDATE pgqueue.jobs SET finished_at = '9999-12-31Z' WHERE outcome IS NOT NULL",
    "UPDATE pgqueue.job_attempts SET finished_at = '9999-12-31Z', started_at = NULL, error = NULL",
    "UPDATE pgqueue.dead_letters SET finished_at = '9999-12-31Z'",
    "INSERT INTO pgqueue.schedules (name, task, args, options, every, timezone, catch_up, overlap,"
    " next_at) VALUES ('s', 'send', '{}', '{}', '99 years', 'UTC', 1, 'skip', '9998-01-01')",
    *(
        "INSERT INTO pgqueue.operator_actions (actor, action, target, options, first_ids, last_id)"
        f" VALUES ('a', 'requeue', jsonb_build_object('error', {error}), '[]', '{{}}', 5)"
        for error in ("true", "9e30", "99999999999999999999")
    ),
)


def test_rows_that_a_hand_has_written_are_shown(shop: Shop) -> None:
    pages, ann = addresses(shop), Visitor(shop.queue)
    for change in ODD:
        execute(shop.engine, change)
        failed = [address for address in pages if ann.get(address).status_code >= 500]
        assert failed == [], change


def test_many_viewers_share_two_connections(shop: Shop) -> None:
    statuses: list[int] = []
    ann = Visitor(shop.queue)
    together = threading.Barrier(12)

    def look() -> None:
        together.wait(60)
        statuses.append(ann.client.get("/jobs").status_code)

    viewers = [threading.Thread(target=look) for _ in range(12)]
    for viewer in viewers:
        viewer.start()
    for viewer in viewers:
        viewer.join(60)

    assert len(statuses) == 12
    assert {*statuses} <= {200, 503}
    assert ann.get("/jobs").status_code == 200, "no connection is lost"


def test_one_slow_preview_at_a_time_so_that_others_find_a_connection(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("lock_timeout", "statement_timeout"):
        monkeypatch.setitem(READ_ONLY, limit, 60_000)
    monkeypatch.setattr(dashboard, "LONGEST_TURN", 0)
    ann, first = Visitor(shop.queue), list[int]()
    ann.get("/you")
    preview = "/actions/preview?action=requeue&q=status:failed+tag:x"
    with shop.engine.begin() as other:
        other.execute(text("LOCK TABLE pgqueue.dead_letters IN ACCESS EXCLUSIVE MODE"))
        looks = threading.Thread(target=lambda: first.append(ann.get(preview).status_code))
        looks.start()
        wait_until(lambda: is_waiting(shop.engine))
        second = ann.client.get(preview)
    looks.join(60)

    assert second.status_code == 503
    assert "another preview is being counted" in second.text
    assert first == [200]
    assert ann.get(preview).status_code == 200


def is_waiting(engine: Engine) -> bool:
    with engine.connect() as connection:
        return bool(
            connection.scalar(text("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)"))
        )


def test_a_database_that_is_away_is_said_and_found_again(shop: Shop) -> None:
    ann = Visitor(shop.queue)
    ann.get("/jobs")
    execute(
        shop.engine,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = 'pgqueue dashboard' OR datname = current_database()"
        " AND pid <> pg_backend_pid()",
    )

    first, second = ann.get("/jobs"), ann.get("/jobs")

    assert (first.status_code, second.status_code) in {(200, 200), (503, 200)}


def test_each_page_answers_head_and_options_and_a_form_only_post(shop: Shop) -> None:
    client = Visitor(shop.queue).client
    heads = [client.head(address) for address in addresses(shop)]
    options = [client.options(address).status_code for address in addresses(shop)]
    forms = [route.rule for route in ROUTES if route.method == "POST" and "<" not in route.rule]

    assert [(head.status_code < 500, head.data) for head in heads] == [(True, b"")] * len(heads)
    assert {*options} == {405}
    assert {client.get(rule).status_code for rule in forms} <= {404, 405}


def test_a_body_that_is_no_form_changes_nothing(shop: Shop) -> None:
    client = Visitor(shop.queue).client
    before = shop.statuses()
    kinds = (
        "application/json",
        "text/plain",
        "multipart/form-data",
        "multipart/form-data; boundary=x",
        "",
    )
    for kind in kinds:
        for body in (b'{"action": "requeue", "id": 1}', b"\xff\x00", b"--x\r\n"):
            response = client.post("/actions/requeue", data=body, content_type=kind)
            assert response.status_code in (400, 403), kind
    assert shop.statuses() == before
