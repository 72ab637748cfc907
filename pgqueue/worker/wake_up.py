"""How the threads of a worker wake one that is made after them."""

from collections.abc import Callable


class WakeUp:
    """Call it when there may be work.  Nothing happens before the other thread is connected."""

    def __init__(self) -> None:
        self._wake: Callable[[bool], object] = lambda _: None

    def connect(self, wake: Callable[[bool], object]) -> None:
        """Pass each call to this function of the other thread."""
        self._wake = wake

    def __call__(self, behind: bool = False) -> None:
        """``behind``: whether jobs may be due behind the cursors of the claimer too."""
        self._wake(behind)
