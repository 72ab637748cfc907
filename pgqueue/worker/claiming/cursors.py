"""Claim cursors: how far each (queue, priority) pair has been claimed.

A claim starts at the cursor instead of at the head of the index, because the head is full of dead
entries while a transaction holds an old snapshot.  Rows that become visible behind the cursor, by
a late commit or a rescue, are found by a *sweep*: the cursor goes back to the start and follows
the claims forward again, so that the sweep ends when all these rows are claimed.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from pgqueue.repository.claim import Claim, ClaimCursor
from pgqueue.worker.claiming.aging import Aging
from pgqueue.worker.claiming.shares import Shares
from pgqueue.worker.claiming.waiting_pairs import FEW, LEAST_IN_A_CLAIM, WaitingPairs

PRIORITIES = range(10)
START = ("-infinity", 0)


class ClaimCursors:
    """The pairs of one worker in the order of claims, and where the next claim of each begins.

    Used by one thread.

    Times and ids are compared as the database wrote them: in one time zone, timestamps sort as
    their text does.
    """

    def __init__(
        self, queues: Sequence[str], *, shares: Shares | None = None, aging: Aging | None = None
    ) -> None:
        self._queues = list(queues)
        self._shares = shares
        self.aging = aging
        self._keys: dict[tuple[str, int], tuple[str, int]] = {}
        """The cursors: for each (queue, priority), the (run_at, message_id) of the last row."""
        self._turn = 0
        """Counts the calls of :meth:`pairs`: the queues take turns to be first."""
        self._waiting = WaitingPairs()

    @property
    def waiting(self) -> WaitingPairs | None:
        """Which pairs have messages, if there are too many pairs for a claim.

        With weights and with aging a claim reads all pairs, as these order them.
        """
        are_many = len(PRIORITIES) * len(self._queues) > FEW
        is_plain = self._shares is None and self.aging is None
        return self._waiting if are_many and is_plain else None

    def learn(self, found: Iterable[tuple[str, int, bool]], *, began: float, ended: float) -> None:
        """Learn which pairs have messages, of all queues, and whether the first one is due."""
        served = set(self._queues)
        of_these = (row for row in found if row[0] in served)
        self._waiting.learn(of_these, began=began, ended=ended)

    def next_pairs(self, limit: int, *, paused: Collection[str] = ()) -> list[ClaimCursor]:
        """The pairs for the next claim of up to ``limit`` jobs: all, or those that have messages.

        The most urgent come first.
        """
        if self.waiting is None or not self.waiting.has_looked:
            return self.pairs(paused=paused)
        first = self.waiting.first(max(limit, LEAST_IN_A_CLAIM), paused=paused)
        return [ClaimCursor(*pair, *self._keys.get(pair, START)) for pair in first]

    def have_more(self, *, paused: Collection[str] = ()) -> bool:
        """Whether there are pairs that the claims since the last look have not exhausted."""
        return self.waiting is not None and bool(self.waiting.first(1, paused=paused))

    def pairs(self, *, paused: Collection[str] = (), from_start: bool = False) -> list[ClaimCursor]:
        """All pairs that may have messages, the most urgent first; queues of one priority take
        turns to be first.

        With weights, all pairs of one queue come before those of the next.
        """
        if self.waiting is not None and self.waiting.has_looked:
            keys = {} if from_start else self._keys
            seen = self.waiting.seen(paused=paused)
            return [ClaimCursor(*pair, *keys.get(pair, START)) for pair in seen]
        open_queues = [queue for queue in self._queues if queue not in paused]
        self._turn += 1
        first = self._turn % len(open_queues) if open_queues else 0
        in_turn = open_queues[first:] + open_queues[:first]
        keys = {} if from_start else self._keys
        pairs = [
            ClaimCursor(queue, priority, *keys.get((queue, priority), START))
            for priority in PRIORITIES
            for queue in in_turn
        ]
        if self.aging is not None:
            pairs = self.aging.in_order(pairs)
        if self._shares is not None:
            order = self._shares.order(open_queues)
            pairs.sort(key=lambda pair: order.index(pair.queue))
        return pairs

    def limit(self, room: int, *, paused: Collection[str] = ()) -> int:
        """How many jobs the next claim takes: all for which there is room, or those of one turn."""
        if self._shares is None:
            return room
        return self._shares.turn([each for each in self._queues if each not in paused], room)

    def serve(self, queues: Sequence[str]) -> None:
        """Claim from these queues from now on."""
        self._queues, served = list(queues), set(queues)
        self._keys = {pair: key for pair, key in self._keys.items() if pair[0] in served}
        self._waiting = WaitingPairs()

    def pass_over(self, message: ClaimCursor) -> None:
        """Begin the next claim of a pair after this message; the next sweep looks at it again."""
        self._keys[message.queue, message.priority] = (message.run_at, message.message_id)

    def rewind(self) -> None:
        """Start again at the head of every pair."""
        self._keys.clear()
        self._waiting.begin_again()

    @property
    def is_at_start(self) -> bool:
        """Whether the next claim is a sweep, because it begins at the head of every pair."""
        return not self._keys

    def advance(self, pairs: Sequence[ClaimCursor], claim: Claim, *, limit: int) -> None:
        """Move each cursor past the rows that the claim has read of its pair.

        The claim read the pairs in order until the batch was full.  The pair of the last row may
        hold more; the pairs before it are exhausted; the pairs after it were not read.  A claim
        that has left messages moves no cursor, so that a later claim can take them.
        """
        if self.aging is not None:
            self.aging.took(claim.rows)
        if self._shares is not None:
            order = list(dict.fromkeys(pair.queue for pair in pairs))
            jobs = Counter(row.queue for row in claim.rows)
            self._shares.took(order, jobs, is_full=claim.found >= limit)
        if claim.left:
            return
        last: dict[tuple[str, int], tuple[str, int]] = {}
        for row in claim.rows:
            last[row.queue, row.priority] = (row.run_at, row.message_id)
        unfinished = len(pairs)
        if claim.taken >= limit:
            reached = [i for i, pair in enumerate(pairs) if (pair.queue, pair.priority) in last]
            unfinished = max(reached, default=0)
        for index, pair in enumerate(pairs[: unfinished + 1]):
            name = (pair.queue, pair.priority)
            key = max(last.get(name, START), (pair.run_at, pair.message_id))
            if index < unfinished:
                # A second back: a transaction about to commit may have inserted a row due now.
                key = max(key, (claim.quiet_until, 0))
                self._waiting.forget(name)
            else:
                self._waiting.end_turn(name)
            # A key later than the database's clock: it was set back, or another server took over.
            self._keys[name] = START if key[0] > claim.read_at else key
