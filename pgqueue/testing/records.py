"""Records of steps that a test writes, so that a handler starts after them."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy.orm import Session, scoped_session

from pgqueue.checks import check_step_name
from pgqueue.database.callers import translated_errors
from pgqueue.errors import ArgumentsError, PgQueueError
from pgqueue.handler.error_reports import storable_result
from pgqueue.meta import RESERVED
from pgqueue.models import Job
from pgqueue.repository.steps import WaitingJobSteps
from pgqueue.testing.running import expire, joined_connection


@translated_errors()
def record_steps(
    session: "Session | scoped_session[Any]", job: Job, steps: Mapping[str, Any], /
) -> None:
    """Record steps of a job as if an earlier attempt had run them.

    The handler does not call the functions of these steps: ``ctx.step`` returns the results that
    are given here, as JSON gives them back.

    Args:
        session: The Session of the test.
        job: A job that has not ended.  It may wait for others, or for a later time.
        steps: The results of the steps by their names.  A result that is on record is replaced.

    Raises:
        ArgumentsError: A name is reserved for pgqueue.
        PayloadError: A result is no JSON.
        PgQueueError: No step can have such a name, or the job has ended.

    Example:
        >>> job = deliver.enqueue(session, 7)
        >>> record_steps(session, job, {"charge": "receipt of 7"})
        >>> ran = run_jobs(session)
    """
    session, connection = joined_connection(session)
    rows = WaitingJobSteps(connection)
    where = f"record_steps: job {job.id} {job.task}"
    for name, result in steps.items():
        check_step_name(where, name)
        if name.startswith(RESERVED):
            raise ArgumentsError(
                f"{where}: the name of a step is {name!r}; names that begin with {RESERVED!r} are "
                "reserved"
            )
        if not rows.record(job.id, name, storable_result(result)):
            raise PgQueueError(f"{where}: the job has ended; give one that waits")
    expire(session)
