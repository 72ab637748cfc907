"""How a claimer that finds no job goes to sleep, and for how long.

::

    busy --no job, twice--> two short waits --no job--> armed: one claim more --no job--> asleep
    asleep --the time of a poll is over--> one read --a job is due--> a claim
    asleep --a notification--> a claim
    any --a claim that found as many jobs as it asked for--> busy

An armed worker is notified by enqueuers; one that is busy is not, so that they save the
notification.
"""

BRIEF = (0.001, 0.002)
"""Seconds of the short waits after which a worker that was busy goes to sleep."""
FIRST_SLEEP = 0.005
SLEEP_SHARE = 0.98
"""Share of the poll interval to sleep.  The rest of the interval is for the claim and the start of
a job that became due right after the last poll."""
FALSE_ALARMS = 10
"""How many wake-ups in a row may find no job before the worker pauses after each further one.  A
few are normal: other workers have claimed the job."""


class Sleep:
    """The state of one claimer.  Pure: times are arguments."""

    def __init__(self, *, poll_interval: float) -> None:
        """``poll_interval``: in seconds."""
        self._longest = SLEEP_SHARE * poll_interval
        self._empty_claims = 0
        self._false_alarms = 0
        self._armed_at: float | None = None
        self.is_poll_due = False
        """Whether the last sleep lasted until the next poll, without a sign of a job."""

    @property
    def is_busy(self) -> bool:
        """Whether enqueuers need not notify this worker."""
        return self._armed_at is None

    @property
    def has_many_false_alarms(self) -> bool:
        return self._false_alarms > FALSE_ALARMS

    def found_jobs(self) -> None:
        """Learn of a claim with jobs."""
        self._empty_claims = self._false_alarms = 0

    def stay_awake(self) -> None:
        """Learn that there is more to claim: enqueuers notify this worker no longer."""
        self._armed_at = None

    def found_nothing(self) -> float | None:
        """Learn of a claim that found no message; returns the seconds of a short wait, or None if
        the worker is to go to sleep."""
        self._empty_claims += 1
        is_brief = self.is_busy and self._empty_claims <= len(BRIEF)
        return BRIEF[self._empty_claims - 1] if is_brief else None

    def armed(self, now: float) -> None:
        """Learn that enqueuers notify this worker from now on."""
        self._armed_at = now

    def notified(self) -> None:
        self._false_alarms += 1

    def seconds(self, now: float) -> float:
        """How long to sleep at most.

        An enqueuer that found no sleeper may commit only now.  Each sleep is as long as all sleeps
        before it, so the job waits no longer than its transaction took to commit.
        """
        lasted = now - (self._armed_at or now)
        return min(max(lasted, FIRST_SLEEP), self._longest)
