"""The frame of the dashboard: who gets in, what a form needs, and what every response carries."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import Flask, abort, session
from kiosk import closing_engines, kiosk_app
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import InternalError
from visitor import SAME_ORIGIN, SECRET, TOKEN, Visitor
from werkzeug import Request, Response
from werkzeug.test import Client

from pgqueue import PgQueue
from pgqueue.dashboard import RIGHTS, Access, Dashboard
from pgqueue.dashboard.pages import ROUTES
from pgqueue.dashboard.protection import HEADERS
from pgqueue.database.bounded import BoundedTransactions
from pgqueue.errors import OptionError
from pgqueue.flask import PgQueue as FlaskQueue

ANN = Access(user="ann")


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine, secret=SECRET)


def test_a_dashboard_without_authorize_is_refused(queue: PgQueue) -> None:
    with pytest.raises(TypeError, match="authorize"):
        queue.dashboard()  # type: ignore[call-arg]
    with pytest.raises(OptionError, match="who may see it"):
        queue.dashboard(authorize=None)  # type: ignore[arg-type]


def _raise(request: Request) -> Access:
    raise ValueError("the user's table is away")


@pytest.mark.parametrize(
    ("authorize", "status"),
    [
        (lambda request: ANN, 200),
        (lambda request: None, 403),
        (lambda request: True, 403),
        (lambda request: Response("log in", 302, {"Location": "/login"}), 302),
        (lambda request: abort(401), 401),
        (_raise, 403),
    ],
)
def test_what_authorize_returns_decides(
    queue: PgQueue, authorize: Callable[[Request], Any], status: int
) -> None:
    client = Client(queue.dashboard(authorize=authorize).wsgi)
    assert client.get("/you").status_code == status


def test_each_route_needs_its_right(queue: PgQueue) -> None:
    for route in ROUTES:
        assert route.right in RIGHTS
        poor = Visitor(queue, rights=RIGHTS - {route.right})
        method = poor.get if route.method == "GET" else poor.post
        response = method(_address(route.rule))
        assert response.status_code == 403, route.endpoint
        assert f"needs the right '{route.right}'" in response.text.replace("&#39;", "'")


def _address(rule: str) -> str:
    return re.sub(r"<(int\([^>]*\)|int|[^:>]*):?[^>]*>", "1", rule)


@pytest.mark.parametrize(
    ("headers", "change", "status"),
    [
        (SAME_ORIGIN, {}, 303),
        ({"Origin": "http://localhost"}, {}, 303),
        ({"Sec-Fetch-Site": "cross-site"}, {}, 403),
        ({"Sec-Fetch-Site": "same-site"}, {}, 403),
        ({"Origin": "https://evil.example"}, {}, 403),
        (SAME_ORIGIN, {"csrf": ""}, 403),
        (SAME_ORIGIN, {"csrf": "of bob"}, 403),
    ],
)
def test_a_form_is_of_this_site_and_this_user(
    queue: PgQueue, headers: dict[str, str], change: dict[str, str], status: int
) -> None:
    tokens = {}
    for user in ("ann", "bob"):
        page = Visitor(queue, user=user).get("/you").text
        tokens[user] = TOKEN.search(page)[1]  # type: ignore[index]
    ann = Visitor(queue, user="ann")
    given = {"csrf": tokens["ann"], **change}
    if given["csrf"] == "of bob":
        given["csrf"] = tokens["bob"]
    response = ann.client.post("/you/choose", data=given, headers=headers)
    assert response.status_code == status


@pytest.mark.parametrize("cookie", ["theme", "live"])
def test_a_choice_of_the_user_is_kept_in_a_cookie(queue: PgQueue, cookie: str) -> None:
    ann = Visitor(queue)
    response = ann.post("/you/choose", {cookie: "dark" if cookie == "theme" else "off"})
    assert f"pgqueue_{cookie}=" in response.headers["Set-Cookie"]
    refused = ann.post("/you/choose", {cookie: "other"})
    assert refused.status_code == 400
    assert f"{cookie} is" in refused.text


@pytest.mark.parametrize("back", ["//evil.example/", "https://evil.example", "/\\evil.example"])
def test_an_action_leads_to_a_page_of_the_dashboard_only(queue: PgQueue, back: str) -> None:
    response = Visitor(queue).post("/you/choose", {"theme": "dark", "back": back})
    assert response.headers["Location"] == "/"


def test_no_header_of_a_proxy_changes_an_address(queue: PgQueue) -> None:
    forged = {"X-Forwarded-Host": "evil.example", "X-Forwarded-Prefix": "/evil"}
    page = Visitor(queue).get("/you", headers=forged)
    assert "evil" not in page.text


@pytest.mark.parametrize("address", ["/you", "/nowhere", "/static/0/style.css"])
def test_every_response_has_the_headers(queue: PgQueue, address: str) -> None:
    response = Visitor(queue).get(address)
    assert {name: response.headers[name] for name in HEADERS} == HEADERS


@pytest.mark.parametrize(
    "address", ["/nowhere", "/jobs/99999999999999999999", f"/log/{'9' * 5000}"]
)
def test_an_address_without_a_page_is_refused_in_the_frame(queue: PgQueue, address: str) -> None:
    words = Visitor(queue).text(address, status=404)
    assert "there is no page with this address" in words
    assert "Overview Failures Jobs" in words


@pytest.mark.parametrize("address", ["//you", "/jobs//1", "//evil.example/jobs"])
def test_two_slashes_lead_to_no_address_of_the_host_header(queue: PgQueue, address: str) -> None:
    answer = Visitor(queue).client.open(base_url="http://evil.example", path=address)
    assert answer.status_code in (200, 404)
    assert "Location" not in answer.headers


def test_a_message_is_for_its_user_only(queue: PgQueue) -> None:
    to = Visitor(queue, user="ann").post("/queues/pause", {"queue": "mail"}).headers["Location"]
    assert "paused queue mail" in Visitor(queue, user="ann").text(to)
    assert "paused queue mail" not in Visitor(queue, user="bob").text(to)


def test_an_error_of_the_database_does_not_say_where_it_is() -> None:
    gone = PgQueue("postgresql://me:secret@127.0.0.1:1/away", secret=SECRET)
    answer = Visitor(gone).get("/workers")
    assert answer.status_code == 503
    assert "the database did not answer" in answer.text
    assert "127.0.0.1" not in answer.text
    assert 'href="/workers"' in answer.text.partition("</nav>")[2], "Try again"
    assert answer.headers["Refresh"] == "10"


def test_a_large_form_is_refused(queue: PgQueue) -> None:
    response = Visitor(queue).post("/you/choose", {"theme": "dark", "back": "x" * 300_000})
    assert response.status_code == 413


def test_get_reads_only(queue: PgQueue, engine: Engine) -> None:
    ann = Visitor(queue)
    assert ann.get("/you/choose").status_code == 405
    bounded = BoundedTransactions(engine)
    with pytest.raises(InternalError, match="read-only"), bounded.begin(read_only=True) as session:
        session.execute(text("CREATE TABLE t ()"))


def test_without_a_secret_the_dashboard_says_what_to_give(engine: Engine) -> None:
    dashboard = Dashboard(PgQueue(engine), authorize=lambda request: ANN)
    with pytest.raises(OptionError, match="SECRET_KEY"):
        Client(dashboard.wsgi).get("/you")


def test_tables_of_another_version_are_named(empty_engine: Engine) -> None:
    response = Visitor(PgQueue(empty_engine, secret=SECRET)).get("/you")
    assert response.status_code == 503
    assert "upgrade" in response.text


def test_the_queue_of_a_test_is_read_in_its_transaction(connection: Connection) -> None:
    assert "You are ann" in Visitor(PgQueue(connection, secret=SECRET)).text("/you")


@pytest.fixture
def app(database_url: str) -> Iterator[Flask]:
    queue = FlaskQueue()
    with closing_engines(kiosk_app(queue, database_url)) as app:
        app.secret_key = "of the app"
        app.config["TESTING"] = True
        dashboard = queue.dashboard(authorize=lambda request: Access(user=session["user"]))
        app.register_blueprint(dashboard.blueprint(url_prefix="/ops/jobs"))

        @app.get("/login")
        def login() -> str:
            session["user"] = "eve"
            return "welcome"

        yield app


def test_a_blueprint_answers_in_the_requests_of_the_application(app: Flask) -> None:
    browser = app.test_client()
    assert browser.get("/ops/jobs/you").status_code == 403
    browser.get("/login")
    page = browser.get("/ops/jobs/you")
    assert "You are eve" in page.text
    assert "<code>flask pgqueue workers</code>" in browser.get("/ops/jobs/workers").text
    token = TOKEN.search(page.text)[1]  # type: ignore[index]
    form = {"csrf": token, "theme": "dark", "back": "/ops/jobs/you?a=1"}
    response = browser.post("/ops/jobs/you/choose", data=form, headers=SAME_ORIGIN)
    assert response.headers["Location"] == "/ops/jobs/you?a=1"
    assert "Path=/ops/jobs/;" in response.headers["Set-Cookie"]


def test_a_blueprint_below_a_prefix_of_the_server_has_both(app: Flask) -> None:
    browser = app.test_client()
    browser.get("/login", environ_overrides={"SCRIPT_NAME": "/shop"})
    form = {"theme": "dark", "back": "//evil.example"}
    page = browser.get("/ops/jobs/you", environ_overrides={"SCRIPT_NAME": "/shop"})
    form["csrf"] = TOKEN.search(page.text)[1]  # type: ignore[index]
    response = browser.post(
        "/ops/jobs/you/choose",
        data=form,
        headers=SAME_ORIGIN,
        environ_overrides={"SCRIPT_NAME": "/shop"},
    )
    assert response.headers["Location"].startswith("/shop/ops/jobs")
