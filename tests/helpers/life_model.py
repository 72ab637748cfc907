"""The life of a job as a table of steps, small enough to try all of it.

Two slots, of two workers or of one, at one job.  Each function below is one line of
docs/explanation/architecture.md: what a session finds, and what it then does, at once.  What
happens between the statements of two sessions is tried on a real server instead, by
chaos/scenarios/interleavings.py.

The model without its guard, the fence (``state.has_fence``), is broken: a test demands a
counterexample.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

MAX_ATTEMPTS = 2
CLAIMS = 3


class Message(NamedTuple):
    """The permission to start an attempt."""

    id: int
    used: int
    """Attempts used up so far."""


class Lease(NamedTuple):
    """The right to finish an attempt."""

    message: int
    attempt: int
    worker: int


class Slot(NamedTuple):
    """The attempt that one slot of a worker believes to run; message 0 for none."""

    message: int = 0
    attempt: int = 0


IDLE = Slot()


class State(NamedTuple):
    """Everything there is to know about one job."""

    has_fence: bool = True
    """Whether a settle names the message and the worker of its lease."""
    workers: tuple[int, ...] = (0, 1)
    """Whose slots these are."""
    outcome: str | None = None
    attempts: int = 0
    is_cancel_requested: bool = False
    messages: tuple[Message, ...] = (Message(1, 0),)
    lease: Lease | None = None
    slots: tuple[Slot, ...] = (IDLE, IDLE)
    dead: frozenset[int] = frozenset()
    next_message: int = 2
    claims_left: int = CLAIMS
    cancels_left: int = 1
    requeues_left: int = 1
    given: frozenset[tuple[int, int]] = frozenset()
    """The attempts (message, number) that were given out."""
    accepted: frozenset[tuple[int, int]] = frozenset()
    wrong: str | None = None
    """What a step has done that no step may do."""

    def with_slot(self, slot: int, now: Slot) -> "State":
        slots = tuple(now if n == slot else one for n, one in enumerate(self.slots))
        return self._replace(slots=slots)

    def without(self, message: int) -> "State":
        return self._replace(messages=tuple(one for one in self.messages if one.id != message))


Step = Callable[[State, int], Iterator[State]]
STEPS: dict[str, Step] = {}


def step(function: Step) -> Step:
    STEPS[function.__name__.replace("_", " ")] = function
    return function


# What a worker does


@step
def claim(state: State, slot: int) -> Iterator[State]:
    """By a living worker: delete the message, and lease the job."""
    worker = state.workers[slot]
    is_idle = worker not in state.dead and state.slots[slot] == IDLE and state.claims_left > 0
    if not is_idle or not state.messages:
        return
    message = state.messages[0]
    state = state.without(message.id)._replace(claims_left=state.claims_left - 1)
    # The message of an ended job, and a second one of a leased job, are dropped.
    if state.outcome is None and state.lease is None:
        lease = Lease(message.id, message.used + 1, worker)
        state = _given(state._replace(lease=lease), lease)
        state = state.with_slot(slot, Slot(message.id, lease.attempt))
    yield state


@step
def settle(state: State, slot: int) -> Iterator[State]:
    """The owner, be it declared dead: delete the lease by all its names."""
    mine, lease = state.slots[slot], state.lease
    if mine == IDLE:
        return
    done = state.with_slot(slot, IDLE)
    named = lease is not None and lease == Lease(*mine, state.workers[slot])
    if lease is None or (not named and state.has_fence):
        yield done
        return
    if not named:
        late, now = tuple(mine), (lease.message, lease.attempt)
        done = done._replace(wrong=f"the outcome of attempt {late} was written for {now}")
    for ending in _endings(mine.attempt):
        yield _verdict(done, mine, ending)


# What may happen to a worker


@step
def crash(state: State, slot: int) -> Iterator[State]:
    """The process is gone."""
    if state.slots[slot] != IDLE:
        yield _buried(state, slot).with_slot(slot, IDLE)


@step
def be_declared_dead(state: State, slot: int) -> Iterator[State]:
    """Frozen or cut off: it comes back as a zombie, and settles what it had."""
    if state.slots[slot] != IDLE and state.workers[slot] not in state.dead:
        yield _buried(state, slot)


# What others may do, at any time


@step
def rescue(state: State, slot: int) -> Iterator[State]:
    """Give back what the dead hold."""
    lease = state.lease
    if slot == 0 and lease is not None and lease.worker in state.dead:
        yield _verdict(state, Slot(lease.message, lease.attempt), None)


@step
def cancel(state: State, slot: int) -> Iterator[State]:
    """Never waits: ends the job if it waits; else asks its owner."""
    if slot != 0 or not state.cancels_left or state.outcome is not None:
        return
    state = state._replace(cancels_left=0)
    if state.lease is not None:
        yield state._replace(is_cancel_requested=True)
    else:
        yield state._replace(outcome="cancelled", messages=())


@step
def requeue(state: State, slot: int) -> Iterator[State]:
    """A failed or cancelled job begins again."""
    if slot != 0 or not state.requeues_left or state.outcome not in ("failed", "cancelled"):
        return
    again = state._replace(outcome=None, attempts=0, is_cancel_requested=False, requeues_left=0)
    yield _with_message(again._replace(lease=None, messages=()), used=0)


# What the steps are made of


def _endings(attempt: int) -> tuple[str | None, ...]:
    """None: it is to be tried again."""
    return ("failed",) if attempt > MAX_ATTEMPTS else ("succeeded", "failed", None)


def _verdict(state: State, mine: Slot, ending: str | None) -> State:
    """The lease is gone; the job's row is the arbiter, and a requested cancel wins."""
    state = _accept(state._replace(lease=None), mine.message, mine.attempt)
    if state.outcome is not None:
        return state
    if state.is_cancel_requested:
        ending = "cancelled"
    elif ending is None and mine.attempt >= MAX_ATTEMPTS:
        ending = "failed"
    state = state._replace(outcome=ending, attempts=min(mine.attempt, MAX_ATTEMPTS))
    return state if ending is not None else _with_message(state, used=mine.attempt)


def _with_message(state: State, *, used: int) -> State:
    message = Message(state.next_message, used)
    return state._replace(messages=(*state.messages, message), next_message=state.next_message + 1)


def _given(state: State, lease: Lease) -> State:
    attempt = (lease.message, lease.attempt)
    if attempt in state.given:
        return state._replace(wrong=f"attempt {attempt} was given out twice")
    return state._replace(given=state.given | {attempt})


def _accept(state: State, message: int, attempt: int) -> State:
    if (message, attempt) in state.accepted:
        return state._replace(wrong=f"two outcomes of attempt {(message, attempt)} were accepted")
    return state._replace(accepted=state.accepted | {(message, attempt)})


def _buried(state: State, slot: int) -> State:
    return state._replace(dead=state.dead | {state.workers[slot]})
