"""Tasks that are deferred regularly."""

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .tasks import Options, Task

EVERY_SECONDS = re.compile(r"\* \* \* \* \* \*(?:/(\d+))?")


class PeriodicTask(NamedTuple):
    """A task, and when it is deferred."""

    task: "Task"
    cron: str
    periodic_id: str
    options: "Options"

    @property
    def rule(self) -> dict[str, Any]:
        """The rule in the form of ``PgQueue.schedule``, whose expressions have five fields.

        Raises:
            ValueError: There are six, and they mean more than an interval of seconds.
        """
        if len(self.cron.split()) <= 5:
            return {"cron": self.cron}
        found = EVERY_SECONDS.fullmatch(" ".join(self.cron.split()))
        if found is None or 60 % int(found[1] or 1):
            raise ValueError(
                f"{self.task.name}: the sixth field of {self.cron!r} can be * or */n alone, where "
                "n divides 60, with * in the five others"
            )
        return {"every": timedelta(seconds=int(found[1] or 1))}

    def kwargs(self, tick: datetime) -> Mapping[str, Any]:
        """The arguments of the job of a tick."""
        return {**(self.options.get("task_kwargs") or {}), "timestamp": int(tick.timestamp())}
