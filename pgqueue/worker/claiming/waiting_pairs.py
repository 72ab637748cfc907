"""Which pairs have due messages, for a worker of so many queues that a claim cannot read them all.

A look finds them by one probe of the index for each pair that has messages.  Claims take the first
of them, forget those that are exhausted, and move one that has more behind the others of its
priority.  So jobs of a pair that was empty are found by the next look.  Pure: times are arguments.
"""

from collections.abc import Collection, Iterable, Iterator

from pgqueue.worker.pace import Pace

Pair = tuple[str, int]
"""A queue and a priority."""

FEW = 50
"""The pairs of five queues: of no more, every claim reads all, and nothing here is used."""
LEAST_IN_A_CLAIM = 100
"""A claim reads at least so many pairs, and as many as it may take jobs."""
LOOK_EVERY = 0.25
"""Seconds between two looks of a busy worker; more if looks take long.  A worker that knows of no
due message may spend half of its time on them."""


class WaitingPairs:
    """The pairs of one worker that have messages."""

    def __init__(self) -> None:
        self._seen: list[Pair] = []
        self._due: list[Pair] = []
        """Those of the last look whose first messages were due."""
        self._left: dict[int, dict[str, None]] = {}
        """Those that may have more due messages: by priority, the queues in their turn."""
        self._pace = Pace()
        self._next_at = self._soonest_at = float("-inf")

    @property
    def has_looked(self) -> bool:
        return self._next_at > float("-inf")

    def is_look_due(self, now: float, *, paused: Collection[str]) -> bool:
        """Whether to look now."""
        return now >= (self._next_at if self.first(1, paused=paused) else self._soonest_at)

    def seconds_left(self, now: float, *, paused: Collection[str]) -> float | None:
        """The seconds until the next look, if it came too soon and nothing else is known."""
        left = self._soonest_at - now
        return left if left > 0 and not self.first(1, paused=paused) else None

    def learn(self, found: Iterable[tuple[str, int, bool]], *, began: float, ended: float) -> None:
        """Learn of a look: the pairs, and whether the first message of each is due."""
        found = list(found)
        self._seen = [(queue, priority) for queue, priority, _ in found]
        self._due = [(queue, priority) for queue, priority, is_due in found if is_due]
        due = set(self._due)
        # Those that are known keep their turn.
        kept = [pair for pair in self._in_turn() if pair in due]
        self._begin([*kept, *self._due])
        took = ended - began
        self._pace.took(took)
        self._next_at = began + max(LOOK_EVERY, self._pace.rest)
        self._soonest_at = ended + min(took, 1.0)

    def begin_again(self) -> None:
        """Take all pairs of the last look for such as have more."""
        self._begin([*self._in_turn(), *self._due])

    def forget(self, pair: Pair) -> None:
        """Learn that a claim has found no more messages of a pair."""
        self._left.get(pair[1], {}).pop(pair[0], None)

    def end_turn(self, pair: Pair) -> None:
        """Put a pair behind the others of its priority."""
        queues = self._left.get(pair[1], {})
        if pair[0] in queues:
            queues[pair[0]] = queues.pop(pair[0])

    def first(self, count: int, *, paused: Collection[str]) -> list[Pair]:
        """The first pairs that may have due messages, the most urgent first."""
        found: list[Pair] = []
        for pair in self._in_turn():
            if len(found) >= count:
                break
            if pair[0] not in paused:
                found.append(pair)
        return found

    def seen(self, *, paused: Collection[str]) -> list[Pair]:
        """All pairs of the last look, also those whose messages are due later."""
        return [pair for pair in self._seen if pair[0] not in paused]

    def _in_turn(self) -> Iterator[Pair]:
        for priority, queues in self._left.items():
            for queue in queues:
                yield queue, priority

    def _begin(self, pairs: Iterable[Pair]) -> None:
        left: dict[int, dict[str, None]] = {}
        for queue, priority in pairs:
            left.setdefault(priority, {}).setdefault(queue)
        self._left = dict(sorted(left.items()))
