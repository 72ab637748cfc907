"""One attempt of one job, from its arguments to its outcome."""

from pgqueue.execution.attempt import (
    INTERRUPTED,
    AttemptResult,
    CancelWins,
    Replay,
    Stale,
    after_crash,
    after_error,
    complete,
    never,
    run,
    run_async,
    tell,
    tell_final_failure,
    too_late,
)

__all__ = [
    "INTERRUPTED",
    "AttemptResult",
    "CancelWins",
    "Replay",
    "Stale",
    "after_crash",
    "after_error",
    "complete",
    "never",
    "run",
    "run_async",
    "tell",
    "tell_final_failure",
    "too_late",
]
