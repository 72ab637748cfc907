"""The list of bad inputs that this project was begun with, and what becomes of each.

The numbers are those of the list.  E is given at an enqueue, R is written by raw SQL, H is what a
handler returns or raises, O is sent by an operator or a visitor.  What is refused or cut by its
size alone is smaller here than there: 27 and 78 are 300 MB and 2 GB, 28 has a million keys, 80 is
100 MB; and 94 is a crowd of 100,000.
"""

import math
from datetime import timedelta

from bad_calls import Text, by_many
from bad_input_calls import (
    calls,
    declared,
    kept,
    one_bad_in_a_batch,
    options,
    polling_without_a_pause,
    queues,
    schedule,
    unknown_tasks,
)
from bad_input_checks import (
    MEGABYTE,
    channel,
    command,
    dataclass_with_annotation,
    full_payload,
    inert_tags,
    long_key,
    no_key,
    queues_by_case,
    taken_key,
    visit,
)
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
from bad_input_kinds import Case, Damaged, Ending, Kept
from bad_rows import DEPTH, DIGITS, EXHAUSTED

SOON = timedelta(seconds=0.3)

CASES: dict[int, tuple[Case, ...]] = {
    # Payload
    1: calls("NUL in a text", "NUL in a str parameter"),
    2: calls("NUL in a key"),
    3: calls("lone high surrogate", "surrogate in a key"),
    4: calls("lone low surrogate"),
    5: kept("astral pair"),
    6: kept("U+FFFF, U+2028 and BOM"),
    7: calls("NaN"),
    8: calls("Infinity"),
    9: calls("minus Infinity"),
    10: kept("minus zero"),
    11: calls("a float literal too large"),
    12: kept("2**53 + 1"),
    13: kept("10**400"),
    14: (*calls("5000 digits"), *unreadable("5000 digits", DIGITS)),
    15: calls("Decimal"),
    16: calls("datetime", "naive datetime without annotation", "naive datetime"),
    17: calls("bytes"),
    18: calls("set"),
    19: calls("tuple"),
    20: calls("int keys"),
    21: (Damaged("of a key given twice the last counts", args='{"n": 1, "n": 2}', result=2),),
    22: (*calls("depth 65"), *kept("depth 64")),
    23: unreadable("depth 3000", DEPTH),
    24: calls("depth 100000"),
    25: calls("a circle"),
    26: (full_payload, *calls("256 KiB and a byte")),
    27: calls("30 MB", doors=(by_many,)),
    28: calls("many keys", doors=(by_many,)),
    29: kept("empty dict", "empty list"),
    30: unreadable("no object", "null", "7", '"text"', "[1]"),
    31: calls("generator", "lambda", "ORM object", "open file", "lock"),
    32: (Kept("subclass of str", Text("fine")), *calls("Enum")),
    33: (dataclass_with_annotation, *calls("dataclass without annotation")),
    34: calls("raises when looked at"),
    35: kept("keys of JavaScript and Python"),
    36: (
        *kept("pickles in words"),
        *unreadable("pickle in words", '{"n": {"py/object": "os.system"}}'),
    ),
    37: kept("HTML", "ANSI and RTL"),
    38: kept("formula"),
    39: kept("forged log line"),
    40: kept("placeholders"),
    # Names and options
    41: queues(""),
    42: queues("q" * 65),
    43: queues('a"b'),
    44: queues("a'; DROP TABLE jobs;--"),
    45: queues("../x"),
    46: queues("a\0b"),
    47: queues("mail\u2709"),
    48: queues("mail "),
    49: queues("*"),
    50: (queues_by_case,),
    51: (
        unknown_tasks("no.such"),
        renamed("unknown task waits for a worker that knows it", KNOWN_LATER),
    ),
    52: (
        unknown_tasks("os.system", "builtins.eval", "a.b:c"),
        *(
            renamed(f"task {name} waits", name, outcome=None, result=None)
            for name in ("os.system", "builtins.eval", "antigravity:fly")
        ),
    ),
    53: (channel,),
    54: options("priority 32768", "priority -1", "priority True", "priority text", "priority 1.5"),
    55: options("run_at naive"),
    56: options("run_at year 1", "run_at last"),
    57: refused("infinity"),
    58: refused("10000-01-01", "BC"),
    59: options("delay negative", "delay NaN", "delay 1e308", "delay largest"),
    60: options("max_attempts 0", "max_attempts -1", "max_attempts 2**31", "max_attempts None"),
    61: declared("timeout 0", "timeout -1", "timeout infinity"),
    62: (
        answered("-1", -1),
        answered("NaN", math.nan),
        answered("None", None),
        answered("an error", ZeroDivisionError()),
    ),
    63: (long_key, no_key, *options("unique_key NUL", "unique_key empty")),
    64: declared("limit 0", "limit -1"),
    65: (inert_tags, *options("tags text", "tag empty", "tag number", "tag long", "tags many")),
    66: (one_bad_in_a_batch(0), one_bad_in_a_batch(5000), one_bad_in_a_batch(10_000)),
    67: (taken_key,),  # no error: a key is no claim about the arguments
    # Schedules
    68: (schedule("six fields", "needs five fields, not 6", "* * * * * *"),),
    69: (schedule("minute 60", "field 1, the minute, is '60'", "60 * * * *"),),
    70: (schedule("never due", "field 3, the day-of-month, is '31'", "0 0 31 2 *"),),
    71: (schedule("every 0 minutes", "field 1, the minute, is", "*/0 * * * *"),),
    72: (schedule("no fields", "needs five fields, not 0", ""),),
    73: (schedule("5 KB", "needs five fields, not 1", "*," * 2500),),
    74: (schedule("unknown zone", "timezone is 'Mars/Olympus'", timezone="Mars/Olympus"),),
    75: (schedule("zone of a path", "give an IANA name", timezone="../../etc/passwd"),),
    76: (schedule("at a reboot", "needs five fields, not 1", "@reboot"),),
    # What a handler returns or raises
    77: (
        *returned("NaN", "infinity"),
        mended("result with NUL", "a\0b"),
        mended("result with half a surrogate", "\ud800"),
    ),
    78: returned("64 MB"),
    79: returned("not JSON", "circular", "an integer of 5,000 digits"),
    80: (
        *raised("message of 50 MB", "message with NUL and half a surrogate"),
        Ending(
            "secret in a variable",
            secret_raised,
            said="a password of",
            hidden=SECRET,
            options={"max_attempts": 1},
        ),
    ),
    81: raised("no message"),
    82: raised(
        "SystemExit",
        "KeyboardInterrupt",
        "GeneratorExit",
        "CancelledError",
        "StopIteration",
        "a bare BaseException",
    ),
    83: raised("groups 1,000 deep"),
    84: raised("endless recursion"),
    85: (
        *raised("a coroutine returned"),
        Ending("async and never waits", return_at_once, "succeeded", result=7),
    ),
    86: (
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
    ),
    87: (
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
    ),
    # Rows
    88: refused("outcome = 'done'"),
    89: (
        Damaged(
            "message without a job",
            change="DELETE FROM pgqueue.jobs WHERE id = :id",
            jobs=0,
        ),
    ),
    90: (lost("job without a message", "it has neither", UNFINISHED),),
    91: (
        Damaged(
            "attempts set back after the end",
            change="UPDATE pgqueue.jobs SET attempts = 0 WHERE id = :id",
            found=frozenset({UNATTEMPTED}),
            late=True,
        ),
    ),
    92: unreadable("payload null", "null"),
    93: (
        harmless("more attempts than there are"),
        *refused("attempt = 31001"),
        Damaged(
            "attempts of a message used up",
            change=f"UPDATE pgqueue.{EXHAUSTED}",
            outcome="failed",
            result=None,
        ),
    ),
    94: (Damaged(f"{CROWD} due at one time", change=COPIES, jobs=CROWD),),
    95: (harmless("times beyond all time"),),
    # Pages, for which there are commands, and requests, for which nobody listens
    96: (
        command("page -1", ("jobs", "--limit", "-1"), said="-1 is not in the range"),
        command(
            "page 1e99, ' or a list",
            *(("jobs", "--limit", page) for page in ("1e99", "'", "[1]")),
            said="is not a valid integer",
        ),
    ),
    97: (polling_without_a_pause(),),
    98: (
        command(
            "id 1 OR 1=1, 2**64 or ..",
            *(("jobs", "show", id) for id in ("1 OR 1=1", str(2**64), "..")),
            said="is not the id of a job",
        ),
    ),
    99: (
        visit(
            "spoofed Host",
            headers={"Host": "evil.example", "X-Forwarded-Host": "evil.example"},
        ),
    ),
    100: (visit("method override", "POST", headers={"X-HTTP-Method-Override": "DELETE"}),),
    101: (visit("body of 100 MB", "POST", body=b"x" * 100 * MEGABYTE),),
    102: (
        visit(
            "chunked with a bad length",
            "POST",
            headers={"Transfer-Encoding": "chunked"},
            environ={"CONTENT_LENGTH": "-1"},
            body=b"FFFFFFFFFFFFFFFF\r\nx\r\n0\r\n\r\n",
        ),
    ),
    103: tuple(
        visit(f"Accept {kind:.20}", headers={"Accept": kind})
        for kind in ("*/*", "application/json", "image/svg+xml", "x/" * 5_000)
    ),
    104: (visit("path //evil.example", paths=("//evil.example", "//evil.example/..")),),
    105: (visit("cookie of 64 KB", headers={"Cookie": "c=" + "x" * 65_536}),),
}
