"""The rules of schedules: what a time of the clock means in every zone, and which ticks get a job.

The oracle walks through a window minute by minute, and knows nothing of cronsim.
"""

import sys
import zoneinfo
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgqueue import OptionError
from pgqueue.rules.ticks import (
    Firing,
    Overlap,
    ScheduleRule,
    Standing,
    checked_catch_up,
    checked_overlap,
    checked_rule,
    decide,
    next_after,
)

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
NOW = datetime(2026, 11, 23, 12, 0, 30, tzinfo=UTC)

CHANGES = {
    "Europe/Berlin": ("2026-03-29", "2026-10-25"),
    "Europe/London": ("2026-03-29", "2026-10-25"),
    "Europe/Dublin": ("2026-03-29", "2026-10-25"),  # summer is the standard time, legally
    "America/New_York": ("2026-03-08", "2026-11-01"),
    "America/St_Johns": ("2006-04-02", "2006-10-29"),  # at one minute past midnight
    "America/Havana": ("2026-03-08", "2026-11-01"),  # at midnight
    "America/Sao_Paulo": ("2018-11-04", "2018-02-18"),  # at midnight; has given it up in 2019
    "Australia/Lord_Howe": ("2026-10-04", "2026-04-05"),  # half an hour
    "Australia/Sydney": ("2026-10-04", "2026-04-05"),
    "Pacific/Auckland": ("2026-09-27", "2026-04-05"),
    "Africa/Casablanca": ("2025-04-06", "2025-02-23"),  # around Ramadan
    "Asia/Tehran": ("2022-03-22", "2022-09-21"),  # at midnight; has given it up in 2022
    "Europe/Moscow": ("2011-03-27", "2014-10-26"),  # changed its standard time twice
    "Asia/Pyongyang": ("2018-05-05", "2015-08-15"),  # by half an hour, and back
    "Pacific/Apia": ("2011-12-30", "2011-04-02"),  # has left a whole day out
    "Asia/Kathmandu": ("1986-01-01", "1985-06-01"),  # by a quarter of an hour
}
"""Zones of both hemispheres, each with a day on which clocks are set forward, and one back."""

DAYS = [(zone, day) for zone, days in CHANGES.items() for day in days]


def walls(minutes: frozenset[int], hours: frozenset[int], days: list[Any]) -> list[datetime]:
    """The times that an expression names on these days."""
    found = [
        datetime(day.year, day.month, day.day, hour, minute)
        for day in days
        for hour in hours
        for minute in minutes
    ]
    return sorted(found)


def shown(zone: ZoneInfo, start: datetime, end: datetime) -> Iterator[tuple[datetime, datetime]]:
    """Each minute that passes, and what the clocks show."""
    moment = start
    while moment < end:
        yield moment, moment.astimezone(zone).replace(tzinfo=None)
        moment += MINUTE


def expected(
    zone: ZoneInfo, minutes: frozenset[int], hours: frozenset[int] | None, day: datetime
) -> list[datetime]:
    """The ticks within two days around a day, found by looking at the clock each minute."""
    start, end = day - 2 * DAY, day + 3 * DAY
    passing = list(shown(zone, start, end))
    within = [day - DAY, day + DAY + DAY]
    if hours is None:
        ticks = {moment for moment, wall in passing if wall.minute in minutes}
    else:
        ticks = set()
        days = sorted({(day + n * DAY).date() for n in range(-3, 5)})
        for wall in walls(minutes, hours, days):
            # The first minute at which the clock shows this time, or a later one.
            later = next((moment for moment, now in passing if now >= wall), start)
            if later > start:
                ticks.add(later)
    return sorted(tick for tick in ticks if within[0] < tick <= within[1])


numbers = st.frozensets(st.integers(0, 59), min_size=1, max_size=3)
hours = st.none() | st.frozensets(st.integers(0, 23), min_size=1, max_size=3)


def listed(numbers: frozenset[int]) -> str:
    return ",".join(map(str, sorted(numbers)))


