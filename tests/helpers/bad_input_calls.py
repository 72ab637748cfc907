"""Bad input at the doors: refused in words, kept as it is, or held to a promise of its own."""

import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from bad_calls import (
    ACCEPTED,
    CALLS,
    Bad,
    Door,
    by_add,
    by_delay,
    by_enqueue,
    by_many,
    pay,
    plain,
    queue,
)
from bad_input_kinds import Kept, Refused
from bad_options import DECLARED, OPTIONS, Option
from sqlalchemy.orm import Session

from pgqueue import OptionError, PayloadError, PgQueue, UnknownTask, Worker

DOORS: tuple[Door, ...] = (by_enqueue, by_many, by_add, by_delay)
BATCH = 10_001


def calls(*names: str, doors: tuple[Door, ...] = DOORS) -> tuple[Refused, ...]:
    """Calls that each of these doors refuses."""
    found = {bad.name: bad for bad in CALLS}
    return tuple(_call(found[name], doors) for name in names)


def options(*names: str) -> tuple[Refused, ...]:
    """Options that are refused before there is a job."""
    return _refused(OPTIONS, names, lambda session, **given: pay.options(**given).delay(1))


def queues(*names: str) -> tuple[Refused, ...]:
    """Names that no queue may have."""
    return options(*(f"queue {name!r:.20}" for name in names))


def declared(*names: str) -> tuple[Refused, ...]:
    """Options that are refused where the task is declared."""
    return _refused(DECLARED, names, lambda session, **given: PgQueue().task(**given)(plain))


def kept(*names: str) -> tuple[Kept, ...]:
    """Values that only look bad."""
    return tuple(Kept(name, ACCEPTED[name]) for name in names)


def schedule(name: str, said: str, expression: str = "0 3 * * *", **given: Any) -> Refused:
    """A rule that a schedule refuses where it is declared."""
    door = partial(_schedule, expression, given)
    return Refused(f"schedule: {name}", (door,), OptionError, (said,))


def _schedule(expression: str, given: dict[str, Any], _session: Session) -> None:
    PgQueue().schedule(expression, **given)(PgQueue().task(plain))


def unknown_tasks(*names: str) -> Refused:
    return Refused(
        f"task {', '.join(names)}",
        tuple(partial(_find, name) for name in names),
        UnknownTask,
        (r"no task '\S+' is registered; known are shop\.broken_key, ",),
    )


def one_bad_in_a_batch(index: int) -> Refused:
    def enqueue(session: Session) -> None:
        rows = [("fine",)] * BATCH
        rows[index] = ("a\0b",)
        pay.enqueue_many(session, rows)

    words = ("argument order", "NUL", f"call {index} of the batch")
    return Refused(f"number {index} of {BATCH} is bad", (enqueue,), PayloadError, words)


def polling_without_a_pause() -> Refused:
    """The nearest to a page that refreshes itself all the time."""

    def work(session: Session) -> None:
        Worker(PgQueue(), poll_interval=timedelta(0))

    return Refused("refresh of 0", (work,), OptionError, ("0.01 seconds or more",))


def _call(bad: Bad, doors: tuple[Door, ...]) -> Refused:
    def at(door: Door) -> Callable[[Session], object]:
        return lambda session: door(session, bad.task, bad.args, bad.kwargs or {})

    return Refused(bad.name, tuple(map(at, doors)), bad.error, tuple(map(re.escape, bad.said)))


def _refused(
    known: list[Option], names: tuple[str, ...], attempt: Callable[..., object]
) -> tuple[Refused, ...]:
    found = {option[0]: option for option in known}
    return tuple(
        Refused(name, (partial(attempt, **found[name][1]),), found[name][2], (found[name][3],))
        for name in names
    )


def _find(name: str, session: Session) -> None:
    queue.find(name)
