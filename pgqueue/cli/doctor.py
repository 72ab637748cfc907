"""``pgqueue doctor``: finds problems of a database, and names the remedies."""

import json
from collections.abc import Iterator
from dataclasses import asdict

import click
from sqlalchemy.orm import Session

from pgqueue import schema
from pgqueue.cli.finding import SHOWN, Finding, Level, age
from pgqueue.cli.remedies import remedy_for
from pgqueue.cli.schedules import words_for_overdue
from pgqueue.cli.server_findings import of_server, of_tables
from pgqueue.errors import SchemaError
from pgqueue.job_queue import PgQueue
from pgqueue.models import SCHEMA
from pgqueue.redaction import redacted
from pgqueue.repository import Admissions, Health, Unreadable, Waiting
from pgqueue.terminal import harmless

DURABILITY = {
    "fsync": "a crash of the server can destroy the whole database",
    "full_page_writes": "a crash of the server can leave torn pages behind",
    "synchronous_commit": "a crash of the server loses jobs whose commit was acknowledged",
}
OTHERS = ("autovacuum", "transaction_read_only", "default_transaction_isolation")


def examine(queue: PgQueue, *, as_json: bool) -> None:
    """Print the findings; exit with 1 if something is wrong."""
    with queue.session() as session:
        findings = [
            *_schema(queue, session),
            *_durability(Health(session)),
            *_settings(Health(session)),
            *of_server(queue, Health(session)),
        ]
    is_sound = all(finding.level is not Level.WRONG for finding in findings)
    if as_json:
        found = {"is_sound": is_sound, "findings": [asdict(finding) for finding in findings]}
        click.echo(json.dumps(found, indent=2))
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
            "committed whatever it says; your enqueuing transactions and, in lease mode, your "
            "handlers do not, and have to be ready for serialization failures",
        )
