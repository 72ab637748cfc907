"""Templates and their filters."""

import re
from datetime import UTC, datetime, timedelta

from pgqueue.dashboard.rendering import environment, plot

CHART = '{% import "macros.html" as ui with context %}{{ ui.chart("Ends", times, series) }}'


def test_the_bars_of_a_chart_stand_on_each_other_and_the_table_has_each_number() -> None:
    now = datetime(2026, 1, 1, 12, tzinfo=UTC)
    times = [now - timedelta(minutes=2), now - timedelta(minutes=1)]
    series = [("succeeded", "done", [1500, 0]), ("failed", "failed", [300, None])]

    chart = environment().from_string(CHART).render(times=times, series=series, now=now)

    bars = re.findall(r'<rect class="k-(\w+)" y="([\d.]+)%".*?height="(.*?)%"', chart)
    assert bars == [("done", "25.0", "75.0"), ("failed", "10.0", "15.0")]
    assert re.findall(r'<svg x="(.*?)%"', chart) == ["0.0", "50.0"]
    assert "01 Jan 11:58 UTC\nsucceeded: 1,500\nfailed: 300" in chart
    rows = re.findall(r'<th scope="row">(.*?)</th>(.*?)</tr>', chart)
    assert [(time, re.findall(r">([^<]+)</td>", cells)) for time, cells in rows] == [
        ("01 Jan 11:59", ["0", "–"]),  # noqa: RUF001
        ("01 Jan 11:58", ["1,500", "300"]),
    ]


def test_a_line_has_a_gap_where_there_is_no_number() -> None:
    now = datetime(2026, 1, 1, 12, tzinfo=UTC)
    times = [now + timedelta(minutes=number) for number in range(4)]

    drawn = plot(times, [("p95", "slow", [0.5, None, 1, 2])], "span", lines=True)

    assert drawn.lines == [("slow", "M0.5 75.00h0M2.5 50.00h0L3.5 0.00")]
    assert drawn.axis == ["2.0 s", "1.0 s", "0 ms"]
