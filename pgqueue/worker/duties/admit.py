"""The admitter: moves jobs that wait for room in their limits to the message queue.

A worker runs this thread if its application has limits, or if limits were ever declared in its
database.  It admits in rounds.  A round reads all lanes, one after the other, in short
transactions.  A hint begins a round sooner; a lost hint does no harm, because a later round finds
every job.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import chain, groupby
from threading import Event
from typing import NamedTuple

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from pgqueue import redaction
from pgqueue.database.settings import ADMITTING
from pgqueue.repository.admit import FIRST_LANE, FIRST_PLACE, Admissions, LaneKey, lane_of
from pgqueue.repository.claim import Claimed
from pgqueue.repository.workers import Paused
from pgqueue.rules.admission import (
    Buckets,
    Place,
    Rule,
    Rules,
    TurnGroup,
    Turns,
    Waiting,
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
)
from pgqueue.rules.limits import SEPARATOR, Limit, Limited, name_of
from pgqueue.worker.loop import Loop
from pgqueue.worker.outage import Outage, words_of
from pgqueue.worker.threads import wait_until

logger = redaction.logger(__name__)


SWEEP_EVERY = 10.0
"""Seconds between two sweeps, which delete free places."""
MOMENT = 0.2
"""Seconds that a worker which ends waits for a statement before it cancels the statement."""
LAST_ROUND = 10.0
"""Seconds for which a worker that ends when no job is left waits for a round."""


class Admitter(Loop):
    """The admitting thread.  Many workers may have one; a lock lets one of them admit at a time.

    A step of the loop is a round.
    """

    patience = MOMENT

    def __init__(
        self,
        engine: Engine,
        rounds: "AdmissionRounds",
        outage: Outage,
        *,
        limited: Limited,
        poll_interval: float,
        stopping: Event,
        on_admitted: Callable[[], object],
    ) -> None:
        super().__init__(engine, ADMITTING, outage, name="admitter", stopping=stopping)
        self.again = poll_interval
        self.is_in_use = bool(limited.limits)
        self.admitted = 0
        """How many jobs this worker has admitted."""
        self._limited = limited
        self._rounds = rounds
        self._poll_interval = poll_interval
        self._on_admitted = on_admitted
        self._are_declared = not limited.limits
        self._begun = self._ended = 0
        """The numbers of the rounds that have begun and ended last."""
        self._swept_at = time.monotonic()

    def look_for_limits(self, connection: Connection) -> None:
        """Find out whether limits are in use: jobs may wait for limits of earlier code."""
        self.is_in_use = self.is_in_use or Admissions(connection).are_declared()

    def settled(self, jobs: Iterable[Claimed]) -> None:
        """Begin a round soon if one of these jobs may have held a place."""
        limited = self._limited
        if any(job.task in limited.tasks or job.queue in limited.queues for job in jobs):
            self.wake()

    def has_admitted_since(self, count: int) -> bool:
        """Run a round; returns whether ``admitted`` differs from ``count`` after it."""
        if not self.is_in_use:
            return False
        wanted = self._begun + 1  # a round that runs now may have read too early
        self.wake()
        wait_until(lambda: self._ended >= wanted or self.stopping.is_set(), lambda: LAST_ROUND)
        return self.admitted != count

    def step(self, connection: Connection) -> float:
        """Admit from all lanes; returns the seconds until the next round."""
        self._begun += 1
        try:
            if not self._are_declared:
                with connection.begin():
                    Admissions(connection).declare(self._limited.limits.values())
                self._are_declared = True
            wait = self._run_round(connection)
            self._sweep(connection)
        finally:
            self._ended = self._begun
        return wait

    def _run_round(self, connection: Connection) -> float:
        self._rounds.begin()
        wait, step = self._poll_interval, Step(0, is_last=False)
        while not step.is_last and not self.stopping.is_set():
            step = self._guarded_step(connection)
            if step.seconds_to_next is not None:
                wait = min(wait, step.seconds_to_next)
            if step.admitted:
                self.admitted += step.admitted
                self._on_admitted()
        return wait

    def _sweep(self, connection: Connection) -> None:
        """Every ``SWEEP_EVERY`` seconds, delete places that are free."""
        is_more = time.monotonic() - self._swept_at >= SWEEP_EVERY
        while is_more and not self.stopping.is_set():
            self._swept_at = time.monotonic()
            with connection.begin():
                is_more = self._rounds.sweep(connection)

    def _guarded_step(self, connection: Connection) -> "Step":
        """Run a step; if one lane is the cause of an error, only this lane is skipped."""
        try:
            with connection.begin():
                return self._rounds.step(connection)
        except Exception as error:
            if not is_of_a_row(error) or not self._rounds.isolate(error):
                raise
            return Step(0, is_last=False)


def is_of_a_row(error: Exception) -> bool:
    """Whether a value of a row, or a trigger or constraint on it, can be the cause."""
    if isinstance(error, DBAPIError):
        return str(getattr(error.orig, "sqlstate", None) or "")[:2] in ("22", "23", "P0")
    return isinstance(error, ArithmeticError | TypeError | ValueError)


MOST_LANES = 1000
"""Lanes in one transaction."""
MOST = 1000
"""Jobs that one transaction admits."""
MOST_OF_LANE = 100
"""Jobs of one lane that one transaction reads."""
KEYS_FOR_ONE_MORE = 10
"""For so many lanes, one more job of a fair limit may be ready, because a round takes longer."""
SWEPT_AT_ONCE = 1000
"""Places that one step of a sweep reads."""
NO_BUCKETS = Buckets(datetime.min, {})


class Step(NamedTuple):
    """What one transaction has done."""

    admitted: int
    is_last: bool
    """Whether the last lane was read."""
    seconds_to_next: float | None = None
    """Seconds until one of the jobs that were read becomes due or gets a token, if any."""


class Admitted(NamedTuple):
    """What was admitted from some lanes."""

    jobs: Collection[int] = ()
    are_all: bool = True
    """Whether all jobs that could be admitted are."""
    seconds_to_token: float | None = None
    """Seconds until the next token comes back for which a job waits, if any."""
    full: Collection[TurnGroup] = ()
    """The groups of which enough jobs are ready."""


Lane = list[Waiting]
"""The first jobs of a lane."""


class AdmissionRounds:
    """Admits jobs of some queues and tasks, step by step.

    A step reads the next lanes and admits from them.  If the lanes are more than one step reads,
    those of fair limits are set aside: only when all are known, the keys that have waited longest
    can be given their turns.

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
        own: Mapping[str, Rule] | None = None,
        is_only_admitter: bool = False,
    ) -> None:
        self._queues = queues
        self._paused = paused
        self._tasks = tasks
        self._notify = notify
        self._most_ready = most_ready
        self._own = own or {}
        self._is_only_admitter = is_only_admitter
        self._after = FIRST_LANE
        self._passed = 0
        """How many lanes were read in this round."""
        self._lanes = 1
        """How many lanes there are, as far as is known."""
        self._set_aside: dict[LaneKey, tuple[datetime, Lane]] = {}
        """The lanes of fair limits that were read, with the last turns of their keys."""
        self._in_turn: list[Lane] = []
        """The lanes that were set aside, in the order of their turns."""
        self._swept_to = FIRST_PLACE
        self._locked: set[int] = set()
        """Jobs that could not be moved in this round: other transactions have locked their rows."""
        self._most_lanes = MOST_LANES
        self._reading: list[LaneKey] = []
        """The lanes from which this step admits."""
        self._bad: set[LaneKey] = set()
        """Lanes from which nothing can be admitted, until the next sweep."""
        self._reported: set[LaneKey] = set()

    def begin(self) -> None:
        """Begin a round: look again at jobs that were locked."""
        self._locked.clear()
        self._most_lanes = MOST_LANES

    def isolate(self, error: Exception) -> bool:
        """After a step that has failed: read fewer lanes, and skip a lane that fails alone.

        False if the step has failed before it has read any.
        """
        if len(self._reading) > 1:
            self._most_lanes = -(-len(self._reading) // 10)
            return True
        for lane in self._reading:
            if lane not in self._reported:
                logger.error(
                    "admitter: no job under %s can be admitted to queue %s: %s; the others go on, "
                    "and this is tried again every %d seconds",
                    lane.limit_keys.replace(SEPARATOR, ", "),
                    lane.queue,
                    words_of(error),
                    SWEEP_EVERY,
                )
        self._bad.update(self._reading)
        self._reported.update(self._reading)
        self._most_lanes = MOST_LANES
        return bool(self._reading)

    def step(self, connection: Connection) -> Step:
        """Admit from the next lanes, in the transaction that the caller has begun."""
        admissions = Admissions(connection)
        self._reading = []
        rules = {**self._own, **admissions.rules()}
        if self._in_turn:
            return self._take_turns(admissions, rules)
        return self._read_lanes(admissions, rules)

    def _read_lanes(self, admissions: Admissions, rules: Rules) -> Step:
        paused, per_lane = self._paused(), self._jobs_per_lane(rules)
        lanes = admissions.first_waiting(
            self._after,
            queues=[queue for queue in self._queues() if queue not in paused.queues],
            tasks=self._tasks(),
            lanes=self._most_lanes,
            of_lane=per_lane,
        )
        passed = self._passed + lanes.number
        self._lanes = max(passed, 1 if lanes.are_all else self._lanes)
        waiting = lanes.waiting
        if passed > lanes.number or not lanes.are_all:
            waiting = self._without_fair(admissions, waiting, rules)
        result = self._admit(admissions, waiting, rules)
        is_to_repeat = not result.are_all or _is_lane_used_up(waiting, result.jobs, per_lane)
        if not is_to_repeat:
            self._after, self._passed = lanes.last or FIRST_LANE, passed
            if lanes.are_all:
                self._end_reading()
        waits = [
            wait for wait in (lanes.seconds_to_next, result.seconds_to_token) if wait is not None
        ]
        is_last = lanes.are_all and not is_to_repeat and not self._in_turn
        return Step(len(result.jobs), is_last, min(waits, default=None))

    def _without_fair(
        self, admissions: Admissions, waiting: Sequence[Waiting], rules: Rules
    ) -> list[Waiting]:
        """Set the lanes of fair limits aside; returns the jobs of the others."""
        lanes = {key: list(jobs) for key, jobs in groupby(waiting, lane_of)}
        fair = {key: lane for key, lane in lanes.items() if turn_group(lane[0], rules)}
        if fair:
            keys = {key for lane in fair.values() for key in lane[0].limit_keys}
            last = admissions.buckets(sorted(keys)).full_at
            for key, lane in fair.items():
                if due := [job for job in lane if job.is_due]:
                    self._set_aside[key] = last_turn(due[0], last, rules), due
        return [job for key, lane in lanes.items() if key not in fair for job in lane]

    def _end_reading(self) -> None:
        """Put the lanes that were set aside in the order of their turns; the next round reads the
        lanes from the first one."""
        lanes = sorted(
            self._set_aside.values(),
            key=lambda turn: (turn[1][0].priority, turn[0], turn[1][0].run_at, turn[1][0].job_id),
        )
        self._in_turn = [lane for _, lane in lanes]
        self._set_aside = {}
        self._after, self._passed = FIRST_LANE, 0

    def _take_turns(self, admissions: Admissions, rules: Rules) -> Step:
        """Admit from the lanes whose turn is next."""
        lanes, later = self._in_turn[: self._most_lanes], self._in_turn[self._most_lanes :]
        result = self._admit(admissions, list(chain.from_iterable(lanes)), rules)
        if result.are_all:
            self._in_turn = [
                lane for lane in later if turn_group(lane[0], rules) not in result.full
            ]
        else:
            left = [[job for job in lane if job.job_id not in result.jobs] for lane in lanes]
            self._in_turn = [lane for lane in left if lane] + later
        return Step(len(result.jobs), not self._in_turn, result.seconds_to_token)

    def sweep(self, connection: Connection) -> bool:
        """Delete some free places and full buckets; returns whether many more places may be free.

        An admission deletes free places too, but only under keys for which a job waits.
        """
        self._bad.clear()
        admissions = Admissions(connection)
        self._serialize(admissions)
        places = admissions.places_after(self._swept_to, most=SWEPT_AT_ONCE)
        if free := [place for place in places if not place.is_held]:
            admissions.delete_places(free)
        admissions.delete_full_buckets(most=SWEPT_AT_ONCE)
        is_last = len(places) < SWEPT_AT_ONCE
        self._swept_to = FIRST_PLACE if is_last else (places[-1].key, places[-1].job_id)
        return not is_last and len(free) > SWEPT_AT_ONCE // 2

    def _admit(self, admissions: Admissions, waiting: Sequence[Waiting], rules: Rules) -> Admitted:
        if self._bad:
            waiting = [job for job in waiting if lane_of(job) not in self._bad]
        if not any(job.is_due for job in waiting):
            return Admitted()
        self._reading = list({lane_of(job): None for job in waiting})
        self._serialize(admissions)
        keys = {key for job in waiting if job.is_due for key in job.limit_keys}
        places = _places_that_stay(admissions, keys, rules, self._paused())
        # Read after the places: a job that starts in between still counts as not started.
        timed = {key for key in keys if is_rate(key, rules) or is_fair(key, rules)}
        buckets = admissions.buckets(sorted(timed)) if timed else NO_BUCKETS
        held = held_by_key(places, buckets, rules)
        most_ready = self._most_ready + self._lanes // KEYS_FOR_ONE_MORE
        ready = ready_by_group(places, rules)
        turns = Turns(ready, most_ready, buckets.full_at)
        chosen = to_admit(waiting, held, rules, locked=self._locked, most=MOST, turns=turns)
        moved = admissions.admit(chosen, notify=self._notify) if chosen else set()
        if unmoved := set(chosen) - moved:
            self._skip_stuck(
                admissions, [job for job in waiting if job.job_id not in moved], unmoved
            )
        admitted = [job_id for job_id in chosen if job_id in moved]
        wait = _take_tokens(admissions, waiting, admitted, buckets, rules) if timed else None
        ready.update(
            group for job in waiting if job.job_id in moved and (group := turn_group(job, rules))
        )
        full = {group for group, count in ready.items() if count >= most_ready}
        return Admitted(moved, len(chosen) < MOST and len(moved) == len(chosen), wait, full)

    def _skip_stuck(
        self, admissions: Admissions, waiting: Sequence[Waiting], unmoved: Collection[int]
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
        self._locked |= stuck

    def _serialize(self, admissions: Admissions) -> None:
        if not self._is_only_admitter:
            admissions.serialize()

    def _jobs_per_lane(self, rules: Rules) -> int:
        """How many jobs of each lane to read: one more than can be admitted.

        Under a fair limit, one more than are likely to be admitted.  Two more for each locked job,
        so that few steps find the first job that is not locked.
        """
        largest = max((self._likely_to_admit(rule) for rule in rules.values()), default=0)
        return min(largest, MOST_OF_LANE) + 1 + 2 * len(self._locked)

    def _likely_to_admit(self, rule: Rule) -> int:
        if not rule.is_fair:
            return rule.most_at_once
        return min(rule.capacity, 1 + self._most_ready // self._lanes)


def _places_that_stay(
    admissions: Admissions, keys: Collection[str], rules: Rules, paused: Paused
) -> list[Place]:
    """Read the places under these keys, and under the names of their fair limits.

    Deletes free places, sends back the jobs that cannot start now, and returns the other places.
    """
    names = {name_of(key) for key in keys if is_fair(key, rules)}
    places = admissions.places_under(sorted({*keys, *names}), paused=paused)
    if free := [place for place in places if not place.is_held]:
        admissions.delete_places(free)
    cannot_start = to_send_back(places, rules)
    sent_back = admissions.send_back(cannot_start, paused=paused) if cannot_start else set()
    return [place for place in places if place.job_id not in sent_back]


def _take_tokens(
    admissions: Admissions,
    waiting: Sequence[Waiting],
    admitted: Sequence[int],
    buckets: Buckets,
    rules: Rules,
) -> float | None:
    """Take a token under each rate of the admitted jobs, and record the turns of their fair keys.

    Also gives each job of a fair limit a place under the name of the limit.  Returns the seconds
    until the next token comes back for which a job waits.
    """
    by_id = {job.job_id: job for job in waiting}
    jobs = [by_id[job_id] for job_id in admitted]
    rates = {key for key in chain.from_iterable(_key_sets(waiting)) if is_rate(key, rules)}
    starts = Counter(key for job in jobs for key in job.limit_keys if key in rates)
    full_at = after_starts(starts, buckets, rules)
    turns = after_turns(jobs, buckets.now, rules)
    if full_at or turns:
        admissions.write_buckets({**full_at, **turns})
    if turns:
        admissions.add_places(fair_names(jobs, rules))
    taken = set(admitted)
    unadmitted = [job for job in waiting if job.is_due and job.job_id not in taken]
    keys = rates.intersection(chain.from_iterable(_key_sets(unadmitted)))
    wait = next_token(keys, Buckets(buckets.now, {**buckets.full_at, **full_at}), rules)
    return None if wait is None else wait.total_seconds()


def _key_sets(jobs: Iterable[Waiting]) -> set[tuple[str, ...]]:
    return {job.limit_keys for job in jobs}


def _is_lane_used_up(waiting: Sequence[Waiting], admitted: Collection[int], per_lane: int) -> bool:
    """Whether all jobs that were read from some lane are admitted: the lane may have more."""
    lanes = Counter(lane_of(job) for job in waiting if job.job_id in admitted)
    return any(count >= per_lane for count in lanes.values())


def rules_of(limits: Mapping[str, Limit]) -> dict[str, Rule]:
    """Return the limits of the code as rules, as if a worker had declared them."""
    return {
        name: Rule(
            limit.capacity, limit.is_strict, limit.failed_head == "skip", is_fair=limit.is_fair
        )
        for name, limit in limits.items()
    }
