"""``pgqueue doctor``: finds jobs that do not run and broken rows, and names the remedies."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

import click
from sqlalchemy.orm import Session

from pgqueue import schema
from pgqueue.cli.app_loader import CliState
from pgqueue.cli.options import on_database_with_json
from pgqueue.database.settings import LIMITS as RAISED
from pgqueue.errors import OptionError, SchemaError
from pgqueue.job_queue import PgQueue
from pgqueue.models import SCHEMA
from pgqueue.redaction import redacted
from pgqueue.repository.admit import Admissions
from pgqueue.repository.batches import Batches, Candidate
from pgqueue.repository.claim import waiting_queues
from pgqueue.repository.health import LIMITS, Health, TableHealth, Unreadable, Waiting
from pgqueue.repository.invariants import Violation
from pgqueue.repository.schedules import ScheduleState
from pgqueue.repository.workers import Workers
from pgqueue.rules import admission
from pgqueue.rules.ticks import LATE, Overlap
from pgqueue.tasks import Task
from pgqueue.tasks.pauses import open_tasks, under_all_names
from pgqueue.terminal import harmless, print_json

DURABILITY = {
    "fsync": "a crash of the server can destroy the whole database",
    "full_page_writes": "a crash of the server can leave torn pages behind",
    "synchronous_commit": "a crash of the server loses jobs whose commit was acknowledged",
}
TURN_ON = {
    "configuration file": "; run ALTER SYSTEM SET {name} = on; SELECT pg_reload_conf();",
    "database": "; run ALTER DATABASE ... RESET {name}",
    "user": "; run ALTER ROLE ... RESET {name}",
    "database user": "; run ALTER ROLE ... IN DATABASE ... RESET {name}",
}
"""By the source of a setting, as pg_settings names it.  Other sources are named in the finding."""
OTHERS = ("autovacuum", "transaction_read_only", "default_transaction_isolation")
SHOWN = 20
"""How many broken rows, tasks, queues and sessions are named individually."""
LOOK_AGAIN = 3.0
"""Seconds between two looks at jobs that limits with room block: a worker looks every second."""
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
            *_of_rows(queue, session),
            *_of_settings(Health(session)),
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


def _of_rows(queue: PgQueue, session: Session) -> Iterator[Finding]:
    """What the tables tell; nothing more if they cannot be read."""
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
    yield from _of_jobs(queue, session)
    health = Health(session)
    yield from of_tables(health.tables())
    for table in health.tables_without_autovacuum():
        yield Finding(
            Level.WARNING,
            "autovacuum",
            f"off for {SCHEMA}.{table}: its dead rows stay, and claims become slow; "
            f"ALTER TABLE {SCHEMA}.{table} RESET (autovacuum_enabled)",
        )


def _of_jobs(queue: PgQueue, session: Session) -> Iterator[Finding]:
    """Jobs that do not run, and why.  Without an app, its tasks are unknown."""
    health = Health(session)
    if queue.tasks:
        yield from _warnings(
            "unknown task",
            map(words_for_unknown, health.unknown_tasks(queue.tasks)),
            sound=("tasks", "no job is due of a task this app does not know"),
        )
        yield from _warnings(
            "retention",
            words_for_unpruned(health.unpruned_tasks(queue.tasks)),
            sound=("retention", "this app knows the tasks of all ended jobs"),
        )
    yield from _warnings(
        "unreadable jobs",
        map(words_for_unreadable, health.unreadable()),
        sound=("arguments", "no job waits for code that can read its arguments"),
    )
    yield from _warnings(
        "workers",
        (
            f"no living worker serves queue {one.name}, where {_due(one)}; run pgqueue worker "
            f"--queues {one.name}"
            for one in health.unserved_queues()
        ),
        sound=("workers", "every queue with due jobs is served"),
    )
    yield from _warnings(
        "schedules",
        filter(None, (words_for_overdue(queue, one) for one in queue.schedules.list(session))),
        sound=("schedules", "no tick is overdue"),
    )
    yield from _warnings(
        "batches",
        (
            words_for_open_batch(one)
            for one in Batches(session).overdue()
            if one.unreadable or one.since > OLD  # a worker ends the others within seconds
        ),
        sound=("batches", "none whose jobs have ended is open"),
    )
    yield from _warnings(
        "limits",
        (
            f"{_wait(jobs)} for {name}, which no worker has declared, and none admits them: start "
            "a worker with the code that declares it"
            for name, jobs in Admissions(session).undeclared().items()
        ),
        sound=("limits", "no job waits for a limit that no worker has declared"),
    )
    if queue.tasks:
        yield from _warnings(
            "admission",
            map(words_for_skipped, skipped_jobs(queue, session)),
            sound=("admission", "no job waits for a limit that has room"),
        )


def skipped_jobs(queue: PgQueue, session: Session) -> list[admission.Waiting]:
    """The jobs that workers skip: they are due, and their limits have room.

    Workers fill a place that becomes free within a second, so a job counts if it is found twice.
    """

    def look() -> dict[int, admission.Waiting]:
        unserved = {one.name for one in Health(session).unserved_queues()}
        paused = Workers(session).paused()
        served = set(session.scalars(waiting_queues())) - unserved - set(paused.queues)
        jobs = Admissions(session).skipped(
            sorted(served),
            tasks=open_tasks(queue.tasks, paused),
            paused=under_all_names(queue.tasks, paused),
            longer_than=LATE,
        )
        return {job.job_id: job for job in jobs}

    if not (found := look()):
        return []
    session.rollback()  # or REPEATABLE READ would show the same rows again
    time.sleep(LOOK_AGAIN)
    return [job for job_id, job in look().items() if job_id in found]


def _warnings(subject: str, details: Iterable[str], *, sound: tuple[str, str]) -> Iterator[Finding]:
    """The first warnings about a subject; if there are none, the finding that it is sound."""
    found = list(details)
    for detail in found[:SHOWN]:
        yield Finding(Level.WARNING, subject, detail)
    if not found:
        yield Finding(Level.OK, *sound)


def words_for_open_batch(batch: Candidate) -> str:
    why = batch.unreadable or "no worker runs, or its log says why it cannot end the batch"
    since = age(batch.since)
    return f"batch {batch.id} is open, although the job it waited for ended {since} ago: {why}"


def words_for_skipped(job: admission.Waiting) -> str:
    return (
        f"job {job.job_id} waits for {', '.join(job.limit_keys)} in queue {job.queue}, which has "
        f"room, since {job.run_at:%Y-%m-%d %H:%M %Z}: no live worker knows its task, another "
        "transaction has locked its row, or the database refuses to admit it, and the log of the "
        f'workers says why ("can be admitted"); mend that, or run pgqueue cancel {job.job_id}'
    )


def words_for_unpruned(tasks: dict[str, int]) -> Iterator[str]:
    """Say how many ended jobs no rule deletes; nothing if there are none."""
    if tasks:
        named = ", ".join(f"{name} ({number:,})" for name, number in list(tasks.items())[:SHOWN])
        yield (
            f"{sum(tasks.values()):,} ended jobs belong to tasks this app does not know, and its "
            f"workers keep them: {named}; declare these tasks in a module that --app imports, or "
            "delete the jobs by session.delete"
        )


def words_for_unknown(task: Waiting) -> str:
    return (
        f"this app knows no task {task.name}, of which {_due(task)}: its workers leave them "
        "alone; have the module of --app import that task, or give it that name again, if it was "
        "renamed, by @queue.task(name=...), or run "
        f"pgqueue cancel --status pending --status blocked --task {task.name}"
    )


def words_for_unreadable(found: Unreadable) -> str:
    return (
        f"{_wait(found.jobs)} (the oldest since {age(found.since)}) for a worker that can read the "
        f"arguments: {found.reason}; start workers with the code that has enqueued them, before "
        "they fail after the max_unreadable of their task"
    )


def words_for_overdue(queue: PgQueue, state: ScheduleState) -> str | None:
    """Say why a tick that is more than a minute late has not been fired; None if none is late."""
    is_late = state.next_at is not None and state.read_at - state.next_at > LATE
    if state.paused_at is not None or not is_late:
        return None
    what = f"schedule {state.name}: its tick of {state.next_at} has not been fired"
    try:
        state.rule  # noqa: B018  # raises if this system cannot read it
    except OptionError as error:
        return f"{what}: {error}; change the rule, or run workers on a system that can read it"
    if queue.tasks and state.task not in queue.tasks:
        return (
            f"{what}: this app knows no task {state.task}; run a worker that does, or "
            f"pgqueue schedules remove {state.name}"
        )
    if state.overlap == Overlap.WAIT and state.last_job_id is not None:
        return f"{what}: it waits for job {state.last_job_id}, unless that has ended"
    return f"{what}: no worker runs that knows task {state.task}, or its log says why it cannot"


def _due(waiting: Waiting) -> str:
    jobs = "1 job is due" if waiting.jobs == 1 else f"{waiting.jobs:,} jobs are due"
    return f"{jobs} (since {age(waiting.since)})"


def _wait(jobs: int) -> str:
    return "1 job waits" if jobs == 1 else f"{jobs:,} jobs wait"


def _of_settings(health: Health) -> Iterator[Finding]:
    """Settings of this session that lose jobs, or under which none is written."""
    found = health.settings([*DURABILITY, *OTHERS])
    for name, danger in DURABILITY.items():
        value, source = found[name].value, found[name].source
        if value == "off":
            remedy = TURN_ON.get(source, "").format(name=name)
            yield Finding(Level.WRONG, name, f"off, by the {source}: {danger}{remedy}")
        else:
            yield Finding(Level.OK, name, value)
    if health.is_standby():
        detail = "this server is a standby: jobs are written on its primary; use the URL of that"
        yield Finding(Level.WRONG, "standby", detail)
    elif found["transaction_read_only"].value == "on":
        detail = "on: jobs cannot be written here; run ALTER DATABASE ... RESET "
        detail += "default_transaction_read_only, or ALTER ROLE or ALTER SYSTEM, whoever has set it"
        yield Finding(Level.WRONG, "transaction_read_only", detail)
    if found["autovacuum"].value == "off":
        remedy = TURN_ON["configuration file"].format(name="autovacuum")
        detail = f"off: dead rows stay, and claims become slow{remedy}"
        yield Finding(Level.WARNING, "autovacuum", detail)
    isolation = found["default_transaction_isolation"].value
    if isolation != "read committed":
        yield Finding(
            Level.WARNING,
            "default_transaction_isolation",
            f"{isolation}; workers claim and settle in read committed whatever it says; your "
            "enqueuing transactions and your handlers do not, and have to be ready for "
            "serialization failures",
        )


def of_server(queue: PgQueue, health: Health) -> Iterator[Finding]:
    yield from of_transactions(health)
    yield from _server_limits(queue.tasks.values(), health)
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
    return _warnings(
        "old transaction",
        (
            f"{one.who} is {one.state}, open for {age(timedelta(seconds=one.seconds))}: vacuum "
            f"keeps all that died since; end it, or run {one.remedy}"
            for one in health.old_transactions(older_than)
        ),
        sound=("transactions", f"none is older than {age(older_than)}"),
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


def remedy_for(violation: Violation) -> tuple[str, ...]:
    """The commands and the SQL that repair the row, in the order to run them."""
    return tuple(
        step.format(id=violation.job_id, schema=f'"{SCHEMA}"') for step in REMEDIES[violation.rule]
    )


_CANCEL = "pgqueue cancel {id}"
_REQUEUE = "pgqueue requeue {id}"
_NO_MESSAGE = "DELETE FROM {schema}.message_queue WHERE target_id = {id}"
_NOT_WAITING = "DELETE FROM {schema}.waiting_messages WHERE target_id = {id}"
_NO_LETTER = "DELETE FROM {schema}.dead_letters WHERE job_id = {id}"

REMEDIES: dict[str, tuple[str, ...]] = {
    "an unfinished job has a message or a lease": (_CANCEL, _REQUEUE),
    "attempts never exceed max_attempts": (
        "UPDATE {schema}.jobs SET attempts = max_attempts WHERE id = {id}",
    ),
    "a message has a job": (_NO_MESSAGE,),
    "a job has at most one message": (_NO_MESSAGE, _CANCEL, _REQUEUE),
    "a message stands where its job says": (_NO_MESSAGE, _CANCEL, _REQUEUE),
    "a message beside a lease is the one the lease holds": (_NO_MESSAGE,),
    "a lease has a job": ("DELETE FROM {schema}.leases WHERE target_id = {id}",),
    # Every worker looks for them twice a second.
    "a lease has an owner that lives, or is rescued within a minute": ("pgqueue worker",),
    "a dead letter says what its job says": (_NO_LETTER,),
    "a failed or cancelled job has a dead letter": (
        _NO_LETTER,
        "INSERT INTO {schema}.dead_letters (job_id, outcome, queue, task, finished_at) "
        "SELECT id, outcome, queue, task, finished_at FROM {schema}.jobs WHERE id = {id}",
    ),
    "a waiting message has an unfinished job": (_NOT_WAITING,),
    "a waiting message stands where its job says": (_NOT_WAITING, _CANCEL, _REQUEUE),
    "a waiting job has neither message nor lease": (_NOT_WAITING,),
    "an admitted job has a place in each of its limits": (
        "INSERT INTO {schema}.limit_places (limit_key, job_id) SELECT unnest(string_to_array("
        "limit_keys, chr(10))), id FROM {schema}.jobs WHERE id = {id} ON CONFLICT DO NOTHING",
    ),
    "a job of a batch has its batch": (
        "DELETE FROM {schema}.batch_jobs WHERE job_id = {id} AND NOT EXISTS "
        "(SELECT FROM {schema}.batches WHERE id = batch_id)",
    ),
    "no job is added to a batch after its end": (
        "DELETE FROM {schema}.batch_jobs USING {schema}.batches "
        "WHERE id = batch_id AND job_id = {id} AND ended_at IS NOT NULL",
    ),
    # A worker ends it again.
    "an ended batch has enqueued its callback": (
        "UPDATE {schema}.batches SET ended_at = NULL, outcome = NULL, total = NULL "
        "FROM {schema}.batch_jobs WHERE id = batch_id AND job_id = {id} AND callback_id IS NULL",
    ),
    "an ended job holds no unique key": (
        "UPDATE {schema}.jobs SET held_unique_key = NULL WHERE id = {id}",
    ),
    "a succeeded job was attempted": ("UPDATE {schema}.jobs SET attempts = 1 WHERE id = {id}",),
}
"""By the text of the rule.  If a job breaks several rules, apply them in the order of the check."""
