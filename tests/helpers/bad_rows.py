"""What may be written behind our back, and what becomes of it."""

DIGITS = f'{{"n": {"1" * 5000}}}'
DEPTH = f'{{"n": {"[" * 3000 + "]" * 3000}}}'

UNREADABLE = {
    "null": "are a JSON NoneType, not an object",
    "7": "are a JSON int, not an object",
    '"text"': "are a JSON str, not an object",
    "[1]": "are a JSON list, not an object",
    '{"n": "1"}': "argument n must be an int, not str",
    '{"n": null}': "argument n must be an int, not NoneType",
    '{"n": 1.5}': "argument n must be an int, not float",
    '{"n": {"py/object": "os.system"}}': "argument n must be an int, not dict",
    DIGITS: "are not JSON that can be read",
    # The json of newer Pythons reads it; then it is of the wrong type.
    DEPTH: "stored argument",
}
"""The arguments of a job, and why they cannot be read."""

RUNS_ANYWAY = {
    "more attempts than there are": "jobs SET attempts = 32767 WHERE id = :id",
    "a time long past": "jobs SET run_at = '2001-01-01Z' WHERE id = :id",
    "another place": "jobs SET queue = 'a\"b', priority = 0 WHERE id = :id",
    "an error of a megabyte": "jobs SET last_error = repeat('x', 1000000) WHERE id = :id",
    "times beyond all time": "jobs SET created_at = 'infinity', started_at = '-infinity' "
    "WHERE id = :id",
    "one attempt": "jobs SET max_attempts = 1 WHERE id = :id",
    "crashes": "message_queue SET crashes = 31000 WHERE target_id = :id",
}

EXHAUSTED = "message_queue SET attempt = 31000 WHERE target_id = :id"

NEVER_RUNS = {
    "it has neither": "DELETE FROM pgqueue.message_queue WHERE target_id = :id",
    "a message stands where its job says": "UPDATE pgqueue.message_queue SET queue = 'a''b\"; --' "
    "WHERE target_id = :id",
    "has a dead letter": "UPDATE pgqueue.jobs SET outcome = 'failed', finished_at = now() "
    "WHERE id = :id",
}
"""What no worker can mend, and what the check says of it."""

REFUSED = [
    "jobs SET args = NULL",
    "jobs SET task = NULL",
    "jobs SET queue = NULL",
    "jobs SET max_attempts = 0",
    "jobs SET max_attempts = 30001",
    "jobs SET max_attempts = NULL",
    "jobs SET attempts = NULL",
    "jobs SET priority = 10",
    "jobs SET run_at = 'infinity'",
    "jobs SET run_at = '-infinity'",
    "jobs SET run_at = '0044-03-15 BC'",
    "jobs SET outcome = 'done', finished_at = now()",
    "jobs SET outcome = 'failed'",
    "jobs SET finished_at = now()",
    "message_queue SET attempt = -1",
    "message_queue SET attempt = 31001",
    "message_queue SET crashes = -1",
    "message_queue SET crashes = 31001",
    "message_queue SET priority = 12",
    "message_queue SET priority = -1",
    "message_queue SET run_at = 'infinity'",
    "message_queue SET run_at = '-infinity'",
    "message_queue SET run_at = '10000-01-01 00:00:00+00'",
    "message_queue SET queue = NULL",
    "message_queue SET task = NULL",
    "message_queue SET target_id = NULL",
    "message_queue SET alone = NULL",
    "leases SET attempt = 32767",
    "leases SET attempt = 0",
    "leases SET crashes = -1",
    "leases SET worker_id = NULL",
]
"""What the tables themselves do not take: some of it would fail the claims of all."""
