WITH gone AS
(DELETE FROM pgqueue.leases WHERE ctid = ANY (array((SELECT lease.ctid
FROM pg_catalog.jsonb_to_recordset(CAST(%(verdicts)s::VARCHAR AS JSONB)) AS verdicts(target_id
    BIGINT, message_id BIGINT, attempt SMALLINT, job_outcome TEXT, delay FLOAT, give_up_after FLOAT,
    used_up SMALLINT, crashed SMALLINT, snoozed SMALLINT, max_interruptions SMALLINT, max_unreadable
    FLOAT, result JSONB, attempt_end TEXT, error_type TEXT, error TEXT, traceback TEXT, fingerprint
    BIGINT, to_queue TEXT, to_priority SMALLINT) JOIN LATERAL (SELECT ctid
FROM pgqueue.leases
WHERE pgqueue.leases.target_id = verdicts.target_id AND pgqueue.leases.message_id =
    verdicts.message_id AND pgqueue.leases.attempt = verdicts.attempt AND pgqueue.leases.worker_id =
    %(worker_id)s::UUID AND NOT
    pg_catalog.row_security_active('"pgqueue".jobs'::pg_catalog.regclass::oid)
 LIMIT ALL OFFSET 0) AS lease ON true))) AND pgqueue.leases.worker_id = %(worker_id)s::UUID
    RETURNING pgqueue.leases.target_id, pgqueue.leases.message_id, pgqueue.leases.attempt,
    pgqueue.leases.crashes, pgqueue.leases.worker_id, pgqueue.leases.started_at),
settled AS
(SELECT gone.target_id AS target_id, gone.message_id AS message_id, gone.attempt AS attempt,
    gone.worker_id AS worker_id, gone.started_at AS started_at, gone.crashes + verdicts.crashed AS
    crashes, verdicts.snoozed AS snoozed, verdicts.max_interruptions AS max_interruptions,
    verdicts.result AS result, verdicts.error_type AS error_type, verdicts.error AS error,
    verdicts.traceback AS traceback, verdicts.fingerprint AS fingerprint, verdicts.to_queue AS
    to_queue, verdicts.to_priority AS to_priority, pg_catalog.statement_timestamp() -
    coalesce(met.since, pg_catalog.statement_timestamp()) < verdicts.max_unreadable * interval '1
    second' AS waits, CASE WHEN (pg_catalog.statement_timestamp() - coalesce(met.since,
    pg_catalog.statement_timestamp()) < verdicts.max_unreadable * interval '1 second') THEN
    least(greatest(CAST(EXTRACT(epoch FROM pg_catalog.statement_timestamp() - coalesce(met.since,
    pg_catalog.statement_timestamp())) AS FLOAT) * CAST(0.5 AS FLOAT), CAST(5 AS FLOAT)), CAST(60 AS
    FLOAT)) ELSE verdicts.delay END AS delay, CASE WHEN (pg_catalog.statement_timestamp() -
    coalesce(met.since, pg_catalog.statement_timestamp()) < verdicts.max_unreadable * interval '1
    second') THEN CAST(0 AS SMALLINT) ELSE verdicts.used_up END AS used_up, CASE WHEN
    (pg_catalog.statement_timestamp() - coalesce(met.since, pg_catalog.statement_timestamp()) <
    verdicts.max_unreadable * interval '1 second') THEN NULL WHEN CASE WHEN (verdicts.give_up_after
    IS NOT NULL) THEN pg_catalog.clock_timestamp() + verdicts.delay * interval '1 second' > CASE
    WHEN (gone.attempt = CAST(1 AS SMALLINT)) THEN gone.started_at ELSE coalesce((SELECT
    pg_catalog.max(pgqueue.job_attempts.started_at) AS max_1
FROM pgqueue.job_attempts
WHERE pgqueue.job_attempts.job_id = verdicts.target_id AND pgqueue.job_attempts.attempt = CAST(1 AS
    SMALLINT)), gone.started_at) END + verdicts.give_up_after * interval '1 second' END THEN
    'failed' ELSE verdicts.job_outcome END AS job_outcome, CASE WHEN
    (pg_catalog.statement_timestamp() - coalesce(met.since, pg_catalog.statement_timestamp()) <
    verdicts.max_unreadable * interval '1 second') THEN NULL ELSE verdicts.attempt_end END AS
    attempt_end
FROM gone JOIN pg_catalog.jsonb_to_recordset(CAST(%(verdicts)s::VARCHAR AS JSONB)) AS
    verdicts(target_id BIGINT, message_id BIGINT, attempt SMALLINT, job_outcome TEXT, delay FLOAT,
    give_up_after FLOAT, used_up SMALLINT, crashed SMALLINT, snoozed SMALLINT, max_interruptions
    SMALLINT, max_unreadable FLOAT, result JSONB, attempt_end TEXT, error_type TEXT, error TEXT,
    traceback TEXT, fingerprint BIGINT, to_queue TEXT, to_priority SMALLINT) ON gone.target_id =
    verdicts.target_id AND gone.message_id = verdicts.message_id AND gone.attempt = verdicts.attempt
    LEFT OUTER JOIN LATERAL (SELECT pgqueue.unreadable_jobs.since AS since
FROM pgqueue.unreadable_jobs
WHERE pgqueue.unreadable_jobs.job_id = verdicts.target_id AND verdicts.max_unreadable IS NOT NULL
 LIMIT ALL OFFSET 0) AS met ON true),
