"""``pgqueue doctor``: finds problems of a database, and names the remedies."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from ipaddress import ip_address

import click
from sqlalchemy.orm import Session

from pgqueue import schema
from pgqueue.cli.app_loader import CliState
from pgqueue.cli.group import on_database_with_json
from pgqueue.cli.remedies import remedy_for
from pgqueue.cli.schedules import words_for_overdue
from pgqueue.connections.settings import LIMITS as RAISED
from pgqueue.errors import SchemaError
from pgqueue.job_queue import PgQueue
from pgqueue.models import SCHEMA
from pgqueue.redaction import redacted
from pgqueue.repository import (
    LIMITS,
    Admissions,
    Creator,
    Health,
    Slot,
    TableHealth,
    Unreadable,
    Waiting,
)
from pgqueue.tasks import Task
from pgqueue.terminal import harmless, print_json

DURABILITY = {
    "fsync": "a crash of the server can destroy the whole database",
    "full_page_writes": "a crash of the server can leave torn pages behind",
    "synchronous_commit": "a crash of the server loses jobs whose commit was acknowledged",
}
OTHERS = ("autovacuum", "transaction_read_only", "default_transaction_isolation")
SHOWN = 20
"""How many broken rows, tasks, queues and sessions are named individually."""
OLD = timedelta(minutes=5)
"""Age from which a transaction is reported as holding back vacuum."""

MANY_DEAD = 10_000
"""Number of dead rows up to which a table is not reported, however few live rows it has."""

FULL = 0.1
"""Share of the notification queue that is in use; when it is full, every NOTIFY fails at COMMIT."""


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It works, but needs attention."""
    WRONG = "wrong"
    """Makes the exit code 1."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of the doctor."""

    level: Level
    subject: str
    detail: str


@click.command()
@on_database_with_json
def doctor(given: CliState, as_json: bool) -> None:
    """Look for problems: the tables' version, broken rows, settings that lose commits.

    Changes nothing, reads all jobs, and exits with 1 if something is wrong.

    \b
    Example:  pgqueue --url postgresql://me@localhost/shop doctor
    """
    queue = given.database()
    with queue.session() as session:
        findings = [
            *_schema(queue, session),
            *_durability(Health(session)),
            *_settings(Health(session)),
            *of_server(queue, Health(session)),
        ]
    is_sound = all(finding.level is not Level.WRONG for finding in findings)
    if as_json:
        print_json({"is_sound": is_sound, "findings": findings})
    else:
        for finding in findings:
            line = f"{finding.level:7}  {finding.subject}: {finding.detail}"
            click.echo(harmless(redacted(line)))
    if not is_sound:
        click.get_current_context().exit(1)


def _schema(queue: PgQueue, session: Session) -> Iterator[Finding]:
    try:
        schema.verify(session.connection())
    except SchemaError as error:
        yield Finding(Level.WRONG, "schema", str(error))
        return
    yield Finding(Level.OK, "schema", f"{SCHEMA}, version {schema.SCHEMA_VERSION}")
    violations = queue.check(session)
    for violation in violations[:SHOWN]:
        steps = "; ".join(remedy_for(violation))
        yield Finding(Level.WRONG, "invariant", f"{violation}; to mend it run {steps}")
    if len(violations) > SHOWN:
        yield Finding(Level.WRONG, "invariants", f"{len(violations) - SHOWN} more are broken")
    if not violations:
        yield Finding(Level.OK, "invariants", "no row breaks one")
    yield from _waiting(queue, Health(session))
    yield from _schedules(queue, session)
    yield from _limits(Admissions(session).undeclared())
    yield from of_tables(Health(session).tables())
    for table in Health(session).tables_without_autovacuum():
        yield Finding(
            Level.WARNING,
            "autovacuum",
            f"off for {SCHEMA}.{table}: its dead rows stay, and claims become slow; "
            f"ALTER TABLE {SCHEMA}.{table} RESET (autovacuum_enabled)",
        )


def _waiting(queue: PgQueue, health: Health) -> Iterator[Finding]:
    """Without an app the tasks are unknown, and only the queues are checked."""
    if queue.tasks:
        unknown = health.unknown_tasks(queue.tasks)
        for task in unknown[:SHOWN]:
            yield Finding(Level.WARNING, "unknown task", words_for_unknown(task))
        if not unknown:
            yield Finding(Level.OK, "tasks", "no job is due of a task this app does not know")
        yield from _unpruned(health.unpruned_tasks(queue.tasks))
    unreadable = health.unreadable()
    for each in unreadable[:SHOWN]:
        yield Finding(Level.WARNING, "unreadable jobs", words_for_unreadable(each))
    if not unreadable:
        yield Finding(Level.OK, "arguments", "no job waits for code that can read its arguments")
    unserved = health.unserved_queues()
    for one in unserved[:SHOWN]:
        detail = f"no living worker serves queue {one.name}, where {_due(one)}"
        detail += f"; run pgqueue worker --queues {one.name}"
        yield Finding(Level.WARNING, "workers", detail)
    if not unserved:
        yield Finding(Level.OK, "workers", "every queue with due jobs is served")


