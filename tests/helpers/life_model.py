"""The life of a job as a table of steps, small enough to try all of it.

Two slots, of two workers or of one, at one job.  Each function below is one line of
docs/explanation/life-of-a-job.md: what a session finds, and what it then does, at once.  What
happens between the statements of two sessions is tried on a real server instead, by
chaos/scenarios/interleavings.py.

A guard that is left away (``state.lacks``) makes a broken model, of which a test demands a
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
    held: bool


class Slot(NamedTuple):
    """What one slot of a worker believes."""

    does: str = "nothing"
    """claimed: runs in lease mode.  locked: T has the message.  running: T has it, stamped.
    unstamped, late: the same two, but T has ended, and the slot does not know it yet."""
    message: int = 0
    used: int = 0
    attempt: int = 0
    """That it runs, or, while it is locked, that it saw left over: 0 for none."""


IDLE = Slot()


class State(NamedTuple):
    """Everything there is to know about one job."""

    lacks: str = ""
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

    def has(self, guard: str) -> bool:
        """Whether a guard stands; every guard has its name here."""
        assert guard in GUARDS, guard
        return self.lacks != guard

    def with_slot(self, slot: int, now: Slot) -> "State":
        slots = tuple(now if n == slot else one for n, one in enumerate(self.slots))
        return self._replace(slots=slots)

    def is_locked(self, message: int) -> bool:
        return any(
            one.does in ("locked", "running") and one.message == message for one in self.slots
        )

    @property
    def free(self) -> Message | None:
        """A message that nobody holds."""
        return next((one for one in self.messages if not self.is_locked(one.id)), None)

    def without(self, message: int) -> "State":
        return self._replace(messages=tuple(one for one in self.messages if one.id != message))

    def has_message(self, id: int) -> bool:
        return any(one.id == id for one in self.messages)


ARBITER = "a job that has ended is left alone, by stamps and by settles"
NAMES = "the fence names the message and the worker"
ATTEMPT = "the fence names the attempt"
TAKE = "a settle in T takes the message"
COMPARE = "a stamp compares the attempt it has seen"
LOOK = "a stamp looks for its message"
HELD = "a rescue leaves held leases alone"
TIDY = "an ended job keeps no lease: cancel and requeue delete it"
FREE = "a requeue leaves a job whose message is held alone"
GUARDS = {ARBITER, NAMES, ATTEMPT, TAKE, COMPARE, LOOK, HELD, TIDY, FREE}
"""Where two guards cover each other against everything but half-done statements, they are one
here: the interleavings tell them apart."""

Step = Callable[[State, int], Iterator[State]]
STEPS: dict[str, Step] = {}


def step(function: Step) -> Step:
    STEPS[function.__name__.replace("_", " ")] = function
    return function


# Lease mode


@step
def claim(state: State, slot: int) -> Iterator[State]:
    """S0 or S3, by a living worker: delete the message, and lease the job."""
    message, worker = state.free, state.workers[slot]
    if not _can_take(state, slot) or message is None:
        return
    state = state.without(message.id)._replace(claims_left=state.claims_left - 1)
    if state.outcome is not None:  # the message of an ended job is dropped
        yield state
        return
    old = state.lease
    if old is None:
        lease = Lease(message.id, message.used + 1, worker, held=False)
    elif old.message == message.id:
        lease = Lease(message.id, old.attempt + 1, worker, held=False)
    else:
        yield state  # a second message of a leased job: damage, and dropped
        return
    claimed = Slot("claimed", message.id, message.used, lease.attempt)
    yield _given(state._replace(lease=lease), lease).with_slot(slot, claimed)


@step
def settle(state: State, slot: int) -> Iterator[State]:
    """The owner in lease mode, be it declared dead: delete the lease by all its names."""
    mine = state.slots[slot]
    if mine.does != "claimed":
        return
    done = state.with_slot(slot, IDLE)
    if not _passes_fence(state, slot, held=False):
        yield done
        return
    for ending in _endings(mine.attempt):
        yield _verdict(_checked(done, mine), mine, ending)


# Transaction mode


@step
def lock(state: State, slot: int) -> Iterator[State]:
    """S0 to S1, S3 to S1: T locks the message, and sees what a crash has left."""
    message, old = state.free, state.lease
    if not _can_take(state, slot) or message is None or state.outcome is not None:
        return
    if old is not None and not (old.held and old.message == message.id):
        yield state.without(message.id)  # a second message of a leased job
        return
    locked = Slot("locked", message.id, message.used, old.attempt if old else 0)
    yield state.with_slot(slot, locked)._replace(claims_left=state.claims_left - 1)


@step
def stamp(state: State, slot: int) -> Iterator[State]:
    """S1 to S2, committed beside T, also by a slot that does not know that T has ended."""
    mine, old = state.slots[slot], state.lease
    if mine.does not in ("locked", "unstamped"):
        return
    refused = state.with_slot(slot, IDLE)
    if mine.attempt == 0:
        is_over = state.outcome is not None and state.has(ARBITER)
        is_gone = not state.has_message(mine.message) and state.has(LOOK)
        if is_over or is_gone or old is not None:
            yield refused
            return
        attempt = mine.used + 1
    else:
        same = old is not None and old.held and old.message == mine.message
        if not same or old is None or (old.attempt != mine.attempt and _compares(state)):
            yield refused
            return
        attempt = old.attempt + 1
        # The attempt before it is put on record as crashed, which can be done once.
        state = _accept(state, mine.message, mine.attempt)
    lease = Lease(mine.message, attempt, state.workers[slot], held=True)
    state = _given(state._replace(lease=lease), lease)
    if mine.does == "unstamped":  # its next word to T fails, and the handler never starts
        yield state.with_slot(slot, IDLE)
    else:
        yield state.with_slot(slot, mine._replace(does="running", attempt=attempt))


@step
def settle_in_transaction(state: State, slot: int) -> Iterator[State]:
    """S2 to S4 or S0, in T; a late slot tries it in a new transaction."""
    mine = state.slots[slot]
    if mine.does not in ("running", "late"):
        return
    done = state.with_slot(slot, IDLE)  # of all that follows, all is undone or nothing
    is_there = state.has_message(mine.message) and not done.is_locked(mine.message)
    if not is_there and state.has(TAKE):
        yield done
        return
    if not _passes_fence(state, slot, held=True) or (state.outcome and state.has(ARBITER)):
        yield done
        return
    done = done.without(mine.message) if is_there else done
    for ending in _endings(mine.attempt):
        yield _verdict(_checked(done, mine), mine, ending)


# What may happen to a worker


@step
def lose_the_transaction(state: State, slot: int) -> Iterator[State]:
    """S1 to S0, S2 to S3: the server ends T, and the slot goes on."""
    mine = state.slots[slot]
    ended = {"locked": "unstamped", "running": "late"}
    if mine.does in ended:
        yield state.with_slot(slot, mine._replace(does=ended[mine.does]))


@step
def crash(state: State, slot: int) -> Iterator[State]:
    """The process is gone, and T with it."""
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
    """Give back what the dead hold: in lease mode always, S5 only if its message is gone."""
    lease = state.lease
    if slot != 0 or lease is None or lease.worker not in state.dead:
        return
    comes_back = lease.held and state.has_message(lease.message)
    if comes_back and state.has(HELD):
        return
    crashed = Slot("claimed", lease.message, 0, lease.attempt)
    yield _verdict(state, crashed, None)


@step
def cancel(state: State, slot: int) -> Iterator[State]:
    """Never waits: ends the job if it waits or is being taken; else asks its owner."""
    if slot != 0 or not state.cancels_left or state.outcome is not None:
        return
    state = state._replace(cancels_left=0)
    if state.free is not None:
        state = state.without(state.free.id)
        if state.has(TIDY):
            state = state._replace(lease=None)
    elif state.lease is not None:
        yield state._replace(is_cancel_requested=True)
        return
    yield state._replace(outcome="cancelled")


@step
def requeue(state: State, slot: int) -> Iterator[State]:
    """A failed or cancelled job begins again, unless somebody still holds its old message."""
    if slot != 0 or not state.requeues_left or state.outcome not in ("failed", "cancelled"):
        return
    if state.has(TIDY):
        state = state._replace(lease=None)
    if state.free is not None:
        state = state.without(state.free.id)
    if state.messages and state.has(FREE):
        return
    again = state._replace(outcome=None, attempts=0, is_cancel_requested=False, requeues_left=0)
    yield _with_message(again, used=0)


# What the steps are made of


def _can_take(state: State, slot: int) -> bool:
    is_alive = state.workers[slot] not in state.dead
    return is_alive and state.slots[slot] == IDLE and state.claims_left > 0


def _compares(state: State) -> bool:
    return state.has(COMPARE)


def _passes_fence(state: State, slot: int, *, held: bool) -> bool:
    lease, mine = state.lease, state.slots[slot]
    if lease is None or lease.held != held:
        return False
    named = (lease.message, lease.worker) == (mine.message, state.workers[slot])
    counted = lease.attempt == mine.attempt
    return (named or not state.has(NAMES)) and (counted or not state.has(ATTEMPT))


def _checked(state: State, mine: Slot) -> State:
    """What the fence is for."""
    lease = state.lease
    if lease is None or (lease.message, lease.attempt) == (mine.message, mine.attempt):
        return state
    late, now = (mine.message, mine.attempt), (lease.message, lease.attempt)
    return state._replace(wrong=f"the outcome of attempt {late} was written for {now}")


def _endings(attempt: int) -> tuple[str | None, ...]:
    """None: it is to be tried again."""
    return ("failed",) if attempt > MAX_ATTEMPTS else ("succeeded", "failed", None)


def _verdict(state: State, mine: Slot, ending: str | None) -> State:
    """The lease is gone; the job's row is the arbiter, and a requested cancel wins."""
    state = _accept(state._replace(lease=None), mine.message, mine.attempt)
    if state.outcome is not None:
        if state.has(ARBITER):
            return state
        state = state._replace(wrong=f"a job that had {state.outcome} was settled again")
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
