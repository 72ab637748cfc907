"""The examples in our docstrings run, and each public name has the sections that it needs."""

import ast
import doctest
import logging
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from documents import ROOT
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import Engine, ForeignKey, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import pgqueue
from pgqueue import JobContext, Limit, PgQueue, flask
from pgqueue.metrics import serving
from pgqueue.testing import assert_blocked, assert_enqueued, record_steps, run_jobs
from pgqueue.tracing import instrument

WITH_EXAMPLES = {
    *("PgQueue", "Task", "Limit", "Unique", "Retry", "Worker", "JobContext"),
    *("PgQueue.batch", "PgQueue.workflow"),
}


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    is_paid: Mapped[bool] = mapped_column(default=False)


class Line(Base):
    __tablename__ = "lines"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id))


def examples() -> Iterator[tuple[str, str]]:
    """The path of each object of the package with an example, and the code."""
    for path in sorted((ROOT / "pgqueue").rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        yield from _examples_in(tree, path.relative_to(ROOT).with_suffix("").as_posix())


def _examples_in(node: Any, path: str) -> Iterator[tuple[str, str]]:
    for child in node.body:
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        parts = doctest.DocTestParser().get_examples(ast.get_docstring(child) or "")
        if parts:
            yield f"{path}.{child.name}", "".join(part.source for part in parts)
        if isinstance(child, ast.ClassDef):
            yield from _examples_in(child, f"{path}.{child.name}")


@pytest.mark.parametrize(("path", "code"), [pytest.param(*each, id=each[0]) for each in examples()])
def test_the_examples_of_docstrings_run(path: str, code: str, engine: Engine) -> None:
    queue = PgQueue(engine)
    with queue.session() as session:
        names = _names(queue, session)
        if ".JobContext" in path:
            _run_in_handler(code, queue, session, names)
        elif ".OpenWorkflow" in path and "queue.workflow" not in code:
            with queue.workflow(session) as flow:
                rows = flow.add(names["extract"].job(12))
                exec(code, names | {"flow": flow, "rows": rows, "done": rows})
        else:
            own = {"PgQueue": flask.PgQueue} if path.startswith("pgqueue/flask/") else {}
            exec(code, names | own)


def _run_in_handler(code: str, queue: PgQueue, session: Session, names: dict[str, Any]) -> None:
    @queue.task
    def handler(ctx: JobContext) -> None:
        exec(code, names | {"ctx": ctx})

    with queue.bound_to(session.connection()):
        handler.enqueue(session)
        run_jobs(session, queue=queue)


def _names(queue: PgQueue, session: Session) -> dict[str, Any]:
    """What the examples may use: an application, with a job that waits and one that has failed."""

    @queue.task(name="pay")
    def pay(session: Session, order_id: int) -> None: ...

    @queue.task(name="mail", queue="mail")
    def mail(address: str) -> None: ...

    @queue.task(name="charge", limit=Limit(5, name="bank"))
    def charge(order_id: int) -> None: ...

    @queue.task(name="extract", max_attempts=1)
    def extract(file: int) -> None:
        raise ValueError(f"{file} is no file")

    @queue.task(name="transform")
    def transform(number: int) -> int:
        return number

    @queue.task(name="load")
    def load(file: int) -> None: ...

    @queue.task(name="tell")
    def tell(batch_id: int) -> None: ...

    @queue.task(name="count")
    def count(year: int, month: int) -> int:
        return month

    @queue.task(name="deliver")
    def deliver(ctx: JobContext, order_id: int) -> str:
        return str(ctx.step("charge", str, order_id))

    queue.resource(nullcontext)
    Base.metadata.create_all(session.connection())
    order = Order(id=7)
    with queue.workflow(session) as flow:
        failed = flow.add(extract.job(12))
    run_jobs(session, queue=queue, raise_errors=False)
    session.add(order)
    session.flush()
    own: dict[str, Any] = {
        "pay": pay,
        "mail": mail,
        "charge": charge,
        "extract": extract,
        "load": load,
        "transform": transform,
        "tell": tell,
        "count": count,
        "deliver": deliver,
        "clean_up": load,
        "audit": load,
        "report": load,
        "rows_of": lambda file: [(file,)],
        "Order": Order,
        "Line": Line,
        "order": order,
        "order_id": 7,
        "year": 2026,
        "queue": queue,
        "session": session,
        "failed": failed,
        "log": logging.getLogger("shop"),
        "job": mail.enqueue(session, "eve@example.org"),
        "attempts": Counter[Any](),
        "bank": SimpleNamespace(charge=lambda *_, **__: "receipt"),
        "book": pay,
        "BankClient": lambda *_: nullcontext(),
        "FakeBank": object,
        "open_bank": nullcontext,
        "run_jobs": partial(run_jobs, queue=queue),
        "record_steps": record_steps,
        "assert_enqueued": assert_enqueued,
        "assert_blocked": assert_blocked,
        "timedelta": timedelta,
        "Session": Session,
        "select": select,
        "Iterator": Iterator,
        "DBAPIError": DBAPIError,
        "Flask": Flask,
        "SQLAlchemy": SQLAlchemy,
        "instrument": instrument,
        "serving": serving,
    }
    return {name: getattr(pgqueue, name) for name in dir(pgqueue) if name[0].isupper()} | own


def test_what_users_begin_with_has_an_example() -> None:
    have = {path.rpartition("/")[2].partition(".")[2] for path, _ in examples()}

    assert {each for each in WITH_EXAMPLES if each not in have} == set()


def test_the_written_parts_of_the_reference_are_those_of_the_code() -> None:
    reference = _reference()

    assert [
        page.name for page in reference.PAGES if reference.written(page) != page.read_text()
    ] == []


def test_each_public_name_has_the_sections_that_it_needs() -> None:
    reference = _reference()
    shown = [each for page in reference.PAGES for each in reference.shown_on(page)]

    missing = [f"{each.name}: {lack}" for each in shown for lack in _lacking(each)]

    assert not missing, "\n".join(missing)


def _lacking(shown: Any) -> Iterator[str]:
    """What the docstring of a function, or of a class that the application calls, lacks."""
    of = shown.object
    if not of.is_function and not shown.is_constructed:
        return
    if of.is_class and _is_no_constructor(of):
        return
    text = "" if of.docstring is None else of.docstring.value
    sections = {each.kind.value: each for each in of.docstring.parse("google")} if text else {}
    called = of.all_members.get("__init__", of) if of.is_class else of
    called = called.final_target if called.is_alias else called
    named = {each.name for each in sections["parameters"].value} if "parameters" in sections else ()
    for parameter in called.parameters:
        if parameter.name not in ("self", "cls") and parameter.name not in {
            *named,
            *(name.lstrip("*") for name in named),
        }:
            yield f"Args has no {parameter.name}"
    nothing = of.is_class or str(of.returns) in ("None", "Iterator[None]")
    if not nothing and "returns" not in sections:
        yield "no Returns"
    if re.search(r"^ +raise [A-Z]", "\n".join(called.lines), re.M) and "raises" not in sections:
        yield "no Raises"
    prose = re.split(r"^Args:", text, flags=re.MULTILINE)[0]
    prose = re.split(r"^Args:", text, flags=re.MULTILINE)[0]
    if re.search(r"\b[Rr]aises `?`?[A-Z]\w+", prose) and "raises" not in sections:
        yield "no Raises, but a sentence"


def _is_no_constructor(of: Any) -> bool:
    """An exception is caught, a member of an enum or a row is read: none is made by a call."""
    return any(
        str(base) in ("StrEnum", "Base", "Exception", "UserWarning") or "Error" in str(base)
        for base in (*of.bases, *(base for each in of.mro() for base in each.bases))
    )


def _reference() -> Any:
    pytest.importorskip("griffe")
    sys.path.insert(0, str(ROOT / "docs" / "site"))
    import reference

    return reference
