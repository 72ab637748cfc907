"""What an enqueue does when another job holds its unique key."""

from contextvars import ContextVar
from dataclasses import dataclass

from pgqueue.errors import DuplicateJob
from pgqueue.options import Options
from pgqueue.repository.claim import Claimed
from pgqueue.rules.unique import CHANGES_HOLDER, is_across_queues, when_free

running_job: ContextVar[Claimed | None] = ContextVar("pgqueue_running_job", default=None)
"""The job whose handler runs, or ran last, in this thread or asyncio task.

A slot does not reset it after the handler: it runs no other code of the application.
"""


def running_id() -> int | None:
    """The id of the job whose handler runs this code."""
    running = running_job.get()
    return None if running is None else running.job_id


@dataclass(frozen=True, slots=True)
class Enqueued:
    """What an enqueue says about a taken unique key."""

    task: str
    queue: str
    conflict: str
    """The option ``on_conflict``."""
    has_period: bool = False

    @classmethod
    def by(cls, options: Options) -> "Enqueued":
        has_period = options.unique is not None and options.unique.period is not None
        return cls(options.task, options.queue, options.conflict, has_period)


def check_holder(enqueued: Enqueued, holder_id: int, unique_key: str | None) -> None:
    """Raise DuplicateJob if an enqueue must not return the job that holds its unique key.

    A job that enqueues its successor under its own key would get itself, and a chain of jobs would
    end without an error.  A job that was not changed as the enqueue asked would lose its arguments.
    """
    running = running_job.get()
    across = is_across_queues(unique_key)
    is_caller = (
        running is not None
        and running.job_id == holder_id
        and (across or running.queue == enqueued.queue)
    )
    words = _refusal(enqueued, holder_is_caller=is_caller)
    if words:
        of_queue = "" if across else f" of queue {enqueued.queue!r}"
        reason = words.format(of_queue=of_queue, key=unique_key, free=when_free(unique_key))
        duplicate = DuplicateJob(f"task {enqueued.task}: job {holder_id}{reason}")
        duplicate.holder = holder_id
        raise duplicate


def _refusal(enqueued: Enqueued, *, holder_is_caller: bool) -> str:
    """What DuplicateJob says; empty if the enqueue returns the holder."""
    if enqueued.has_period and (holder_is_caller or enqueued.conflict != "return"):
        return (
            "{of_queue} holds the unique key {key!r} until its period is over, so no job "
            "was enqueued; enqueue one of the next period, with delay= or run_at="
        )
    if holder_is_caller:
        return (
            ", which is running this code, holds the unique key {key!r} until it ends, so no job "
            "was enqueued; give the next job another unique_key, for example one with its date, "
            "use unique=Unique(..., until='started'), or enqueue it after this job has ended"
        )
    if enqueued.conflict == "raise":
        return (
            "{of_queue} holds the unique key {key!r}, so no job was enqueued; wait until "
            "{free}, or use on_duplicate='return' to get it"
        )
    if enqueued.conflict == "cancel":
        return (
            "{of_queue} holds the unique key {key!r} and has ended, or is of another task, so it "
            "was not cancelled and no job was enqueued; enqueue again when {free}"
        )
    if enqueued.conflict in CHANGES_HOLDER:
        return (
            "{of_queue} holds the unique key {key!r} and has started, waits for other jobs, or is "
            "of another task, so it was not changed and no job was enqueued; enqueue again when "
            "{free}, or use until='started'"
        )
    return ""


def check_rows(options: Options, unique_keys: list[str | None]) -> None:
    """Raise DuplicateJob if two rows of one call have the same unique key and none may."""
    if options.conflict != "raise":
        return
    seen: dict[str, int] = {}
    for index, key in enumerate(unique_keys):
        if key is not None and seen.setdefault(key, index) != index:
            raise DuplicateJob(
                f"task {options.task}: rows {seen[key]} and {index} of enqueue_many have the same "
                f"unique key {key!r}, so no job was enqueued; drop one of them, or use "
                "on_duplicate='return'"
            )


def rows_to_place(options: Options, unique_keys: list[str | None]) -> dict[int, int]:
    """For each row of one call, the row that is enqueued for it, in the ascending order of keys.

    Rows with one key become one job.  As in one call after the other, ``replace`` and ``cancel``
    take the last of these rows, and any other conflict the first.
    """
    order = sorted(range(len(unique_keys)), key=lambda index: unique_keys[index] or "")
    if options.conflict not in CHANGES_HOLDER:
        return {index: index for index in order}  # the statement itself skips the others
    is_last = options.conflict in ("replace", "cancel")
    chosen = {unique_keys[index]: index for index in (order if is_last else reversed(order))}
    return {
        index: index if unique_keys[index] is None else chosen[unique_keys[index]]
        for index in order
    }
