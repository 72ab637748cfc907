"""The rules of schedules: which ticks a rule has, and which of them get a job.

Pure functions: times are arguments, and come from the database.  A cron expression is read by
cronsim, as wall-clock times without a zone; the functions here decide what such a time means on
a day on which the clocks change (docs/decisions/0022).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from itertools import takewhile
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from pgqueue.errors import OptionError

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SHORTEST = timedelta(seconds=1)
LONGEST = timedelta(days=36_525)
INSTANT = timedelta(microseconds=1)
SECOND = timedelta(seconds=1)
LATE = timedelta(minutes=1)
"""With ``catch_up="none"``, a tick that is later than this has been missed."""
MOST_CAUGHT_UP = 1000

LONGEST_SHOWN = 100
"""Characters of an expression or a zone in an error."""

OF_THE_MACHINE = ("localtime", "posixrules")
"""Names of files that are another zone on each machine."""

FIELDS = ("minute", "hour", "day-of-month", "month", "day-of-week")
CATCH_UP = {"none": 0, "last": 1}


class Overlap(StrEnum):
    """What a tick does while the job of the tick before is unfinished."""

    ALLOW = "allow"
    SKIP = "skip"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Rule:
    """A cron expression in a zone, or an interval."""

    cron: str | None
    every: timedelta | None
    timezone: str = "UTC"

    def ticks(self, after: datetime) -> Iterator[datetime]:
        """The ticks after a time, in UTC; ends where the rule has none in the next 50 years."""
        tick = self.next_tick(after)
        while tick is not None:
            yield tick
            tick = self.next_tick(tick)

    def next_tick(self, after: datetime) -> datetime | None:
        """The first tick after a time, in UTC."""
        if self.every is not None:
            # Counted from the epoch: the ticks do not move when a worker starts.
            return EPOCH + ((after - EPOCH) // self.every + 1) * self.every
        local = after.astimezone(ZoneInfo(self.timezone))
        if self._hour != "*":
            return next((tick for tick in self._once(local) if tick > after), None)
        found = [next((tick for tick in self._passing(local) if tick > after), None)]
        if length := _left_of_first_pass(local):
            # The second pass begins again before this time of the clock.
            repeated = self._passing(local, back=length)
            found.append(next((tick for tick in repeated if tick > after), None))
        return min((tick for tick in found if tick is not None), default=None)

    def latest(self, after: datetime, last: datetime, most: int) -> list[datetime]:
        """The last ``most`` ticks after a time and up to ``last``, in order.

        Looks back in growing steps: after an outage of a year, it does not visit each tick.
        """
        span = timedelta(minutes=1)
        while True:
            start = max(after, last - span)
            found = list(takewhile(lambda tick: tick <= last, self.ticks(start)))
            if len(found) >= most or start == after:
                return found[-most:]
            span *= 8

    @property
    def _hour(self) -> str:
        return str(self.cron).split()[1]

    def _walls(self, local: datetime, back: timedelta = timedelta(0)) -> Iterator[datetime]:
        """The times of the clock that the expression names after a local time."""
        return CronSim(str(self.cron), local.replace(tzinfo=None) - back)

    def _once(self, local: datetime) -> Iterator[datetime]:
        """Each named time once: at the end of the gap if it is skipped, and the first time if it
        comes twice."""
        for wall in self._walls(local):
            there = wall.replace(tzinfo=local.tzinfo)
            yield there.astimezone(UTC) if _exists(there) else _end_of_gap(there)

    def _passing(self, local: datetime, back: timedelta = timedelta(0)) -> Iterator[datetime]:
        """Each named time as often as the clocks show it: skipped times never."""
        for wall in self._walls(local, back):
            there = wall.replace(tzinfo=local.tzinfo)
            if _exists(there):
                yield there.astimezone(UTC)
                if _offset(there) != _offset(there.replace(fold=1)):
                    yield there.replace(fold=1).astimezone(UTC)


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a schedule stands when one of its ticks is due."""

    next_at: datetime
    catch_up: int
    overlap: str
    is_running: bool
    """Whether the job of the last tick is unfinished."""


@dataclass(frozen=True, slots=True)
class Firing:
    """The ticks that get a job now, and where the schedule stands then."""

    ticks: tuple[datetime, ...]
    last_tick_at: datetime
    next_at: datetime | None


def decide(rule: Rule, standing: Standing, now: datetime) -> Firing | None:
    """Decide what is fired at a time of the database; None if the due tick waits.

    ``next_at`` of the result is always after ``last_tick_at``, and ``last_tick_at`` after that of
    the standing: no tick is fired twice, whatever the rule and the clock were in between.
    """
    # The row's own tick counts, also if the rules of its zone have changed since it was written.
    most = max(standing.catch_up, 1)
    due = [standing.next_at, *rule.latest(standing.next_at, now, most)][-most:]
    passed = due[-1]
    if standing.catch_up == 0:
        due = [tick for tick in due if now - tick <= LATE]
    if standing.overlap == Overlap.WAIT:
        if standing.is_running:
            return None
        if len(due) > 1:
            return Firing((due[0],), due[0], due[1])
    if standing.overlap == Overlap.SKIP:
        due = [] if standing.is_running else due[-1:]
    return Firing(tuple(due), passed, rule.next_tick(max(passed, now)))


