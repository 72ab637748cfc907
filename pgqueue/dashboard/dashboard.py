"""``Dashboard``: answers the requests of operators.

It knows no web framework: a door passes it a Werkzeug request, and returns its response.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from werkzeug import Request as HttpRequest
from werkzeug import Response
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound
from werkzeug.routing import Map, MapAdapter, Rule

from pgqueue import redaction, schema
from pgqueue.dashboard.access import Access
from pgqueue.dashboard.pages import ROUTES
from pgqueue.dashboard.protection import HEADERS, LARGEST_BODY, Tokens, is_foreign
from pgqueue.dashboard.rendering import render, static_files
from pgqueue.dashboard.routing import (
    CONVERTERS,
    Answer,
    Done,
    Download,
    Page,
    Refused,
    Request,
    Route,
)
from pgqueue.database.bounded import BoundedTransactions
from pgqueue.database.callers import translated_errors
from pgqueue.database.sqlstates import LOCK_TIMEOUT, NO_RIGHT, STATEMENT_TIMEOUT, sqlstate_of
from pgqueue.errors import (
    BatchNotFound,
    DuplicateJob,
    JobNotFound,
    OptionError,
    PgQueueError,
    ScheduleNotFound,
    SchemaError,
    UnknownTask,
)
from pgqueue.job_queue import PgQueue
from pgqueue.views.errors import MOST_KINDS

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

    from pgqueue.dashboard.blueprint import Blueprint

logger = redaction.logger(__name__)

Authorize = Callable[[HttpRequest], Access | Response | None]

NOT_FOUND = (JobNotFound, BatchNotFound, ScheduleNotFound, UnknownTask)
REFUSALS = {
    LOCK_TIMEOUT: (
        "another transaction has locked what this page needs; nothing was changed, and you can try "
        "again",
        503,
    ),
    STATEMENT_TIMEOUT: (
        "this has taken longer than two seconds, and was stopped; nothing was changed",
        503,
    ),
    NO_RIGHT: (
        "the database role of the dashboard does not have the right to do this, or row security "
        "hides rows from it; the log of the server says which",
        403,
    ),
}
"""By the code of an error of PostgreSQL, what the page says, and its status."""
BY_A_RULE = ("P0", "23")
"""How the codes begin by which triggers and constraints refuse a change."""
NO_ANSWER = "the database did not answer; the log of the server says why"
"""Other errors name the server, its address, the role or the database."""
COMES_BACK = 10
"""Seconds after which the browser asks again for a page that was not available."""
LONGEST_TURN = 0.25
"""Seconds that a slow page waits for another one."""
STATIC = "static_file"
YEAR = 365 * 24 * 3600
FOR_EVER = "public, max-age=31536000, immutable"


class Dashboard:
    """The pages of a queue, as one object that a web application mounts.

    Args:
        queue: The queue.
        authorize: A function that is called with each request, and returns the :class:`Access` of
            its user.  None refuses the request, and a Response, such as a redirect to a login page,
            is passed on.  If it raises, the request is refused; an HTTPException of Werkzeug, as by
            ``abort(401)``, is answered as it says.
        environment: A word that each page shows, such as ``production``.
        secret: The key that signs the forms; by default that of the queue, in Flask the
            ``SECRET_KEY``.  All processes that serve the dashboard need the same.

    Raises:
        OptionError: ``authorize`` is no function.
    """

    def __init__(
        self,
        queue: PgQueue,
        *,
        authorize: Authorize,
        environment: str = "",
        secret: str | None = None,
    ) -> None:
        if not callable(authorize):
            raise OptionError(
                "the dashboard needs authorize=, a function that says who may see it: it is given "
                "the request, and returns an Access, or None to refuse"
            )
        self.queue = queue
        self.environment = environment
        self._authorize = authorize
        self._secret = secret
        self._transactions: WeakKeyDictionary[Engine, BoundedTransactions] = WeakKeyDictionary()
        self._lock = Lock()
        self._slow = Lock()
        self.around: Callable[[], AbstractContextManager[object]] = nullcontext
        """The context manager around each request that comes by :attr:`wsgi`."""

    # The doors

    def wsgi(self, environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        """Answer a request of a WSGI server: mount this method as an application.

        Args:
            environ: The environment of the request.
            start_response: The function that begins the response.

        Returns:
            The body of the response.
        """
        http = HttpRequest(environ)
        with self.around():
            response = self.answer(http, root=http.root_path, path=http.path)
        return response(environ, start_response)

    def blueprint(self, name: str = "pgqueue_dashboard", url_prefix: str = "/jobs") -> "Blueprint":
        """Return the dashboard as a blueprint of Flask, for ``app.register_blueprint``.

        Args:
            name: The name of the blueprint.
            url_prefix: The path at which it is mounted.

        Returns:
            The blueprint.
        """
        from pgqueue.dashboard.blueprint import blueprint  # not where there is no Flask

        return blueprint(self.answer, name, url_prefix)

    # The requests

    def answer(self, request: HttpRequest, *, root: str, path: str) -> Response:
        """Answer a request; ``root``: where the dashboard is mounted, ``path``: what follows."""
        try:
            adapter = _map().bind(request.host, script_name=root or "/", path_info=path)
            adapter.default_method = request.method
            response = self._answered(request, adapter)
        except HTTPException as error:
            response = error.get_response(request.environ)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    def _answered(self, http: HttpRequest, adapter: MapAdapter) -> Response:
        endpoint, unknown = "", None
        values: Mapping[str, Any] = {}
        try:
            endpoint, values = adapter.match(method=http.method)
        except (NotFound, MethodNotAllowed) as error:
            unknown = error
        if endpoint == STATIC:
            return _static(**values)
        access = self._access(http)
        if not isinstance(access, Access):
            return access
        request = Request(self.queue, access, http, adapter, self._bounded)
        try:
            if unknown is not None:
                raise _no_page(unknown)
            answer = self._checked(request, _routes()[endpoint], values)
            response = self._response(request, answer)
            request.finish()
        except BaseException as error:
            request.finish(error)
            if isinstance(error, HTTPException) or not isinstance(error, Exception):
                raise
            return self._refusal(request, error)
        return response

    def _access(self, http: HttpRequest) -> Access | Response:
        try:
            access = self._authorize(http)
        except HTTPException:
            raise
        except Exception:  # the application's function may raise anything
            logger.exception("authorize of the dashboard has failed; the request is refused")
            access = None
        if access is None:
            return Response("You may not see this page.", 403, content_type="text/plain")
        if isinstance(access, Access | Response):
            return access
        logger.error("authorize of the dashboard returned %s, no Access", type(access).__name__)
        return Response("You may not see this page.", 403, content_type="text/plain")

    def _checked(self, request: Request, route: Route, values: Mapping[str, Any]) -> Answer:
        request.check_right(route.right)
        if route.method == "POST":
            self._check_form(request)
        with translated_errors(), self._turn(route):
            return route.answer(request, **values)

    @contextmanager
    def _turn(self, route: Route) -> Iterator[None]:
        """One slow page at a time, so that connections and threads are left for others.

        Raises Refused if another one takes longer.
        """
        if not route.is_slow:
            yield
            return
        if not self._slow.acquire(timeout=LONGEST_TURN):
            raise Refused("another preview is being counted; try again in a moment", 503)
        try:
            yield
        finally:
            self._slow.release()

    def _check_form(self, request: Request) -> None:
        http = request.http
        if http.content_length is None or http.content_length > LARGEST_BODY:
            raise Refused(f"the form has more than {LARGEST_BODY // 1024} kB", 413)
        if is_foreign(http):
            raise Refused("the form was sent by another site; nothing was changed", 403)
        if not self._tokens.is_form(http.form.get("csrf", ""), request.access.user):
            raise Refused("the form is too old; go back, load the page again, and repeat it", 403)

    # The responses

    def _response(self, request: Request, answer: Answer) -> Response:
        if isinstance(answer, Done):
            to = answer.to
            if answer.words:
                message = self._tokens.message(answer.words, request.access.user)
                to += f"{'&' if '?' in to else '?'}message={message}"
            response = Response(status=303, headers={"Location": to})
            for name, value in answer.cookies.items():
                path = request.url("you").removesuffix("you")
                response.set_cookie(
                    name,
                    value,
                    max_age=YEAR,
                    path=path,
                    secure=request.http.is_secure,
                    httponly=True,
                    samesite="Lax",
                )
            return response
        if isinstance(answer, Download):
            pieces = (piece.encode() for piece in answer.pieces)
            response = Response(pieces, content_type=answer.media_type)
            response.headers["Content-Disposition"] = f'attachment; filename="{answer.name}"'
            return response
        failures = None
        if not request.access.is_limited:
            count = request.part("the number of failures", self.queue.views.number_of_errors)
            if count:
                failures = f"{MOST_KINDS}+" if count > MOST_KINDS else str(count)
        return self._html(request, answer, now=request.now, failures=failures)

    def _refusal(self, request: Request, error: Exception) -> Response:
        """The page for a request that was not answered; what it had changed is undone."""
        headers: Mapping[str, str] = {}
        match error:
            case Refused():
                words, status, headers = str(error), error.status, error.headers
            case SchemaError() | PoolTimeout():
                words, status = str(error), 503
            case DuplicateJob() if request.access.is_limited or not request.may("view_arguments"):
                words, status = "another job holds its unique key; nothing was changed", 409
            case PgQueueError():
                words, status = str(error), 404 if isinstance(error, NOT_FOUND) else 409
            case DBAPIError():
                logger.warning("a page of the dashboard: %s", error.orig)
                state = sqlstate_of(error)
                words, status = REFUSALS.get(state, (NO_ANSWER, 503))
                if state.startswith(BY_A_RULE):
                    words = f"the database refused: {str(error.orig).partition(chr(10))[0]}"
            case _:
                logger.exception("a page of the dashboard has failed", exc_info=error)
                words, status = "this page has failed; the log of the server says why", 500
        title = {404: "Not found"}.get(status, "Refused" if status < 500 else "Not available")
        is_form = request.http.method == "POST"
        page = Page(
            "refused.html",
            title=title,
            status=status,
            words=redaction.redacted(words),
            again="" if is_form or status < 500 else request.here(),
        )
        response = self._html(request, page, now=datetime.now(UTC))
        response.headers.update(headers)
        if page.variables["again"] and status == 503 and is_live(request.http):
            response.headers["Refresh"] = str(COMES_BACK)
        return response

    def _html(
        self, request: Request, page: Page, *, now: datetime, failures: str | None = None
    ) -> Response:
        """``failures``: the number beside the page Failures; none is shown if nothing fails."""
        notice = self._tokens.words(request.http.args.get("message", ""), request.access.user)
        variables = {
            "request": request,
            "pages": _routes(),
            "url": request.url,
            "here": request.here,
            "may": request.may,
            "static": lambda name: request.url(
                STATIC, digest=static_files()[name].digest, name=name
            ),
            "csrf_token": self._tokens.form(request.access.user),
            "environment": self.environment,
            "theme": request.http.cookies.get("pgqueue_theme", ""),
            "is_live": is_live(request.http),
            "notice": notice,
            "title": page.title,
            "command": request.shell(page.command),
            "shell": request.shell,
            "now": now,
            "left_out": request.left_out,
            "failures": failures,
        }
        if taken := variables.keys() & page.variables.keys():
            raise TypeError(f"{page.template} is given {min(taken)}, a variable of every page")
        html = render(page.template, {**variables, **page.variables})
        return Response(html, page.status, content_type="text/html; charset=utf-8")

    # What the requests share

    @property
    def _tokens(self) -> Tokens:
        secret = self._secret or self.queue.secret
        if not secret:
            raise OptionError(
                "there is no secret to sign the forms of the dashboard: give PgQueue(secret=...) "
                "or dashboard(secret=...), in a Flask application the SECRET_KEY"
            )
        return Tokens(secret)

    def _bounded(self) -> BoundedTransactions | None:
        """The transactions on the queue's engine; None if the queue is bound to a Connection."""
        if self.queue.connection is not None:
            return None
        engine = self.queue.engine
        with self._lock:
            known = self._transactions.get(engine)
        if known is None:
            known = BoundedTransactions(engine)
            with known.begin(read_only=True) as session:
                schema.verify(session.connection())
            with self._lock:
                known = self._transactions.setdefault(engine, known)
        return known


