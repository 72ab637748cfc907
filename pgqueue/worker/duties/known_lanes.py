"""What an admitter remembers, so that its reads step over no dead index entries.

While a transaction holds an old snapshot, no vacuum removes the index entries of admitted jobs and
of places that were given up.  A read from the start of a lane or a key then steps over all of them.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable

from pgqueue.repository.admit import NEVER_READ, FirstRead, LaneKey, Lanes, PlacesOfKey
from pgqueue.rules.admission import Place
from pgqueue.rules.limits import SEPARATOR, name_of

MOST_EMPTY = 1000
"""Lanes that are remembered although no job was found in them."""
MOST_KEYS = 20_000
"""Keys whose places are remembered."""


class KnownLanes:
    """The lanes in which jobs wait, and where the next read of each begins.

    A job that becomes visible before that, by a late commit, is found by a read of all lanes from
    their starts.
    """

    def __init__(self) -> None:
        self._reads: dict[LaneKey, FirstRead | None] = {}
        self._by_key: defaultdict[str, list[LaneKey]] = defaultdict(list)
        """The lanes under each key."""
        self._due_at: dict[LaneKey, float] = {}
        """When to read a lane again, as a job in it becomes due or gets a token."""
        self._full: set[LaneKey] = set()
        """Lanes in which a job waits for a place under one of its keys."""

    def __len__(self) -> int:
        return len(self._reads)

    def all(self) -> list[LaneKey]:
        return list(self._reads)

    def with_room(self) -> list[LaneKey]:
        """The lanes in which no job waits for a place: a new job there may be admitted."""
        return [lane for lane in self._reads if lane not in self._full]

    def under(self, keys: Iterable[str]) -> list[LaneKey]:
        """The lanes under these keys."""
        return list(dict.fromkeys(lane for key in keys for lane in self._by_key.get(key, ())))

    def of_limits(self, names: Collection[str]) -> list[LaneKey]:
        """The lanes under all keys of these limits."""
        return self.under(key for key in self._by_key if name_of(key) in names) if names else []

    def due(self, now: float) -> list[LaneKey]:
        """The lanes whose time has come."""
        return [lane for lane, at in self._due_at.items() if at <= now]

    def seconds_left(self, now: float) -> float | None:
        """Seconds until the time of a lane comes; None without such a lane."""
        return None if not self._due_at else max(min(self._due_at.values()) - now, 0.0)

    def last_reads(self, lanes: Iterable[LaneKey]) -> dict[LaneKey, FirstRead | None]:
        """What the last reads of these lanes have found first."""
        return {lane: self._reads[lane] for lane in lanes}

    def add(self, lane: LaneKey) -> None:
        """Remember a lane, to be read from its start."""
        if lane not in self._reads:
            self._reads[lane] = None
            for key in lane.limit_keys.split(SEPARATOR):
                self._by_key[key].append(lane)

    def learn(self, page: Lanes, now: float) -> None:
        """Remember what was read of some lanes."""
        for lane, read in page.reads.items():
            self.add(lane)
            self._reads[lane] = read
            self._due_at.pop(lane, None)
            self._full.discard(lane)
        for lane, seconds in page.seconds_to_due.items():
            self.read_again(lane, now + seconds)

    def note_full(self, lanes: Iterable[LaneKey]) -> None:
        """Note the lanes in which a job waits for a place, until they are read again."""
        self._full.update(lanes)

    def read_again(self, lane: LaneKey, at: float) -> None:
        """Read a lane again at this time, or sooner."""
        self._due_at[lane] = min(at, self._due_at.get(lane, at))

    def keep(self, found: Collection[LaneKey]) -> None:
        """Forget all lanes but these and the last of the others, in which no job waits."""
        empty = [lane for lane in self._reads if lane not in found]
        for lane in empty[:-MOST_EMPTY]:
            del self._reads[lane]
            self._due_at.pop(lane, None)
            self._full.discard(lane)
            for key in lane.limit_keys.split(SEPARATOR):
                self._by_key[key].remove(lane)
                if not self._by_key[key]:
                    del self._by_key[key]


class KnownPlaces:
    """The places that this worker has found under some keys.

    They are exact: admissions run one after the other, and each gives its places greater ids than
    all that were there.  So besides the known ones, only places with greater ids can exist.  This
    holds for one session of the server: after a failover or a crash, committed admissions may be
    lost, and ids be given again.
    """

    def __init__(self) -> None:
        self.of_key: dict[str, PlacesOfKey] = {}
        self._session: object = None

    def begin(self, session: object) -> None:
        """Forget all if this is another session of the server."""
        if session != self._session:
            self._session = session
            self.of_key.clear()

    def forget(self) -> None:
        self.of_key.clear()

    def learn(self, keys: Iterable[str], places: Iterable[Place]) -> None:
        """Remember all places under these keys, as an admission has read them."""
        ids: defaultdict[str, list[int]] = defaultdict(list)
        for place in places:
            ids[place.key].append(place.id)
        of_key = self.of_key
        for key in keys:
            last, _ = of_key.pop(key, NEVER_READ)  # to the end: the first ones are forgotten first
            there = ids.get(key)
            of_key[key] = (max(last, *there), tuple(there)) if there else (last, ())
        while len(of_key) > MOST_KEYS:
            del of_key[next(iter(of_key))]
