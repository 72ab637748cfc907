"""The exceptions of handlers, kept so that a test can see them as they were raised."""

from collections.abc import Iterator
from contextlib import contextmanager

from pgqueue.context import Around, JobContext
from pgqueue.outcomes import Cancel, Discard, Snooze


class HandlerErrors:
    """Keeps what each handler has raised; a Cancel, Discard or Snooze is no error."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], BaseException] = {}

    def around(self, inner: Around) -> Around:
        """Return what to enter around each handler, with ``inner`` inside of it."""

        @contextmanager
        def keeping(context: JobContext) -> Iterator[None]:
            attempt = (context.job_id, context.attempt)
            self._kept.pop(attempt, None)  # its transaction is replayed
            try:
                with inner(context):
                    yield
            except (Cancel, Discard, Snooze):
                raise
            except BaseException as error:
                self._kept[attempt] = error
                raise

        return keeping

    def take_first(self) -> BaseException | None:
        """Return the first error, and forget all."""
        first = next(iter(self._kept.values()), None)
        self._kept.clear()
        return first
