"""By hand: a claim that is committed at once, and a status that marks running tasks.

DATABASE_URL=postgresql://... python -m examples.claim_with_cte.by_hand
"""

from datetime import timedelta

from sqlalchemy import Connection, Engine, Row, text

from examples.payments import open_shop, pay

TASKS = text("""
CREATE TABLE IF NOT EXISTS tasks (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    order_id bigint NOT NULL,
    status text NOT NULL DEFAULT 'pending',
    started_at timestamptz
)
""")

ENQUEUE = text("INSERT INTO tasks (order_id) VALUES (:order_id) RETURNING id")

CLAIM = text("""
WITH next_task AS (
    SELECT id
    FROM tasks
    WHERE status = 'pending'
    ORDER BY id
    LIMIT 1
    FOR UPDATE SKIP LOCKED
)
UPDATE tasks
SET status = 'running', started_at = now()
FROM next_task
WHERE tasks.id = next_task.id
RETURNING tasks.id, tasks.order_id
""")

# Correct, but slow: every session waits until the previous one has committed.
CLAIM_THAT_WAITS = text(CLAIM.text.replace("FOR UPDATE SKIP LOCKED", "FOR UPDATE"))

# Wrong, but rarely: no row is locked between the SELECT and the UPDATE.
CLAIM_WITHOUT_A_LOCK = text("""
UPDATE tasks
SET status = 'running', started_at = now()
WHERE id = (SELECT id FROM tasks WHERE status = 'pending' ORDER BY id LIMIT 1)
RETURNING id, order_id
""")

SUCCEED = text("UPDATE tasks SET status = 'done' WHERE id = :id")

REAP = text("""
UPDATE tasks
SET status = 'pending'
WHERE status = 'running' AND started_at < now() - :longest
""")

Task = Row[tuple[int, int]]


def create_tables(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(TASKS)


def enqueue(connection: Connection, order_id: int) -> int:
    task_id: int = connection.execute(ENQUEUE, {"order_id": order_id}).scalar_one()
    return task_id


def claim(engine: Engine) -> Task | None:
    with engine.begin() as connection:
        return connection.execute(CLAIM).one_or_none()


def finish(engine: Engine, task: Task) -> None:
    """Do the work, and mark the task as done in the same transaction."""
    with engine.begin() as connection:
        pay(connection, task.order_id)
        connection.execute(SUCCEED, {"id": task.id})


def reap(engine: Engine, longest: timedelta) -> int:
    """Reset tasks that have been running for too long, and return their number."""
    with engine.begin() as connection:
        return connection.execute(REAP, {"longest": longest}).rowcount


def work_until_empty(engine: Engine) -> None:
    while task := claim(engine):
        finish(engine, task)


if __name__ == "__main__":
    engine = open_shop()
    create_tables(engine)
    with engine.begin() as connection:
        for order_id in (1, 2, 3):
            enqueue(connection, order_id)
    work_until_empty(engine)
    with engine.connect() as connection:
        for task in connection.execute(text("SELECT * FROM tasks ORDER BY id")):
            print(task)
