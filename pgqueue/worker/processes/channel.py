"""What the worker and a child say to each other: jobs one way, progress and answers the other.

Messages are pickled, because a child is the same program as its worker, and is believed.
"""

import pickle
import select
import socket
import struct
from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import UUID

from pgqueue.outcomes import Outcome
from pgqueue.repository.claim import Claimed

LENGTH = struct.Struct("!I")
"""Stands before each message."""
LONGEST = 2**28
"""Bytes of a message; a handler that writes text to the socket sends a greater length."""
AT_ONCE = 2**16
NOTICE = struct.Struct("!q")
"""What the worker tells while a handler runs: the message of the attempt that is cancelled, or
``STOP``."""
STOP = 0

Wait = Callable[[int], object]
"""Waits for an event of ``select.poll``; raises if the other side will never be ready."""


class ChildJob(NamedTuple):
    """A job for a child."""

    claimed: Claimed
    worker_id: UUID
    """That of its lease."""


class ChildAnswer(NamedTuple):
    """The last message of a child about a job."""

    outcome: Outcome
    left_behind: str = ""
    """What the handler has left changed in its process, in words."""


class BadMessage(Exception):
    """What a child process has to tell cannot be pickled or unpickled, or is no message."""


class Channel:
    """Pickled messages over a socket that never blocks: the caller decides how long to wait."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._received = bytearray()

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: object, wait: Wait | None = None) -> None:
        """Send a message.  Without ``wait``, waits for the other side for ever.

        Raises BadMessage before anything is sent.
        """
        try:
            pickled = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise BadMessage(f"a {type(message).__name__} cannot be pickled: {error}") from error
        left = memoryview(LENGTH.pack(len(pickled)) + pickled)
        while left:
            try:
                left = left[self._end.send(left) :]
            except BlockingIOError:  # there is no room
                (wait or self._wait)(select.POLLOUT)

    def receive(self, wait: Wait | None = None) -> Any:
        """Receive a message.  Without ``wait``, waits for the other side for ever.

        Raises EOFError if the other side has closed its end, and BadMessage.
        """
        while (pickled := self._next()) is None:
            (wait or self._wait)(select.POLLIN)
            received = self._end.recv(AT_ONCE)
            if not received:
                raise EOFError
            self._received += received
        try:
            return pickle.loads(pickled)  # noqa: S301
        except Exception as error:
            words = "the handler's process has sent a message that cannot be unpickled"
            raise BadMessage(f"{words}: {type(error).__name__}: {error}") from error

    def _next(self) -> bytes | None:
        """Take a message that was received; None if it is not complete."""
        if len(self._received) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
        if end > LONGEST:
            raise BadMessage(
                "the handler's process has sent what is no message: did its handler write to a "
                "descriptor that it had not opened?"
            )
        if len(self._received) < end:
            return None
        pickled = bytes(self._received[LENGTH.size : end])
        del self._received[:end]
        return pickled

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._end, event)
        poll.poll()
