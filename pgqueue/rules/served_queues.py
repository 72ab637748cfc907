"""Which queues a worker serves: by name, and by a pattern, as ``tenant-*``."""

from collections.abc import Callable, Iterable, Sequence

from pgqueue.checks import ALL_QUEUES


def is_pattern(queue: str) -> bool:
    """Whether this stands for all queues whose names begin with what is before its ``*``."""
    return queue.endswith("*")


class EveryQueue(tuple[str, ...]):
    """The names of paused queues with ``*`` among them: every queue is one of these.

    An iteration has the names alone.
    """

    def __contains__(self, queue: object) -> bool:
        return True


def paused_among(names: Sequence[str]) -> Sequence[str]:
    """Paused queues, so that ``in`` says whether a queue is one of them."""
    return EveryQueue(names) if ALL_QUEUES in names else names


def served_queues(given: Sequence[str], waiting: Callable[[], Iterable[str]]) -> list[str]:
    """The names to claim from: those that are given, and those that fit a pattern.

    ``waiting`` reads in which queues jobs wait, and is called only if there is a pattern.
    """
    names = [queue for queue in given if not is_pattern(queue)]
    prefixes = tuple(queue.removesuffix("*") for queue in given if is_pattern(queue))
    if not prefixes:
        return names
    fitting = {queue for queue in waiting() if queue.startswith(prefixes)}
    return names + sorted(fitting.difference(names))


def serves(given: Sequence[str], queue: str) -> bool:
    """Whether a worker of these names and patterns serves a queue."""
    return queue in served_queues(given, lambda: [queue])
