"""The limits, and the jobs that hold their places."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from pgqueue.operations import Operations
from pgqueue.repository.limits import LimitHolder, Limits
from pgqueue.repository.limits import LimitState as LimitState
from pgqueue.rules.limits import name_of

MOST_HOLDERS = 5


@dataclass(frozen=True, slots=True)
class LimitView:
    """A limit or one of its keys, with the jobs that hold places."""

    state: LimitState
    is_by_key: bool
    """Whether each value of an argument has the capacity, so that the sum of all is no part of it.
    """
    holders: Sequence[LimitHolder]
    """The first of the jobs that hold places."""
    has_more: bool
    """Whether more jobs wait than ``state`` says."""

    @property
    def limit(self) -> str:
        return name_of(self.state.name)

    @property
    def key(self) -> str:
        """Of a capacity of one key: its values as JSON, or their digest; else empty."""
        return key_in(self.state.name)

    @property
    def is_digest(self) -> bool:
        return self.key.startswith("sha256:")

    @property
    def is_full(self) -> bool:
        return not self.is_by_key and 0 < self.state.capacity <= self.state.held


def read_limits(queue: Operations, connection: Connection) -> list[LimitView]:
    limits, own = Limits(connection), queue.limited.limits
    holders, (states, more) = limits.holders(), limits.at_a_glance()
    found = []
    for state in states:
        fits = [one for one in holders if state.name in (one.key, name_of(one.key))]
        declared = own.get(state.name)
        is_by_key = any(key_in(one.key) for one in fits) if declared is None else bool(declared.by)
        is_sum = is_by_key and not key_in(state.name)
        found.append(LimitView(state, is_sum, fits[:MOST_HOLDERS], state.name in more))
    return found


def key_in(name: str) -> str:
    """What is behind the name of a limit in one of its keys."""
    return name.partition(" ")[2]
