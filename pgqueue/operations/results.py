"""``Result``: what an action has done to one job."""

from dataclasses import dataclass
from enum import StrEnum


class Effect(StrEnum):
    """What an action has done to a job: a :class:`Change`, or why the action has failed for it."""

    CANCELLED = "cancelled"
    CANCEL_REQUESTED = "cancel_requested"
    REQUEUED = "requeued"
    DUE_NOW = "due_now"
    CHANGED = "changed"
    COPIED = "copied"
    DELETED = "deleted"
    UNCHANGED = "unchanged"
    NOT_FOUND = "not_found"
    KEY_TAKEN = "key_taken"
    REFUSED = "refused"
    """The new values of the job are wrong, its handler cannot be killed, or the job cannot be
    deleted."""
    LOCKED = "locked"
    """Another transaction held a lock on the job for longer than ``lock_timeout``, or waited for a
    lock of this transaction."""

    @property
    def is_failure(self) -> bool:
        return self in (Effect.NOT_FOUND, Effect.KEY_TAKEN, Effect.REFUSED, Effect.LOCKED)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an action on one job."""

    id: int
    change: Effect
    reason: str | None = None
    copy_id: int | None = None
    """The id of the new job, of a job that was copied."""

    @property
    def is_changed(self) -> bool:
        """Whether the job was changed."""
        return self.change is not Effect.UNCHANGED and not self.is_missed

    @property
    def is_missed(self) -> bool:
        """Whether the action has failed for the job.

        A job that was left unchanged because the action is not for it is not missed.
        """
        return self.change.is_failure

    def __str__(self) -> str:
        words = self.change.replace("_", " ")
        if self.copy_id is not None:
            words += f" as job {self.copy_id}"
        return f"{self.id}: {words}{f', because {self.reason}' if self.reason else ''}"
