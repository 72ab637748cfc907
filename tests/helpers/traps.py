"""What a role may make that can create functions in a schema of the search_path.

Each trap counts who steps on it, by a sequence, which no rollback sets back, and raises.
"""

import importlib
import inspect
import itertools
import pkgutil
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, cast, get_type_hints

from sqlalchemy import ClauseElement, Connection, Engine, text
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from pgqueue import repository
from pgqueue.models import SCHEMA, JobStatus
from pgqueue.repository import claim_order, id_order, listing, many
from pgqueue.repository.conditions import JobFilter
from pgqueue.repository.messages import MESSAGE_KEYS, Start
from pgqueue.repository.references import Reference
from pgqueue.repository.tables import dead_letters, jobs
from pgqueue.schema import Roles, grant_statements, revoke_statements

SIMILAR = {
    "text": ["character varying", "name"],
    "bigint": ["integer", "smallint"],
    "integer": ["smallint"],
    "numeric": ["integer"],
    "oid": ["regclass", "regnamespace"],
    "interval": [],
    "double precision": ["integer"],
    "timestamp with time zone": [],
    "uuid": [],
    "jsonb": [],
    "xid": [],
    "tid": [],
}
"""The types that stand beside an operator somewhere, and those that become one of them unasked."""

OPERATORS = ["=", "<>", "<", ">", "<=", ">=", "+", "-", "*", "||", "<<", "|", "?", "~", "~~"]
OPERATORS += ["->", "->>", "?|", "@>"]
REFERENCES = tuple(Reference(SCHEMA, "leases", "target_id", to) for to in ("jobs", "batches"))


def all_statements() -> Iterator[tuple[str, str]]:
    """Every statement of ``pgqueue.repository`` by name, in the words that psycopg gets."""
    for name, build in _builders():
        for arguments in _arguments(build):
            yield f"{name} {arguments}", words_of(build(**arguments))
    for status in [None, *JobStatus]:
        chosen = frozenset([status] if status else [])
        which = JobFilter(**every_condition() | {"statuses": chosen})
        yield f"list_jobs {status}", words_of(id_order.list_jobs(which, limit=9))
    start = claim_order.Position()
    yield "list_pending", words_of(claim_order.list_pending(which, start, start, limit=9))
    yield "end_of_window", words_of(claim_order.end_of_window(which, start, size=9))
    yield "job_details", words_of(listing.job_details(frozenset()))
    yield "attempts_of_job", words_of(listing.attempts_of_job(frozenset()))


def every_condition() -> dict[str, Any]:
    """A value of each condition, also of those that are added later: by the types of the fields."""
    values: dict[Any, Any] = {
        int | None: 7,
        str | None: "x",
        bool | None: True,
        timedelta | None: timedelta(seconds=1.5),
        datetime | timedelta | None: datetime(2030, 1, 31, tzinfo=UTC),
        tuple[tuple[str, Any], ...]: (("order_id", 42), ("to", ["a", "b"])),
        frozenset[str] | None: frozenset(["a", "b"]),
        frozenset[JobStatus]: frozenset([JobStatus.FAILED]),
    }
    found = {name: values[hint] for name, hint in get_type_hints(JobFilter).items()}
    return found | {"created_after": timedelta(days=1)}


def all_commands() -> list[str]:
    """What gives and takes rights: blocks of PL/pgSQL."""
    roles = Roles(worker="w", enqueue="e", dashboard="d", migrator="m", owner="o")
    return [*grant_statements(roles), *revoke_statements(roles)]


def words_of(statement: Any) -> str:
    dialect = cast(Any, PGDialect_psycopg)()
    options = {"render_postcompile": True}
    return str(cast(ClauseElement, statement).compile(dialect=dialect, compile_kwargs=options))


def _builders() -> Iterator[tuple[str, Callable[..., Any]]]:
    for found in pkgutil.iter_modules(repository.__path__, "pgqueue.repository."):
        for name, build in vars(importlib.import_module(found.name)).items():
            is_cached = hasattr(build, "cache_info") and not name.startswith("_")
            if is_cached and build.__module__ == found.name:
                yield name, build


