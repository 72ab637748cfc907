"""The rules of schedules: computes the ticks of a rule, and decides which of them get a job.

The functions do no I/O; their time arguments come from the database.  cronsim reads a cron
expression as wall-clock times without a zone.  The functions here decide what such a time means on
a day on which the clocks change.  Given a zone, cronsim itself drops a run at a skipped hour, and
one of ``30 * * * *`` where clocks are set back by half an hour.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from enum import StrEnum
from itertools import takewhile
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError
from cronsim.explain import Expression

from pgqueue.errors import OptionError
from pgqueue.rules.spans import exactly

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SHORTEST = timedelta(seconds=1)
LONGEST = timedelta(days=36_525)
SECOND = timedelta(seconds=1)
LATE = timedelta(minutes=1)
"""With ``catch_up="none"``, a tick that is late by more than this counts as missed."""
MOST_CAUGHT_UP = 1000

LONGEST_SHOWN = 100
"""Characters of an expression or a zone in an error."""

OF_THE_MACHINE = ("localtime", "posixrules")
"""Names of files that are another zone on each machine."""

FIELDS = {
    "minute": "0 to 59",
    "hour": "0 to 23",
    "day-of-month": "1 to the last day of the months in field 4, L or LW",
    "month": "1 to 12, or JAN to DEC",
    "day-of-week": "0 to 7, or SUN to SAT",
}
"""What each field of a cron expression takes, besides ``*``, lists, ranges and steps."""
WORDS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
"""Words for expressions, as in crontab files."""
DAYS = ("or", "and")
"""What a day must match if both the day of the month and that of the week are restricted."""
CATCH_UP = {"none": 0, "last": 1}


class Overlap(StrEnum):
    """What a tick does while the job of the previous tick is unfinished."""

    ALLOW = "allow"
    SKIP = "skip"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class ScheduleRule:
    """A cron expression in a zone, or an interval."""

    cron: str | None
    every: timedelta | None
    timezone: str = "UTC"
    days: str = "or"
    """"and": a day must match both the day of the month and that of the week."""

    def in_words(self) -> str:
        """The rule as an English sentence, without its zone."""
        if self.every is not None:
            return f"Every {exactly(self.every)}"
        expression = Expression(str(self.cron).upper().split())
        expression.day_and = expression.day_and or self.days == "and"
        return expression.explain()

    def ticks(self, after: datetime) -> Iterator[datetime]:
        """Yield the ticks after a time, in UTC.  Ends if there is no tick in the next 50 years."""
        tick = self.next_tick(after)
        while tick is not None:
            yield tick
            tick = self.next_tick(tick)

    def next_tick(self, after: datetime) -> datetime | None:
        """Return the first tick after a time, in UTC."""
        if self.every is not None:
            # Counted from the epoch, so that the start of a worker does not move the ticks.
            return EPOCH + ((after - EPOCH) // self.every + 1) * self.every
        local = after.astimezone(zone_of(self.timezone))
        _, hour, *_ = str(self.cron).split()
        if hour != "*":
            return next((tick for tick in self._once(local) if tick > after), None)
        found = [next((tick for tick in self._passing(local) if tick > after), None)]
        if length := _left_of_first_pass(local):
            # The second pass begins again before this time of the clock.
            repeated = self._passing(local, back=length)
            found.append(next((tick for tick in repeated if tick > after), None))
        return min((tick for tick in found if tick is not None), default=None)

    def latest(self, after: datetime, last: datetime, most: int) -> list[datetime]:
        """Return the last ``most`` ticks after a time and up to ``last``, in order.

        It searches backwards in growing steps, so that it does not compute every tick of a long
        outage.
        """
        span = timedelta(minutes=1)
        while True:
            start = max(after, last - span)
            found = list(takewhile(lambda tick: tick <= last, self.ticks(start)))
            if len(found) >= most or start == after:
                return found[-most:]
            span *= 8

    def _walls(self, local: datetime, back: timedelta = timedelta(0)) -> Iterator[datetime]:
        """Yield the wall-clock times of the expression after a local time."""
        walls = CronSim(str(self.cron), local.replace(tzinfo=None) - back)
        walls.day_and = walls.day_and or self.days == "and"
        return walls

    def _once(self, local: datetime) -> Iterator[datetime]:
        """Yield each named time once.

        A skipped time is moved to the end of the gap; of a repeated time, the first is used.
        """
        for wall in self._walls(local):
            there = wall.replace(tzinfo=local.tzinfo)
            yield there.astimezone(UTC) if _exists(there) else _end_of_gap(there)

    def _passing(self, local: datetime, back: timedelta = timedelta(0)) -> Iterator[datetime]:
        """Yield each named time as often as the clocks show it: twice, once or never."""
        for wall in self._walls(local, back):
            there = wall.replace(tzinfo=local.tzinfo)
            if _exists(there):
                yield there.astimezone(UTC)
                if _offset(there) != _offset(there.replace(fold=1)):
                    yield there.replace(fold=1).astimezone(UTC)


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a schedule when one of its ticks is due."""

    next_at: datetime
    catch_up: int
    overlap: str
    is_running: bool
    """Whether the job of the last tick is unfinished."""


