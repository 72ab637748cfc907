"""Creates the tables of the queue, their domains, the views of jobs and invariants, and the row of
the version.

Downgrading removes all of it but the schema itself, which may hold the version table of the
stand-alone history.
"""

from hashlib import sha256
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.types import UserDefinedType

from pgqueue.models.base import SCHEMA

revision = "pgqueue_0001"
down_revision = None
branch_labels = ("pgqueue",)
depends_on = None

# Names pass through op.f: the naming convention of a host's metadata must not change them.

CLOCK = sa.text("clock_timestamp()")
EMPTY = sa.text("'{}'")

# Storage: jobs and workers are updated in place; message_queue, leases and what waits are emptied
# all day; workers write to the rows of a minute six times and more.
ROOM_FOR_UPDATES = "fillfactor = 45"
ROOM_FOR_COUNTS = "fillfactor = 70"
EMPTIED_OFTEN = "autovacuum_vacuum_scale_factor = 0.05"

TABLES = (
    *("jobs", "message_queue", "leases", "job_attempts", "dead_letters", "workers", "queues"),
    *("unreadable_jobs", "schedules", "waiting_messages", "limit_places", "limits"),
    *("limit_buckets", "batches", "batch_jobs", "blocked", "dependencies", "paused_tasks"),
    *("task_minutes", "error_groups", "deploys", "operator_actions", "queue_minutes"),
    *("job_steps", "signals", "tasks", "schema_version"),
)
# A CHECK constraint of a table is parsed anew by each statement that writes the table; that of a
# domain is prepared once in a session.
DOMAINS = {
    # Finite, and within the range of Python's datetime, so that one row cannot make others
    # unreadable.
    "finite_time": "timestamptz CHECK (VALUE BETWEEN '2000-01-01 00:00:00+00'"
    " AND '9999-12-31 00:00:00+00')",
    "priority": "smallint CHECK (VALUE BETWEEN 0 AND 9)",
    # A counter that overflows would fail the claim of all.  A crash may follow the last attempt.
    "attempts": "smallint CHECK (VALUE BETWEEN 0 AND 31000)",
    "max_attempts": "smallint CHECK (VALUE BETWEEN 1 AND 30000)",
    "outcome": "text CHECK (VALUE IN ('succeeded', 'failed', 'cancelled'))",
}
VIEWS = ("job_overview", "invariant_violations_in_flight", "invariant_violations")


def upgrade() -> None:
    create_schema()
    for name, definition in DOMAINS.items():
        op.execute(f'CREATE DOMAIN "{SCHEMA}".{name} AS {definition}')
    create_jobs()
    create_messages_and_leases()
    create_what_ended()
    create_workers_and_queues()
    create_schedules()
    create_limits()
    create_batches()
    create_statistics()
    create_operator_actions()
    create_enqueue()
    for view in (JOB_OVERVIEW, INVARIANT_VIOLATIONS_IN_FLIGHT, INVARIANT_VIOLATIONS):
        op.execute(view)
    create_schema_version()


def downgrade() -> None:
    for function in reversed(FUNCTIONS):
        op.execute(f'DROP FUNCTION "{SCHEMA}".{function}')
    for view in reversed(VIEWS):
        op.execute(f'DROP VIEW "{SCHEMA}".{view}')
    for table in reversed(TABLES):
        op.drop_table(table, schema=SCHEMA)
    for name in DOMAINS:
        op.execute(f'DROP DOMAIN "{SCHEMA}".{name}')


def create_schema() -> None:
    # CREATE SCHEMA IF NOT EXISTS wants the right to create schemas even where there is one.
    op.execute(
        f"""
        DO $$ BEGIN
            IF to_regnamespace('"{SCHEMA}"') IS NULL THEN CREATE SCHEMA "{SCHEMA}"; END IF;
        END $$
        """
    )


class Domain(UserDefinedType[Any]):
    """The type of a column: a domain of :data:`DOMAINS`."""

    cache_ok = True

    def __init__(self, name: str) -> None:
        self.name = name

    def get_col_spec(self, **_: Any) -> str:
        return f'"{SCHEMA}".{self.name}'


def create_table(
    name: str,
    *parts: sa.Column[Any] | sa.PrimaryKeyConstraint | sa.CheckConstraint,
    storage: str | None = None,
) -> sa.Table:
    table = op.create_table(name, *parts, schema=SCHEMA)
    if storage:
        # As a statement of its own: create_table takes postgresql_with from SQLAlchemy 2.1 on.
        op.execute(f'ALTER TABLE "{SCHEMA}".{name} SET ({storage})')
    return table


def create_index(
    name: str, table: str, columns: list[str], *, where: str | None = None, unique: bool = False
) -> None:
    op.create_index(
        op.f(name),
        table,
        columns,
        unique=unique,
        schema=SCHEMA,
        postgresql_where=None if where is None else sa.text(where),
    )


def column(name: str, type: Any, *, null: bool = False, default: Any = None) -> sa.Column[Any]:
    # No autoincrement: the ids of jobs in other tables get no sequence of their own.
    return sa.Column(name, type, nullable=null, server_default=default, autoincrement=False)


def id_column(*, always: bool = False) -> sa.Column[Any]:
    return sa.Column("id", sa.BigInteger, sa.Identity(always=always), nullable=False)


def text(name: str, *, null: bool = False, default: Any = None) -> sa.Column[Any]:
    return column(name, sa.Text, null=null, default=default)


