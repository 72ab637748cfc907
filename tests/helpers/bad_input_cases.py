"""Rows that somebody damages, and what handlers do wrong; with what becomes of each.

What an enqueue refuses stands in ``bad_calls`` and ``bad_options``.
"""

import math
from datetime import timedelta

from bad_input_jobs import (
    AT_ONCE,
    COPIES,
    CROWD,
    KNOWN_LATER,
    SECRET,
    UNATTEMPTED,
    UNFINISHED,
    answered,
    change_arguments,
    harmless,
    lost,
    mended,
    never_return,
    never_return_though_cancelled,
    raised,
    refused,
    renamed,
    return_at_once,
    returned,
    secret_raised,
    unreadable,
)
from bad_input_kinds import Damaged, Ending
from bad_rows import DEPTH, DIGITS, EXHAUSTED

SOON = timedelta(seconds=0.3)

ROWS: tuple[Damaged, ...] = (
    *unreadable("5000 digits", DIGITS),
    Damaged("of a key given twice the last counts", args='{"n": 1, "n": 2}', result=2),
    *unreadable("depth 3000", DEPTH),
    *unreadable("no object", "null", "7", '"text"', "[1]"),
    *unreadable("pickle in words", '{"n": {"py/object": "os.system"}}'),
    renamed("unknown task waits for a worker that knows it", KNOWN_LATER),
    *(
        renamed(f"task {name} waits", name, outcome=None, result=None)
        for name in ("os.system", "builtins.eval", "antigravity:fly")
    ),
    *refused("infinity"),
    *refused("10000-01-01", "BC"),
    *refused("outcome = 'done'"),
    Damaged(
        "message without a job",
        change="DELETE FROM pgqueue.jobs WHERE id = :id",
        jobs=0,
    ),
    lost("job without a message", "it has neither", UNFINISHED),
    Damaged(
        "attempts set back after the end",
        change="UPDATE pgqueue.jobs SET attempts = 0 WHERE id = :id",
        found=frozenset({UNATTEMPTED}),
        late=True,
    ),
    *unreadable("payload null", "null"),
    harmless("more attempts than there are"),
    *refused("attempt = 31001"),
    Damaged(
        "attempts of a message used up",
        change=f"UPDATE pgqueue.{EXHAUSTED}",
        outcome="failed",
        result=None,
    ),
    Damaged(f"{CROWD} due at one time", change=COPIES, jobs=CROWD),
    harmless("times beyond all time"),
)

ENDINGS: tuple[Ending, ...] = (
    answered("-1", -1),
    answered("NaN", math.nan),
    answered("None", None),
    answered("an error", ZeroDivisionError()),
    *returned("NaN", "infinity"),
    mended("result with NUL", "a\0b"),
    mended("result with half a surrogate", "\ud800"),
    *returned("64 MB"),
    *returned("not JSON", "circular", "an integer of 5,000 digits"),
    *raised("message of 50 MB", "message with NUL and half a surrogate"),
    Ending(
        "secret in a variable",
        secret_raised,
        said="a password of",
        hidden=SECRET,
        options={"max_attempts": 1},
    ),
    *raised("no message"),
    *raised(
        "SystemExit",
        "KeyboardInterrupt",
        "GeneratorExit",
        "CancelledError",
        "StopIteration",
        "a bare BaseException",
    ),
    *raised("groups 1,000 deep"),
    *raised("endless recursion"),
    *raised("a coroutine returned"),
    Ending("async and never waits", return_at_once, "succeeded", result=7),
    Ending(
        "changes its arguments",
        change_arguments,
        "succeeded",
        attempts=2,
        said="once more",
        result=["fine", "changed"],
        args=(["fine"],),
        options={"retry": AT_ONCE},
    ),
    Ending(
        "never returns",
        never_return,
        said="TimeoutError",
        options={"timeout": SOON, "max_attempts": 1},
    ),
    Ending(
        "never returns though cancelled",
        never_return_though_cancelled,
        "cancelled",
        said="TimeoutError",
        options={"timeout": SOON, "max_attempts": 1},
    ),
)
