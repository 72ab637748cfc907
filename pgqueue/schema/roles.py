"""Five roles, each with the fewest rights that its work needs."""

from dataclasses import dataclass

from pgqueue.errors import OptionError

LONGEST_NAME = 63
"""Bytes; PostgreSQL truncates longer names, and would find another role."""

QUOTE = "$pgqueue$"

ALL_OF_IT = ""
"""A right on all columns of a table, including those that later versions add."""

MESSAGE = "queue, priority, run_at, target_id, task, alone"
WAITING = "limit_keys, queue, priority, run_at, target_id, task"

TO_LOCK = "alone"
"""SELECT ... FOR UPDATE requires the right to update one column; of a message's columns this one
does least harm, of a lease's its start time."""

Rights = dict[str, dict[str, str]]
"""Column names, by table and privilege."""

VERSION: Rights = {
    "schema_version": {"SELECT": ALL_OF_IT},
    "alembic_version": {"SELECT": ALL_OF_IT},
}
ENQUEUE: Rights = {
    **VERSION,
    "jobs": {
        "INSERT": ALL_OF_IT,
        # Columns that RETURNING returns and ON CONFLICT compares.
        "SELECT": (
            "id, queue, task, priority, run_at, max_attempts, attempts, snoozes, interruptions, "
            "created_at, unique_key, held_unique_key, limit_keys"
        ),
        # For session.add() of a job with a unique key, a separate statement takes the key.
        "UPDATE": "held_unique_key",
    },
    "message_queue": {"INSERT": MESSAGE},
    # An application manages the schedules of its customers, their arguments included.
    "schedules": dict.fromkeys(("SELECT", "INSERT", "UPDATE", "DELETE"), ALL_OF_IT),
    "waiting_messages": {"INSERT": WAITING},
    # UPDATE also for SELECT ... FOR KEY SHARE, by which an addition keeps a batch open.
    "batches": {
        "INSERT": "name, meta, application",
        "SELECT": "id, ended_at",
        "UPDATE": "on_success, on_failure, on_cancelled",
    },
    "batch_jobs": {"INSERT": ALL_OF_IT},
}
WORKER: Rights = {
    **VERSION,
    # DELETE for pruning, here and below.
    "jobs": dict.fromkeys(("SELECT", "INSERT", "UPDATE", "DELETE"), ALL_OF_IT),
    "message_queue": {
        **dict.fromkeys(("SELECT", "INSERT", "DELETE"), ALL_OF_IT),
        "UPDATE": TO_LOCK,
    },
    "leases": dict.fromkeys(("SELECT", "INSERT", "UPDATE", "DELETE"), ALL_OF_IT),
    "workers": dict.fromkeys(("SELECT", "INSERT", "UPDATE", "DELETE"), ALL_OF_IT),
    "job_attempts": dict.fromkeys(("SELECT", "INSERT", "DELETE"), ALL_OF_IT),
    "dead_letters": dict.fromkeys(("SELECT", "INSERT", "DELETE"), ALL_OF_IT),
    "unreadable_jobs": dict.fromkeys(("SELECT", "INSERT", "DELETE"), ALL_OF_IT),
    "queues": {"SELECT": ALL_OF_IT},
    "paused_tasks": {"SELECT": ALL_OF_IT},
    "schedules": dict.fromkeys(("SELECT", "INSERT", "UPDATE"), ALL_OF_IT),
    "waiting_messages": dict.fromkeys(("SELECT", "INSERT", "UPDATE", "DELETE"), ALL_OF_IT),
    "limit_places": dict.fromkeys(("SELECT", "INSERT", "DELETE"), ALL_OF_IT),
    "limits": dict.fromkeys(("SELECT", "INSERT", "UPDATE"), ALL_OF_IT),
    "limit_buckets": dict.fromkeys(("SELECT", "INSERT", "UPDATE", "DELETE"), ALL_OF_IT),
    "batches": dict.fromkeys(("SELECT", "INSERT", "UPDATE", "DELETE"), ALL_OF_IT),
    "batch_jobs": dict.fromkeys(("SELECT", "INSERT", "DELETE"), ALL_OF_IT),
    "task_minutes": dict.fromkeys(("SELECT", "INSERT", "UPDATE", "DELETE"), ALL_OF_IT),
    "error_groups": dict.fromkeys(("SELECT", "INSERT", "UPDATE", "DELETE"), ALL_OF_IT),
    "queue_minutes": dict.fromkeys(("SELECT", "INSERT", "UPDATE", "DELETE"), ALL_OF_IT),
    "deploys": dict.fromkeys(("SELECT", "INSERT", "DELETE"), ALL_OF_IT),
    # SELECT to find the old ones.
    "operator_actions": dict.fromkeys(("SELECT", "DELETE"), ALL_OF_IT),
}
DASHBOARD: Rights = {
    **VERSION,
    "jobs": {
        # All but args and result.
        "SELECT": (
            "id, queue, task, priority, run_at, max_attempts, attempts, snoozes, "
            "interruptions, outcome, last_error, unique_key, held_unique_key, tags, meta, "
            "progress, created_at, started_at, finished_at, cancel_requested_at, "
            "kill_requested_at, limit_keys"
        ),
        # The columns that cancel and requeue write, and a change of the priority.
        "UPDATE": (
            "outcome, queue, priority, attempts, snoozes, interruptions, run_at, result, "
            "progress, started_at, finished_at, cancel_requested_at, kill_requested_at, "
            "held_unique_key"
        ),
    },
    "message_queue": {
        "SELECT": ALL_OF_IT,
        # A job that is to run now keeps its past attempts.
        "INSERT": f"{MESSAGE}, attempt, crashes",
        "DELETE": ALL_OF_IT,
        "UPDATE": TO_LOCK,
    },
    "waiting_messages": {
        **dict.fromkeys(("SELECT", "DELETE"), ALL_OF_IT),
        # A job that is to start later gives up its places, and keeps its past attempts.
        "INSERT": f"{WAITING}, attempt, crashes",
        "UPDATE": "queue, priority, run_at",
    },
    "limit_places": dict.fromkeys(("SELECT", "DELETE"), ALL_OF_IT),
    "limit_buckets": {"SELECT": ALL_OF_IT},
    "batches": {"SELECT": ALL_OF_IT},
    "batch_jobs": {"SELECT": ALL_OF_IT},
    "task_minutes": {"SELECT": ALL_OF_IT},
    "error_groups": {"SELECT": ALL_OF_IT, "UPDATE": "muted_until"},
    "queue_minutes": {"SELECT": ALL_OF_IT},
    "deploys": {"SELECT": ALL_OF_IT},
    # What was logged stays: only the progress of an action changes.
    "operator_actions": {
        **dict.fromkeys(("SELECT", "INSERT"), ALL_OF_IT),
        "UPDATE": "jobs, skipped, first_ids, cursor, left_ids, finished_at",
    },
    "limits": {**dict.fromkeys(("SELECT", "INSERT"), ALL_OF_IT), "UPDATE": "capacity"},
    "leases": {**dict.fromkeys(("SELECT", "DELETE"), ALL_OF_IT), "UPDATE": "started_at"},
    "dead_letters": dict.fromkeys(("SELECT", "INSERT", "DELETE"), ALL_OF_IT),
    "queues": {"SELECT": ALL_OF_IT, "INSERT": "name, paused_at", "UPDATE": "paused_at"},
    "paused_tasks": dict.fromkeys(("SELECT", "INSERT", "DELETE"), ALL_OF_IT),
    "workers": {"SELECT": ALL_OF_IT, "UPDATE": "queues"},
    "unreadable_jobs": dict.fromkeys(("SELECT", "DELETE"), ALL_OF_IT),
    "job_attempts": {
        # All but the traceback.
        "SELECT": (
            "job_id, message_id, attempt, outcome, error_type, error, worker_id, started_at, "
            "finished_at"
        )
    },
    "schedules": {
        # All but args and options.
        "SELECT": (
            "name, task, cron, every, timezone, catch_up, overlap, declared_in, next_at, "
            "last_tick_at, last_job_id, paused_at, created_at, application"
        ),
        "UPDATE": "paused_at, next_at",
    },
    "job_overview": {"SELECT": ALL_OF_IT},
    "invariant_violations": {"SELECT": ALL_OF_IT},
    "invariant_violations_in_flight": {"SELECT": ALL_OF_IT},
}


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
    def users(self) -> list[tuple[str, Rights]]:
        """The roles that get rights on the tables, with these rights."""
        wanted = ((self.worker, WORKER), (self.enqueue, ENQUEUE), (self.dashboard, DASHBOARD))
        return [(name, rights) for name, rights in wanted if name is not None]


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
