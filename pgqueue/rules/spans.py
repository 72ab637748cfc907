"""Spans of time in words."""

from datetime import timedelta

UNITS = (("d", timedelta(days=1)), ("h", timedelta(hours=1)), ("min", timedelta(minutes=1)))
SECOND = timedelta(seconds=1)


def exactly(span: timedelta) -> str:
    """A span in its largest unit that needs no fraction, such as ``90 min`` or ``1 h``."""
    for unit, size in UNITS:
        if span and not span % size:
            return f"{span // size} {unit}"
    return f"{span / SECOND:g} s"