def _schedules(queue: PgQueue, session: Session) -> Iterator[Finding]:
    states = queue.schedules.list(session)
    overdue = [words for state in states if (words := words_for_overdue(queue, state))]
    for words in overdue[:SHOWN]:
        yield Finding(Level.WARNING, "schedules", words)
    if not overdue:
        yield Finding(Level.OK, "schedules", "no tick is overdue")


def _limits(undeclared: dict[str, int]) -> Iterator[Finding]:
    for name, jobs in list(undeclared.items())[:SHOWN]:
        waits = "1 job waits" if jobs == 1 else f"{jobs:,} jobs wait"
        detail = f"{waits} for {name}, which no worker has declared, and none admits them: start a "
        yield Finding(Level.WARNING, "limits", detail + "worker with the code that declares it")
    if not undeclared:
        yield Finding(Level.OK, "limits", "no job waits for a limit that no worker has declared")


def _unpruned(tasks: dict[str, int]) -> Iterator[Finding]:
    if not tasks:
        yield Finding(Level.OK, "retention", "this app knows the tasks of all ended jobs")
        return
    jobs = sum(tasks.values())
    named = ", ".join(f"{name} ({number:,})" for name, number in list(tasks.items())[:SHOWN])
    detail = f"{jobs:,} ended jobs belong to tasks this app does not know, and its workers keep "
    detail += f"them: {named}; declare these tasks in a module that --app imports, or delete the "
    yield Finding(Level.WARNING, "retention", detail + "jobs by session.delete")


def words_for_unknown(task: Waiting) -> str:
    return (
        f"this app knows no task {task.name}, of which {_due(task)}: its workers leave them "
        "alone; have the module of --app import that task, or give it that name again, if it was "
        "renamed, by @queue.task(name=...), or run "
        f"pgqueue cancel --status pending --task {task.name}"
    )


def words_for_unreadable(found: Unreadable) -> str:
    jobs = "1 job waits" if found.jobs == 1 else f"{found.jobs:,} jobs wait"
    return (
        f"{jobs} (the oldest since {age(found.since)}) for a worker that can read the arguments: "
        f"{found.reason}; start workers with the code that has enqueued them, before they fail "
        "after the max_unreadable of their task"
    )


def _due(waiting: Waiting) -> str:
    jobs = "1 job is due" if waiting.jobs == 1 else f"{waiting.jobs:,} jobs are due"
    return f"{jobs} (since {age(waiting.since)})"


def _durability(health: Health) -> Iterator[Finding]:
    settings = health.settings(DURABILITY)
    for name, danger in DURABILITY.items():
        if settings[name].value == "off":
            source = settings[name].source
            detail = f"off, by the {source}: {danger}; run {_turn_on(name, source)}"
            yield Finding(Level.WRONG, name, detail)
        else:
            yield Finding(Level.OK, name, settings[name].value)
    for other in health.settings_of_other_roles(DURABILITY):
        if other.value == "off":
            detail = f"off, for the role {other.role}: {DURABILITY[other.name]}; run "
            role = other.role.replace('"', '""')
            detail += f'ALTER ROLE "{role}" RESET {other.name}, or the same with IN DATABASE ... '
            detail += "before RESET where it is set for one database"
            yield Finding(Level.WRONG, other.name, detail)


def _turn_on(name: str, source: str) -> str:
    """Return the command that turns a setting on, by the source that turned it off."""
    match source:
        case "database":
            return f"ALTER DATABASE ... RESET {name}"
        case "user" | "database user":
            return f"ALTER ROLE ... RESET {name}"
        case "client" | "session":
            return f"this again without {name} in the options of the URL or of the engine"
        case "command line":
            return f"the server without {name} on its command line"
        case _:
            return f"ALTER SYSTEM SET {name} = on; SELECT pg_reload_conf();"


def _settings(health: Health) -> Iterator[Finding]:
    found = {name: setting.value for name, setting in health.settings(OTHERS).items()}
    if health.is_standby():
        detail = "this server is a standby: jobs are written on its primary; use the URL of that"
        yield Finding(Level.WRONG, "standby", detail)
    elif found["transaction_read_only"] == "on":
        detail = "on: jobs cannot be written here; run ALTER DATABASE ... RESET "
        detail += "default_transaction_read_only, or ALTER ROLE or ALTER SYSTEM, whoever has set it"
        yield Finding(Level.WRONG, "transaction_read_only", detail)
    if found["autovacuum"] == "off":
        detail = "off: dead rows stay, and claims become slow; run "
        detail += _turn_on("autovacuum", "configuration file")
        yield Finding(Level.WARNING, "autovacuum", detail)
    if found["default_transaction_isolation"] != "read committed":
        yield Finding(
            Level.WARNING,
            "default_transaction_isolation",
            f"{found['default_transaction_isolation']}; workers claim and settle in read "
            "committed whatever it says; your enqueuing transactions and your handlers do not, and "
            "have to be ready for serialization failures",
        )


def of_server(queue: PgQueue, health: Health) -> Iterator[Finding]:
    yield from of_transactions(health)
    yield from of_slots(health.slots())
    yield from _server_limits(queue.tasks.values(), health)
    yield from of_connection(*health.connection())
    yield from of_search_path(health.creators_in_search_path())
    yield from of_notifications(health.notification_queue_usage())