@dataclass(frozen=True, slots=True)
class Firing:
    """The ticks that get a job now, and the new state of the schedule."""

    ticks: tuple[datetime, ...]
    last_tick_at: datetime
    next_at: datetime | None


def decide(rule: ScheduleRule, standing: Standing, now: datetime) -> Firing | None:
    """Decide which ticks are fired now, by the database's clock; None if the due tick waits.

    In the result, ``next_at`` is after ``last_tick_at``, and ``last_tick_at`` is not before the
    due tick.  No tick is therefore fired twice, even if the rule or the clock has changed.
    """
    # The tick in the row is fired even if the rules of its zone have changed since it was written.
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


def next_after(rule: ScheduleRule, now: datetime, last_tick_at: datetime | None) -> datetime | None:
    """Return the next tick of a new, changed or resumed schedule.  Missed ticks are not fired."""
    return rule.next_tick(now if last_tick_at is None else max(now, last_tick_at))


def checked_rule(
    where: str, cron: Any, every: Any, timezone: Any, days: Any = "or"
) -> ScheduleRule:
    """Return a rule that has at least one tick.  Raises OptionError."""
    if (cron is None) == (every is None):
        found = "neither" if cron is None else "both"
        raise OptionError(
            f"{where}{found} of a cron expression and every= given; give one of them, as "
            '"0 3 * * *" or every=timedelta(minutes=5)'
        )
    _check_zone(where, timezone)
    if days not in DAYS:
        raise OptionError(f"{where}days is {days!r}; give 'or' or 'and'")
    if every is not None:
        if not isinstance(every, timedelta) or not SHORTEST <= every <= LONGEST:
            raise OptionError(
                f"{where}every is {every!r}; give a timedelta from one second to {LONGEST.days} "
                "days"
            )
        if days != "or":
            raise OptionError(f"{where}days is for a cron expression; omit it with every=")
        return ScheduleRule(None, every, timezone)
    rule = ScheduleRule(_checked_cron(where, cron), None, timezone, days)
    if days == "and" and "*" in (rule.cron or "").split()[2::2]:
        raise OptionError(
            f"{where}days='and' is for an expression with a day of the month and a day of the "
            f"week, and {cron!r} has a *; omit days"
        )
    if rule.next_tick(EPOCH + 50 * timedelta(days=365)) is None:
        raise OptionError(f"{where}cron expression {cron!r} names no day of the calendar")
    return rule


def checked_catch_up(where: str, catch_up: Any) -> int:
    """Return how many missed ticks get a job.  Raises OptionError."""
    if isinstance(catch_up, str) and catch_up in CATCH_UP:
        return CATCH_UP[catch_up]
    if type(catch_up) is not int or not 1 <= catch_up <= MOST_CAUGHT_UP:
        raise OptionError(
            f"{where}catch_up is {catch_up!r}; give 'none', 'last' or a whole number from 1 to "
            f"{MOST_CAUGHT_UP}"
        )
    return catch_up


def checked_overlap(where: str, overlap: Any, catch_up: int) -> str:
    """Return the checked overlap.  Raises OptionError."""
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
    if cron.strip() == "@reboot":
        raise OptionError(
            f"{where}there is no @reboot: workers start often; enqueue where your application "
            "starts, with a unique key"
        )
    fields = WORDS.get(cron.strip(), cron).split()
    shown = f"{where}cron expression {repr(cron)[:LONGEST_SHOWN]}"
    if len(fields) != len(FIELDS):
        raise OptionError(
            f"{shown} needs five fields, not {len(fields)}: give {', '.join(FIELDS)}"
            f"; or one of {', '.join(WORDS)}"
        )
    try:
        CronSim(" ".join(fields), EPOCH.replace(tzinfo=None))
    except CronSimError as error:
        place = _place(str(error), fields)
        raise OptionError(f"{shown}: {place}") from error
    return " ".join(fields)


def _place(message: str, fields: list[str]) -> str:
    for number, (name, values) in enumerate(FIELDS.items()):
        if message.endswith(name):
            value = repr(fields[number])[:LONGEST_SHOWN]
            return f"field {number + 1}, the {name}, is {value}; it takes {values}"
    return message


def zone_of(name: str) -> tzinfo:
    """The time zone with this name.  UTC needs no zone files, which not every system has."""
    return UTC if name == "UTC" else ZoneInfo(name)


def _check_zone(where: str, timezone: Any) -> None:
    shown = f"{where}timezone is {repr(timezone)[:LONGEST_SHOWN]}"
    if timezone in OF_THE_MACHINE:
        raise OptionError(
            f"{shown}, which is another zone on each machine; give an IANA name as 'Europe/Berlin'"
        )
    try:
        zone_of(timezone)
    # Errors for a directory, a path outside the zone files, a file without a zone, or no str.
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
    """Whether the clocks show this time, which is not so in the gap when they are set forward."""
    back = there.astimezone(UTC).astimezone(there.tzinfo)
    return back.replace(tzinfo=None) == there.replace(tzinfo=None)


def _end_of_gap(there: datetime) -> datetime:
    """Return the time, in UTC, at which the clocks are set forward over a local time."""
    # With the later offset a skipped time is before the gap, with the earlier one after it.
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
    """How far the clocks will be set back, if this local time occurs twice; otherwise None."""
    if local.fold:
        return None
    return _offset(local) - _offset(local.replace(fold=1)) or None
