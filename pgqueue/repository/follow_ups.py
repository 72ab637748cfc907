"""Follow-ups: the job that a failed or succeeded job names in its meta, enqueued by the settle.

The description is in the job and not in the worker, so any worker that settles or rescues the job
can enqueue the follow-up, also one that does not know the task.
"""

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from pgqueue.meta import RESERVED
from pgqueue.models import DEFAULT_MAX_ATTEMPTS, DEFAULT_PRIORITY
from pgqueue.repository.messages import DISPATCHED, MESSAGE_COLUMNS, message_rows
from pgqueue.repository.tables import (
    FAILED,
    SUCCEEDED,
    clock,
    jobs,
    message_queue,
    pg,
    wake_up_call,
)

ON_FAILED = "pgqueue.on_failed"
"""The key, in the meta of a job, of the description of what follows its failure."""
ON_SUCCESS = "pgqueue.on_success"
"""The same for its success."""

MOST_ATTEMPTS_OF_FOLLOW_UP = 9999

_KEYS = {
    FAILED: sa.cast(sa.literal_column(f"'{ON_FAILED}'", sa.Text), sa.Text),
    SUCCEEDED: sa.cast(sa.literal_column(f"'{ON_SUCCESS}'", sa.Text), sa.Text),
}
_NO_RESULT = sa.literal_column("'{}'::jsonb", JSONB)

# The description may be written by hand.  A value that the tables refuse would fail the settle of
# a whole batch: such a description counts as none.
_QUEUE_NAME = sa.literal_column("'^[A-Za-z0-9_.:-]{1,64}$'", sa.Text)
_TASK_NAME = sa.literal_column(r"'^\S{1,200}$'", sa.Text)
_PRIORITY = sa.literal_column("'^[0-9]$'", sa.Text)
_MAX_ATTEMPTS = sa.literal_column("'^[1-9][0-9]{0,3}$'", sa.Text)


def follow_up_messages(job: sa.CTE) -> sa.CTE:
    """Insert the follow-ups of settled jobs that have failed or succeeded, and their messages.

    Wakes a sleeping worker, as an enqueue does.
    """
    names = ("task", "queue", "argument", "result")
    task, queue, argument, result = (_setting(job, name) for name in names)
    own_result = pg.jsonb_build_object(result, job.c.result, type_=JSONB)
    values: dict[str, sa.ColumnElement[Any]] = {
        "queue": queue,
        "task": task,
        "args": pg.jsonb_build_object(argument, job.c.id, type_=JSONB).op("||")(
            sa.case((result.is_not(None), own_result), else_=_NO_RESULT)
        ),
        "priority": _number(_setting(job, "priority"), _PRIORITY, DEFAULT_PRIORITY),
        "max_attempts": _number(_setting(job, "max_attempts"), _MAX_ATTEMPTS, DEFAULT_MAX_ATTEMPTS),
        "run_at": clock(),
        "meta": _meta_of_the_application(job.c.meta),
    }
    rows = sa.select(*values.values()).where(
        job.c.outcome.in_([*_KEYS]),
        task.regexp_match(_TASK_NAME),
        queue.regexp_match(_QUEUE_NAME),
        argument.is_not(None),
    )
    follow_up = (
        sa.insert(jobs).from_select(list(values), rows).returning(*DISPATCHED).cte("follow_up")
    )
    return (
        sa.insert(message_queue)
        .from_select(MESSAGE_COLUMNS, message_rows(follow_up))
        .returning(wake_up_call())
        .cte("follow_up_message")
    )


def _meta_of_the_application(meta: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """This meta without what pgqueue has noted about the failed job itself."""
    key = pg.jsonb_object_keys(meta, type_=sa.Text).column_valued("key")
    reserved = sa.select(pg.array_agg(key, type_=ARRAY(sa.Text))).where(
        pg.starts_with(key, sa.literal_column(f"'{RESERVED}'", sa.Text))
    )
    return meta.op("-", return_type=JSONB())(reserved.scalar_subquery())


def _setting(job: sa.CTE, name: str) -> sa.ColumnElement[str]:
    key = sa.case(*((job.c.outcome == outcome, key) for outcome, key in _KEYS.items()))
    return pg.jsonb_extract_path_text(
        job.c.meta, key, sa.literal_column(f"'{name}'", sa.Text), type_=sa.Text
    )


def _number(
    text: sa.ColumnElement[str], pattern: sa.ColumnElement[str], default: int
) -> sa.ColumnElement[int]:
    written = sa.case(
        (text.regexp_match(pattern), text), else_=sa.literal_column(f"'{default}'", sa.Text)
    )
    return sa.cast(written, sa.SmallInteger)