def of_tables(tables: Iterable[TableHealth]) -> Iterator[Finding]:
    """Tables with more dead rows than live ones."""
    for table in tables:
        if table.dead <= max(MANY_DEAD, table.live):
            continue
        when = "never" if table.vacuumed_at is None else f"{table.vacuumed_at:%Y-%m-%d %H:%M %Z}"
        yield Finding(
            Level.WARNING,
            "bloat",
            f"{SCHEMA}.{table.name} has {table.dead:,} dead rows beside {table.live:,} that live "
            f"(last autovacuum: {when}); if no old transaction is named here, run "
            f"VACUUM {SCHEMA}.{table.name}",
        )


def of_transactions(health: Health, *, older_than: timedelta = OLD) -> Iterator[Finding]:
    """Old snapshots, of a session or a prepared transaction."""
    old = health.old_transactions(older_than)
    for one in old[:SHOWN]:
        span = age(timedelta(seconds=one.seconds))
        detail = (
            f"{one.who} is {one.state}, open for {span}: vacuum keeps all that died since; "
            f"end it, or run {one.remedy}"
        )
        yield Finding(Level.WARNING, "old transaction", detail)
    if not old:
        yield Finding(Level.OK, "transactions", f"none is older than {age(older_than)}")


def of_slots(slots: Iterable[Slot]) -> Iterator[Finding]:
    """Replication slots that nothing reads, or that hold back vacuum."""
    for slot in slots:
        if slot.is_active and slot.transactions_held is None:
            continue
        state = "active" if slot.is_active else "read by nobody"
        holds = "the write-ahead log"
        if slot.transactions_held is not None:
            holds += f" and what died in the last {slot.transactions_held:,} transactions"
        name = slot.name.replace("'", "''")
        detail = f"slot {slot.name} is {state} and keeps {holds}; if its reader is gone, run "
        yield Finding(
            Level.WARNING, "replication slot", f"{detail}SELECT pg_drop_replication_slot('{name}')"
        )


def _server_limits(tasks: Iterable[Task[..., object]], health: Health) -> Iterator[Finding]:
    """Server settings that end a handler's transaction before the task's own timeout."""
    slowest = max(tasks, key=_time_allowed, default=None)
    if slowest is None:
        return
    allowed = _time_allowed(slowest)
    words = "without a timeout" if allowed == timedelta.max else f"for up to {age(allowed)}"
    found = [("this role", name, one.value) for name, one in health.settings(LIMITS).items()]
    others = health.settings_of_other_roles(LIMITS)
    found += [(f"the role {other.role}", other.name, other.value) for other in others]
    for role, name, value in found:
        limit = timedelta(milliseconds=int(value))
        if name in RAISED and allowed < timedelta.max:
            continue  # a worker raises these to the timeout and more
        if limit and limit < allowed:
            yield Finding(
                Level.WARNING,
                name,
                f"{limit.total_seconds():g} s for {role}, and task {slowest.name} runs {words}: "
                "the server may end its transaction before; for the role of the workers run "
                f"ALTER ROLE ... SET {name} = 0",
            )


def _time_allowed(task: Task[..., object]) -> timedelta:
    return task.settings.timeout or timedelta.max


def of_connection(address: str | None, is_encrypted: bool) -> Iterator[Finding]:
    """An unencrypted connection to another machine; ``address`` is None for a local socket."""
    if address is None or is_encrypted or ip_address(address).is_loopback:
        return
    yield Finding(
        Level.WARNING,
        "encryption",
        f"this connection to {address} is in clear, passwords and arguments too: add "
        "?sslmode=verify-full to the URL, and set ssl = on on the server",
    )


def of_search_path(creators: Sequence[Creator]) -> Iterator[Finding]:
    """Other roles that may create functions where the application's statements look up names."""
    for one in creators[:SHOWN]:
        who = "everybody" if one.role is None else f"the role {one.role}"
        given = "PUBLIC" if one.role is None else _quoted(one.role)
        may = "may fit a call better than PostgreSQL's, and then runs with the caller's rights"
        if one.is_before_catalog:
            may = "comes before PostgreSQL's, for the path names that schema before pg_catalog"
        yield Finding(
            Level.WARNING,
            "search_path",
            f"{who} may create in schema {one.schema}, where this connection looks names up: a "
            f"function or operator made there {may}; run "
            f"REVOKE CREATE ON SCHEMA {_quoted(one.schema)} FROM {given}",
        )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def of_notifications(usage: float) -> Iterator[Finding]:
    if usage > FULL:
        yield Finding(
            Level.WARNING,
            "notifications",
            f"{usage:.0%} of the server's queue are taken, and when it is full every COMMIT with "
            "a notification fails: a session that listens is in a long transaction; pgqueue "
            "doctor names it above if it is of this database; end it by "
            "SELECT pg_terminate_backend(...)",
        )


def age(span: timedelta) -> str:
    seconds = int(span.total_seconds())
    for name, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {name}"
    return f"{seconds} s"