@cache
def _routes() -> dict[str, Route]:
    """All routes, by endpoint.  Raises ValueError if two have the same."""
    routes = {route.endpoint: route for route in ROUTES}
    if len(routes) != len(ROUTES):
        raise ValueError("two routes of the dashboard have the same endpoint")
    return routes


@cache
def _map() -> Map:
    """The addresses of all routes."""
    rules = [Rule(route.rule, endpoint=route.endpoint, methods=[route.method]) for route in ROUTES]
    static = Rule("/static/<digest>/<path:name>", endpoint=STATIC, methods=["GET"])
    # Without merge_slashes: it answers by an absolute address, made from the header Host.
    return Map([*rules, static], converters=CONVERTERS, strict_slashes=False, merge_slashes=False)


def _no_page(unknown: HTTPException) -> Refused:
    if isinstance(unknown, MethodNotAllowed):
        allowed = ", ".join(sorted(unknown.valid_methods or ()))
        words = f"this address does not answer this method, but {allowed}; nothing was changed"
        return Refused(words, 405, {"Allow": allowed})
    return Refused("there is no page with this address", 404)


def is_live(http: HttpRequest) -> bool:
    """Whether pages refresh themselves, as the user has chosen."""
    return http.cookies.get("pgqueue_live", "on") != "off"


def _static(digest: str, name: str) -> Response:
    file = static_files().get(name)
    if file is None or file.digest != digest:
        return Response("There is no such file.", 404, content_type="text/plain")
    return Response(file.content, content_type=file.media_type, headers={"Cache-Control": FOR_EVER})
