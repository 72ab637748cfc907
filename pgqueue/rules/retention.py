"""Retention: how long ended jobs stay in the tables, and which rule applies to a job."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pgqueue.errors import OptionError

LONGEST = timedelta(days=36_525)
AT_ONCE = timedelta(0)
LEFT_OVER = timedelta(days=14)
"""When pruning looks for jobs that could not be deleted as they succeeded, if for no others."""
FOR_EVER = -1.0
"""In the rules of a statement: no job of this outcome is deleted."""


def _is_span(value: Any) -> bool:
    return isinstance(value, timedelta) and AT_ONCE <= value <= LONGEST


@dataclass(frozen=True, slots=True)
class Keep:
    """How long ended jobs stay, by their outcome.  None keeps them for ever.

    Args:
        succeeded: How long succeeded jobs stay.  ``timedelta(0)`` deletes the job in the
            transaction that ends it.
        cancelled: How long cancelled jobs stay; they are deleted by the next round of pruning at
            the earliest.
        failed: How long failed jobs stay; likewise.

    Raises:
        OptionError: A value is no timedelta from 0 on.

    Example:
        >>> keep = Keep(succeeded=timedelta(days=1), failed=None)
    """

    succeeded: timedelta | None = timedelta(days=14)
    cancelled: timedelta | None = timedelta(days=14)
    failed: timedelta | None = timedelta(days=90)

    def __post_init__(self) -> None:
        for outcome, span in self._spans():
            if span is not None and not _is_span(span):
                raise OptionError(
                    f"Keep: {outcome} is {span!r}; give a timedelta from zero to {LONGEST.days} "
                    "days, or None to keep these jobs for ever"
                )

    def seconds(self) -> dict[str, float]:
        """The same as numbers, for a statement."""
        return {
            outcome: FOR_EVER if span is None else span.total_seconds()
            for outcome, span in self._spans()
        }

    def _spans(self) -> Iterator[tuple[str, timedelta | None]]:
        yield "succeeded", self.succeeded
        yield "cancelled", self.cancelled
        yield "failed", self.failed


DEFAULT_KEEP = Keep()
KEEP_ALL = Keep(succeeded=None, cancelled=None, failed=None)


def keep_of(value: Any, where: str) -> Keep:
    """Return the Keep that an option means; raises OptionError.

    A timedelta is for succeeded and cancelled jobs.  Failed jobs stay for 90 days, or as long as
    the others if that is longer.
    """
    if isinstance(value, Keep):
        return value
    if value is None:
        return KEEP_ALL
    if not _is_span(value):
        raise OptionError(
            f"{where}keep is {value!r}; give a timedelta from zero to {LONGEST.days} days, a Keep, "
            "or None to keep all jobs for ever"
        )
    assert DEFAULT_KEEP.failed is not None
    return Keep(succeeded=value, cancelled=value, failed=max(value, DEFAULT_KEEP.failed))


@dataclass(frozen=True, slots=True)
class Retention:
    """The rules of an application.

    A job has the rule of its task, else that of its queue, else the default.  A job of a task that
    is not in ``tasks`` has no rule, and stays.
    """

    default: Keep
    queues: Mapping[str, Keep]
    tasks: Mapping[str, Keep | None]
    """All tasks of the application; None for a task without a rule of its own."""
    application: str = ""
    """The name of the application, whose batches have the default rule."""

    def keep(self, task: str, queue: str) -> Keep:
        """The rule of a known task's jobs in a queue."""
        return self.tasks.get(task) or self.queues.get(queue, self.default)

    def deletes_at_once(self, task: str, queue: str) -> bool:
        """Whether a job is deleted in the transaction in which it succeeds."""
        return self.keep(task, queue).succeeded == AT_ONCE

    @property
    def ever_deletes_at_once(self) -> bool:
        """Whether the settles have to ask :meth:`deletes_at_once` at all."""
        return any(keep.succeeded == AT_ONCE for keep in self._rules())

    @property
    def shortest(self) -> float | None:
        """Seconds before which pruning looks for no succeeded job; None if all stay for ever.

        Few jobs are left of those that are deleted when they succeed: they are found late.
        """
        spans = [keep.succeeded for keep in self._rules() if keep.succeeded is not None]
        if not spans:
            return None
        return min((span for span in spans if span), default=LEFT_OVER).total_seconds()

    @property
    def ever_prunes_dead(self) -> bool:
        """Whether failed or cancelled jobs are ever deleted."""
        spans = {span for keep in self._rules() for span in (keep.failed, keep.cancelled)}
        return spans != {None}

    def parameters(self) -> dict[str, str]:
        """The rules as the parameters of a statement; a task without a rule has an empty one."""
        tasks = {name: keep.seconds() if keep else {} for name, keep in self.tasks.items()}
        queues = {name: keep.seconds() for name, keep in self.queues.items()}
        return {
            "keep_of_tasks": json.dumps(tasks),
            "keep_of_queues": json.dumps(queues),
            "keep_of_others": json.dumps(self.default.seconds()),
        }

    def _rules(self) -> Iterator[Keep]:
        yield self.default
        yield from self.queues.values()
        yield from (keep for keep in self.tasks.values() if keep is not None)