job AS
(UPDATE pgqueue.jobs SET queue=CASE WHEN (CASE WHEN (pgqueue.jobs.cancel_requested_at IS NOT NULL)
    THEN 'cancelled' WHEN (settled.job_outcome IS NOT NULL) THEN settled.job_outcome WHEN
    (settled.used_up = 1 AND settled.attempt >= pgqueue.jobs.max_attempts) THEN 'failed' WHEN
    (CAST(pgqueue.jobs.interruptions AS INTEGER) + 1 >= settled.max_interruptions) THEN 'failed' END
    IS NULL AND settled.to_queue IS NOT NULL AND (pgqueue.jobs.held_unique_key IS NULL OR
    pg_catalog.starts_with(pgqueue.jobs.held_unique_key, 'pgqueue.across:'))) THEN settled.to_queue
    ELSE pgqueue.jobs.queue END, priority=CASE WHEN (CASE WHEN (pgqueue.jobs.cancel_requested_at IS
    NOT NULL) THEN 'cancelled' WHEN (settled.job_outcome IS NOT NULL) THEN settled.job_outcome WHEN
    (settled.used_up = 1 AND settled.attempt >= pgqueue.jobs.max_attempts) THEN 'failed' WHEN
    (CAST(pgqueue.jobs.interruptions AS INTEGER) + 1 >= settled.max_interruptions) THEN 'failed' END
    IS NULL) THEN coalesce(settled.to_priority, pgqueue.jobs.priority) ELSE pgqueue.jobs.priority
    END, run_at=CASE WHEN (CASE WHEN (pgqueue.jobs.cancel_requested_at IS NOT NULL) THEN 'cancelled'
    WHEN (settled.job_outcome IS NOT NULL) THEN settled.job_outcome WHEN (settled.used_up = 1 AND
    settled.attempt >= pgqueue.jobs.max_attempts) THEN 'failed' WHEN
    (CAST(pgqueue.jobs.interruptions AS INTEGER) + 1 >= settled.max_interruptions) THEN 'failed' END
    IS NULL AND settled.delay IS NOT NULL) THEN pg_catalog.clock_timestamp() + settled.delay *
    interval '1 second' ELSE pgqueue.jobs.run_at END, attempts=least((settled.attempt -
    %(attempt_1)s::SMALLINT) + settled.used_up, pgqueue.jobs.max_attempts),
    snoozes=least(CAST(pgqueue.jobs.snoozes AS INTEGER) + settled.snoozed, 32767),
    interruptions=CASE WHEN (settled.max_interruptions IS NOT NULL) THEN
    CAST(pgqueue.jobs.interruptions AS INTEGER) + 1 ELSE pgqueue.jobs.interruptions END,
    outcome=CASE WHEN (pgqueue.jobs.cancel_requested_at IS NOT NULL) THEN 'cancelled' WHEN
    (settled.job_outcome IS NOT NULL) THEN settled.job_outcome WHEN (settled.used_up = 1 AND
    settled.attempt >= pgqueue.jobs.max_attempts) THEN 'failed' WHEN
    (CAST(pgqueue.jobs.interruptions AS INTEGER) + 1 >= settled.max_interruptions) THEN 'failed'
    END, result=settled.result, last_error=coalesce(CASE WHEN (CAST(pgqueue.jobs.interruptions AS
    INTEGER) + 1 >= settled.max_interruptions) THEN pg_catalog.concat(settled.error, ' The job has
    reached max_interruptions = ', settled.max_interruptions) END, nullif(CAST(settled.error AS
    TEXT), ''), settled.error_type, CASE WHEN (settled.job_outcome IS DISTINCT FROM 'succeeded')
    THEN pgqueue.jobs.last_error END), held_unique_key=CASE WHEN (CASE WHEN
    (pgqueue.jobs.cancel_requested_at IS NOT NULL) THEN 'cancelled' WHEN (settled.job_outcome IS NOT
    NULL) THEN settled.job_outcome WHEN (settled.used_up = 1 AND settled.attempt >=
    pgqueue.jobs.max_attempts) THEN 'failed' WHEN (CAST(pgqueue.jobs.interruptions AS INTEGER) + 1
    >= settled.max_interruptions) THEN 'failed' END IS NULL) THEN pgqueue.jobs.held_unique_key WHEN
    (CASE WHEN (pgqueue.jobs.cancel_requested_at IS NOT NULL) THEN 'cancelled' WHEN
    (settled.job_outcome IS NOT NULL) THEN settled.job_outcome WHEN (settled.used_up = 1 AND
    settled.attempt >= pgqueue.jobs.max_attempts) THEN 'failed' WHEN
    (CAST(pgqueue.jobs.interruptions AS INTEGER) + 1 >= settled.max_interruptions) THEN 'failed' END
    = 'succeeded') THEN CASE WHEN pg_catalog.starts_with(pgqueue.jobs.held_unique_key,
    CAST('pgqueue.period:' AS TEXT)) THEN pgqueue.jobs.held_unique_key END WHEN (CASE WHEN
    (pgqueue.jobs.cancel_requested_at IS NOT NULL) THEN 'cancelled' WHEN (settled.job_outcome IS NOT
    NULL) THEN settled.job_outcome WHEN (settled.used_up = 1 AND settled.attempt >=
    pgqueue.jobs.max_attempts) THEN 'failed' WHEN (CAST(pgqueue.jobs.interruptions AS INTEGER) + 1
    >= settled.max_interruptions) THEN 'failed' END = 'failed') THEN CASE WHEN
    pg_catalog.starts_with(pgqueue.jobs.held_unique_key, CAST('pgqueue.until_succeeded:' AS TEXT))
    THEN pgqueue.jobs.held_unique_key END END, started_at=CASE WHEN (settled.used_up = 1) THEN
    settled.started_at END, finished_at=CASE WHEN (CASE WHEN (pgqueue.jobs.cancel_requested_at IS
    NOT NULL) THEN 'cancelled' WHEN (settled.job_outcome IS NOT NULL) THEN settled.job_outcome WHEN
    (settled.used_up = 1 AND settled.attempt >= pgqueue.jobs.max_attempts) THEN 'failed' WHEN
    (CAST(pgqueue.jobs.interruptions AS INTEGER) + 1 >= settled.max_interruptions) THEN 'failed' END
    IS NOT NULL) THEN pg_catalog.clock_timestamp() END FROM settled WHERE pgqueue.jobs.id =
    settled.target_id AND pgqueue.jobs.outcome IS NULL RETURNING pgqueue.jobs.id,
    pgqueue.jobs.queue, pgqueue.jobs.task, pgqueue.jobs.args, pgqueue.jobs.priority,
    pgqueue.jobs.run_at, pgqueue.jobs.max_attempts, pgqueue.jobs.attempts, pgqueue.jobs.snoozes,
    pgqueue.jobs.interruptions, pgqueue.jobs.outcome, pgqueue.jobs.result, pgqueue.jobs.last_error,
    pgqueue.jobs.unique_key, pgqueue.jobs.held_unique_key, pgqueue.jobs.limit_keys,
    pgqueue.jobs.tags, pgqueue.jobs.meta, pgqueue.jobs.progress, pgqueue.jobs.created_at,
    pgqueue.jobs.started_at, pgqueue.jobs.finished_at, pgqueue.jobs.cancel_requested_at,
    pgqueue.jobs.kill_requested_at, settled.target_id AS settled_target_id, settled.message_id AS
    settled_message_id, settled.attempt AS settled_attempt, settled.worker_id AS settled_worker_id,
    settled.started_at AS settled_started_at, settled.crashes AS settled_crashes, settled.snoozed AS
    settled_snoozed, settled.max_interruptions AS settled_max_interruptions, settled.result AS
    settled_result, settled.error_type AS settled_error_type, settled.error AS settled_error,
    settled.traceback AS settled_traceback, settled.fingerprint AS settled_fingerprint,
    settled.to_queue AS settled_to_queue, settled.to_priority AS settled_to_priority, settled.waits
    AS settled_waits, settled.delay AS settled_delay, settled.used_up AS settled_used_up,
    settled.job_outcome AS settled_job_outcome, settled.attempt_end AS settled_attempt_end, CASE
    WHEN (pgqueue.jobs.limit_keys IS NOT NULL) THEN (SELECT pg_catalog.bool_or(pgqueue.limits.period
    IS NOT NULL) AND NOT pg_catalog.bool_or(pgqueue.limits.is_strict) AS anon_2
FROM pgqueue.limits
WHERE pgqueue.limits.name = ANY (array((SELECT pg_catalog.split_part(key, CAST(' ' AS TEXT), 1) AS
    split_part_1
FROM pg_catalog.unnest(pg_catalog.string_to_array(pgqueue.jobs.limit_keys, pg_catalog.chr(10))) AS
    key)))) END AS next_start_counts, CASE WHEN (pgqueue.jobs.queue = settled.to_queue) THEN
    settled.to_queue END AS moved_to, CASE WHEN (pgqueue.jobs.queue = settled.to_queue) THEN CASE
    WHEN pg_catalog.pg_try_advisory_lock(-2192786854117710778) THEN
    pg_catalog.pg_advisory_unlock(-2192786854117710778) ELSE
    pg_catalog.pg_notify('pgqueue_66eafb31', 'enqueued') IS NULL END END AS woken),
