"""What a browser may send that no page has: the dashboard answers, and leads to no other site."""

import pytest
from sqlalchemy import Engine, text
from visitor import SECRET, Visitor

from pgqueue import PgQueue


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine, secret=SECRET)


@pytest.mark.parametrize("name", ["endpoint", "self"])
def test_a_parameter_may_have_any_name(queue: PgQueue, name: str) -> None:
    assert Visitor(queue).get(f"/failures?{name}=1").status_code == 200


def test_a_host_that_is_no_name_is_a_bad_request(queue: PgQueue) -> None:
    assert Visitor(queue).get("/you", headers={"Host": "a..b"}).status_code == 400


@pytest.mark.parametrize("back", ["/\t/evil.example", "/\n/evil.example", "/\\evil.example"])
def test_a_form_leads_back_to_no_other_site(queue: PgQueue, back: str) -> None:
    answer = Visitor(queue).post("/queues/pause", {"queue": "mail", "back": back})
    assert answer.headers["Location"].startswith("/?message=")


def test_a_key_that_nests_too_deep_is_a_text(queue: PgQueue) -> None:
    answer = Visitor(queue).post("/queues/limit", {"limit": "bank", "key": "[" * 1000})
    assert answer.status_code == 409


def test_a_commit_that_fails_is_refused_as_any_statement(engine: Engine, queue: PgQueue) -> None:
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE FUNCTION pgqueue.refuse() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN RAISE 'no room'; END $$"
            )
        )
        connection.execute(
            text(
                "CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON pgqueue.operator_actions "
                "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION pgqueue.refuse()"
            )
        )
    try:
        answer = Visitor(queue).post("/queues/pause", {"queue": "mail"})
        assert answer.status_code == 503
    finally:
        with engine.begin() as connection:
            connection.execute(text("DROP FUNCTION pgqueue.refuse() CASCADE"))
