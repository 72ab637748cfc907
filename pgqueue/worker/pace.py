"""How often a worker repeats a read that may take long."""

SHARE = 50
"""Such a read may take a fiftieth of the time: it steps over every dead index entry, and while a
transaction holds an old snapshot, no vacuum removes these."""


class Pace:
    """Says how long to wait between two reads, from how long they take.

    The shorter of two in a row counts: the first one compiles its statement, and the machine may be
    busy once.
    """

    def __init__(self) -> None:
        self._before = 0.0
        self.rest = 0.0
        """Seconds from one read to the next, for the share."""

    def took(self, seconds: float) -> None:
        """Record how long a read took."""
        self.rest, self._before = SHARE * min(seconds, self._before), seconds
