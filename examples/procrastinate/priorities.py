"""The two scales of priorities."""

HIGHEST = 9


def priority_of(priority: int) -> int:
    """Return pgqueue's priority, from 0, which starts first, to 9.

    Here, higher numbers start first, and the default is 0: all below it is the same, and all above
    9.
    """
    return HIGHEST - min(max(priority, 0), HIGHEST)
