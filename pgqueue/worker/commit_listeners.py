"""The ``after_commit`` listeners of a handler's Session."""

from collections.abc import Callable

from sqlalchemy.orm import Session

from pgqueue import redaction
from pgqueue.context import Around, JobContext
from pgqueue.database.handlers import listeners_to_commit

logger = redaction.logger(__name__)


def call_after_commit(
    around: Around, context_of: Callable[[Session], JobContext], session: Session | None
) -> None:
    """Call the ``after_commit`` listeners of a handler's Session after the COMMIT.

    Called inside the same ``around`` as a handler.  Their errors change no outcome.
    """
    if session is None or not (listeners := listeners_to_commit(session)):
        return
    context = context_of(session)
    try:
        with around(context):
            for listener in listeners:
                _call(listener, context.job_id, session)
    except BaseException:  # ``around`` is the application's code
        logger.exception("job %d: around its after_commit listeners", context.job_id)
    session.close()


def call_listeners(job_id: int, session: Session) -> None:
    """Call the ``after_commit`` listeners of a Session while its handler still runs."""
    for listener in listeners_to_commit(session):
        _call(listener, job_id, session)


def _call(listener: Callable[[Session], None], job_id: int, session: Session) -> None:
    try:
        listener(session)
    except BaseException:  # a listener may raise anything, as a handler may
        logger.exception(
            "job %d: it is committed, and a listener to after_commit has failed", job_id
        )
