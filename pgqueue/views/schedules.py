"""The schedules: when each one runs next, and how its last jobs have ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from pgqueue.errors import OptionError
from pgqueue.models import JobStatus
from pgqueue.repository.schedules import RECENT as RECENT
from pgqueue.repository.schedules import ScheduleState
from pgqueue.rules.ticks import zone_of


@dataclass(frozen=True, slots=True)
class ScheduleView:
    """A schedule with its next runs."""

    state: ScheduleState
    words: str
    """The rule as a sentence, or why this system cannot read it."""
    next_runs: Sequence[datetime]
    """In the zone of the schedule."""
    results: Sequence[tuple[int, JobStatus]] = ()
    """Its last jobs, the oldest first."""
    is_written: bool = True
    """False for a schedule of the code that no worker has written into the table so far."""

    @classmethod
    def of(
        cls,
        state: ScheduleState,
        runs: int,
        results: Sequence[tuple[int, JobStatus]] = (),
        *,
        is_written: bool = True,
    ) -> "ScheduleView":
        try:
            words, zone = state.rule.in_words(), zone_of(state.timezone)
            times = [time.astimezone(zone) for time in state.next_runs(runs)]
        except (OptionError, OverflowError) as error:  # no such zone here, or after the year 9999
            words, times = str(error), []
        return cls(state, words, times, results, is_written)

    @property
    def rule(self) -> str:
        """The rule as it was given."""
        state = self.state
        if state.cron is None:
            return f"every {state.every}"
        both = " (both days)" if state.days == "and" else ""
        return f"{state.cron}{both} {state.timezone}"
