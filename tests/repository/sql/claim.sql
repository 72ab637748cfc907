WITH due AS
(SELECT due.ctid AS ctid, due.crashes AS crashes, due.alone AS alone
FROM pg_catalog.jsonb_to_recordset(CAST(%(pairs)s::VARCHAR AS JSONB)) AS pairs(queue TEXT, priority
    SMALLINT, run_at TIMESTAMP WITH TIME ZONE, message_id BIGINT) JOIN LATERAL (SELECT ctid,
    pgqueue.message_queue.crashes AS crashes, pgqueue.message_queue.alone AS alone
FROM pgqueue.message_queue
WHERE pgqueue.message_queue.queue = pairs.queue AND pgqueue.message_queue.priority = pairs.priority
    AND pgqueue.message_queue.task = ANY (CAST(%(tasks)s::VARCHAR AS TEXT[])) AND
    (pgqueue.message_queue.run_at, pgqueue.message_queue.id) > (pairs.run_at, pairs.message_id) AND
    pgqueue.message_queue.run_at <= pg_catalog.statement_timestamp() ORDER BY
    pgqueue.message_queue.run_at, pgqueue.message_queue.id
 LIMIT %(limit)s::INTEGER FOR UPDATE SKIP LOCKED) AS due ON true
WHERE (SELECT pgqueue.workers.dead_at IS NULL AS anon_1
FROM pgqueue.workers
WHERE pgqueue.workers.id = %(worker_id)s::UUID) AND NOT
    pg_catalog.row_security_active('"pgqueue".jobs'::pg_catalog.regclass::oid) AND NOT
    pg_catalog.row_security_active('"pgqueue".leases'::pg_catalog.regclass::oid) AND NOT
    pg_catalog.row_security_active('"pgqueue".message_queue'::pg_catalog.regclass::oid)
 LIMIT %(limit)s::INTEGER),
message AS
(DELETE FROM pgqueue.message_queue WHERE ctid = ANY (array((SELECT due.ctid
FROM due
WHERE due.crashes = %(crashes_1)s::SMALLINT OR due.ctid = (SELECT due.ctid
FROM due
WHERE due.crashes > %(crashes_2)s::SMALLINT
 LIMIT %(param_1)s::INTEGER)))) RETURNING pgqueue.message_queue.queue,
    pgqueue.message_queue.priority, pgqueue.message_queue.run_at, pgqueue.message_queue.id,
    pgqueue.message_queue.target_id, pgqueue.message_queue.task, pgqueue.message_queue.attempt,
    pgqueue.message_queue.crashes, pgqueue.message_queue.alone),
started AS
(SELECT message.id AS id, message.target_id AS target_id, message.queue AS queue, message.priority
    AS priority, CAST(message.run_at AS TEXT) AS run_at, message.task AS task, message.attempt AS
    used_attempts, message.crashes AS past_crashes, job.max_attempts AS max_attempts, job.args AS
    args, job.meta AS meta
FROM message JOIN LATERAL (SELECT pgqueue.jobs.max_attempts AS max_attempts, CAST(pgqueue.jobs.args
    AS TEXT) AS args, CAST(pgqueue.jobs.meta AS TEXT) AS meta
FROM pgqueue.jobs
WHERE pgqueue.jobs.id = message.target_id AND pgqueue.jobs.outcome IS NULL
 LIMIT ALL OFFSET 0) AS job ON true),
lease AS
(INSERT INTO pgqueue.leases (target_id, message_id, attempt, crashes, worker_id) SELECT
    started.target_id AS target_id, started.id AS id, started.used_attempts +
    %(used_attempts_1)s::SMALLINT AS anon_2, started.past_crashes AS past_crashes,
    %(worker_id)s::UUID AS anon_3
FROM started ON CONFLICT DO NOTHING RETURNING pgqueue.leases.message_id, pgqueue.leases.attempt,
    pgqueue.leases.crashes)
 SELECT moment.read_at, moment.quiet_until, moment.taken, moment.found, claimed.priority,
    claimed.run_at, claimed.id, claimed.target_id, claimed.queue, claimed.task, claimed.args,
    claimed.max_attempts, claimed.attempt, claimed.crashes, claimed.meta
FROM (SELECT CAST(pg_catalog.statement_timestamp() AS TEXT) AS read_at,
    CAST(pg_catalog.statement_timestamp() - interval '1 second' AS TEXT) AS quiet_until, (SELECT
    pg_catalog.count(*) AS count_1
FROM message) AS taken, CASE WHEN (NOT
    pg_catalog.row_security_active('"pgqueue".jobs'::pg_catalog.regclass::oid) AND NOT
    pg_catalog.row_security_active('"pgqueue".leases'::pg_catalog.regclass::oid) AND NOT
    pg_catalog.row_security_active('"pgqueue".message_queue'::pg_catalog.regclass::oid)) THEN
    (SELECT pg_catalog.count(*) AS count_2
FROM due) END AS found) AS moment LEFT OUTER JOIN (SELECT started.priority AS priority,
    started.run_at AS run_at, started.id AS id, started.target_id AS target_id, started.queue AS
    queue, started.task AS task, started.args AS args, started.max_attempts AS max_attempts,
    lease.attempt AS attempt, lease.crashes AS crashes, started.meta AS meta
FROM started JOIN lease ON started.id = lease.message_id) AS claimed ON true
