"""The doctor's checks around the tables: what holds back vacuum or ends handlers early."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from ipaddress import ip_address

from pgqueue.cli.finding import SHOWN, Finding, Level, age
from pgqueue.connections.settings import LIMITS as RAISED
from pgqueue.job_queue import PgQueue
from pgqueue.models import SCHEMA
from pgqueue.repository import LIMITS, Creator, Health, Slot, TableHealth
from pgqueue.tasks import Task

OLD = timedelta(minutes=5)
"""Age from which a transaction is reported as holding back vacuum."""

MANY_DEAD = 10_000
"""Number of dead rows up to which a table is not reported, however few live rows it has."""

FULL = 0.1
"""Share of the notification queue that is in use; when it is full, every NOTIFY fails at COMMIT."""


def of_server(queue: PgQueue, health: Health) -> Iterator[Finding]:
    yield from of_transactions(health)
    yield from of_slots(health.slots())
    yield from _limits(queue.tasks.values(), health)
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
            Level.WARNING,
            "replication slot",
            f"{detail}SELECT pg_drop_replication_slot('{name}')",
        )


def _limits(tasks: Iterable[Task[..., object]], health: Health) -> Iterator[Finding]:
    """Server settings that end a handler's transaction before the task's own timeout."""
    slowest = max(tasks, key=_time_allowed, default=None)
    if slowest is None:
        return
    allowed = _time_allowed(slowest)
    words = "without a timeout" if allowed == timedelta.max else f"for up to {age(allowed)}"
    found = [("this role", name, one.value) for name, one in health.settings(LIMITS).items()]
    found += [(f"the role {one.role}", one.name, one.value) for one in health.limits_of_others()]
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
