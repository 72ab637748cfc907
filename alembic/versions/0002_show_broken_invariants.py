"""Creates the views `invariant_violations` and `invariant_violations_in_flight`.

Nothing that exists changes: code of version 1 works on.
"""

from alembic import op

from pgqueue.models.base import SCHEMA

revision = "pgqueue_0002"
down_revision = "pgqueue_0001"
branch_labels = None
depends_on = None

# Each rule is a branch of its own: WHERE rule = '...' leaves the plan with that branch alone.
# OFFSET 0 keeps the planner from turning a probe of jobs by key into a pass over all of jobs.
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

ALL = f"""
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
         SELECT target_id FROM "{SCHEMA}".leases)
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

    UNION ALL
    SELECT 'a succeeded job was attempted', id, concat('outcome ', outcome)
    FROM "{SCHEMA}".jobs
    WHERE outcome = 'succeeded' AND attempts < 1
    """  # noqa: S608  # the schema name is checked where it is read


def upgrade() -> None:
    op.execute(IN_FLIGHT)
    op.execute(ALL)
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 2')  # noqa: S608  # checked


def downgrade() -> None:
    op.execute(f'UPDATE "{SCHEMA}".schema_version SET version = 1')  # noqa: S608  # checked
    op.execute(f'DROP VIEW "{SCHEMA}".invariant_violations')
    op.execute(f'DROP VIEW "{SCHEMA}".invariant_violations_in_flight')
