"""A job that is about to be enqueued, and what became of it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from pgqueue.statements.enqueueing import Start
from pgqueue.unique import Unique


@dataclass(frozen=True, slots=True)
class NewJob:
    """The values that all jobs of one enqueue have in common."""

    task: str
    queue: str
    priority: int
    max_attempts: int
    notify: bool
    delay: timedelta | None = None
    run_at: datetime | None = None
    meta: str | None = None
    tags: Sequence[str] = ()
    unique: Unique | None = None

    @property
    def changes_holder(self) -> bool:
        """Whether the job that holds the unique key may be changed instead."""
        return self.unique is not None and self.unique.changes_holder

    @property
    def is_labelled(self) -> bool:
        return self.meta is not None or bool(self.tags)

    @property
    def labels(self) -> dict[str, Any]:
        """Meta and tags as attributes of a Job, if there are any."""
        if not self.is_labelled:
            return {}
        meta = None if self.meta is None else json.loads(self.meta)
        return {"meta": meta, "tags": list(self.tags) or None}

    @property
    def start(self) -> Start:
        if self.run_at is not None:
            return Start.AT
        return Start.NOW if self.delay is None else Start.AFTER

    def parameters(self) -> dict[str, Any]:
        parameters: dict[str, Any] = {
            "task": self.task,
            "queue": self.queue,
            "priority": self.priority,
            "max_attempts": self.max_attempts,
        }
        if self.run_at is not None:
            parameters["run_at"] = self.run_at
        elif self.delay is not None:
            parameters["delay"] = self.delay
        if self.is_labelled:
            parameters["meta"] = self.meta
            parameters["tags"] = json.dumps(self.tags) if self.tags else None
        return parameters


class Enqueued(NamedTuple):
    """The values that the database chose for a new job."""

    id: int
    run_at: datetime
    created_at: datetime


class Row(NamedTuple):
    """One row of an enqueue with unique keys."""

    args: Any
    unique_key: str | None
    limit_keys: str | None = None


class Placed(NamedTuple):
    """The job of one row of an enqueue with unique keys."""

    id: int
    is_new: bool
    """False for a job that already held the key."""
    is_changed: bool = False
    """Whether an enqueue that may change the holder did so, or has found it at its bound."""


class KeyHolder(NamedTuple):
    """The job that has a unique key."""

    id: int
    is_readable: bool
    """Whether the role may read the whole job, or only the columns needed to enqueue."""
