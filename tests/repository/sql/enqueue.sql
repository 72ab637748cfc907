WITH job AS
(INSERT INTO pgqueue.jobs (queue, task, args, priority, run_at, max_attempts) VALUES
    (%(queue)s::VARCHAR, %(task)s::VARCHAR, CAST(%(args)s::VARCHAR AS JSONB),
    %(priority)s::SMALLINT, pg_catalog.clock_timestamp(), %(max_attempts)s::SMALLINT) RETURNING
    pgqueue.jobs.id, pgqueue.jobs.queue, pgqueue.jobs.priority, pgqueue.jobs.run_at,
    pgqueue.jobs.task, pgqueue.jobs.max_attempts, pgqueue.jobs.held_unique_key,
    pgqueue.jobs.created_at),
message AS
(INSERT INTO pgqueue.message_queue (queue, priority, run_at, target_id, task, alone) SELECT
    job.queue AS queue, job.priority AS priority, job.run_at AS run_at, job.id AS id, job.task AS
    task, job.max_attempts = %(max_attempts_1)s::SMALLINT AS anon_1
FROM job)
 SELECT job.id, EXTRACT(epoch FROM job.run_at) AS run_at, EXTRACT(epoch FROM job.created_at) AS
    created_at, CASE WHEN pg_catalog.pg_try_advisory_lock(-2192786854117710778) THEN
    pg_catalog.pg_advisory_unlock(-2192786854117710778) ELSE
    pg_catalog.pg_notify('pgqueue_66eafb31', 'enqueued') IS NULL END AS anon_2
FROM job
