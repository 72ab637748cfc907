"""Five roles, each with the fewest rights that its work needs."""

from dataclasses import dataclass
from typing import NamedTuple

from pgqueue.errors import OptionError
from pgqueue.models import Base
from pgqueue.models.base import SCHEMA

LONGEST_NAME = 63
"""Bytes; PostgreSQL truncates longer names, and would find another role."""

QUOTE = "$pgqueue$"


class Rights(NamedTuple):
    """The rights on one table of each role, written as in GRANT; empty for none.

    A right without columns is one on all columns, including those that later versions add.
    """

    worker: str = ""
    enqueue: str = ""
    dashboard: str = ""


def _all_but(table: str, *hidden: str) -> str:
    columns = Base.metadata.tables[f"{SCHEMA}.{table}"].columns
    return ", ".join(column.name for column in columns if column.name not in hidden)


READ = "SELECT"
WRITE = "SELECT, INSERT, UPDATE, DELETE"
ADD = "SELECT, INSERT, DELETE"
"""For rows that never change.  A worker deletes them to prune."""

SIGNAL = "INSERT (name, key, payload)"
MESSAGE = "queue, priority, run_at, target_id, task, alone"
TO_LOCK = "alone"
"""SELECT ... FOR UPDATE requires the right to update one column; this one does least harm."""

RIGHTS = {
    "schema_version": Rights(worker=READ, enqueue=READ, dashboard=READ),
    "alembic_version": Rights(worker=READ, enqueue=READ, dashboard=READ),
    "jobs": Rights(
        worker=WRITE,
        # Reads the columns that RETURNING returns and ON CONFLICT compares.  For session.add() of
        # a job with a unique key, a separate statement takes the key.
        enqueue="INSERT, UPDATE (held_unique_key), SELECT (id, queue, task, priority, run_at, "
        "max_attempts, attempts, snoozes, interruptions, created_at, unique_key, held_unique_key, "
        "limit_keys)",
        # Changes the columns that cancel and requeue write, and what a change does but arguments
        # and meta, which may say what is enqueued if the job fails.
        dashboard=f"SELECT ({_all_but('jobs', 'args', 'result')}), UPDATE (outcome, queue, "
        "priority, max_attempts, tags, attempts, snoozes, interruptions, run_at, result, "
        "last_error, progress, started_at, finished_at, cancel_requested_at, kill_requested_at, "
        "held_unique_key)",
    ),
    "jobs_id_seq": Rights(worker="USAGE", enqueue="USAGE"),
    "message_queue": Rights(
        worker=f"SELECT, INSERT, UPDATE ({TO_LOCK}), DELETE",
        enqueue=f"INSERT ({MESSAGE})",
        # A job that is to run now keeps its past attempts.
        dashboard=f"SELECT, INSERT ({MESSAGE}, attempt, crashes), UPDATE ({TO_LOCK}), DELETE",
    ),
    "waiting_messages": Rights(
        worker=WRITE,
        enqueue="INSERT (limit_keys, queue, priority, run_at, target_id, task)",
        # A job that is to start later gives up its places, and keeps its past attempts.
        dashboard="SELECT, INSERT, UPDATE (queue, priority, run_at), DELETE",
    ),
    "leases": Rights(worker=WRITE, dashboard="SELECT, DELETE"),
    "job_attempts": Rights(
        worker=ADD, dashboard=f"SELECT ({_all_but('job_attempts', 'traceback')})"
    ),
    "job_steps": Rights(
        worker=WRITE, dashboard=f"SELECT ({_all_but('job_steps', 'result')}), DELETE"
    ),
    "signals": Rights(
        worker=f"SELECT, {SIGNAL}, UPDATE (delivered), DELETE",
        enqueue=f"{SIGNAL}, SELECT (id)",
        dashboard=f"{SIGNAL}, SELECT ({_all_but('signals', 'payload')})",
    ),
    "dead_letters": Rights(worker=ADD, dashboard=ADD),
    "unreadable_jobs": Rights(worker=ADD, dashboard="SELECT, DELETE"),
    "workers": Rights(worker=WRITE, dashboard="SELECT, UPDATE (queues, withheld_queues)"),
    "queues": Rights(worker=READ, dashboard="SELECT, INSERT, UPDATE (paused_at)"),
    "paused_tasks": Rights(worker=READ, dashboard=ADD),
    "limits": Rights(
        worker="SELECT, INSERT, UPDATE", dashboard="SELECT, INSERT, UPDATE (capacity)"
    ),
    "tasks": Rights(worker="SELECT, INSERT, UPDATE", enqueue=READ, dashboard="SELECT (name)"),
    "limit_places": Rights(worker=ADD, dashboard="SELECT, DELETE"),
    "limit_buckets": Rights(worker=ADD, dashboard=READ),
    "batches": Rights(
        worker=WRITE,
        enqueue="INSERT (name, meta, application, is_workflow, deadline_at, "
        "workflow_id), SELECT (id, application, is_workflow, workflow_id)",
        # A requeue opens a workflow again.
        dashboard="SELECT, UPDATE (outcome, total, failed, cancelled, callback_id, "
        "ended_at, deadline_at)",
    ),
    "batch_jobs": Rights(worker=ADD, enqueue="SELECT, INSERT", dashboard=READ),
    "blocked": Rights(
        worker=WRITE,
        # UPDATE also for SELECT ... FOR SHARE, by which an addition keeps a batch open.
        enqueue="INSERT, SELECT (node_id), UPDATE (waits_for)",
        # Drops the row of a job that it cancels, and blocks again what a requeue brings back.
        dashboard=WRITE,
    ),
    "dependencies": Rights(worker=ADD, enqueue="SELECT, INSERT", dashboard=READ),
    "schedules": Rights(
        worker="SELECT, INSERT, UPDATE",
        # An application manages the schedules of its customers, their arguments included.
        enqueue=WRITE,
        dashboard=f"SELECT ({_all_but('schedules', 'args', 'options', 'declaration')}), "
        "UPDATE (paused_at, next_at)",
    ),
    "task_minutes": Rights(worker=WRITE, dashboard=READ),
    "queue_minutes": Rights(worker=WRITE, dashboard=READ),
    "error_groups": Rights(worker=WRITE, dashboard="SELECT, UPDATE (muted_until)"),
    "deploys": Rights(worker=ADD, dashboard=READ),
    "operator_actions": Rights(
        worker="SELECT, DELETE",  # to prune
        # What was logged stays: only the progress of an action changes.
        dashboard="SELECT, INSERT, "
        "UPDATE (jobs, skipped, first_ids, cursor, left_ids, finished_at)",
    ),
    "job_overview": Rights(dashboard=READ),
    "invariant_violations": Rights(dashboard=READ),
    "invariant_violations_in_flight": Rights(dashboard=READ),
}
"""Each table, view and sequence, with all rights that a role has on it.

A workflow takes the ids of its jobs from the sequence before it writes them."""

