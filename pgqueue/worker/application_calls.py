"""Calls of the application's code by a worker's loop, on threads on which it may hang."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pgqueue import redaction

logger = redaction.logger(__name__)

T = TypeVar("T")

PATIENCE = 1.0
"""Seconds after which a call counts as hanging: the next call gets another thread."""
MOST_HANGING = 100
"""Calls that may hang at once, each of which holds a thread; then the others wait."""


@dataclass(eq=False)
class ApplicationCall(Generic[T]):
    """One call, by the name of its schedule."""

    name: str
    function: Callable[[], T]
    result: "Future[T]" = field(default_factory=Future)
    started_at: float | None = None
    hangs: bool = False


class ApplicationCalls(Generic[T]):
    """Makes calls one after the other on a thread of its own; one that hangs delays no other.

    Used by one loop, which holds no lock of ours meanwhile.  The threads end when no call is left.
    What a call raises is in its result, also SystemExit.
    """

    def __init__(self, around: Callable[[], AbstractContextManager[object]]) -> None:
        """``around`` makes the context of each call."""
        self._around = around
        self._changed = threading.Condition()
        self._calls: dict[str, ApplicationCall[T]] = {}
        """All calls whose results were not taken."""
        self._waiting: deque[ApplicationCall[T]] = deque()
        self._has_thread = False

    def is_pending(self, name: str) -> bool:
        """Whether a call of this name was started, and its result was not taken."""
        return name in self._calls

    def start(self, functions: Mapping[str, Callable[[], T]]) -> None:
        """Make a call for each name; none of them may be pending."""
        with self._changed:
            for name, function in functions.items():
                self._calls[name] = call = ApplicationCall(name, function)
                self._waiting.append(call)
            self._ensure_thread()

    def take_results(self) -> "dict[str, Future[T]]":
        """Return the results of the calls that have ended; waits a moment for those that run."""
        deadline = time.monotonic() + PATIENCE
        with self._changed:
            while (left := deadline - time.monotonic()) > 0 and self._are_awaited():
                self._changed.wait(min(left, self._note_hanging()))
            self._note_hanging()
            ended = {name: each.result for name, each in self._calls.items() if each.result.done()}
            for name in ended:
                del self._calls[name]
        return ended

    def hanging(self) -> dict[str, float]:
        """Return the calls that hang, with the seconds that they have run so far."""
        now = time.monotonic()
        with self._changed:
            return {
                call.name: now - call.started_at
                for call in self._hanging()
                if call.started_at is not None
            }

    def close(self) -> None:
        """Start no further call.  Calls that hang are left to end with the process."""
        with self._changed:
            self._waiting.clear()
            self._calls.clear()
            self._changed.notify_all()

    def _are_awaited(self) -> bool:
        if self._waiting and self._has_thread:
            return True
        return any(not call.hangs and not call.result.done() for call in self._calls.values())

    def _hanging(self) -> list[ApplicationCall[T]]:
        return [call for call in self._calls.values() if call.hangs and not call.result.done()]

    def _note_hanging(self) -> float:
        """Pass over calls that hang; returns the seconds until the next one may."""
        # The more calls hang already, the sooner the next one is passed over.
        patience = PATIENCE / (1 + len(self._hanging()))
        now, next_in = time.monotonic(), patience
        for call in self._calls.values():
            if call.started_at is None or call.hangs or call.result.done():
                continue
            if now - call.started_at < patience:
                next_in = call.started_at + patience - now
                continue
            call.hangs, self._has_thread = True, False
            logger.warning(
                "schedule %s: the application's code (on_enqueue, unique_key or the arguments) has "
                "not returned for %.1f s; the others go on",
                call.name,
                now - call.started_at,
            )
            self._ensure_thread()
        return next_in

    def _ensure_thread(self) -> None:
        if self._waiting and not self._has_thread and len(self._hanging()) < MOST_HANGING:
            self._has_thread = True
            threading.Thread(target=self._work, name="pgqueue-calls", daemon=True).start()

    def _work(self) -> None:
        while (call := self._next()) is not None:
            try:
                with self._around():
                    value = copy_context().run(call.function)
            except BaseException as error:
                call.result.set_exception(error)
            else:
                call.result.set_result(value)
            with self._changed:
                self._changed.notify_all()
                if call.hangs:  # another thread goes on
                    self._ensure_thread()
                    break

    def _next(self) -> ApplicationCall[T] | None:
        with self._changed:
            if not self._waiting:
                self._has_thread = False
                return None
            call = self._waiting.popleft()
            call.started_at = time.monotonic()
            return call