def number(
    name: str, type: Any = sa.SmallInteger, *, null: bool = False, default: int | None = None
) -> sa.Column[Any]:
    return column(name, type, null=null, default=None if default is None else sa.text(str(default)))


def flag(name: str) -> sa.Column[Any]:
    return column(name, sa.Boolean, default=sa.false())


def time(name: str, *, null: bool = True, default: Any = None) -> sa.Column[Any]:
    return column(name, Domain("finite_time"), null=null, default=default)


def time_of_insert(name: str) -> sa.Column[Any]:
    return time(name, null=False, default=CLOCK)


def key(table: str, *columns: str) -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint(*columns, name=op.f(f"{table}_pkey"))


def check(name: str, condition: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(condition, name=op.f(name))


def create_jobs() -> None:
    create_table(
        "jobs",
        id_column(),
        text("queue", default="default"),
        text("task"),
        column("args", JSONB, default=EMPTY),
        number("priority", Domain("priority"), default=5),
        time_of_insert("run_at"),
        number("max_attempts", Domain("max_attempts"), default=10),
        number("attempts", default=0),
        number("snoozes", default=0),
        column("outcome", Domain("outcome"), null=True),
        column("result", JSONB, null=True),
        text("last_error", null=True),
        text("unique_key", null=True),
        text("held_unique_key", null=True),
        column("tags", JSONB, null=True),
        column("meta", JSONB, null=True),
        time_of_insert("created_at"),
        time("started_at"),
        time("finished_at"),
        time("cancel_requested_at"),
        number("interruptions", default=0),
        column("progress", JSONB, null=True),
        text("limit_keys", null=True),
        time("kill_requested_at"),
        key("jobs", "id"),
        check("jobs_finished_at", "(outcome IS NULL) = (finished_at IS NULL)"),
        storage=ROOM_FOR_UPDATES,
    )
    create_index(
        "jobs_held_unique_key",
        "jobs",
        ["queue", "held_unique_key"],
        unique=True,
        where="held_unique_key IS NOT NULL",
    )
    create_index(
        "jobs_held_unique_key_across",
        "jobs",
        ["held_unique_key"],
        unique=True,
        where="pg_catalog.starts_with(held_unique_key, 'pgqueue.across:')",
    )


def create_messages_and_leases() -> None:
    create_table(
        "message_queue",
        text("queue"),
        number("priority", Domain("priority")),
        time("run_at", null=False),
        id_column(),
        number("target_id", sa.BigInteger),
        text("task"),
        number("attempt", Domain("attempts"), default=0),
        number("crashes", Domain("attempts"), default=0),
        flag("alone"),
        key("message_queue", "queue", "priority", "run_at", "id"),
        storage=EMPTIED_OFTEN,
    )
    create_table(
        "waiting_messages",
        text("limit_keys"),
        text("queue"),
        number("priority", Domain("priority")),
        time("run_at", null=False),
        number("target_id", sa.BigInteger),
        text("task"),
        number("attempt", Domain("attempts"), default=0),
        number("crashes", Domain("attempts"), default=0),
        key("waiting_messages", "limit_keys", "queue", "priority", "run_at", "target_id"),
        storage=EMPTIED_OFTEN,
    )
    create_table(
        "leases",
        number("target_id", sa.BigInteger),
        number("message_id", sa.BigInteger),
        number("attempt"),
        number("crashes", default=0),
        column("worker_id", sa.Uuid),
        flag("held"),
        time_of_insert("started_at"),
        key("leases", "target_id"),
        check("leases_attempt", "attempt BETWEEN 1 AND 32000"),
        check("leases_crashes", "crashes BETWEEN 0 AND 32000"),
        storage=EMPTIED_OFTEN,
    )
    create_table(
        "unreadable_jobs",
        number("job_id", sa.BigInteger),
        text("task"),
        text("reason"),
        time_of_insert("since"),
        key("unreadable_jobs", "job_id"),
    )
    create_table(
        "job_steps",
        number("job_id", sa.BigInteger),
        text("name"),
        text("kind"),
        column("result", JSONB, null=True),
        number("attempt"),
        time("started_at", null=False),
        time("finished_at"),
        text("signal", null=True),
        text("key", null=True),
        key("job_steps", "job_id", "name"),
        check("job_steps_kind", "kind IN ('step', 'sleep', 'each', 'wait', 'gather')"),
    )
    create_index(
        "job_steps_signal",
        "job_steps",
        ["signal", "key"],
        where="signal IS NOT NULL AND result IS NULL",
    )
    create_table(
        "signals",
        id_column(always=True),
        text("name"),
        text("key"),
        column("payload", JSONB, null=True),
        time_of_insert("created_at"),
        flag("delivered"),
        key("signals", "id"),
    )
    create_index("signals_name_key", "signals", ["name", "key", "id"])
    create_index("signals_undelivered", "signals", ["id"], where="NOT delivered")


def create_what_ended() -> None:
    create_table(
        "job_attempts",
        number("job_id", sa.BigInteger),
        number("message_id", sa.BigInteger),
        number("attempt"),
        text("outcome"),
        text("error_type", null=True),
        text("error", null=True),
        text("traceback", null=True),
        column("worker_id", sa.Uuid, null=True),
        text("moved_to", null=True),
        time("started_at"),
        time_of_insert("finished_at"),
        key("job_attempts", "job_id", "message_id", "attempt"),
    )
    create_table(
        "dead_letters",
        number("job_id", sa.BigInteger),
        text("outcome"),
        text("queue"),
        text("task"),
        time_of_insert("finished_at"),
        number("fingerprint", sa.BigInteger, null=True),
        key("dead_letters", "job_id"),
        check("dead_letters_outcome", "outcome IN ('failed', 'cancelled')"),
    )
    create_index("dead_letters_by_outcome", "dead_letters", ["outcome", "job_id"])
    create_index("dead_letters_by_task", "dead_letters", ["task", "job_id"])
    create_index(
        "dead_letters_by_error",
        "dead_letters",
        ["fingerprint", "job_id"],
        where="fingerprint IS NOT NULL",
    )


def create_workers_and_queues() -> None:
    create_table(
        "workers",
        column("id", sa.Uuid),
        text("hostname"),
        number("pid", sa.Integer),
        number("backend_pid", sa.Integer),
        column("queues", JSONB),
        column("withheld_queues", JSONB, null=True),
        number("slots"),
        time_of_insert("started_at"),
        time_of_insert("heartbeat_at"),
        time("dead_at"),
        number("attempts_ended", sa.BigInteger, default=0),
        text("version", null=True),
        key("workers", "id"),
        storage=ROOM_FOR_UPDATES,
    )
    create_table(
        "queues",
        text("name"),
        time("paused_at"),
        key("queues", "name"),
    )
    create_table(
        "paused_tasks",
        text("task"),
        time_of_insert("paused_at"),
        key("paused_tasks", "task"),
    )


def create_schedules() -> None:
    create_table(
        "schedules",
        text("name"),
        text("task"),
        column("args", JSONB, default=EMPTY),
        column("options", JSONB, default=EMPTY),
        text("cron", null=True),
        column("every", sa.Interval, null=True),
        text("timezone", default="UTC"),
        text("days", default="or"),
        number("catch_up", default=1),
        text("overlap", default="allow"),
        text("declared_in", null=True),
        column("declaration", JSONB, null=True),
        time("next_at"),
        time("last_tick_at"),
        number("last_job_id", sa.BigInteger, null=True),
        time("paused_at"),
        time_of_insert("created_at"),
        text("application", default=sa.text("''")),
        key("schedules", "name"),
        check("schedules_rule", "(cron IS NULL) <> (every IS NULL)"),
        check("schedules_every", "every BETWEEN '1 second' AND '36525 days'"),
        check("schedules_days", "days IN ('or', 'and')"),
        check("schedules_catch_up", "catch_up BETWEEN 0 AND 1000"),
        check("schedules_overlap", "overlap IN ('allow', 'skip', 'wait')"),
        check("schedules_tick", "next_at > last_tick_at"),
    )
    create_index("schedules_next_tick", "schedules", ["next_at", "name"], where="paused_at IS NULL")


def create_limits() -> None:
    create_table(
        "limits",
        text("name"),
        number("declared", sa.Integer),
        number("capacity", sa.Integer, null=True),
        flag("is_strict"),
        flag("skips_failed"),
        time_of_insert("declared_at"),
        column("period", sa.Interval, null=True),
        number("burst", sa.Integer, null=True),
        flag("is_fair"),
        key("limits", "name"),
        check("limits_declared", "declared >= 0"),
        check("limits_capacity", "capacity >= 0"),
        check("limits_period", "period BETWEEN '1 millisecond' AND '366 days'"),
        check("limits_burst", "burst BETWEEN 1 AND 1000000"),
        check("limits_refill", "burst * period <= '36525 days'"),
    )
    create_table(
        "limit_places",
        text("limit_key"),
        id_column(),
        number("job_id", sa.BigInteger),
        key("limit_places", "limit_key", "id"),
        storage=EMPTIED_OFTEN,
    )
    create_table(
        "limit_buckets",
        text("limit_key"),
        time("full_at", null=False),
        key("limit_buckets", "limit_key", "full_at"),
    )
    create_index("limit_buckets_full_at", "limit_buckets", ["full_at"])


def create_enqueue() -> None:
    """The tasks that workers know, and the function that enqueues by the name of a task."""
    create_table("tasks", text("name"), column("declaration", JSONB), key("tasks", "name"))
    for name, function in FUNCTIONS.items():
        op.execute(sa.text(function.replace(":", r"\:")))
        op.execute(f'REVOKE ALL ON FUNCTION "{SCHEMA}".{name} FROM PUBLIC')


def create_batches() -> None:
    create_table(
        "batches",
        id_column(),
        text("name", null=True),
        column("meta", JSONB, null=True),
        time_of_insert("created_at"),
        column("outcome", Domain("outcome"), null=True),
        number("total", sa.BigInteger, null=True),
        number("failed", sa.BigInteger, null=True),
        number("cancelled", sa.BigInteger, null=True),
        number("callback_id", sa.BigInteger, null=True),
        time("ended_at"),
        text("application", default=sa.text("''")),
        column("counted", JSONB, null=True),
        time("count_at"),
        flag("is_workflow"),
        time("deadline_at"),
        number("workflow_id", sa.BigInteger, null=True),
        key("batches", "id"),
        check("batches_ended_at", "(outcome IS NULL) = (ended_at IS NULL)"),
    )
    create_index("batches_open", "batches", ["id"], where="ended_at IS NULL")
    create_index(
        "batches_deadline_at",
        "batches",
        ["deadline_at"],
        where="deadline_at IS NOT NULL AND ended_at IS NULL",
    )
    create_index("batches_workflow_id", "batches", ["workflow_id"], where="workflow_id IS NOT NULL")
    create_table(
        "batch_jobs",
        number("batch_id", sa.BigInteger),
        number("job_id", sa.BigInteger),
        key("batch_jobs", "batch_id", "job_id"),
    )
    create_index("batch_jobs_job_id", "batch_jobs", ["job_id"])
    create_table(
        "blocked",
        number("node_id", sa.BigInteger),
        number("waits_for", sa.BigInteger),
        key("blocked", "node_id"),
        storage=EMPTIED_OFTEN,
    )
    create_index("blocked_waits_for", "blocked", ["waits_for", "node_id"])
    create_table(
        "dependencies",
        number("job_id", sa.BigInteger),
        number("after_id", sa.BigInteger),
        key("dependencies", "job_id", "after_id"),
    )
    create_index("dependencies_after_id", "dependencies", ["after_id"])


def create_statistics() -> None:
    create_table(
        "task_minutes",
        time("at", null=False),
        text("task"),
        *(
            number(ended, sa.Integer, default=0)
            for ended in ("succeeded", "failed", "retried", "cancelled", "other")
        ),
        column("ran", ARRAY(sa.Integer), default=EMPTY),
        column("waited", ARRAY(sa.Integer), default=EMPTY),
        key("task_minutes", "at", "task"),
        storage=ROOM_FOR_COUNTS,
    )
    create_table(
        "queue_minutes",
        time("at", null=False),
        text("queue"),
        time("counted_at"),
        *(
            number(count, sa.Integer, null=True)
            for count in ("waiting", "due", "blocked", "running", "oldest_due_s")
        ),
        number("started", sa.Integer, default=0),
        key("queue_minutes", "at", "queue"),
        storage=ROOM_FOR_COUNTS,
    )
    create_table(
        "error_groups",
        number("fingerprint", sa.BigInteger),
        text("task"),
        text("error_type"),
        text("place"),
        number("attempts", sa.BigInteger, default=0),
        time("first_at", null=False),
        time("last_at", null=False),
        text("first_version", default=sa.text("''")),
        number("job_id", sa.BigInteger),
        text("message"),
        time("muted_until"),
        key("error_groups", "fingerprint", "task"),
    )
    create_table(
        "deploys",
        text("application"),
        text("version"),
        time_of_insert("first_at"),
        key("deploys", "application", "version"),
    )


def create_operator_actions() -> None:
    create_table(
        "operator_actions",
        id_column(always=True),
        time_of_insert("at"),
        text("actor"),
        text("action"),
        column("target", JSONB, default=EMPTY),
        column("options", JSONB, default=EMPTY),
        text("reason", default=sa.text("''")),
        number("jobs", sa.Integer, default=0),
        number("skipped", sa.Integer, default=0),
        column("first_ids", ARRAY(sa.BigInteger), default=EMPTY),
        column("before", JSONB, null=True),
        column("after", JSONB, null=True),
        number("last_id", sa.BigInteger, null=True),
        number("cursor", sa.BigInteger, null=True),
        column("left_ids", ARRAY(sa.BigInteger), default=EMPTY),
        time("finished_at"),
        key("operator_actions", "id"),
    )
    create_index(
        "operator_actions_unfinished", "operator_actions", ["id"], where="finished_at IS NULL"
    )


def create_schema_version() -> None:
    schema_version = create_table(
        "schema_version",
        column("only_row", sa.Boolean, default=sa.true()),
        number("version", sa.Integer),
        number("oldest_code", sa.Integer),
        key("schema_version", "only_row"),
        check("schema_version_only_row", "only_row"),
    )
    op.bulk_insert(schema_version, [{"version": 1, "oldest_code": 1}])


# A job waits where its row says: the whole key is known, and one probe finds the message.
WAITS = f"""
    SELECT FROM "{SCHEMA}".waiting_messages AS waiting
    WHERE waiting.limit_keys = jobs.limit_keys
      AND waiting.queue = jobs.queue
      AND waiting.priority = jobs.priority
      AND waiting.run_at = jobs.run_at
      AND waiting.target_id = jobs.id
    """  # the schema name is checked where it is read

# Without args and result, which may be secret: the view can be granted where jobs cannot.
# A lease wins over a message: after a crash in transaction mode a job has both.
# Reads at most ten messages of a job's moment, of which there may be a million.  Only damage leaves
# an unfinished job without a message, so a job that is not among the ten is taken to be pending.
JOB_OVERVIEW = f"""
    CREATE VIEW "{SCHEMA}".job_overview AS
    SELECT jobs.id, jobs.queue, jobs.task, jobs.priority, jobs.run_at,
           CASE WHEN jobs.outcome IS NOT NULL THEN jobs.outcome
                WHEN leases.target_id IS NOT NULL THEN 'running'
                WHEN EXISTS (SELECT FROM "{SCHEMA}".blocked WHERE node_id = jobs.id) THEN 'blocked'
                WHEN jobs.limit_keys IS NOT NULL AND EXISTS ({WAITS}) THEN 'blocked'
                WHEN (
                    SELECT bool_or(ten.target_id = jobs.id) OR count(*) = 10
                    FROM (
                        SELECT messages.target_id FROM "{SCHEMA}".message_queue AS messages
                        WHERE messages.queue = jobs.queue
                          AND messages.priority = jobs.priority
                          AND messages.run_at = jobs.run_at
                        ORDER BY messages.id
                        LIMIT 10
                    ) AS ten
                ) THEN 'pending'
                ELSE 'blocked' END AS status,
           jobs.outcome, jobs.attempts, jobs.max_attempts, jobs.snoozes, jobs.interruptions,
           jobs.last_error, jobs.unique_key, jobs.tags, jobs.meta, jobs.progress,
           jobs.created_at, jobs.started_at, jobs.finished_at, jobs.cancel_requested_at,
           leases.worker_id, leases.started_at AS lease_started_at,
           jobs.limit_keys
    FROM "{SCHEMA}".jobs
    LEFT JOIN "{SCHEMA}".leases ON leases.target_id = jobs.id AND jobs.outcome IS NULL
    """  # noqa: S608  # the schema name is checked where it is read

# Writes what canonical_text() of Python writes, for the keys of unique jobs and of limits.
CANONICAL_TEXT = rf"""
    CREATE FUNCTION "{SCHEMA}".canonical_text(value jsonb) RETURNS text
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $pgqueue$
    DECLARE
        written text;
        number double precision;
    BEGIN
        CASE jsonb_typeof(value)
        WHEN 'object' THEN
            SELECT string_agg(
                "{SCHEMA}".canonical_text(to_jsonb(each.key)) || ':'
                    || "{SCHEMA}".canonical_text(each.value),
                ',' ORDER BY each.key COLLATE "C")
            INTO written FROM jsonb_each(canonical_text.value) AS each;
            RETURN concat('{{', written, '}}');
        WHEN 'array' THEN
            SELECT string_agg(
                "{SCHEMA}".canonical_text(each.item), ',' ORDER BY each.number)
            INTO written
            FROM jsonb_array_elements(canonical_text.value) WITH ORDINALITY
                AS each (item, number);
            RETURN concat('[', written, ']');
        WHEN 'string' THEN
            written := value::text;
            IF written ~ '[^ -~]' THEN
                SELECT string_agg(
                    CASE
                    WHEN ascii(letter) > 65535 THEN
                        '\u' || to_hex(55296 + ((ascii(letter) - 65536) >> 10))
                            || '\u' || to_hex(56320 + ((ascii(letter) - 65536) & 1023))
                    WHEN ascii(letter) > 126 THEN '\u' || lpad(to_hex(ascii(letter)), 4, '0')
                    ELSE letter END,
                    '' ORDER BY position)
                INTO written
                FROM regexp_split_to_table(written, '') WITH ORDINALITY AS each (letter, position);
            END IF;
            RETURN written;
        WHEN 'number' THEN
            written := value::text;
            IF written !~ '[.]' THEN
                RETURN written;
            END IF;
            number := written::double precision;
            IF number <> trunc(number) THEN
                RETURN number::text;
            END IF;
            RETURN trunc(written::numeric)::text;
        ELSE
            RETURN value::text;
        END CASE;
    END $pgqueue$
    """  # noqa: S608  # the schema name is checked where it is read


def lock_key(purpose: str) -> int:
    digest = sha256(f"pgqueue:{SCHEMA}:{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


CHANNEL = f"pgqueue_{sha256(SCHEMA.encode()).hexdigest()[:8]}"

# Runs with the rights of its caller, in the caller's transaction.  Without a percent sign:
# a script (alembic upgrade --sql) doubles it or not, as env.py says.
ENQUEUE = f"""
    CREATE FUNCTION "{SCHEMA}".enqueue(
        task text,
        args jsonb DEFAULT '{{}}',
        queue text DEFAULT NULL,
        priority integer DEFAULT NULL,
        run_at timestamp with time zone DEFAULT NULL,
        delay interval DEFAULT NULL,
        unique_key text DEFAULT NULL,
        max_attempts integer DEFAULT NULL,
        meta jsonb DEFAULT NULL,
        tags jsonb DEFAULT NULL,
        notify boolean DEFAULT true
    ) RETURNS bigint
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $pgqueue$
    #variable_conflict use_column
    DECLARE
        known jsonb;
        own jsonb;
        starts timestamp with time zone;
        held text;
        own_limits text;
        uniqueness jsonb;
        job_id bigint;
    BEGIN
        SELECT declaration INTO known FROM "{SCHEMA}".tasks WHERE name = enqueue.task;
        IF known IS NULL AND queue IS NULL THEN
            RAISE USING ERRCODE = 'PQ001', MESSAGE = concat(
                'task ', task,
                ' is not known to this database: no worker that has it was started; start ',
                'one, or give the queue');
        END IF;
        queue := coalesce(queue, known ->> 'queue');
        args := coalesce(args, '{{}}');
        IF task IS NULL OR task !~ '^[^[:space:][:cntrl:]]{{1,200}}$' THEN
            RAISE USING ERRCODE = 'PQ002', MESSAGE = concat(
                'task is ', quote_nullable(task), '; give 1 to 200 characters without spaces');
        ELSIF queue !~ '^[A-Za-z0-9_.:-]{{1,64}}$' THEN
            RAISE USING ERRCODE = 'PQ002', MESSAGE = concat(
                'task ', task, ': queue is ', quote_literal(queue),
                '; give 1 to 64 letters, digits or _ . : -');
        ELSIF jsonb_typeof(args) <> 'object' THEN
            RAISE USING ERRCODE = 'PQ002', MESSAGE = concat(
                'task ', task, ': args is an ', jsonb_typeof(args),
                '; give an object with the arguments by name');
        ELSIF run_at IS NOT NULL AND delay IS NOT NULL THEN
            RAISE USING ERRCODE = 'PQ002', MESSAGE = concat(
                'task ', task, ': both run_at and delay are given; give one of them');
        ELSIF jsonb_typeof(coalesce(meta, '{{}}')) <> 'object' OR EXISTS (
            SELECT FROM jsonb_object_keys(meta) AS each (name) WHERE starts_with(name, 'pgqueue.')
        ) THEN
            RAISE USING ERRCODE = 'PQ002', MESSAGE = concat(
                'task ', task, ': meta is no object, or has a key that begins with pgqueue.');
        ELSIF jsonb_typeof(tags) <> 'array' OR tags @? '$[*] ? (@.type() != "string")' THEN
            RAISE USING ERRCODE = 'PQ002', MESSAGE = concat(
                'task ', task, ': tags is ', tags, '; give an array of texts');
        END IF;
        starts := greatest(run_at, clock_timestamp() + coalesce(delay, interval '0'));

        -- A job of an undeclared task waits until a worker that has the task gives it its keys.
        own_limits := CASE WHEN known IS NULL THEN concat('pgqueue.undeclared ', task) END;
        meta := coalesce(enqueue.meta, '{{}}') || coalesce(nullif(known -> 'meta', 'null'), '{{}}');
        own := coalesce(known -> 'defaults', '{{}}') || args || (
            SELECT coalesce(jsonb_object_agg('meta.' || name, value), '{{}}')
            FROM jsonb_each(meta) AS each (name, value));
        SELECT coalesce(string_agg(each.key, chr(10) ORDER BY each.key COLLATE "C"), own_limits)
        INTO own_limits
        FROM (
            SELECT DISTINCT CASE
                WHEN one -> 'by' = '[]' THEN one ->> 'name'
                ELSE concat(one ->> 'name', ' ', CASE
                    WHEN (one -> 'is_secret')::boolean OR length(made.text) > 100
                    THEN 'sha256:' || encode(sha256(convert_to(made.text, 'UTF8')), 'hex')
                    ELSE made.text END)
                END AS key
            FROM jsonb_array_elements(
                    known -> 'limits' || coalesce(known -> 'queue_limits' -> queue, '[]')
                ) AS every (one),
                LATERAL (
                    SELECT "{SCHEMA}".canonical_text(
                        coalesce(jsonb_agg(
                            coalesce(own -> argument, 'null') ORDER BY number), '[]'))
                    FROM jsonb_array_elements_text(one -> 'by') WITH ORDINALITY
                        AS named (argument, number)
                ) AS made (text)
        ) AS each;

        -- Who gives a key replaces what the task says of uniqueness, or calls its function.
        uniqueness := nullif(known -> 'unique', 'null');
        IF unique_key IS NOT NULL THEN
            IF unique_key = '' OR starts_with(unique_key, 'pgqueue.') THEN
                RAISE USING ERRCODE = 'PQ002', MESSAGE = concat(
                    'task ', task, ': unique_key is ', quote_literal(unique_key),
                    '; give another text');
            END IF;
            held := CASE WHEN length(unique_key) <= 512 THEN unique_key
                ELSE 'sha256:' || encode(sha256(convert_to(unique_key, 'UTF8')), 'hex') END;
            IF NOT (uniqueness -> 'is_function')::boolean THEN
                uniqueness := NULL;
            END IF;
        ELSIF (uniqueness -> 'is_function')::boolean THEN
            RAISE USING ERRCODE = 'PQ002', MESSAGE = concat(
                'task ', task, ': its unique key is made by a Python function; give unique_key');
        ELSIF uniqueness -> 'by' = '[]' THEN
            held := uniqueness ->> 'key';
        ELSIF uniqueness IS NOT NULL THEN
            SELECT concat(uniqueness ->> 'key', ':', left(encode(sha256(convert_to(
                "{SCHEMA}".canonical_text(
                    coalesce(jsonb_object_agg(name, own -> name), '{{}}')),
                'UTF8')), 'hex'), 32))
            INTO held FROM jsonb_array_elements_text(uniqueness -> 'by') AS named (name)
            WHERE own ? name;
        END IF;
        IF uniqueness ->> 'on_conflict' NOT IN ('return', 'raise') THEN
            RAISE USING ERRCODE = 'PQ002', MESSAGE = concat(
                'task ', task, ': with on_conflict=',
                quote_literal(uniqueness ->> 'on_conflict'),
                ' an enqueue may change another job, which is for the application that has ',
                'the task');
        ELSIF jsonb_typeof(uniqueness -> 'period') = 'number' THEN
            held := concat('pgqueue.period:', (
                floor(extract(epoch FROM starts)::double precision
                    / (uniqueness -> 'period')::double precision)
                * (uniqueness -> 'period')::double precision)::bigint, ':', held);
        ELSIF uniqueness IS NOT NULL THEN
            held := concat(uniqueness ->> 'prefix', held);
        END IF;

        FOR attempt IN 1..20 LOOP
            WITH job AS (
                INSERT INTO "{SCHEMA}".jobs (
                    queue, task, args, priority, max_attempts, run_at, meta, tags,
                    limit_keys, unique_key, held_unique_key
                ) VALUES (
                    enqueue.queue, enqueue.task, enqueue.args,
                    coalesce(enqueue.priority, (known -> 'priority')::integer, 5),
                    coalesce(enqueue.max_attempts, (known -> 'max_attempts')::integer, 10),
                    greatest(starts, clock_timestamp()),
                    enqueue.meta || '{{"pgqueue.by_name": true}}',
                    enqueue.tags, own_limits, held, held
                )
                ON CONFLICT DO NOTHING
                RETURNING id, queue, priority, run_at, task, max_attempts, limit_keys
            ), message AS (
                INSERT INTO "{SCHEMA}".message_queue (
                    queue, priority, run_at, target_id, task, alone
                )
                SELECT queue, priority, run_at, id, task, max_attempts = 1
                FROM job WHERE limit_keys IS NULL
            ), waiting AS (
                INSERT INTO "{SCHEMA}".waiting_messages (
                    limit_keys, queue, priority, run_at, target_id, task
                )
                SELECT limit_keys, queue, priority, run_at, id, task
                FROM job WHERE limit_keys IS NOT NULL
            )
            SELECT id INTO job_id FROM job;
            IF job_id IS NOT NULL THEN
                -- Only if a worker sleeps: see wake_up_call() of pgqueue.repository.tables.
                IF notify THEN
                    IF pg_try_advisory_lock({lock_key("sleepers")}) THEN
                        PERFORM pg_advisory_unlock({lock_key("sleepers")});
                    ELSE
                        PERFORM pg_notify('{CHANNEL}', 'enqueued');
                    END IF;
                END IF;
                RETURN job_id;
            END IF;
            SELECT id INTO job_id FROM "{SCHEMA}".jobs
            WHERE held_unique_key = held AND held IS NOT NULL
                AND (queue = enqueue.queue OR starts_with(held_unique_key, 'pgqueue.across:'));
            IF job_id IS NOT NULL AND uniqueness ->> 'on_conflict' = 'raise' THEN
                RAISE USING ERRCODE = 'PQ003', MESSAGE = concat(
                    'task ', task, ': job ', job_id, ' of queue ', queue,
                    ' holds the unique key ', quote_literal(held), ', so no job was enqueued');
            ELSIF job_id IS NOT NULL THEN
                RETURN job_id;
            END IF;
        END LOOP;
        RAISE USING ERRCODE = 'PQ003', MESSAGE = concat(
            'task ', task, ': the unique key ', quote_literal(held), ' in queue ', queue,
            ' is held by a job that this transaction cannot see; enqueue again in a new ',
            'transaction');
    END $pgqueue$
    """  # noqa: S608  # the schema name is checked where it is read

FUNCTIONS = {"canonical_text": CANONICAL_TEXT, "enqueue": ENQUEUE}

# Each rule is a branch of its own: WHERE rule = '...' leaves the plan with that branch alone.
# OFFSET 0 keeps the planner from turning a probe of jobs by key into a pass over all of jobs.
INVARIANT_VIOLATIONS_IN_FLIGHT = f"""
    CREATE VIEW "{SCHEMA}".invariant_violations_in_flight AS
    SELECT 'a message has a job'::text AS rule,
           messages.target_id AS job_id,
           concat('message ', messages.id, ' points at no job') AS detail
    FROM "{SCHEMA}".message_queue AS messages
    LEFT JOIN LATERAL (
        SELECT id FROM "{SCHEMA}".jobs WHERE id = messages.target_id OFFSET 0
    ) AS job ON true
    WHERE job.id IS NULL

    UNION ALL
    SELECT 'a job has at most one message', twins.job_id, concat(twins.count, ' messages')
    FROM (
        SELECT target_id AS job_id, count(*) AS count
        FROM "{SCHEMA}".message_queue
        GROUP BY target_id
        HAVING count(*) > 1
    ) AS twins
    CROSS JOIN LATERAL (
        SELECT FROM "{SCHEMA}".jobs WHERE id = twins.job_id AND outcome IS NULL OFFSET 0
    ) AS job

    UNION ALL
    SELECT 'a message stands where its job says',
           messages.target_id,
           concat('message ', messages.id)
    FROM "{SCHEMA}".message_queue AS messages
    CROSS JOIN LATERAL (
        SELECT queue, priority, run_at, task
        FROM "{SCHEMA}".jobs
        WHERE id = messages.target_id AND outcome IS NULL
        OFFSET 0
    ) AS job
    WHERE messages.queue <> job.queue
       OR messages.priority <> job.priority
       OR messages.run_at <> job.run_at
       OR messages.task <> job.task

    UNION ALL
    SELECT 'a message beside a lease is the one the lease holds',
           messages.target_id,
           concat('message ', messages.id)
    FROM "{SCHEMA}".message_queue AS messages
    JOIN "{SCHEMA}".leases ON leases.target_id = messages.target_id
    CROSS JOIN LATERAL (
        SELECT FROM "{SCHEMA}".jobs WHERE id = messages.target_id AND outcome IS NULL OFFSET 0
    ) AS job
    WHERE NOT leases.held OR leases.message_id > messages.id

    UNION ALL
    SELECT 'a lease has a job', leases.target_id, concat('worker ', leases.worker_id)
    FROM "{SCHEMA}".leases
    LEFT JOIN LATERAL (
        SELECT id FROM "{SCHEMA}".jobs WHERE id = leases.target_id OFFSET 0
    ) AS job ON true
    WHERE job.id IS NULL

    UNION ALL
    SELECT 'a lease has an owner that lives, or is rescued within a minute',
           leases.target_id,
           concat('worker ', leases.worker_id)
    FROM "{SCHEMA}".leases
    WHERE leases.started_at < clock_timestamp() - interval '1 minute'
      AND NOT EXISTS (
          SELECT FROM "{SCHEMA}".workers
          WHERE workers.id = leases.worker_id
            AND (workers.dead_at IS NULL
                 OR workers.dead_at > clock_timestamp() - interval '1 minute')
      )
      AND NOT (
          leases.held
          AND EXISTS (
              SELECT FROM "{SCHEMA}".message_queue AS messages
              WHERE messages.target_id = leases.target_id
          )
      )

    UNION ALL
    SELECT 'a waiting message has an unfinished job',
           waiting.target_id,
           concat('waits for ', replace(waiting.limit_keys, chr(10), ', '))
    FROM "{SCHEMA}".waiting_messages AS waiting
    LEFT JOIN LATERAL (
        SELECT id FROM "{SCHEMA}".jobs WHERE id = waiting.target_id AND outcome IS NULL OFFSET 0
    ) AS job ON true
    WHERE job.id IS NULL

    UNION ALL
    SELECT 'a waiting message stands where its job says',
           waiting.target_id,
           concat('waits for ', replace(waiting.limit_keys, chr(10), ', '))
    FROM "{SCHEMA}".waiting_messages AS waiting
    CROSS JOIN LATERAL (
        SELECT limit_keys, queue, priority, run_at, task
        FROM "{SCHEMA}".jobs
        WHERE id = waiting.target_id AND outcome IS NULL
        OFFSET 0
    ) AS job
    WHERE job.limit_keys IS DISTINCT FROM waiting.limit_keys
       OR job.queue <> waiting.queue
       OR job.priority <> waiting.priority
       OR job.run_at <> waiting.run_at
       OR job.task <> waiting.task

    UNION ALL
    SELECT 'a waiting job has neither message nor lease',
           waiting.target_id,
           concat('waits for ', replace(waiting.limit_keys, chr(10), ', '))
    FROM "{SCHEMA}".waiting_messages AS waiting
    JOIN (
        SELECT target_id FROM "{SCHEMA}".message_queue
        UNION ALL
        SELECT target_id FROM "{SCHEMA}".leases
    ) AS admitted ON admitted.target_id = waiting.target_id
    """  # noqa: S608  # the schema name is checked where it is read

# A succeeded job keeps the unique key of a period until the period is over, and a failed one that
# of Unique(until="succeeded").
INVARIANT_VIOLATIONS = f"""
    CREATE VIEW "{SCHEMA}".invariant_violations AS
    SELECT rule, job_id, detail FROM "{SCHEMA}".invariant_violations_in_flight

    UNION ALL
    SELECT 'an unfinished job has a message or a lease',
           lost.id,
           'it has neither, so no worker will ever run it'
    FROM (
        SELECT id FROM "{SCHEMA}".jobs WHERE outcome IS NULL
        EXCEPT
        (SELECT target_id FROM "{SCHEMA}".message_queue
         UNION ALL
         SELECT target_id FROM "{SCHEMA}".leases
         UNION ALL
         SELECT target_id FROM "{SCHEMA}".waiting_messages
         UNION ALL
         SELECT node_id FROM "{SCHEMA}".blocked)
    ) AS lost

    UNION ALL
    SELECT 'attempts never exceed max_attempts', id, concat(attempts, ' of ', max_attempts)
    FROM "{SCHEMA}".jobs
    WHERE attempts > max_attempts

    UNION ALL
    SELECT 'a failed or cancelled job has a dead letter', jobs.id, concat('outcome ', jobs.outcome)
    FROM "{SCHEMA}".jobs
    WHERE jobs.outcome IN ('failed', 'cancelled')
      AND NOT EXISTS (
          SELECT FROM "{SCHEMA}".dead_letters
          WHERE dead_letters.job_id = jobs.id AND dead_letters.outcome = jobs.outcome
      )

    UNION ALL
    SELECT 'a dead letter says what its job says',
           dead_letters.job_id,
           concat('dead letter: ', dead_letters.outcome)
    FROM "{SCHEMA}".dead_letters
    WHERE NOT EXISTS (
        SELECT FROM "{SCHEMA}".jobs
        WHERE jobs.id = dead_letters.job_id AND jobs.outcome = dead_letters.outcome
    )

    UNION ALL
    SELECT 'an ended job holds no unique key', id, concat('outcome ', outcome)
    FROM "{SCHEMA}".jobs
    WHERE outcome IS NOT NULL AND held_unique_key IS NOT NULL
      AND NOT (outcome = 'succeeded' AND starts_with(held_unique_key, 'pgqueue.period:'))
      AND NOT (
          outcome = 'failed' AND starts_with(held_unique_key, 'pgqueue.until_succeeded:'))

    UNION ALL
    SELECT 'a succeeded job was attempted', id, concat('outcome ', outcome)
    FROM "{SCHEMA}".jobs
    WHERE outcome = 'succeeded' AND attempts < 1

    UNION ALL
    SELECT 'an admitted job has a place in each of its limits',
           jobs.id,
           concat('no place in ', missing.limit_key)
    FROM "{SCHEMA}".jobs
    CROSS JOIN unnest(string_to_array(jobs.limit_keys, chr(10))) AS missing (limit_key)
    WHERE jobs.outcome IS NULL
      AND jobs.limit_keys IS NOT NULL
      AND NOT EXISTS ({WAITS})
      AND NOT EXISTS (SELECT FROM "{SCHEMA}".blocked WHERE blocked.node_id = jobs.id)
      AND NOT EXISTS (
          SELECT FROM "{SCHEMA}".limit_places AS places
          WHERE places.limit_key = missing.limit_key AND places.job_id = jobs.id
      )
    """  # noqa: S608  # the schema name is checked where it is read
