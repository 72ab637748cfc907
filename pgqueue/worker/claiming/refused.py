"""Claims around jobs that the database refuses, by a trigger or a constraint of the application."""

import time
from collections.abc import Collection, Sequence
from threading import Event

from sqlalchemy.exc import DBAPIError

from pgqueue.repository.claim import Claim, ClaimCursor
from pgqueue.repository.settle import Attempts
from pgqueue.worker.claiming.cursors import ClaimCursors
from pgqueue.worker.rows import RowGuard, is_refusal_of_row

REFUSED_TRIES = 10
"""How many jobs whose claim was refused before are tried again in one claim."""


class RefusedJobs:
    """The jobs whose claim was refused.  Such a job rests, and claims pass over it untried.

    A refused claim is repeated with half its limit until it succeeds or the job is found.  Few jobs
    are tried again in one claim, so that a thousand refused jobs hold up the jobs behind them once.
    """

    def __init__(self, cursors: ClaimCursors, stopping: Event) -> None:
        self._cursors = cursors
        self._stopping = stopping
        self._guard = RowGuard()

    def claim(
        self,
        attempts: Attempts,
        most: int,
        *,
        paused: Collection[str],
        tasks: str,
        ahead: bool,
        suspects: bool,
        limited: bool,
    ) -> tuple[Claim, list[ClaimCursor], int]:
        """Claim up to ``most`` jobs; returns the claim, and its pairs and limit."""
        guard, limit, tries_left = self._guard, most, REFUSED_TRIES
        while True:
            began = time.monotonic()
            pairs = self._cursors.next_pairs(limit, paused=paused)
            try:
                claim = attempts.claim(
                    pairs,
                    tasks=tasks,
                    limit=limit,
                    ahead=ahead,
                    suspects=suspects,
                    limited=limited,
                )
                if guard.have_failed:
                    for row in claim.rows:
                        guard.succeeded(row.job_id)
                return claim, pairs, limit
            except DBAPIError as error:
                if not is_refusal_of_row(error) or self._stopping.is_set():
                    raise
                due = attempts.first_due(pairs, tasks=tasks, suspects=suspects)
                if not due:
                    raise
                if self._pass_over_resting(due, all_failed=not tries_left):
                    continue
                if limit > 1:
                    limit //= 2
                    continue
                message, job_id = due[0]
                self._cursors.pass_over(message)
                tries_left -= guard.has_failed(job_id)
                guard.failed(job_id, f"job {job_id}: its claim is refused and tried again", error)
            # A trigger may refuse every job: the claims take half of the time.
            self._stopping.wait(time.monotonic() - began)

    def _pass_over_resting(
        self, due: Sequence[tuple[ClaimCursor, int]], *, all_failed: bool
    ) -> bool:
        """Pass over the messages at the front whose jobs were refused lately.

        With ``all_failed``, over those that were ever refused.  Returns whether there were any.
        """
        is_left_out = self._guard.has_failed if all_failed else self._guard.rests
        for count, (message, job_id) in enumerate(due):
            if not is_left_out(job_id):
                return count > 0
            self._cursors.pass_over(message)
        return True
