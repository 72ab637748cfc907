"""Adds limits: how many jobs may run at once.

`jobs` gets `limit_keys`.  The tables `waiting_messages`, `limit_places` and `limits` are new.  The
views show and check the jobs that wait to be admitted, and let a succeeded job keep the unique key
of a period.  Code of version 4 works on: it leaves the new column NULL, and its jobs are under no
limits.
"""

import sqlalchemy as sa
from alembic import op

from pgqueue.models.base import SCHEMA

revision = "pgqueue_0005"
down_revision = "pgqueue_0004"
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True)
ZERO = sa.text("0")
EMPTIED_OFTEN = "autovacuum_vacuum_scale_factor = 0.05"

# A job waits where its row says: the whole key is known, and one probe finds the message.
WAITS = f"""
    SELECT FROM "{SCHEMA}".waiting_messages AS waiting
    WHERE waiting.limit_keys = jobs.limit_keys
      AND waiting.queue = jobs.queue
      AND waiting.priority = jobs.priority
      AND waiting.run_at = jobs.run_at
      AND waiting.target_id = jobs.id
    """  # the schema name is checked where it is read


def overview(blocked: str) -> str:
    return f"""
    CREATE VIEW "{SCHEMA}".job_overview AS
    SELECT jobs.id, jobs.queue, jobs.task, jobs.priority, jobs.run_at,
           CASE WHEN jobs.outcome IS NOT NULL THEN jobs.outcome
                WHEN leases.target_id IS NOT NULL THEN 'running'
                {blocked}
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
           leases.worker_id, leases.started_at AS lease_started_at
           {", jobs.limit_keys" if blocked else ""}
    FROM "{SCHEMA}".jobs
    LEFT JOIN "{SCHEMA}".leases ON leases.target_id = jobs.id AND jobs.outcome IS NULL
    """  # noqa: S608  # the schema name is checked where it is read


BLOCKED = f"WHEN jobs.limit_keys IS NOT NULL AND EXISTS ({WAITS}) THEN 'blocked'"

# The rules of revision 0002.  `waiting` adds those about jobs that wait to be admitted.
IN_FLIGHT = f"""
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
    """  # noqa: S608  # the schema name is checked where it is read

