"""The sampler: asks for broken invariants again and again while a scenario runs."""

from __future__ import annotations

import time
from threading import Event, Thread

from sqlalchemy import Engine, text
from sqlalchemy.exc import SQLAlchemyError

from chaos.broken import Broken
from pgqueue import PgQueue, Violation

EVERY = 0.2
FULLY_EVERY = 10
"""One look in so many asks for all rules, some of which read all of ``jobs``; the others ask for
those of what is in flight."""
SHARE = 20
"""Looking may take one part in so many of the time."""

IN_FLIGHT = text("SELECT rule, job_id, detail FROM pgqueue.invariant_violations_in_flight")
PLAINLY = text("SET LOCAL jit = off")
"""Compiling the view's plan costs more than running it."""


class Sampler:
    """A thread that looks, and remembers the first damage it saw."""

    def __init__(self, engine: Engine, queue: PgQueue) -> None:
        self._engine = engine
        self._queue = queue
        self._stopping = Event()
        self._broken: list[Violation] = []
        self._is_paused = False
        self._thread = Thread(target=self._work, name="sampler", daemon=True)
        self.looks = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def pause(self) -> None:
        """The scenario damages rows itself."""
        self._is_paused = True

    def raise_if_broken(self) -> None:
        if self._broken:
            raise Broken(f"sampled while it ran: {', '.join(map(str, self._broken[:5]))}")

    def _work(self) -> None:
        wait = EVERY
        while not self._stopping.wait(wait):
            began = time.monotonic()
            self._look()
            wait = max(EVERY, SHARE * (time.monotonic() - began))

    def _look(self) -> None:
        if self._is_paused or self._broken:
            return
        try:
            with self._queue.session() as session:
                session.execute(PLAINLY)
                if self.looks % FULLY_EVERY == 0:
                    self._broken = self._queue.check(session)
                else:
                    self._broken = [Violation(*row) for row in session.execute(IN_FLIGHT)]
        except SQLAlchemyError:
            return  # the server is away: the scenario's own doing
        self.looks += 1
