"""Planted bugs: each takes one guard away, and at least one scenario must turn red.

A plant is put in before a worker starts, and into the process of the scenario; nothing of it
is in the product.  Statements are built once and kept, so a plant that changes how one is built
also forgets the built one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Undo = Callable[[], None]


class Patch:
    """Replaces attributes, and puts them back."""

    def __init__(self) -> None:
        self._undo: list[Undo] = []

    def set(self, target: Any, name: str, value: Any) -> Any:
        """Replace an attribute; returns what was there."""
        old = getattr(target, name)
        setattr(target, name, value)
        self._undo.append(lambda: setattr(target, name, old))
        return old

    def rebuild(self, *statements: Any) -> None:
        """Forget built statements, now and when the bug is taken out again."""
        for statement in statements:
            statement.cache_clear()
            self._undo.append(statement.cache_clear)

    def undo(self) -> None:
        for step in reversed(self._undo):
            step()
        self._undo.clear()


MUTATIONS: dict[str, Callable[[Patch], None]] = {}


def mutation(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """Register a planted bug; its docstring says which guard it takes away."""
    assert function.__name__ not in MUTATIONS, f"there are two plants named {function.__name__}"
    MUTATIONS[function.__name__] = function
    return function


@contextmanager
def mutated(name: str | None) -> Iterator[None]:
    """With this bug in the product; None for none."""
    patch = Patch()
    if name is not None:
        load()[name](patch)
    try:
        yield
    finally:
        patch.undo()


def load() -> dict[str, Callable[[Patch], None]]:
    """All planted bugs."""
    import chaos.scenarios  # noqa: F401 - each stands beside the scenario that has to catch it

    return MUTATIONS
