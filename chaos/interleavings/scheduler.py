"""Two sessions, every order of their statements.

Each stepper runs a script in a thread of its own and stops before each statement that it sends,
COMMIT and ROLLBACK included; a scheduler says who goes on.  A statement that waits for a lock
really waits: its stepper is left out until the other has moved far enough to let it through, so
that the server looks at the changed row again, as it does in earnest.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sqlalchemy import Connection, event, text

from chaos.broken import Broken
from chaos.workers import wait_until

SOON = 0.004
"""Seconds in which nearly every statement is done that does not wait for a lock."""
PATIENCE = 60.0

BLOCKED = text("SELECT bool_or(cardinality(pg_blocking_pids(pid)) > 0) FROM unnest(:pids) AS pid")


class Stepper:
    """One session's script, run one statement at a time."""

    def __init__(self, name: str, script: Callable[[], None], pids: Sequence[int]) -> None:
        self.name = name
        self.is_over = False
        self.error: BaseException | None = None
        self._script = script
        self._pids = list(pids)
        self._may_go = threading.Semaphore(0)
        self._is_back = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Go as far as the first statement, which is not sent yet."""
        self._thread.start()
        self._is_back.acquire()

    def pause(self) -> None:
        """Called before each statement, in the stepper's thread."""
        if threading.current_thread() is self._thread:
            self._is_back.release()
            self._may_go.acquire()

    def go_on(self) -> None:
        """Send the statement, and go as far as the next."""
        self._may_go.release()

    def comes_back(self, monitor: Connection) -> bool:
        """Whether its statement is done; False when it waits for another's lock."""
        while not self._is_back.acquire(timeout=SOON):
            if monitor.scalar(BLOCKED, {"pids": self._pids}):
                return False
        return True

    def is_back_now(self) -> bool:
        return self._is_back.acquire(blocking=False)

    def _run(self) -> None:
        try:
            self._script()
        except BaseException as error:  # carried over to the thread of the scenario
            self.error = error
        finally:
            self.is_over = True
            self._is_back.release()


def stop_before_statements(connection: Connection, pause: Callable[[], None]) -> None:
    """Savepoints touch nothing that another session could see, and are no places to stop at."""

    def before(_connection: Any, _cursor: Any, _statement: str, *_: Any) -> None:
        pause()

    event.listen(connection, "before_cursor_execute", before)
    event.listen(connection, "commit", lambda _connection: pause())
    event.listen(connection, "rollback", lambda _connection: pause())


class Scheduler(Protocol):
    """Says which of the steppers that can go on does."""

    def choose(self, count: int) -> int: ...


class EveryOrder:
    """Goes through all orders, one after the other, by turning the last choice that can be."""

    def __init__(self) -> None:
        self._choices: list[list[int]] = []
        """At each step: which stepper was chosen, and of how many."""
        self._step = 0

    def choose(self, count: int) -> int:
        if self._step == len(self._choices):
            self._choices.append([0, count])
        self._step += 1
        return min(self._choices[self._step - 1][0], count - 1)

    def turn(self) -> bool:
        """Prepare the next order; False when that was the last."""
        self._step = 0
        while self._choices and self._choices[-1][0] + 1 >= self._choices[-1][1]:
            self._choices.pop()
        if self._choices:
            self._choices[-1][0] += 1
        return bool(self._choices)


class SomeOrder:
    """Any order, by a seed.

    Each has its own inclination to change over: most mistakes need a long run of one session
    between two statements of the other, which a fair coin hardly ever gives.
    """

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._change_over = dice.choice((0.1, 0.3, 0.5))
        self._last = dice.randrange(2)

    def choose(self, count: int) -> int:
        if self._dice.random() < self._change_over:
            self._last = 1 - self._last
        return min(self._last, count - 1)


class GivenOrder:
    """An order written down: of two steppers who can go on, the first (0) or the second (1)."""

    def __init__(self, order: str) -> None:
        self._left = iter(order)

    def choose(self, count: int) -> int:
        return min(int(next(self._left, "0")), count - 1)


def run_in_order(steppers: Sequence[Stepper], scheduler: Scheduler, monitor: Connection) -> str:
    """Run the scripts to their ends; who was chosen at each step, as :class:`GivenOrder` reads
    it back."""
    order = ""
    for stepper in steppers:
        stepper.start()
    blocked: list[Stepper] = []
    while not all(stepper.is_over for stepper in steppers):
        able = [stepper for stepper in steppers if not stepper.is_over and stepper not in blocked]
        if not able:
            blocked = _wait_for_deadlock(blocked)
            continue
        choice = scheduler.choose(len(able)) if len(able) > 1 else 0
        order += str(choice) if len(able) > 1 else ""
        able[choice].go_on()
        blocked = [one for one in (able[choice], *blocked) if not one.comes_back(monitor)]
    return order


def _wait_for_deadlock(blocked: list[Stepper]) -> list[Stepper]:
    """All wait: the server, or the lock timeout, ends one of them, which then has its error."""
    back: list[Stepper] = []

    def one_is_back() -> bool:
        back.extend(stepper for stepper in blocked if stepper.is_back_now())
        return bool(back)

    wait_until(one_is_back, seconds=PATIENCE, what="one of two sessions that wait goes on")
    return [stepper for stepper in blocked if stepper not in back]


def raise_errors(steppers: Sequence[Stepper], words: str) -> None:
    for stepper in steppers:
        if stepper.error is not None:
            raise Broken(f"{words}: {stepper.name} failed: {stepper.error}") from stepper.error
