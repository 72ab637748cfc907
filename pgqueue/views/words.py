"""Values in words, as every face writes them."""

from datetime import timedelta

UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
UNKNOWN = "–"  # noqa: RUF001


def span(value: timedelta | float | None) -> str:
    """A duration in its largest unit, with two digits; a dash for one that is unknown."""
    if value is None:
        return UNKNOWN
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    if abs(seconds) < 1:
        return f"{float(f'{seconds * 1000:.2g}'):g} ms"
    size, unit = next((size, unit) for size, unit in UNITS if abs(seconds) >= size)
    amount = seconds / size
    digits = 1 if abs(amount) < 10 and unit != "min" else 0
    return f"{amount:.{digits}f} {unit}"
