"""Whether a worker works: what ``Worker.health()`` returns."""

from dataclasses import dataclass

from pgqueue.repository.health import LONGEST_SILENCE


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """The state of a worker at one moment."""

    slots: int
    busy: int
    """Slots that run a handler."""
    heartbeat_age: float
    """Seconds since PostgreSQL has acknowledged a heartbeat."""
    claim_age: float
    """Seconds since the worker has looked for jobs."""
    stale: int
    """Attempts whose lease had passed to another worker; what they wrote was undone."""
    hanging: tuple[str, ...] = ()
    """Schedules whose tick is not fired because ``on_enqueue``, a unique key's function or the
    reading of the arguments does not return.  The worker goes on with all others."""

    @property
    def problems(self) -> list[str]:
        """Why the worker is not live; empty if it is.

        A worker whose slots are all busy need not look for jobs.
        """
        found = []
        if self.heartbeat_age > LONGEST_SILENCE:
            found.append(f"no heartbeat was acknowledged for {self.heartbeat_age:.0f} s")
        if self.claim_age > LONGEST_SILENCE and self.busy < self.slots:
            found.append(f"the worker has not looked for jobs for {self.claim_age:.0f} s")
        return found