next_message AS
(INSERT INTO pgqueue.message_queue (queue, priority, run_at, target_id, task, attempt, crashes,
    alone) SELECT job.queue AS queue, job.priority AS priority, job.run_at AS run_at, job.id AS id,
    job.task AS task, job.attempts AS attempts, job.settled_crashes AS settled_crashes,
    job.settled_crashes > %(settled_crashes_1)s::SMALLINT OR job.max_attempts =
    %(max_attempts_1)s::SMALLINT AS anon_1
FROM job
WHERE job.outcome IS NULL AND job.next_start_counts IS NOT true),
waiting_message AS
(INSERT INTO pgqueue.waiting_messages (limit_keys, queue, priority, run_at, target_id, task,
    attempt, crashes) SELECT job.limit_keys AS limit_keys, job.queue AS queue, job.priority AS
    priority, job.run_at AS run_at, job.id AS id, job.task AS task, job.attempts AS attempts,
    job.settled_crashes AS settled_crashes
FROM job
WHERE job.outcome IS NULL AND job.next_start_counts),
bad_attempt AS
(INSERT INTO pgqueue.job_attempts (job_id, message_id, attempt, outcome, error_type, error,
    traceback, worker_id, started_at, moved_to, finished_at) SELECT job.id AS id,
    job.settled_message_id AS settled_message_id, job.settled_attempt AS settled_attempt,
    job.settled_attempt_end AS settled_attempt_end, job.settled_error_type AS settled_error_type,
    job.settled_error AS settled_error, job.settled_traceback AS settled_traceback,
    job.settled_worker_id AS settled_worker_id, job.settled_started_at AS settled_started_at,
    job.moved_to AS moved_to, pg_catalog.clock_timestamp() AS clock_timestamp_1
FROM job
WHERE job.settled_attempt_end IS NOT NULL ON CONFLICT DO NOTHING),
letter AS
(INSERT INTO pgqueue.dead_letters (job_id, outcome, queue, task, finished_at, fingerprint) SELECT
    job.id AS id, job.outcome AS outcome, job.queue AS queue, job.task AS task, job.finished_at AS
    finished_at, CASE WHEN (job.outcome = 'failed') THEN job.settled_fingerprint END AS anon_3
FROM job
WHERE job.outcome IN ('failed', 'cancelled') ON CONFLICT DO NOTHING),
follow_up AS
(INSERT INTO pgqueue.jobs (queue, task, args, priority, max_attempts, run_at, meta) SELECT
    pg_catalog.jsonb_extract_path_text(job.meta, CASE WHEN (job.outcome = 'failed') THEN
    CAST('pgqueue.on_failed' AS TEXT) WHEN (job.outcome = 'succeeded') THEN
    CAST('pgqueue.on_success' AS TEXT) END, 'queue') AS jsonb_extract_path_text_1,
    pg_catalog.jsonb_extract_path_text(job.meta, CASE WHEN (job.outcome = 'failed') THEN
    CAST('pgqueue.on_failed' AS TEXT) WHEN (job.outcome = 'succeeded') THEN
    CAST('pgqueue.on_success' AS TEXT) END, 'task') AS jsonb_extract_path_text_2,
    pg_catalog.jsonb_build_object(pg_catalog.jsonb_extract_path_text(job.meta, CASE WHEN
    (job.outcome = 'failed') THEN CAST('pgqueue.on_failed' AS TEXT) WHEN (job.outcome = 'succeeded')
    THEN CAST('pgqueue.on_success' AS TEXT) END, 'argument'), job.id) || CASE WHEN
    (pg_catalog.jsonb_extract_path_text(job.meta, CASE WHEN (job.outcome = 'failed') THEN
    CAST('pgqueue.on_failed' AS TEXT) WHEN (job.outcome = 'succeeded') THEN
    CAST('pgqueue.on_success' AS TEXT) END, 'result') IS NOT NULL) THEN
    pg_catalog.jsonb_build_object(pg_catalog.jsonb_extract_path_text(job.meta, CASE WHEN
    (job.outcome = 'failed') THEN CAST('pgqueue.on_failed' AS TEXT) WHEN (job.outcome = 'succeeded')
    THEN CAST('pgqueue.on_success' AS TEXT) END, 'result'), job.result) ELSE '{}'::jsonb END AS
    anon_6, CAST(CASE WHEN (pg_catalog.jsonb_extract_path_text(job.meta, CASE WHEN (job.outcome =
    'failed') THEN CAST('pgqueue.on_failed' AS TEXT) WHEN (job.outcome = 'succeeded') THEN
    CAST('pgqueue.on_success' AS TEXT) END, 'priority') ~ '^[0-9]$') THEN
    pg_catalog.jsonb_extract_path_text(job.meta, CASE WHEN (job.outcome = 'failed') THEN
    CAST('pgqueue.on_failed' AS TEXT) WHEN (job.outcome = 'succeeded') THEN
    CAST('pgqueue.on_success' AS TEXT) END, 'priority') ELSE '5' END AS SMALLINT) AS anon_7,
    CAST(CASE WHEN (pg_catalog.jsonb_extract_path_text(job.meta, CASE WHEN (job.outcome = 'failed')
    THEN CAST('pgqueue.on_failed' AS TEXT) WHEN (job.outcome = 'succeeded') THEN
    CAST('pgqueue.on_success' AS TEXT) END, 'max_attempts') ~ '^[1-9][0-9]{0,3}$') THEN
    pg_catalog.jsonb_extract_path_text(job.meta, CASE WHEN (job.outcome = 'failed') THEN
    CAST('pgqueue.on_failed' AS TEXT) WHEN (job.outcome = 'succeeded') THEN
    CAST('pgqueue.on_success' AS TEXT) END, 'max_attempts') ELSE '10' END AS SMALLINT) AS anon_8,
    pg_catalog.clock_timestamp() AS clock_timestamp_2, job.meta - (SELECT pg_catalog.array_agg(key)
    AS array_agg_1
FROM pg_catalog.jsonb_object_keys(job.meta) AS key
WHERE pg_catalog.starts_with(key, 'pgqueue.')) AS anon_9
FROM job
WHERE job.outcome IN ('failed', 'succeeded') AND pg_catalog.jsonb_extract_path_text(job.meta, CASE
    WHEN (job.outcome = 'failed') THEN CAST('pgqueue.on_failed' AS TEXT) WHEN (job.outcome =
    'succeeded') THEN CAST('pgqueue.on_success' AS TEXT) END, 'task') ~ '^\S{1,200}$' AND
    pg_catalog.jsonb_extract_path_text(job.meta, CASE WHEN (job.outcome = 'failed') THEN
    CAST('pgqueue.on_failed' AS TEXT) WHEN (job.outcome = 'succeeded') THEN
    CAST('pgqueue.on_success' AS TEXT) END, 'queue') ~ '^[A-Za-z0-9_.:-]{1,64}$' AND
    pg_catalog.jsonb_extract_path_text(job.meta, CASE WHEN (job.outcome = 'failed') THEN
    CAST('pgqueue.on_failed' AS TEXT) WHEN (job.outcome = 'succeeded') THEN
    CAST('pgqueue.on_success' AS TEXT) END, 'argument') IS NOT NULL RETURNING pgqueue.jobs.id,
    pgqueue.jobs.queue, pgqueue.jobs.priority, pgqueue.jobs.run_at, pgqueue.jobs.task,
    pgqueue.jobs.max_attempts),