def next_after(rule: Rule, now: datetime, last_tick_at: datetime | None) -> datetime | None:
    """The next tick of a new, changed or resumed schedule: missed ones are not made up."""
    return rule.next_tick(now if last_tick_at is None else max(now, last_tick_at))


def checked_rule(where: str, cron: Any, every: Any, timezone: Any) -> Rule:
    """Return a rule that has ticks; raises OptionError."""
    if (cron is None) == (every is None):
        found = "neither" if cron is None else "both"
        raise OptionError(
            f"{where}{found} of a cron expression and every= given; give one of them, as "
            '"0 3 * * *" or every=timedelta(minutes=5)'
        )
    _check_zone(where, timezone)
    if every is not None:
        if not isinstance(every, timedelta) or not SHORTEST <= every <= LONGEST:
            raise OptionError(
                f"{where}every is {every!r}; give a timedelta from one second to {LONGEST.days} "
                "days"
            )
        return Rule(None, every, timezone)
    rule = Rule(_checked_cron(where, cron), None, timezone)
    if rule.next_tick(EPOCH + 50 * timedelta(days=365)) is None:
        raise OptionError(f"{where}cron expression {cron!r} names no day of the calendar")
    return rule


def checked_catch_up(where: str, catch_up: Any) -> int:
    """Return how many missed ticks get a job; raises OptionError."""
    if isinstance(catch_up, str) and catch_up in CATCH_UP:
        return CATCH_UP[catch_up]
    if type(catch_up) is not int or not 1 <= catch_up <= MOST_CAUGHT_UP:
        raise OptionError(
            f"{where}catch_up is {catch_up!r}; give 'none', 'last' or a whole number from 1 to "
            f"{MOST_CAUGHT_UP}"
        )
    return catch_up


def checked_overlap(where: str, overlap: Any, catch_up: int) -> str:
    """Return the overlap; raises OptionError."""
    if overlap not in list(Overlap):
        raise OptionError(
            f"{where}overlap is {overlap!r}; give {', '.join(map(repr, map(str, Overlap)))}"
        )
    if overlap == Overlap.WAIT and catch_up == 0:
        raise OptionError(
            f"{where}overlap='wait' makes a tick late, and catch_up='none' drops late ticks; give "
            "catch_up='last' or a number, or overlap='skip'"
        )
    return str(overlap)


def _checked_cron(where: str, cron: Any) -> str:
    if not isinstance(cron, str):
        raise OptionError(f"{where}the cron expression is {cron!r}; give a str as '0 3 * * *'")
    fields = cron.split()
    shown = f"{where}cron expression {repr(cron)[:LONGEST_SHOWN]}"
    if len(fields) != len(FIELDS):
        raise OptionError(f"{shown} needs five fields, not {len(fields)}: give {', '.join(FIELDS)}")
    try:
        CronSim(cron, EPOCH.replace(tzinfo=None))
    except CronSimError as error:
        place = _place(str(error), fields)
        raise OptionError(f"{shown}: {place}") from error
    return " ".join(fields)


def _place(said: str, fields: list[str]) -> str:
    for number, name in enumerate(FIELDS):
        if said.endswith(name):
            return f"field {number + 1}, the {name}, is {repr(fields[number])[:LONGEST_SHOWN]}"
    return said


def _check_zone(where: str, timezone: Any) -> None:
    shown = f"{where}timezone is {repr(timezone)[:LONGEST_SHOWN]}"
    if timezone in OF_THE_MACHINE:
        raise OptionError(
            f"{shown}, which is another zone on each machine; give an IANA name as 'Europe/Berlin'"
        )
    try:
        ZoneInfo(timezone)
    # A directory, a path outside, a file that is no zone, no str at all.
    except (ZoneInfoNotFoundError, ValueError, OSError, TypeError, AttributeError) as error:
        raise OptionError(
            f"{shown}, which this system does not have; give an IANA name as 'Europe/Berlin', and "
            "install the package tzdata if the system has no zones"
        ) from error


def _offset(there: datetime) -> timedelta:
    offset = there.utcoffset()
    assert offset is not None, "a time with a zone"
    return offset


def _exists(there: datetime) -> bool:
    """Whether the clocks show this time: not in the gap when they are set forward."""
    back = there.astimezone(UTC).astimezone(there.tzinfo)
    return back.replace(tzinfo=None) == there.replace(tzinfo=None)


def _end_of_gap(there: datetime) -> datetime:
    """The moment at which the clocks are set forward over a time."""
    # The offset after the gap puts a skipped time before it, and the offset before puts it after.
    low = there.replace(fold=1).astimezone(UTC)
    high = there.replace(fold=0).astimezone(UTC)
    before = _offset(low.astimezone(there.tzinfo))
    while high - low > SECOND:
        middle = (low + (high - low) / 2).replace(microsecond=0)
        if _offset(middle.astimezone(there.tzinfo)) == before:
            low = middle
        else:
            high = middle
    return high


def _left_of_first_pass(local: datetime) -> timedelta | None:
    """How far the clocks will be set back, if this time will come a second time; else None."""
    if local.fold:
        return None
    return _offset(local) - _offset(local.replace(fold=1)) or None
