"""What a page is: a route, the request as its function sees it, and what the function returns."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, Literal, NoReturn, TypeVar
from urllib.parse import unquote

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from werkzeug import Request as HttpRequest
from werkzeug.exceptions import HTTPException
from werkzeug.routing import BaseConverter, IntegerConverter, Map, MapAdapter, ValidationError

from pgqueue.dashboard.access import VIEW, Access
from pgqueue.database.bounded import BoundedTransactions
from pgqueue.database.sqlstates import LOCK_TIMEOUT, STATEMENT_TIMEOUT, sqlstate_of
from pgqueue.job_queue import PgQueue
from pgqueue.operations import Operator, Selection
from pgqueue.operations.engine import Begin

T = TypeVar("T")

LONGEST_TEXT = 1000
LARGEST = 2**63 - 1
MOST_IDS = 200
_COMMAND = re.compile("(?:^|(?<=; )|(?<=run ))pgqueue (--app [^ ]+ )?")


class _Number(IntegerConverter):
    """An id in an address; a number that PostgreSQL does not have is no address."""

    def __init__(self, map: Map, signed: bool = False) -> None:
        super().__init__(map, signed=signed, min=-LARGEST - 1 if signed else 0, max=LARGEST)

    def to_python(self, value: str) -> int:
        if len(value) > len(str(LARGEST)) + 1:
            raise ValidationError
        return int(super().to_python(value))


class _TaskName(BaseConverter):
    """The name of a task as one part of an address, also of one named ``a/b`` or ``..``.

    ``~`` and two digits stand for a character that browsers or proxies would take for structure.
    """

    part_isolating = True

    def to_python(self, value: str) -> str:
        name = unquote(value.replace("%", "%25").replace("~", "%"))
        if "\0" in name or "\ufffd" in name:
            raise ValidationError
        return name

    def to_url(self, value: str) -> str:
        odd = "~/\\" + ("." if value in (".", "..") else "")
        name = "".join(f"~{ord(one):02X}" if one in odd else one for one in value)
        return str(super().to_url(name))


CONVERTERS = {"int": _Number, "task": _TaskName}


class Refused(Exception):
    """A request that is not answered; the page shows these words, and nothing is changed."""

    def __init__(
        self, words: str, status: int = 400, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(words)
        self.status = status
        self.headers = headers or {}


class Page:
    """A template with its variables.

    ``title``: of the page.  ``command``: the one that shows or does the same.
    """

    def __init__(
        self, template: str, *, title: str, command: str = "", status: int = 200, **variables: Any
    ) -> None:
        self.template = template
        self.title = title
        self.command = command
        self.status = status
        self.variables = variables


@dataclass(frozen=True, slots=True)
class Done:
    """An action that has been done: the browser goes to a page, which says so once."""

    words: str
    to: str
    cookies: Mapping[str, str] = field(default_factory=dict)
    """Choices of the user that the browser keeps."""


@dataclass(frozen=True, slots=True)
class Download:
    """A file, such as a list as CSV, in pieces of text."""

    name: str
    pieces: Iterable[str]
    media_type: str = "text/csv; charset=utf-8"


Answer = Page | Done | Download


@dataclass(frozen=True, slots=True)
class Route:
    """An address, the function that answers it, and the right that it needs.

    GET reads in a transaction that is READ ONLY; only POST changes something.
    """

    rule: str
    answer: Callable[..., Answer]
    method: Literal["GET", "POST"] = "GET"
    right: str = VIEW
    is_slow: bool = False
    """Whether it may read many jobs, so that one user could keep all others waiting."""

    @property
    def endpoint(self) -> str:
        """The name of the route in :meth:`Request.url`."""
        return self.answer.__name__


class Request:
    """A request, as the function of a page sees it."""

    def __init__(
        self,
        queue: PgQueue,
        access: Access,
        http: HttpRequest,
        adapter: MapAdapter,
        transactions: Callable[[], BoundedTransactions | None],
    ) -> None:
        self.queue = queue
        self.access = access
        self.http = http
        self.left_out: list[str] = []
        """The parts of the page that took too long."""
        self._adapter = adapter
        self._transactions = transactions
        self._stack = ExitStack()

    # What the user may do

    def may(self, right: str) -> bool:
        return right in self.access.rights

    def check_right(self, right: str) -> None:
        """Raises Refused if the user does not have a right."""
        if not self.may(right):
            raise Refused(f"this needs the right {right!r}, which you do not have", 403)

    def scope(self, jobs: Selection) -> Selection:
        """Those of the jobs that the user may see."""
        return jobs.scoped(self.access.queues, self.access.tags)

    @property
    def operator(self) -> Operator:
        """The user, who acts in transactions apart from :attr:`session`."""
        return self._operator(self.transaction)

    @property
    def operator_in_session(self) -> Operator:
        """The user, who acts in the transaction of :attr:`session`."""
        return self._operator(self._savepoint)

    def _operator(self, begin: Begin) -> Operator:
        user, reason = self.access.user, self.posted("reason")
        return Operator(
            self.queue,
            user,
            reason,
            begin=begin,
            unlogged=self._refuse_unlogged,
            is_limited=self.access.is_limited,
        )

    @contextmanager
    def _savepoint(self) -> Iterator[Session]:
        with self.session.begin_nested():
            yield self.session

    def _refuse_unlogged(self) -> None:
        raise Refused(
            "the database role of the dashboard may not write the log of operators; nothing was "
            "changed",
            403,
        )

    def check_sees_all(self, why: str) -> None:
        """Raises Refused for a user who sees only some of the jobs; ``why``: what is of all."""
        if self.access.is_limited:
            raise Refused(f"{why}, and you may see only some of the jobs", 403)

    def check_filter(self, jobs: Selection) -> None:
        """Raises Refused for a filter that searches for what the user may not see."""
        if jobs.which.names_arguments and not self.may("view_arguments"):
            raise Refused(
                "a filter by arguments, or by a key that is made from arguments, needs the right "
                "view_arguments",
                403,
            )

    def check_queue(self, name: str) -> None:
        """Raises Refused for a queue that the user may not see."""
        if self.access.queues is not None and name not in self.access.queues:
            raise Refused(f"there is no queue {name!r}", 404)

    def check_jobs(self, job_ids: Collection[int]) -> None:
        """Raises JobNotFound for a job that does not exist, or that the user may not see."""
        self.scope(Selection(job_ids)).check_scope(self.session)

    # The database

    @cached_property
    def session(self) -> Session:
        """The Session of this request: READ ONLY for a GET, else committed after the answer."""
        is_post = self.http.method == "POST"
        return self._stack.enter_context(self.transaction(read_only=not is_post))

    @contextmanager
    def transaction(self, *, read_only: bool = False) -> Iterator[Session]:
        """A transaction of its own, committed at the end of the block.

        For actions that commit several times; they must not use :attr:`session` meanwhile.
        """
        bounded = self._transactions()
        if bounded is None:  # the queue of a test is bound to one Connection
            with self.queue.session() as session, session.begin():
                yield session
        else:
            with bounded.begin(read_only=read_only) as session:
                yield session

    def part(self, what: str, read: Callable[[Session], T]) -> T | None:
        """Read a part of the page; None if it took too long, and the page says so.

        ``what``: as in "<what> took too long and is left out".
        """
        try:
            with self.session.begin_nested():
                return read(self.session)
        except DBAPIError as error:
            if sqlstate_of(error) not in (STATEMENT_TIMEOUT, LOCK_TIMEOUT):
                raise
            self.left_out.append(what)
            return None

    @cached_property
    def now(self) -> datetime:
        """The time of the request, by the clock of PostgreSQL."""
        now: datetime = self.session.execute(sa.select(sa.func.statement_timestamp())).scalar_one()
        return now

    # The parameters

    @property
    def form(self) -> Mapping[str, str]:
        """The raw form, one text for each name."""
        return self.http.form

    def text(self, name: str, default: str = "", *, longest: int = LONGEST_TEXT) -> str:
        """A parameter of the address."""
        return _checked(name, self.http.args.get(name, default), longest)

    def posted(self, name: str, default: str = "", *, longest: int = LONGEST_TEXT) -> str:
        """A field of the form."""
        return _checked(name, self.http.form.get(name, default), longest)

    def whole(
        self, name: str, default: int | None = None, low: int = 0, high: int = LARGEST
    ) -> int | None:
        """A whole number of the address."""
        return _whole(name, self.http.args.get(name, ""), default, low, high)

    def posted_whole(
        self, name: str, default: int | None = None, low: int = 0, high: int = LARGEST
    ) -> int | None:
        """A whole number of the form."""
        return _whole(name, self.http.form.get(name, ""), default, low, high)

    def one_of(self, name: str, choices: Collection[str], default: str) -> str:
        """A parameter of the address that is one of these words."""
        value = self.text(name) or default
        if value not in choices:
            raise Refused(f"{name} is {value!r}; give one of {', '.join(choices)}")
        return value

    def ids(self, name: str = "id") -> list[int]:
        """The ids that are checked in a form, at most 200."""
        texts = self.http.form.getlist(name)
        if len(texts) > MOST_IDS:
            raise Refused(f"more than {MOST_IDS} jobs are selected")
        return [_number(name, text, 1, LARGEST) for text in texts]

    # The addresses

    def url(self, endpoint: str, /, **values: Any) -> str:
        """The address of a page, relative to the host; values that are None are left out."""
        given = {name: value for name, value in values.items() if value is not None}
        return self._adapter.build(endpoint, given)

    def here(self, /, **values: Any) -> str:
        """The address of this page with other parameters; those that are None are left out."""
        kept = {name: value for name, value in self.http.args.items() if name != "message"}
        try:
            endpoint, of_path = self._adapter.match()
        except HTTPException:  # there is no such page
            return self._adapter.script_name
        return self.url(endpoint, **{**kept, **of_path, **values})

    def back(self) -> str:
        """The address of the page with the form, as the form's field ``back`` has it."""
        address = self.posted("back", longest=4 * LONGEST_TEXT)
        root = self._adapter.script_name
        is_here = address.startswith(root) and not address.startswith("//")
        # Browsers leave out tabs and line breaks, so that the address may begin with // after all.
        return address if is_here and address.isprintable() and "\\" not in address else root

    def shell(self, commands: str) -> str:
        """Commands ``pgqueue ...`` as the application has them, such as ``flask pgqueue ...``."""
        name = self.queue.command_name
        return commands if name == "pgqueue" else _COMMAND.sub(f"{name} ", commands)

    def finish(self, error: BaseException | None = None) -> None:
        """Commit what was done, or undo it."""
        if error is None:
            self._stack.close()
        else:
            self._stack.__exit__(type(error), error, error.__traceback__)


def _checked(name: str, value: str, longest: int) -> str:
    if len(value) > longest:
        raise Refused(f"{name} has more than {longest} characters")
    if "\0" in value:
        raise Refused(f"{name} has a NUL character")
    return value.encode(errors="replace").decode()


def _whole(name: str, text: str, default: int | None, low: int, high: int) -> int | None:
    return _number(name, text, low, high) if text else default


def _number(name: str, text: str, low: int, high: int) -> int:
    if not text.removeprefix("-").isascii() or not text.removeprefix("-").isdigit():
        _refuse(name, text, low, high)
    number = int(text) if len(text) < 25 else high + 1
    return number if low <= number <= high else _refuse(name, text, low, high)


def _refuse(name: str, text: str, low: int, high: int) -> NoReturn:
    raise Refused(f"{name} is {text[:40]!r}; give a whole number from {low} to {high}")
