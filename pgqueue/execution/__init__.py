"""One attempt of one job, from its arguments to its outcome."""

from pgqueue.execution.attempt import (
    AttemptResult,
    CancelWins,
    Replay,
    Stale,
    after_crash,
    after_error,
    complete,
    never,
    obstacle,
    run,
    run_async,
    tell,
    tell_after_finish,
    tell_final_failure,
    tell_of_waiting,
    too_late,
)

__all__ = [
    "AttemptResult",
    "CancelWins",
    "Replay",
    "Stale",
    "after_crash",
    "after_error",
    "complete",
    "never",
    "obstacle",
    "run",
    "run_async",
    "tell",
    "tell_after_finish",
    "tell_final_failure",
    "tell_of_waiting",
    "too_late",
]
