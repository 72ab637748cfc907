"""A bar for each thing measured."""

from __future__ import annotations

from pathlib import Path

import pygal
from pygal.style import Style

from benchmarks.case import Case, Finding

STYLE = Style(
    background="white",
    plot_background="white",
    colors=("#2f6f8f", "#8a8f98", "#b5b9c0", "#d0d3d8", "#5f8f6f", "#9f7f4f"),
    font_family="sans-serif",
    label_font_size=13,
    value_font_size=13,
    legend_font_size=13,
)


def is_worth_drawing(finding: Finding) -> bool:
    """Two things or more, measured in the same unit."""
    return len(finding.series) > 1 and len({one.unit for one in finding.series}) == 1


def draw(case: Case, finding: Finding, file: Path) -> None:
    if not is_worth_drawing(finding):
        return
    chart = pygal.HorizontalBar(
        style=STYLE,
        title=f"{case.name}, {finding.series[0].unit}",
        legend_at_bottom=True,
        print_values=True,
        formatter=lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.2f}",
        js=[],
        width=760,
        height=140 + 50 * len(finding.series),
        no_prefix=True,
        pretty_print=True,
    )
    for one in finding.series:
        chart.add(one.name, [one.median])
    file.write_bytes(chart.render())