@pytest.fixture
def without_zone_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on Windows and in a distroless image."""
    for name in [*sys.modules, "tzdata"]:
        if name.partition(".")[0] == "tzdata":
            monkeypatch.setitem(sys.modules, name, None)
    before = zoneinfo.TZPATH
    zoneinfo.reset_tzpath(to=[])
    ZoneInfo.clear_cache()
    yield
    zoneinfo.reset_tzpath(to=before)
    ZoneInfo.clear_cache()


@pytest.mark.usefixtures("without_zone_files")
@pytest.mark.parametrize(("cron", "every"), [("30 12 * * *", None), (None, HOUR)])
def test_utc_needs_no_zone_files(cron: str | None, every: timedelta | None) -> None:
    with pytest.raises(OptionError, match="install the package tzdata"):
        checked_rule("", cron, every, "Europe/Berlin")

    rule = checked_rule("", cron, every, "UTC")

    assert rule.next_tick(NOW) == NOW.replace(second=0) + (HOUR if every else 30 * MINUTE)


@given(place=st.sampled_from(DAYS), minutes=numbers, hours=hours)
def test_ticks_are_those_that_a_look_at_the_clock_each_minute_finds(
    place: tuple[str, str], minutes: frozenset[int], hours: frozenset[int] | None
) -> None:
    zone, day = place
    noon = datetime.fromisoformat(f"{day}T12:00+00:00")
    hour = "*" if hours is None else listed(hours)
    rule = ScheduleRule(f"{listed(minutes)} {hour} * * *", None, zone)

    ticks = takewhile(lambda tick: tick <= noon + 2 * DAY, rule.ticks(noon - DAY))

    assert list(islice(ticks, 2000)) == expected(ZoneInfo(zone), minutes, hours, noon)


def at(zone: str, rule: str, day: str) -> list[str]:
    """The local times, with their offsets, of the ticks of one day."""
    tz = ZoneInfo(zone)
    start = datetime.fromisoformat(f"{day}T00:00").replace(tzinfo=tz).astimezone(UTC)
    end = start + 26 * HOUR
    ticks = ScheduleRule(rule, None, zone).ticks(start - timedelta(seconds=1))
    local = (tick.astimezone(tz) for tick in islice(ticks, 100) if tick < end)
    return [one.strftime("%H:%M%z") for one in local if one.date().isoformat() == day]


class TestClocksSetForward:
    def test_a_skipped_time_runs_once_at_the_end_of_the_gap(self) -> None:
        assert at("Europe/Berlin", "30 2 * * *", "2026-03-29") == ["03:00+0200"]
        assert at("America/New_York", "15 2 * * *", "2026-03-08") == ["03:00-0400"]
        assert at("Australia/Lord_Howe", "10 2 * * *", "2026-10-04") == ["02:30+1100"]
        assert at("America/Havana", "5 0 * * *", "2026-03-08") == ["01:00-0400"]

    def test_several_skipped_times_run_once_together(self) -> None:
        assert at("Europe/Berlin", "*/10 2,3 * * *", "2026-03-29") == [
            *("03:00+0200", "03:10+0200", "03:20+0200"),
            *("03:30+0200", "03:40+0200", "03:50+0200"),
        ]

    def test_a_day_that_a_zone_leaves_out_runs_once_when_it_is_over(self) -> None:
        rule = ScheduleRule("0 9 * * *", None, "Pacific/Apia")
        after = datetime(2011, 12, 29, 18, tzinfo=UTC)

        local = [tick.astimezone(ZoneInfo("Pacific/Apia")) for tick in islice(rule.ticks(after), 3)]

        assert [one.strftime("%d %H:%M") for one in local] == ["29 09:00", "31 00:00", "31 09:00"]

    def test_an_hourly_rule_skips_what_does_not_pass(self) -> None:
        assert at("Europe/Berlin", "30 * * * *", "2026-03-29")[1:4] == [
            *("01:30+0100", "03:30+0200", "04:30+0200")
        ]


class TestClocksSetBack:
    def test_a_time_that_comes_twice_runs_the_first_time(self) -> None:
        assert at("Europe/Berlin", "30 2 * * *", "2026-10-25") == ["02:30+0200"]
        assert at("America/New_York", "30 1 * * *", "2026-11-01") == ["01:30-0400"]
        assert at("Australia/Lord_Howe", "45 1 * * *", "2026-04-05") == ["01:45+1100"]

    def test_an_hourly_rule_runs_in_each_hour_that_passes(self) -> None:
        assert at("Europe/Berlin", "30 * * * *", "2026-10-25")[1:5] == [
            *("01:30+0200", "02:30+0200", "02:30+0100", "03:30+0100")
        ]
        assert at("Australia/Lord_Howe", "*/15 * * * *", "2026-04-05")[6:12] == [
            *("01:30+1100", "01:45+1100", "01:30+1030"),
            *("01:45+1030", "02:00+1030", "02:15+1030"),
        ]

    def test_an_interval_knows_no_clock(self) -> None:
        rule = ScheduleRule(None, HOUR, "Europe/Berlin")
        midnight = datetime(2026, 10, 25, tzinfo=UTC)

        assert list(islice(rule.ticks(midnight), 3)) == [midnight + n * HOUR for n in (1, 2, 3)]


class TestZoneThatChangedItsRules:
    def test_each_tick_has_the_offset_of_its_own_day(self) -> None:
        rule = ScheduleRule("0 12 26 10 *", None, "Europe/Moscow")
        ticks = islice(rule.ticks(datetime(2010, 1, 1, tzinfo=UTC)), 6)

        assert [tick.hour for tick in ticks] == [8, 8, 8, 8, 9, 9]

    def test_no_summer_time_is_left_after_its_end(self) -> None:
        rule = ScheduleRule("0 0 1 1,12 *", None, "America/Sao_Paulo")
        ticks = islice(rule.ticks(datetime(2018, 6, 1, tzinfo=UTC)), 3)

        assert [tick.hour for tick in ticks] == [2, 2, 3]


@given(
    cron=st.sampled_from(["*/7 * * * *", "0 3 * * *", "5 4 1 * *", "30 2 * * SUN", "0 0 29 2 *"]),
    zone=st.sampled_from(sorted(CHANGES)),
    after=st.datetimes(datetime(2005, 1, 1), datetime(2030, 1, 1)),
)
def test_ticks_are_later_each_time_and_the_same_wherever_one_begins(
    cron: str, zone: str, after: datetime
) -> None:
    rule = ScheduleRule(cron, None, zone)
    first, second, third = islice(rule.ticks(after.replace(tzinfo=UTC)), 3)

    assert after.replace(tzinfo=UTC) < first < second < third
    assert rule.next_tick(first) == rule.next_tick(second - timedelta(microseconds=1)) == second
    assert rule.latest(first, third, 1000) == [second, third]
    assert rule.latest(first, third, 1) == [third]


def test_an_interval_counts_from_the_epoch_whenever_a_worker_starts() -> None:
    rule = ScheduleRule(None, 5 * MINUTE)
    noon = datetime(2026, 11, 23, 12, tzinfo=UTC)

    assert rule.next_tick(noon) == noon + 5 * MINUTE
    assert rule.next_tick(noon + 4.9 * MINUTE) == noon + 5 * MINUTE
    assert rule.next_tick(noon - timedelta(microseconds=1)) == noon


def test_the_last_ticks_of_a_long_outage_are_found_without_visiting_all() -> None:
    began = datetime(2006, 1, 1, tzinfo=UTC)

    assert ScheduleRule(None, timedelta(seconds=1)).latest(began, NOW, 1) == [NOW]
    assert ScheduleRule("* * * * *", None).latest(began, NOW, 2) == [
        NOW.replace(second=0) - MINUTE,
        NOW.replace(second=0),
    ]
    assert ScheduleRule("0 0 29 2 *", None).latest(began, NOW, 1) == [
        datetime(2024, 2, 29, tzinfo=UTC)
    ]


HOURLY = ScheduleRule("0 * * * *", None)
NOON = NOW.replace(second=0)


def standing(hours_late: int = 0, **changes: Any) -> Standing:
    first = NOON - hours_late * HOUR
    given = {"catch_up": 1, "overlap": "allow", "is_running": False, **changes}
    return Standing(next_at=first, **given)


class TestCatchUp:
    def test_a_tick_in_time_is_fired(self) -> None:
        for catch_up in (0, 1, 5):
            fired = decide(HOURLY, standing(catch_up=catch_up), NOW)
            assert fired == Firing((NOON,), NOON, NOON + HOUR)

    def test_catch_up_none_drops_what_is_more_than_a_minute_late(self) -> None:
        late = NOON + timedelta(seconds=61)

        assert decide(HOURLY, standing(3, catch_up=0), late) == Firing((), NOON, NOON + HOUR)

    def test_catch_up_last_fires_the_last_tick(self) -> None:
        assert decide(HOURLY, standing(3), NOW) == Firing((NOON,), NOON, NOON + HOUR)

    def test_a_number_to_catch_up_fires_so_many_of_the_last_in_their_order(self) -> None:
        fired = decide(HOURLY, standing(5, catch_up=3), NOW)

        assert fired == Firing((NOON - 2 * HOUR, NOON - HOUR, NOON), NOON, NOON + HOUR)

    def test_a_number_to_catch_up_fires_no_more_than_there_are(self) -> None:
        fired = decide(HOURLY, standing(1, catch_up=9), NOW)

        assert fired == Firing((NOON - HOUR, NOON), NOON, NOON + HOUR)


def test_the_tick_of_the_row_is_fired_also_if_the_zone_has_other_rules_by_now() -> None:
    at = NOON - timedelta(minutes=30)

    fired = decide(HOURLY, Standing(at, 2, "allow", is_running=False), NOW)

    assert fired == Firing((at, NOON), NOON, NOON + HOUR)


class TestOverlap:
    def test_overlap_allow_fires_whatever_runs(self) -> None:
        fired = decide(HOURLY, standing(is_running=True), NOW)

        assert fired == Firing((NOON,), NOON, NOON + HOUR)

    def test_overlap_skip_passes_over_a_tick_whose_predecessor_runs(self) -> None:
        fired = decide(HOURLY, standing(overlap="skip", is_running=True), NOW)

        assert fired == Firing((), NOON, NOON + HOUR)

    def test_overlap_skip_fires_one_of_several_missed_ticks(self) -> None:
        """The job of the first would run when the second is due."""
        fired = decide(HOURLY, standing(4, catch_up=3, overlap="skip"), NOW)

        assert fired == Firing((NOON,), NOON, NOON + HOUR)

    def test_overlap_wait_leaves_the_tick_due(self) -> None:
        assert decide(HOURLY, standing(overlap="wait", is_running=True), NOW) is None

    def test_overlap_wait_fires_once_for_all_that_have_become_due_meanwhile(self) -> None:
        fired = decide(HOURLY, standing(4, overlap="wait"), NOW)

        assert fired == Firing((NOON,), NOON, NOON + HOUR)

    def test_overlap_wait_fires_the_first_of_several_and_leaves_the_next_due(self) -> None:
        fired = decide(HOURLY, standing(4, catch_up=3, overlap="wait"), NOW)

        assert fired == Firing((NOON - 2 * HOUR,), NOON - 2 * HOUR, NOON - HOUR)


@given(
    rules=st.lists(
        st.sampled_from(
            [
                HOURLY,
                ScheduleRule("*/5 * * * *", None, "Asia/Tehran"),
                ScheduleRule(None, timedelta(minutes=7)),
                ScheduleRule("30 2 * * *", None, "Europe/Berlin"),
            ]
        ),
        min_size=1,
        max_size=8,
    ),
    steps=st.lists(st.integers(-7200, 90_000), min_size=8, max_size=8),
    catch_up=st.integers(0, 4),
    overlap=st.sampled_from(list(Overlap)),
    running=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_no_tick_is_fired_twice_whatever_the_rule_and_the_clock_do(
    rules: list[ScheduleRule],
    steps: list[int],
    catch_up: int,
    overlap: Overlap,
    running: list[bool],
) -> None:
    """The rule changes and changes back, and the clock of the server is set back by hours."""
    now = datetime(2026, 3, 28, 20, tzinfo=UTC)
    last_tick_at: datetime | None = None
    fired: list[datetime] = []
    for rule, step, is_running in zip(rules, steps, running, strict=False):
        next_at = next_after(rule, now, last_tick_at)
        now += timedelta(seconds=step)
        if next_at is None or next_at > now:
            continue
        found = decide(rule, Standing(next_at, catch_up, overlap, is_running), now)
        if found is None:
            continue
        assert last_tick_at is None or found.last_tick_at > last_tick_at
        assert found.next_at is None or found.next_at > found.last_tick_at
        assert all(tick <= now for tick in found.ticks)
        fired += found.ticks
        last_tick_at = found.last_tick_at

    assert fired == sorted(set(fired))


class TestRefusals:
    @pytest.mark.parametrize(
        ("cron", "words"),
        [
            ("0 25 * * *", "field 2, the hour, is '25'; it takes 0 to 23"),
            ("60 * * * *", "field 1, the minute, is '60'; it takes 0 to 59"),
            ("*/0 * * * *", "field 1, the minute, is"),
            ("0 0 32 * *", "field 3, the day-of-month, is '32'; it takes 1 to the last day of"),
            ("0 0 * 13 *", "field 4, the month, is '13'; it takes 1 to 12, or JAN to DEC"),
            ("0 0 * * MOO", "field 5, the day-of-week, is 'MOO'; it takes 0 to 7, or SUN to SAT"),
            ("0 0 31 2 *", "is '31'; it takes 1 to the last day of the months in field 4"),
            ("0 0 */31 2 MON#5", "names no day"),
            ("0 0 * *", "needs five fields, not 4: give minute, hour"),
            ("0 0 0 * * *", "needs five fields, not 6"),
            ("", "needs five fields, not 0"),
            (7, "the cron expression is 7"),
        ],
    )
    def test_a_bad_expression_is_told_by_its_field(self, cron: Any, words: str) -> None:
        with pytest.raises(OptionError, match=r"schedule x: ") as refused:
            checked_rule("schedule x: ", cron, None, "UTC")

        assert words in str(refused.value)

    @pytest.mark.parametrize("zone", ["Berlin", "", "../../etc/passwd", "America", "/etc", None, 3])
    def test_an_unknown_zone_is_refused(self, zone: Any) -> None:
        with pytest.raises(OptionError, match="IANA name"):
            checked_rule("", "0 3 * * *", None, zone)

    @pytest.mark.parametrize("zone", ["localtime", "posixrules"])
    def test_a_zone_of_the_machine_is_refused(self, zone: str) -> None:
        with pytest.raises(OptionError, match="another zone on each machine; give an IANA name"):
            checked_rule("", "0 3 * * *", None, zone)

    def test_a_long_name_of_a_zone_is_shown_in_part(self) -> None:
        with pytest.raises(OptionError) as refused:
            checked_rule("", "0 3 * * *", None, "x" * 5000)
        assert len(str(refused.value)) < 300

    @pytest.mark.parametrize(
        "every", [timedelta(0), timedelta(seconds=0.5), -DAY, 60, 40_000 * DAY]
    )
    def test_the_interval_of_a_rule_has_bounds(self, every: Any) -> None:
        with pytest.raises(OptionError, match="one second to 36525 days"):
            checked_rule("", None, every, "UTC")

    def test_a_rule_is_an_expression_or_an_interval(self) -> None:
        with pytest.raises(OptionError, match="neither"):
            checked_rule("", None, None, "UTC")
        with pytest.raises(OptionError, match="both"):
            checked_rule("", "0 3 * * *", HOUR, "UTC")

    @pytest.mark.parametrize("catch_up", ["all", 0, -1, 1001, True, 1.5, None])
    def test_catch_up_is_a_word_or_a_number(self, catch_up: Any) -> None:
        with pytest.raises(OptionError, match="'none', 'last' or a whole number"):
            checked_catch_up("", catch_up)

    def test_overlap_is_one_of_three_words(self) -> None:
        with pytest.raises(OptionError, match="'allow', 'skip', 'wait'"):
            checked_overlap("", "queue", 1)

    def test_waiting_without_catching_up_is_refused(self) -> None:
        with pytest.raises(OptionError, match="drops late ticks"):
            checked_overlap("", "wait", 0)


@given(st.lists(st.text("0123456789*/,-#LWMONJAN ²", max_size=6), min_size=5, max_size=5))
def test_no_expression_raises_anything_but_an_option_error(fields: list[str]) -> None:
    with suppress(OptionError):
        checked_rule("", " ".join(fields), None, "Europe/Berlin")
