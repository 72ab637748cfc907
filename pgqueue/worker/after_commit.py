"""Calls an application's ``after_commit`` listeners after the COMMIT of a job."""

from collections.abc import Callable

from sqlalchemy.orm import Session

from pgqueue import redaction
from pgqueue.sessions.handlers import listeners_to_commit
from pgqueue.worker.running_attempt import RunningAttempt
from pgqueue.worker.runtime import WorkerRuntime

logger = redaction.logger(__name__)


def tell_of_commit(runtime: WorkerRuntime, run: RunningAttempt) -> None:
    """Call the ``after_commit`` listeners of a handler's Session after the COMMIT.

    Called inside the same ``around`` as a handler.  Their errors change no outcome.
    """
    session = run.session
    if session is None or not (listeners := listeners_to_commit(session)):
        return
    try:
        with runtime.around(run.context(session)):
            for listener in listeners:
                _call(listener, run, session)
    except BaseException:  # ``around`` is the application's code
        logger.exception("job %d: around its after_commit listeners", run.claimed.job_id)
    session.close()


def call_listeners(run: RunningAttempt, session: Session) -> None:
    """Call the ``after_commit`` listeners of a Session while its handler still runs."""
    for listener in listeners_to_commit(session):
        _call(listener, run, session)


def _call(listener: Callable[[Session], None], run: RunningAttempt, session: Session) -> None:
    try:
        listener(session)
    except BaseException:  # a listener may raise anything, as a handler may
        logger.exception(
            "job %d: it is committed, and a listener to after_commit has failed", run.claimed.job_id
        )
