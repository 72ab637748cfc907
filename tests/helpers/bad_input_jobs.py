"""Bad rows, and handlers that go wrong."""

from datetime import timedelta
from threading import Event
from typing import Any

from bad_endings import MENDED, RAISED, RETURNED, fail_with
from bad_input_kinds import Damaged, Ending
from bad_rows import NEVER_RUNS, REFUSED, RUNS_ANYWAY, UNREADABLE
from sqlalchemy.orm import Session

from chaos.workers import PATIENCE
from pgqueue import JobContext, PgQueue, Retry

AT_ONCE = Retry.constant(timedelta(0))
CROWD = 500
UNKEPT = "unserialisable_result"
"""What stands in place of a result that cannot be kept."""

SECRET = "hunter2-in-a-local-variable"

COPIES = f"""
    WITH crowd AS (
        INSERT INTO pgqueue.jobs (queue, task, args, run_at, meta)
        SELECT queue, task, args, '2026-01-01Z', jsonb_build_object('copy_of', id)
        FROM pgqueue.jobs, generate_series(2, {CROWD}) WHERE id = :id
        RETURNING id, queue, priority, run_at, task
    )
    INSERT INTO pgqueue.message_queue (queue, priority, run_at, target_id, task)
    SELECT queue, priority, run_at, id, task FROM crowd
"""

UNFINISHED = "an unfinished job has a message or a lease"
UNATTEMPTED = "a succeeded job was attempted"
KNOWN_LATER = "rows.known_later"
"""A task that the first worker does not know, and the second does."""


def unreadable(name: str, *args: str) -> tuple[Damaged, ...]:
    """Stored arguments that cannot be read: each fails its own job, which is not started."""
    return tuple(
        Damaged(
            f"{name} {words:.12}" if len(args) > 1 else name,
            args=words,
            outcome="failed",
            said=UNREADABLE[words],
            result=None,
        )
        for words in args
    )


def refused(*words: str) -> tuple[Damaged, ...]:
    """Changes with these words, which the tables do not take: the job runs as if untried."""
    return tuple(
        Damaged(change, change=_of_one(change), refused="violates check constraint")
        for change in REFUSED
        if any(word in change for word in words)
    )


def harmless(name: str) -> Damaged:
    """A change that looks odd, and with which the job runs."""
    return Damaged(name, change=f"UPDATE pgqueue.{RUNS_ANYWAY[name]}")


def lost(name: str, words: str, rule: str) -> Damaged:
    """A change that no worker can mend, and the doctor can."""
    return Damaged(name, change=NEVER_RUNS[words], found=frozenset({rule}))


def renamed(name: str, task: str, **expected: Any) -> Damaged:
    """A job of a task that the worker does not know: it waits, and nothing is imported."""
    change = (
        f"UPDATE pgqueue.jobs SET task = '{task}' WHERE id = :id; "
        f"UPDATE pgqueue.message_queue SET task = '{task}' WHERE target_id = :id"
    )
    return Damaged(name, change=change, **expected)


def returned(*names: str) -> tuple[Ending, ...]:
    """Results that cannot be kept, which take nothing from the success."""
    return tuple(
        Ending(f"result {name}", RETURNED[name], "succeeded", result=UNKEPT) for name in names
    )


def mended(name: str, result: str) -> Ending:
    """A result of which a character is replaced."""
    return Ending(name, lambda: result, "succeeded", result=MENDED[result])


def raised(*names: str) -> tuple[Ending, ...]:
    """What is raised, twice, for it is tried again."""

    def failing(name: str) -> Ending:
        fail, said = RAISED[name]
        options = {"retry": AT_ONCE, "max_attempts": 2}
        return Ending(name, lambda: fail(), attempts=2, said=said, options=options)

    return tuple(map(failing, names))


def answered(name: str, answer: Any) -> Ending:
    """A retry function that is of no use: the job waits as if it had none."""

    def delay(attempt: int, error: BaseException) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return Ending(
        f"a retry function gives {name}",
        fail_with(ValueError("try again")),
        outcome=None,
        said="ValueError",
        logged="its retry function",
        options={"retry": Retry(delay)},
    )


def secret_raised() -> None:
    password = SECRET
    raise RuntimeError(f"a password of {len(password)} characters")


def change_arguments(ctx: JobContext, words: list[str]) -> list[str]:
    words.append("changed")
    if ctx.attempt == 1:
        raise ValueError("once more")
    return words


async def return_at_once() -> int:
    return 7


RELEASED = Event()
"""Set when all else has ended: what never returns must not outlive the tests."""


def never_return() -> None:
    RELEASED.wait(PATIENCE)


def never_return_though_cancelled(session: Session, ctx: JobContext) -> None:
    with Session(session.get_bind().engine) as own, own.begin():
        PgQueue().cancel(own, ctx.job_id)
    RELEASED.wait(PATIENCE)


def _of_one(change: str) -> str:
    key = "id" if change.startswith("jobs") else "target_id"
    return f"UPDATE pgqueue.{change} WHERE {key} = :id"
