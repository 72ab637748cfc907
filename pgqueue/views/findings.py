"""What needs somebody's attention: jobs that do not run, settings that lose commits, dead rows.

``pgqueue doctor`` shows all findings, and the dashboard those of :func:`at_a_glance`, which count
no jobs.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from sqlalchemy.orm import Session

from pgqueue.database.settings import LIMITS as RAISED
from pgqueue.errors import OptionError
from pgqueue.models import SCHEMA
from pgqueue.nodes import Node
from pgqueue.operations import Operations
from pgqueue.repository.admit import Admissions
from pgqueue.repository.batches import Batches, OverdueBatch
from pgqueue.repository.claim import queues_with_messages
from pgqueue.repository.health import (
    LIMITS,
    Health,
    TableHealth,
    UnreadableJobs,
    WaitingJobs,
)
from pgqueue.repository.limits import Limits
from pgqueue.repository.nodes import read_number
from pgqueue.repository.queue_minutes import FirstDue, LastCount
from pgqueue.repository.row_security import filtered_tables, remedy
from pgqueue.repository.schedules import ScheduleState
from pgqueue.repository.workers import Workers, WorkerState
from pgqueue.rules import admission
from pgqueue.rules.served_queues import serves
from pgqueue.rules.ticks import LATE, Overlap
from pgqueue.schema import citus
from pgqueue.schema.on_all_nodes import lacks_parts_of_citus
from pgqueue.schema.state import read_state
from pgqueue.tasks import Task
from pgqueue.tasks.pauses import open_tasks, under_all_names
from pgqueue.views.words import (
    jobs_are_due,
    jobs_wait,
    nobody_serves,
    span,
    undeclared,
    unknown_task,
    unreadable,
)

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


UPGRADE_NODES = "pgqueue upgrade --nodes all"


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
    task: str = ""
    """The task whose jobs it is about, if it is about one."""


def of_jobs(queue: Operations, session: Session) -> Iterator[Finding]:
    """Jobs that do not run, and why.  Reads all jobs.  Without an app, its tasks are unknown."""
    health = Health(session)
    if queue.tasks:
        yield from _warnings(
            "unknown task",
            map(words_for_unknown, health.unknown_tasks(queue.tasks)),
            sound=("tasks", "no job is due of a task that this application does not have"),
        )
        yield from _warnings(
            "retention",
            words_for_unpruned(health.unpruned_tasks(queue.tasks)),
            sound=("retention", "this application has the tasks of all ended jobs"),
        )
    yield from _warnings(
        "workers",
        map(words_for_unserved, health.unserved_queues()),
        sound=("workers", "every queue with due jobs is served"),
    )
    yield from _warnings(
        "limits",
        (
            f"{jobs_wait(jobs)}: {undeclared(name)}"
            for name, jobs in Limits(session).undeclared().items()
        ),
        sound=("limits", "no job waits for a limit that no worker has declared"),
    )
    if queue.tasks:
        yield from _warnings(
            "admission",
            map(words_for_skipped, skipped_jobs(queue, session)),
            sound=("admission", "no job waits for a limit that has room"),
        )
    yield from of_records(queue, session)


def of_records(queue: Operations, session: Session) -> Iterator[Finding]:
    """What small tables tell about jobs that do not run."""
    yield from _warnings(
        "unreadable jobs",
        map(words_for_unreadable, Health(session).unreadable()),
        sound=("arguments", "no job waits for code that can read its arguments"),
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
            if one.since > OLD  # a worker ends the others within seconds
        ),
        sound=("batches", "none whose jobs have ended is open"),
    )


def at_a_glance(
    queue: Operations,
    session: Session,
    *,
    count: LastCount | None,
    first: Sequence[FirstDue],
    workers: Sequence[WorkerState],
) -> list[Finding]:
    """What needs attention, found without counting jobs.

    ``count``: the last count of the queues.  ``first``: their first due jobs; of tasks that the
    application does not know, only these are found.  Asks for no settings of the server, nor of
    this session, which has time limits of its own.
    """
    health = Health(session)
    oldest = {one.queue: one for one in reversed(first)}
    live = [worker for worker in workers if worker.is_live]
    unserved = [
        one
        for one in oldest.values()
        if not any(serves(worker.queues, one.queue) for worker in live)
    ]
    found = [
        *([] if live or not (workers or unserved) else [_nobody_lives(workers, unserved)]),
        *(_unserved(one, count) for one in unserved if live),
        *(_unknown(one) for one in first if queue.tasks and one.task not in queue.tasks),
        *of_records(queue, session),
        *of_tables(health.tables()),
        *of_transactions(health),
        *of_notifications(health.notification_queue_usage()),
    ]
    return [finding for finding in dict.fromkeys(found) if finding.level is not Level.OK]


def skipped_jobs(queue: Operations, session: Session) -> list[admission.WaitingJob]:
    """The jobs that workers skip: they are due, and their limits have room.

    Workers fill a place that becomes free within a second, so a job counts if it is found twice.
    """

    def look() -> dict[int, admission.WaitingJob]:
        unserved = {one.name for one in Health(session).unserved_queues()}
        paused = Workers(session).paused()
        served = set(session.scalars(queues_with_messages())) - unserved
        jobs = Admissions(session).skipped(
            sorted(name for name in served if name not in paused.queues),
            tasks=open_tasks(queue.tasks, paused),
            paused=under_all_names(queue.tasks, paused),
            rules=Limits(session).rules(),
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


def _nobody_lives(silent: Sequence[WorkerState], unserved: Sequence[FirstDue]) -> Finding:
    last = min((worker.heartbeat_age for worker in silent), default=None)
    said = "" if last is None else f"; the last was silent {span(last)} ago"
    where = ", ".join(one.queue for one in unserved[:SHOWN])
    waits = f", and nothing runs that is due in {where}" if where else ""
    return Finding(Level.WRONG, "workers", f"no worker lives{said}{waits}; run pgqueue worker")


def _unserved(first: FirstDue, count: LastCount | None) -> Finding:
    is_known = count is not None and not count.is_old and first.queue in count.queues
    due = count.queues[first.queue].due if count is not None and is_known else 1
    where = WaitingJobs(first.queue, max(due, 1), first.since)
    return Finding(Level.WARNING, "workers", words_for_unserved(where))


def _unknown(first: FirstDue) -> Finding:
    return Finding(
        Level.WARNING,
        "unknown task",
        f"{unknown_task(first.task)}, of which jobs in queue {first.queue} are due, the first "
        f"since {span(first.since)}: its workers leave them alone",
        task=first.task,
    )


def words_for_unserved(queue: WaitingJobs) -> str:
    reason, due = nobody_serves(queue.name), jobs_are_due(queue.jobs, queue.since)
    return f"{reason}, where {due}; run {reason.remedy}"


def words_for_open_batch(batch: OverdueBatch) -> str:
    why = "no worker runs, or its log says why it cannot end the batch"
    since = span(batch.since)
    return f"batch {batch.id} is open, although the job it waited for ended {since} ago: {why}"


def words_for_skipped(job: admission.WaitingJob) -> str:
    return (
        f"job {job.job_id} has waited for {', '.join(job.limit_keys)} in queue {job.queue} since "
        f"{job.run_at:%Y-%m-%d %H:%M %Z}, although there is room. No live worker knows its task, "
        "another transaction has locked its row, or the database refuses to admit it: then the "
        'log of the workers has a line with "can be admitted". Remove the cause, or run pgqueue '
        f"cancel {job.job_id}"
    )


def words_for_unpruned(tasks: dict[str, int]) -> Iterator[str]:
    """Say how many ended jobs no rule deletes; nothing if there are none."""
    if tasks:
        named = ", ".join(f"{name} ({number:,})" for name, number in list(tasks.items())[:SHOWN])
        yield (
            f"{sum(tasks.values()):,} ended jobs belong to tasks that this application does not "
            f"have, and its workers keep them: {named}; declare these tasks in a module that --app "
            "imports, or delete the jobs by session.delete"
        )


def words_for_unknown(task: WaitingJobs) -> str:
    due = jobs_are_due(task.jobs, task.since)
    return (
        f"{unknown_task(task.name)}, of which {due}: its workers leave them alone; have the module "
        "of --app import that task, or give it that name again, if it was renamed, by "
        "@queue.task(name=...), or run "
        f"pgqueue cancel --status pending --status blocked --task {task.name}"
    )


def words_for_unreadable(found: UnreadableJobs) -> str:
    return (
        f"{jobs_wait(found.jobs)} (the oldest since {span(found.since)}), and "
        f"{unreadable(found.reason)}; start workers with the code that has enqueued them, "
        "before they fail after the max_unreadable of their task"
    )


def words_for_overdue(queue: Operations, state: ScheduleState) -> str | None:
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
            f"{what}: {unknown_task(state.task)}; run a worker that has it, or "
            f"pgqueue schedules remove {state.name}"
        )
    if state.overlap == Overlap.WAIT and state.last_job_id is not None:
        return f"{what}: it waits for job {state.last_job_id}, unless that has ended"
    return f"{what}: no worker runs that knows task {state.task}, or its log says why it cannot"


def of_settings(health: Health) -> Iterator[Finding]:
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


def of_server(queue: Operations, health: Health) -> Iterator[Finding]:
    yield from of_transactions(health)
    yield from _server_limits(queue.tasks.values(), health)
    yield from of_notifications(health.notification_queue_usage())


def of_row_security(session: Session) -> Iterator[Finding]:
    """Our tables that hide rows from roles that may read them."""
    for table, roles in filtered_tables(session):
        if roles:
            yield Finding(
                Level.WARNING,
                "row security",
                f"on for {SCHEMA}.{table}: it hides rows from {', '.join(roles[:SHOWN])}, and "
                f"pgqueue does nothing for a role that does not see all rows; {remedy(roles[0])}",
            )


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
            f"{one.who} is {one.state}, open for {span(timedelta(seconds=one.seconds))}: vacuum "
            f"keeps all that died since; end it, or run {one.remedy}"
            for one in health.old_transactions(older_than)
        ),
        sound=("transactions", f"none is older than {span(older_than)}"),
    )


def _server_limits(tasks: Iterable[Task[..., object]], health: Health) -> Iterator[Finding]:
    """Server settings that end a handler's transaction before the task's own timeout."""
    slowest = max(tasks, key=_time_allowed, default=None)
    if slowest is None:
        return
    allowed = _time_allowed(slowest)
    words = "without a timeout" if allowed == timedelta.max else f"for up to {span(allowed)}"
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


def of_nodes(nodes: Iterable[Node]) -> Iterator[Finding]:
    """What is wrong between the nodes of a queue that have tables."""
    names: dict[int, list[str]] = {}
    versions: dict[str, int] = {}
    for node in nodes:
        with node.engine().connect() as connection:
            number, group = read_number(connection), citus.group_of(connection)
            version, lacks = read_state(connection).version, lacks_parts_of_citus(connection)
        if number is None or version is None:
            continue
        names.setdefault(number, []).append(node.name)
        versions[node.name] = version
        if (number == 0) if group is None else (number != group):
            detail = f"{node.name}: ids of new jobs do not name the node; run {UPGRADE_NODES}"
            yield Finding(Level.WRONG, "node numbers", detail)
        if lacks:
            yield Finding(
                Level.WRONG,
                "citus",
                f"{node.name}: the table of two-phase commits or the functions of enqueues by key "
                "are missing or old: a crash inside of COMMIT may keep an application's row of "
                f"another node and lose its job; run {UPGRADE_NODES}, then restart what enqueues",
            )
    for number, alike in names.items():
        if number and len(alike) > 1:
            yield Finding(
                Level.WRONG,
                "node numbers",
                f"{' and '.join(alike)} have the number {number}, and their jobs have the same "
                "ids, as when one database is a copy of another: on all of them but one, run "
                f'ALTER SEQUENCE "{SCHEMA}".jobs_id_seq START WITH 1, then {UPGRADE_NODES}',
            )
    if len(set(versions.values())) > 1:
        named = ", ".join(f"{name} {version}" for name, version in versions.items())
        detail = f"tables of different versions: {named}; run {UPGRADE_NODES}"
        yield Finding(Level.WARNING, "node versions", detail)
    named = ", ".join(f"{number} {' and '.join(alike)}" for number, alike in names.items())
    yield Finding(Level.OK, "nodes", f"number and names of those with tables: {named}")