FUNCTIONS = ("canonical_text", "enqueue")
"""The functions of the schema, which run with the rights of their caller.  The roles that write
jobs may call them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Names of roles that exist on the server; None for purposes without a role."""

    worker: str | None = None
    enqueue: str | None = None
    dashboard: str | None = None
    migrator: str | None = None
    owner: str | None = None

    def __post_init__(self) -> None:
        for purpose in self.__slots__:
            name = getattr(self, purpose)
            if name is not None:
                _check_name(purpose, name)
        if self.migrator is not None and self.owner is None:
            raise OptionError(
                f"the migrator {self.migrator!r} is whoever may become the owner: say owner=, too"
            )
        if not self.users and self.owner is None:
            raise OptionError(
                "no role is named: say worker=, enqueue=, dashboard=, or owner= and migrator="
            )

    @property
    def users(self) -> dict[str, str]:
        """The names of the roles that get rights on the tables, by purpose."""
        names = {purpose: getattr(self, purpose) for purpose in Rights._fields}
        return {purpose: name for purpose, name in names.items() if name is not None}


def _check_name(purpose: str, name: object) -> None:
    if not isinstance(name, str) or not name or "\0" in name or QUOTE in name:
        raise OptionError(f"{purpose} is {name!r}; give the name of a role")
    if name.lower() in ("public", "none"):
        raise OptionError(
            f"{purpose} is {name!r}, which PostgreSQL reads as everybody or nobody, also in "
            "quotes; give the name of a role"
        )
    if len(name.encode()) > LONGEST_NAME:
        raise OptionError(
            f"{purpose} is {name!r}: PostgreSQL keeps {LONGEST_NAME} bytes of a name, and would "
            "take this one for another"
        )