follow_up_message AS
(INSERT INTO pgqueue.message_queue (queue, priority, run_at, target_id, task, alone) SELECT
    follow_up.queue AS queue, follow_up.priority AS priority, follow_up.run_at AS run_at,
    follow_up.id AS id, follow_up.task AS task, follow_up.max_attempts =
    %(max_attempts_2)s::SMALLINT AS anon_5
FROM follow_up RETURNING CASE WHEN pg_catalog.pg_try_advisory_lock(-2192786854117710778) THEN
    pg_catalog.pg_advisory_unlock(-2192786854117710778) ELSE
    pg_catalog.pg_notify('pgqueue_66eafb31', 'enqueued') IS NULL END AS anon_4),
unreadable AS
(INSERT INTO pgqueue.unreadable_jobs (job_id, task, reason) SELECT job.id AS id, job.task AS task,
    job.settled_error AS settled_error
FROM job
WHERE job.settled_waits AND job.outcome IS NULL ON CONFLICT DO NOTHING),
readable AS
(DELETE FROM pgqueue.unreadable_jobs WHERE pgqueue.unreadable_jobs.job_id = ANY (array((SELECT
    job.id
FROM job
WHERE job.settled_used_up = 1 OR job.settled_snoozed = 1 OR job.settled_max_interruptions IS NOT
    NULL OR job.outcome IS NOT NULL))))
 SELECT job.id, job.outcome, pg_catalog.concat(CAST(pg_catalog.pg_current_xact_id() AS TEXT), CAST('
    ' AS TEXT),
    pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 1, 8)) AS
    concat_1
FROM job