OF_WAITING = f"""
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

WAITING_MESSAGES = f'UNION ALL SELECT target_id FROM "{SCHEMA}".waiting_messages'  # noqa: S608

WITHOUT_PLACE = f"""
    UNION ALL
    SELECT 'an admitted job has a place in each of its limits',
           jobs.id,
           concat('no place in ', missing.limit_key)
    FROM "{SCHEMA}".jobs
    CROSS JOIN unnest(string_to_array(jobs.limit_keys, chr(10))) AS missing (limit_key)
    WHERE jobs.outcome IS NULL
      AND jobs.limit_keys IS NOT NULL
      AND NOT EXISTS ({WAITS})
      AND NOT EXISTS (
          SELECT FROM "{SCHEMA}".limit_places AS places
          WHERE places.limit_key = missing.limit_key AND places.job_id = jobs.id
      )
    """  # noqa: S608  # the schema name is checked where it is read

# A succeeded job keeps the unique key of a period until the period is over.
KEY_OF_PERIOD = """AND NOT (outcome = 'succeeded'
                          AND starts_with(held_unique_key, 'pgqueue.period:'))"""


def invariants(waiting: str, without_place: str, kept_key: str) -> str:
    return f"""
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
         {waiting})
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
    WHERE outcome IS NOT NULL AND held_unique_key IS NOT NULL {kept_key}

    UNION ALL
    SELECT 'a succeeded job was attempted', id, concat('outcome ', outcome)
    FROM "{SCHEMA}".jobs
    WHERE outcome = 'succeeded' AND attempts < 1
    {without_place}
    """  # noqa: S608  # the schema name is checked where it is read


def upgrade() -> None:
    drop_views()
    op.add_column("jobs", sa.Column("limit_keys", sa.Text), schema=SCHEMA)
    create_waiting_messages()
    create_limit_places()
    create_limits()
    op.execute(overview(BLOCKED))
    op.execute(IN_FLIGHT + OF_WAITING)
    op.execute(invariants(WAITING_MESSAGES, WITHOUT_PLACE, KEY_OF_PERIOD))
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 5')  # noqa: S608  # checked


def downgrade() -> None:
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 4')  # noqa: S608  # checked
    drop_views()
    admit_all()
    op.drop_table("limits", schema=SCHEMA)
    op.drop_table("limit_places", schema=SCHEMA)
    op.drop_table("waiting_messages", schema=SCHEMA)
    op.drop_column("jobs", "limit_keys", schema=SCHEMA)
    op.execute(overview(""))
    op.execute(IN_FLIGHT)
    op.execute(invariants("", "", ""))


def drop_views() -> None:
    op.execute(f'DROP VIEW "{SCHEMA}".invariant_violations')
    op.execute(f'DROP VIEW "{SCHEMA}".invariant_violations_in_flight')
    op.execute(f'DROP VIEW "{SCHEMA}".job_overview')


def admit_all() -> None:
    """Without the tables no worker would run the jobs that wait."""
    columns = "queue, priority, run_at, target_id, task, attempt, crashes"
    op.execute(
        f'INSERT INTO "{SCHEMA}".message_queue ({columns}) '  # noqa: S608  # checked
        f'SELECT {columns} FROM "{SCHEMA}".waiting_messages ORDER BY run_at, target_id'
    )


def create_waiting_messages() -> None:
    op.create_table(
        "waiting_messages",
        sa.Column("limit_keys", sa.Text, nullable=False),
        sa.Column("queue", sa.Text, nullable=False),
        sa.Column("priority", sa.SmallInteger, nullable=False),
        sa.Column("run_at", MOMENT, nullable=False),
        sa.Column("target_id", sa.BigInteger, nullable=False),
        sa.Column("task", sa.Text, nullable=False),
        sa.Column("attempt", sa.SmallInteger, server_default=ZERO, nullable=False),
        sa.Column("crashes", sa.SmallInteger, server_default=ZERO, nullable=False),
        sa.PrimaryKeyConstraint(
            *("limit_keys", "queue", "priority", "run_at", "target_id"),
            name=op.f("waiting_messages_pkey"),
        ),
        sa.CheckConstraint("priority BETWEEN 0 AND 9", name=op.f("waiting_messages_priority")),
        sa.CheckConstraint(
            "run_at BETWEEN '2000-01-01 00:00:00+00' AND '9999-12-31 00:00:00+00'",
            name=op.f("waiting_messages_run_at"),
        ),
        sa.CheckConstraint("attempt BETWEEN 0 AND 31000", name=op.f("waiting_messages_attempt")),
        sa.CheckConstraint("crashes BETWEEN 0 AND 31000", name=op.f("waiting_messages_crashes")),
        schema=SCHEMA,
    )
    op.execute(f'ALTER TABLE "{SCHEMA}".waiting_messages SET ({EMPTIED_OFTEN})')


def create_limit_places() -> None:
    op.create_table(
        "limit_places",
        sa.Column("limit_key", sa.Text, nullable=False),
        sa.Column("job_id", sa.BigInteger, autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("limit_key", "job_id", name=op.f("limit_places_pkey")),
        schema=SCHEMA,
    )
    op.execute(f'ALTER TABLE "{SCHEMA}".limit_places SET ({EMPTIED_OFTEN})')


def create_limits() -> None:
    op.create_table(
        "limits",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("declared", sa.Integer, nullable=False),
        sa.Column("capacity", sa.Integer),
        sa.Column("is_strict", sa.Boolean, server_default=sa.false(), nullable=False),
        sa.Column("skips_failed", sa.Boolean, server_default=sa.false(), nullable=False),
        sa.Column(
            "declared_at", MOMENT, server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("limits_pkey")),
        sa.CheckConstraint("declared >= 0", name=op.f("limits_declared")),
        sa.CheckConstraint("capacity >= 0", name=op.f("limits_capacity")),
        schema=SCHEMA,
    )
