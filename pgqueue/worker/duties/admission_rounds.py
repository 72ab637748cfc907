"""Rounds of admissions: which waiting jobs are admitted, some lanes in each transaction."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import chain
from typing import NamedTuple

from sqlalchemy import Connection

from pgqueue.repository.admit import FIRST_LANE, FIRST_PLACE, Admissions, LaneKey, Lanes
from pgqueue.repository.limits import Limits
from pgqueue.repository.workers import Paused
from pgqueue.rules.admission import (
    Buckets,
    LimitRule,
    Rules,
    TurnGroup,
    Turns,
    WaitingJob,
    after_starts,
    after_turns,
    fair_names,
    held_by_key,
    is_fair,
    is_rate,
    last_turn,
    next_token,
    ready_by_group,
    to_admit,
    to_send_back,
    turn_group,
    with_keys,
)
from pgqueue.rules.limits import SEPARATOR, Limit, name_of
from pgqueue.worker.duties.known_lanes import KnownLanes, KnownPlaces
from pgqueue.worker.reconnecting import is_lock_timeout
from pgqueue.worker.rows import RowGuard, may_be_of_row

MOST_LANES = 1000
"""Lanes in one transaction."""
MOST = 1000
"""Jobs that one transaction admits."""
MOST_OF_LANE = 100
"""Jobs of one lane that one transaction reads."""
KEYS_FOR_ONE_MORE = 10
"""For each so many lanes, one more job of a fair limit may be ready: the round takes longer."""
SWEPT_AT_ONCE = 1000
"""Places that one step of a sweep reads."""
NO_BUCKETS = Buckets(datetime.min, {})


class Step(NamedTuple):
    """What one transaction has done."""

    admitted: int
    is_last: bool
    """Whether the last lane was read."""


class Admitted(NamedTuple):
    """What was admitted from some lanes."""

    jobs: Collection[int] = frozenset()
    are_all: bool = True
    """Whether all jobs that could be admitted are."""
    full: Collection[TurnGroup] = ()
    """The groups of which enough jobs are ready."""


Lane = Sequence[WaitingJob]
"""The first jobs of a lane."""


class FairLane(NamedTuple):
    """A lane of a fair limit that waits for its turn."""

    key: LaneKey
    group: TurnGroup
    last_turn: datetime
    jobs: Lane


@dataclass(slots=True)
class Round:
    """How far a round has come."""

    chosen: list[LaneKey] | None = None
    """The lanes that are left to be read; None: all lanes, in the order of the index."""
    looks_for_lanes: bool = False
    """Whether to look for lanes that are not known."""
    found: set[LaneKey] = field(default_factory=set)
    """The lanes that were read."""
    seconds: float = 0.0
    """How long the reads took."""
    after: LaneKey = FIRST_LANE
    """The last lane that was read."""
    read: int = 0
    """How many lanes were read."""
    are_all_read: bool = False
    fair: list[FairLane] = field(default_factory=list)
    """The lanes of fair limits; when all lanes are read, in the order of their turns."""
    locked: set[int] = field(default_factory=set)
    """Jobs that could not be moved: other transactions have locked their rows."""
    most_lanes: int = MOST_LANES
    """How many lanes a step reads."""
    admitting: Collection[LaneKey] = ()
    """The lanes from which the current step admits."""


class AdmissionRounds:
    """Admits jobs of some queues and tasks.  Call :meth:`step` until it was the last of the round.

    A round reads all lanes from their starts, or some of those that are known, from where the last
    read has begun.  A step reads the next lanes and admits from them.  If there are more lanes than
    one step reads, the lanes of fair limits are set aside until all are read: only then is it known
    which keys have waited longest.  A round that an error ends begins again with the first lane.

    ``most_ready``: how many jobs of a fair limit may be admitted and not started.
    ``own``: limits that are in force although no worker has declared them, as in a test.
    ``is_only_admitter``: no other transaction admits, so this one takes no lock.
    """

    def __init__(
        self,
        queues: Callable[[], Sequence[str]],
        paused: Callable[[], Paused],
        tasks: Callable[[], str],
        *,
        notify: bool,
        most_ready: int,
        own: Mapping[str, LimitRule] | None = None,
        is_only_admitter: bool = False,
    ) -> None:
        self._queues = queues
        self._paused = paused
        self._tasks = tasks
        self._notify = notify
        self._most_ready = most_ready
        self._own = own or {}
        self._is_only_admitter = is_only_admitter
        self._guard = RowGuard()
        self._round = Round()
        self.known = KnownLanes()
        self._places = KnownPlaces()
        self._rules: Rules = {}
        """The limits in force, as they were read last."""
        self._source: object = None
        """The queues, tasks and pauses of the last round of all lanes."""
        self.full_took = 0.0
        """Seconds that the reads of the last round of all lanes took."""
        self._lanes = 1
        """How many lanes there are, as far as is known."""
        self._swept_to = FIRST_PLACE

    def begin(self) -> None:
        """Begin a round of all lanes."""
        self._round = Round()
        if not self._is_only_admitter:
            self._source = self._source_now()

    def begin_some(
        self, freed: Collection[str], now: float = 0.0, *, is_notified: bool = False
    ) -> bool:
        """Begin a round of those lanes from which jobs may be admitted; False if there are none.

        These are the known lanes under keys that may have room, and those whose time has come at
        ``now``.  After a notification of new jobs they are also the lanes in which no job waits for
        room, and those that are not known.  Under a fair limit, whose keys take turns, the round
        looks for lanes that are not known too.
        """
        if self._source != self._source_now():  # there may be jobs behind the cursors
            self.begin()
            return True
        known, fair = self.known, {name_of(key) for key in freed if is_fair(key, self._rules)}
        lanes = dict.fromkeys([*known.under(freed), *known.of_limits(fair), *known.due(now)])
        if is_notified:
            lanes |= dict.fromkeys(known.with_room())
        self._round = Round(list(lanes), looks_for_lanes=is_notified or bool(fair))
        return bool(lanes) or self._round.looks_for_lanes

    @property
    def is_full(self) -> bool:
        """Whether this round is one of all lanes."""
        return self._round.chosen is None

    def step(self, connection: Connection) -> Step:
        """Admit from the next lanes, in the transaction that the caller has begun."""
        admissions = Admissions(connection)
        self._round.admitting = ()
        rules = {**self._own, **Limits(connection).rules()}
        if rules != self._rules:
            self._rules = rules
            if not self.is_full:
                self.begin()
        if self._round.are_all_read:
            return self._take_turns(admissions, rules)
        return self._read_lanes(admissions, rules)

    def guarded_step(self, connection: Connection) -> Step:
        """Run a step in a transaction of its own.

        If it fails, the next one reads fewer lanes, until a lane fails alone: that lane rests.
        """
        try:
            with connection.begin():
                step = self.step(connection)
        except Exception as error:
            current = self._round
            # A step skips rows that are locked: it waits for locks of whole tables only.
            if not current.admitting or is_lock_timeout(error) or not may_be_of_row(error):
                raise
            if len(current.admitting) > 1:
                current.most_lanes = -(-len(current.admitting) // 10)
                return Step(0, is_last=False)
            [lane] = current.admitting
            keys = lane.limit_keys.replace(SEPARATOR, ", ")
            words = f"no job under {keys} can be admitted to queue {lane.queue}; the others go on"
            self._guard.failed(lane, words, error)
            current.most_lanes = MOST_LANES
            return Step(0, is_last=False)
        for lane in self._round.admitting:
            self._guard.succeeded(lane)
        return step

    def sweep(self, connection: Connection) -> bool:
        """Delete some free places and full buckets; returns whether many more places may be free.

        An admission deletes free places too, but only under keys for which a job waits.
        """
        admissions = Admissions(connection)
        self._serialize(admissions)
        self._places.forget()
        places = admissions.places_after(self._swept_to, most=SWEPT_AT_ONCE)
        if free := [place for place in places if not place.is_held]:
            admissions.delete_places(free)
        admissions.delete_full_buckets(most=SWEPT_AT_ONCE)
        is_last = len(places) < SWEPT_AT_ONCE
        self._swept_to = FIRST_PLACE if is_last else (places[-1].key, places[-1].id)
        return not is_last and len(free) > SWEPT_AT_ONCE // 2

    def _read_lanes(self, admissions: Admissions, rules: Rules) -> Step:
        """Admit from the next lanes, or set them aside."""
        current, per_lane = self._round, self._jobs_per_lane(rules)
        began = time.monotonic()
        page = self._next_page(admissions, per_lane)
        read_at = time.monotonic()
        self.known.learn(page, read_at)
        read = current.read + page.number
        if self.is_full:
            self._lanes = max(read, 1 if page.are_all else self._lanes)
        lanes, fair = page.lanes, list[FairLane]()
        if (current.read or not page.are_all) and any(rule.is_fair for rule in rules.values()):
            groups = {
                key: group for key, jobs in lanes.items() if (group := turn_group(jobs[0], rules))
            }
            lanes = {key: jobs for key, jobs in page.lanes.items() if key not in groups}
            keys = {key for lane in groups for key in page.lanes[lane][0].limit_keys}
            last = admissions.buckets(sorted(keys)).full_at if keys else {}
            for key, group in groups.items():
                if due := [job for job in page.lanes[key] if job.is_due]:
                    fair.append(FairLane(key, group, last_turn(due[0], last, rules), due))

        result = self._admit(admissions, lanes, rules)
        current.seconds += (read_at if result.jobs else time.monotonic()) - began
        may_have_more = any(
            len(jobs) == per_lane and all(job.job_id in result.jobs for job in jobs)
            for jobs in lanes.values()
        )
        if may_have_more or not result.are_all:
            return Step(len(result.jobs), False)
        if not current.locked:
            self.known.note_full(
                key
                for key, jobs in lanes.items()
                if not _is_timed(jobs[0], rules)
                and any(job.is_due and job.job_id not in result.jobs for job in jobs)
            )
        current.after, current.read = page.last or FIRST_LANE, read
        current.found.update(page.reads)
        current.fair += fair
        current.are_all_read = page.are_all
        if current.chosen is not None:
            current.chosen = current.chosen[page.number :]
        elif page.are_all:
            self.known.keep(current.found)
            self.full_took = current.seconds
        if page.are_all:
            current.fair.sort(
                key=lambda lane: (
                    lane.key.priority,
                    lane.last_turn,
                    lane.jobs[0].run_at,
                    lane.jobs[0].job_id,
                )
            )
        return Step(len(result.jobs), page.are_all and not current.fair)

    def _next_page(self, admissions: Admissions, per_lane: int) -> Lanes:
        """The first jobs of the next lanes of the round."""
        current, paused = self._round, self._paused()
        queues = [queue for queue in self._queues() if queue not in paused.queues]
        if current.chosen is None:
            return admissions.first_waiting(
                current.after,
                queues=queues,
                tasks=self._tasks(),
                lanes=current.most_lanes,
                of_lane=per_lane,
            )
        if current.looks_for_lanes:
            current.looks_for_lanes = False
            for lane in admissions.new_lanes(self.known.all()):
                self.known.add(lane)
                current.chosen.append(lane)
        some = current.chosen[: current.most_lanes]
        page = admissions.first_in_lanes(
            self.known.last_reads(some), queues=queues, tasks=self._tasks(), of_lane=per_lane
        )
        return page._replace(are_all=len(some) == len(current.chosen))

    def _jobs_per_lane(self, rules: Rules) -> int:
        """How many jobs of each lane to read: one more than can be admitted.

        Under a fair limit, one more than are likely to be admitted.  Two more for each locked job,
        so that few steps find the first job that is not locked.
        """
        fair = 1 + self._most_ready // self._lanes
        most = (
            min(rule.capacity, fair) if rule.is_fair else rule.most_at_once
            for rule in rules.values()
        )
        return min(max(most, default=0), MOST_OF_LANE) + 1 + 2 * len(self._round.locked)

    def _take_turns(self, admissions: Admissions, rules: Rules) -> Step:
        """Admit from the lanes whose turn is next."""
        current = self._round
        lanes = current.fair[: current.most_lanes]
        result = self._admit(admissions, {lane.key: lane.jobs for lane in lanes}, rules)
        left = current.fair[current.most_lanes :]
        if not result.are_all:
            unadmitted = (
                lane._replace(jobs=[job for job in lane.jobs if job.job_id not in result.jobs])
                for lane in lanes
            )
            left = [lane for lane in unadmitted if lane.jobs] + left
        if result.full:
            left = [lane for lane in left if lane.group not in result.full]
        current.fair = left
        return Step(len(result.jobs), not left)

    def _admit(
        self, admissions: Admissions, lanes: Mapping[LaneKey, Lane], rules: Rules
    ) -> Admitted:
        """Admit the jobs of these lanes that have room in their limits, in their order."""
        lanes = {key: jobs for key, jobs in lanes.items() if not self._guard.rests(key)}
        waiting = list(chain.from_iterable(lanes.values()))
        keys = {key for job in waiting if job.is_due for key in job.limit_keys}
        if not keys:
            return Admitted()
        self._round.admitting, rules = lanes.keys(), with_keys(keys, rules)
        self._serialize(admissions)
        # The jobs of a fair limit have second places, under its name.
        names = {name_of(key) for key in keys if is_fair(key, rules)}
        paused = self._paused()
        read = sorted(keys | names)
        places = admissions.places_under(read, paused=paused, known=self._places.of_key)
        self._places.learn(read, places)
        if free := [place for place in places if not place.is_held]:
            admissions.delete_places(free)
        if cannot_start := to_send_back(places, rules):
            sent_back = admissions.send_back(cannot_start, paused=paused)
            places = [place for place in places if place.job_id not in sent_back]
        # Read after the places: a job that starts in between still counts as not started.
        timed = {key for key in keys if is_rate(key, rules) or is_fair(key, rules)}
        buckets = admissions.buckets(sorted(timed)) if timed else NO_BUCKETS

        held = held_by_key(places, buckets, rules)
        ready = ready_by_group(places, rules) if names else Counter()
        most_ready = self._most_ready + self._lanes // KEYS_FOR_ONE_MORE
        turns = Turns(ready, most_ready, buckets.full_at)
        chosen = to_admit(waiting, held, rules, locked=self._round.locked, most=MOST, turns=turns)

        moved = admissions.admit(chosen, notify=self._notify) if chosen else set()
        if unmoved := set(chosen) - moved:
            unadmitted = [job for job in waiting if job.job_id not in moved]
            self._skip_stuck(admissions, unadmitted, unmoved)
        admitted = [job_id for job_id in chosen if job_id in moved]
        tokens = _take_tokens(admissions, waiting, admitted, buckets, rules) if timed else {}
        for lane, jobs in lanes.items():
            if (wait := tokens.get(jobs[0].limit_keys)) is not None:
                self.known.read_again(lane, time.monotonic() + wait.total_seconds())
        if names:
            took = (turn_group(job, rules) for job in waiting if job.job_id in moved)
            ready.update(group for group in took if group)
        full = {group for group, count in ready.items() if count >= most_ready}
        return Admitted(moved, len(chosen) < MOST and not unmoved, full)

    def _skip_stuck(
        self, admissions: Admissions, waiting: Sequence[WaitingJob], unmoved: Collection[int]
    ) -> None:
        """Skip the jobs that could not be moved, for the rest of the round.

        Also checks the other jobs that were read under the same keys, because another transaction
        may have locked thousands.  A waiting message that differs from its job in queue, priority
        or time cannot be moved either, although no transaction has locked the job.
        """
        keys = {job.limit_keys for job in waiting if job.job_id in unmoved}
        suspected = [job for job in waiting if job.limit_keys in keys]
        stuck = {job.job_id for job in suspected} - admissions.free(suspected) | set(unmoved)
        admissions.drop_useless(job for job in suspected if job.job_id in stuck)
        self._round.locked |= stuck

    def _source_now(self) -> object:
        return tuple(self._queues()), self._tasks(), self._paused()

    def _serialize(self, admissions: Admissions) -> None:
        if self._is_only_admitter:  # another transaction may be rolled back
            self._places.forget()
        else:
            self._places.begin(admissions.serialize())


def rules_of(limits: Mapping[str, Limit]) -> dict[str, LimitRule]:
    """Return the limits of the code as rules, as if a worker had declared them."""
    return {
        name: LimitRule(
            limit.capacity, limit.is_strict, limit.failed_head == "skip", is_fair=limit.is_fair
        )
        for name, limit in limits.items()
    }


def _take_tokens(
    admissions: Admissions,
    waiting: Sequence[WaitingJob],
    admitted: Sequence[int],
    buckets: Buckets,
    rules: Rules,
) -> dict[tuple[str, ...], timedelta]:
    """Take a token under each rate of the admitted jobs, and record the turns of their fair keys.

    Also gives each job of a fair limit a place under the name of the limit.  Returns, for the keys
    of jobs that were not admitted, the time until the next token comes back, if they miss one.
    """
    by_id = {job.job_id: job for job in waiting}
    jobs = [by_id[job_id] for job_id in admitted]
    rates = {key for key in chain.from_iterable(_key_sets(waiting)) if is_rate(key, rules)}
    starts = Counter(dict.fromkeys(rates, 0))
    starts.update(key for job in jobs for key in job.limit_keys if key in rates)
    full_at = after_starts(starts, buckets, rules)
    turns = after_turns(jobs, buckets.now, rules)
    if full_at or turns:
        admissions.write_buckets({**full_at, **turns}, before=buckets)
    if turns:
        admissions.add_places(fair_names(jobs, rules))
    taken = set(admitted)
    unadmitted = _key_sets(job for job in waiting if job.is_due and job.job_id not in taken)
    after = Buckets(buckets.now, {**buckets.full_at, **full_at})
    waits = {keys: next_token(rates.intersection(keys), after, rules) for keys in unadmitted}
    return {keys: wait for keys, wait in waits.items() if wait is not None}


def _is_timed(job: WaitingJob, rules: Rules) -> bool:
    """Whether a job may also become admissible without a place that is given up under its keys."""
    return any(is_rate(key, rules) or is_fair(key, rules) for key in job.limit_keys)


def _key_sets(jobs: Iterable[WaitingJob]) -> set[tuple[str, ...]]:
    return {job.limit_keys for job in jobs}