def _arguments(build: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    names = inspect.signature(build).parameters
    others: dict[str, list[Any]] = {"start": list(Start), "references": [(), REFERENCES]}
    others["names"] = [("args", "next_at"), ("cron", "every", "paused_at")]
    others["columns"] = [("priority", "run_at"), ("args", "unique_key")]
    if build in (many.change_pending, many.change_blocked):
        others["columns"] = [("priority", "run_at"), ("priority", "queue")]
    others["callbacks"] = [("on_failure", "on_success"), ("on_cancelled",)]
    others["table"] = [jobs, dead_letters] if build is id_order.id_below else list(MESSAGE_KEYS)
    values = [others.get(name, [False, True]) for name in names]
    for chosen in itertools.product(*values):
        yield dict(zip(names, chosen, strict=True))


def called_functions() -> set[str]:
    """Those of PostgreSQL's that the package calls, and those of which it has a constant."""
    words = [words for _, words in all_statements()]
    called = re.findall(r"pg_catalog\.(\w+)\s?\(", " ".join([*words, *all_commands()]))
    return {*called, "pg_advisory_xact_lock", "pg_try_advisory_xact_lock", "current_setting"} | {
        "pg_advisory_lock_shared",
        "pg_advisory_unlock_shared",
        "starts_with",
    }


def set_traps(engine: Engine) -> None:
    """In ``public``: functions like those that are called, and the operators that are missing."""
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE SEQUENCE public.steps")
        connection.exec_driver_sql("; ".join([*_functions(connection), *_operators(connection)]))


def is_stepped_on(engine: Engine) -> bool:
    with engine.connect() as connection:
        return bool(connection.scalar(text("SELECT is_called FROM public.steps")))


def _functions(connection: Connection) -> Iterator[str]:
    known = connection.execute(
        text(
            """
            SELECT proname, pg_catalog.format_type(prorettype, NULL), proretset,
                   ARRAY(SELECT pg_catalog.format_type(type, NULL)
                         FROM pg_catalog.unnest(proargtypes::oid[]) AS type)
            FROM pg_catalog.pg_proc
            WHERE pronamespace = 'pg_catalog'::regnamespace AND proname = ANY(:names)
            """
        ),
        {"names": sorted(called_functions())},
    ).all()
    signatures: dict[tuple[str, tuple[str, ...]], str] = {}
    for name, returns, is_set, types in known:
        for one in _like(types):
            signatures[name, one] = f"SETOF {returns}" if is_set else returns
    parts = ["text", "character varying", "smallint", "bigint", "uuid"]
    for number in (2, 3):
        for one in itertools.product(parts, repeat=number):
            signatures["concat", one] = "text"
    for (name, one), returns in signatures.items():
        if not any(type in NOT_FOR_PLPGSQL for type in (*one, returns)):
            yield _function(name, one, returns)


NOT_FOR_PLPGSQL = {'"any"', "internal", "anyarray", "anyelement", "anycompatible"} | {
    "anycompatiblearray"
}


def _like(types: list[str]) -> Iterator[tuple[str, ...]]:
    """These types, and what is written in their place without a cast."""
    return itertools.product(*([type, *SIMILAR.get(type, [])] for type in types))


def _operators(connection: Connection) -> Iterator[str]:
    types = sorted({*SIMILAR, *itertools.chain(*SIMILAR.values())})
    rows = connection.execute(
        text(
            """
            SELECT oprname, pg_catalog.format_type(oprleft, NULL),
                   pg_catalog.format_type(oprright, NULL)
            FROM pg_catalog.pg_operator WHERE oprnamespace = 'pg_catalog'::regnamespace
            """
        )
    )
    known = {tuple(row) for row in rows}
    for left, right in itertools.product(types, repeat=2):
        yield _function("step", (left, right), "boolean")
        for name in OPERATORS:
            if (name, left, right) not in known:
                arguments = f"FUNCTION = public.step, LEFTARG = {left}, RIGHTARG = {right}"
                yield f"CREATE OPERATOR public.{name} ({arguments})"


def _function(name: str, types: tuple[str, ...], returns: str) -> str:
    signature = f"{name}({', '.join(types)})"
    return (
        f"CREATE FUNCTION public.{signature} RETURNS {returns} LANGUAGE plpgsql AS $trap$ BEGIN "
        "PERFORM pg_catalog.nextval('public.steps'); "
        f"RAISE EXCEPTION USING MESSAGE = 'stepped on {signature}'; END $trap$"
    )
