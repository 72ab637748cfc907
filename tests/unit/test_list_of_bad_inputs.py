"""The list of bad inputs that this project was begun with, each with the tests that try it.

The numbers are those of the list.  E is given at an enqueue, R is a row written by raw SQL, H is
what a handler returns or raises.  A test is named by its file and name, and its case by words that
stand in that file.
"""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent

CALL = ("database/test_bad_input.py", "test_a_bad_call_is_refused_by_every_door")
ROW = ("database/test_bad_input.py", "test_a_bad_row_of_a_batch_is_named_by_its_index")
OPTION = ("database/test_bad_input.py", "test_a_bad_option_is_refused_before_there_is_a_door")
DECLARED = ("database/test_bad_input.py", "test_a_bad_option_is_refused_where_the_task_is_declared")
FINE = ("database/test_bad_input.py", "test_it_comes_back_as_it_went_in")
STORED = ("unit/test_payload_damage.py", "test_damaged_stored_arguments_are_refused")
VALUE = (
    "unit/test_payload_refusals.py",
    "test_a_value_that_json_or_postgresql_cannot_keep_is_refused",
)
PLAIN = ("unit/test_payload_refusals.py", "test_what_is_not_plain_json_needs_an_annotation")
DAMAGED = ("processes/test_worker_damage.py", "test_a_damaged_row_costs_its_own_job_and_no_other")
REFUSED = (
    "processes/test_worker_damage.py",
    "test_what_would_fail_the_claims_of_all_is_refused_by_the_tables",
)
RETURNED = (
    "processes/test_bad_output.py",
    "test_a_result_that_cannot_be_kept_takes_nothing_from_the_success",
)
MENDED = (
    "processes/test_bad_output.py",
    "test_a_character_that_cannot_be_stored_is_replaced_in_a_result",
)
RAISED = ("processes/test_bad_output.py", "test_whatever_is_raised_costs_an_attempt_and_is_told")
ANSWER = ("unit/test_retry.py", "test_an_answer_of_no_use_is_replaced_by_the_default_and_logged")
CHAOS = ("../chaos/scenarios/damage.py", "damaged_rows")

Case = tuple[tuple[str, str], str]
"""A test, and the words of the case in it; no words where the test is the case."""

COVERED: dict[int, tuple[str, tuple[Case, ...]]] = {
    # Payload
    1: ("NUL in a text", ((CALL, '"NUL in a text"'),)),
    2: ("NUL in a key", ((CALL, '"NUL in a key"'),)),
    3: ("lone high surrogate", ((CALL, '"lone high surrogate"'),)),
    4: ("lone low surrogate", ((CALL, '"lone low surrogate"'),)),
    5: ("astral pair", ((FINE, r'"\U0001f600"'),)),
    6: ("U+FFFF, U+2028, BOM", ((FINE, r'"\uffff\u2028\ufeff"'),)),
    7: ("NaN", ((CALL, '"NaN"'),)),
    8: ("infinity", ((CALL, '"Infinity"'),)),
    9: ("minus infinity", ((CALL, '"minus Infinity"'),)),
    10: ("-0.0", ((FINE, "-0.0"),)),
    11: ("1e400", ((CALL, "(1e400,)"),)),
    12: ("2**53 + 1", ((FINE, "2**53 + 1"),)),
    13: ("10**400", ((FINE, "10**400"),)),
    14: ("5,000 digits, E and R", ((CALL, "10**5000"), (STORED, '"1" * 5000'), (DAMAGED, "5000"))),
    15: ("Decimal", ((CALL, 'unserialisable("Decimal"'),)),
    16: (
        "datetime",
        (
            (CALL, 'unserialisable("datetime"'),
            (CALL, '"naive datetime without annotation"'),
            (CALL, '"naive datetime",'),
        ),
    ),
    17: ("bytes", ((CALL, 'unserialisable("bytes"'),)),
    18: ("set", ((CALL, 'unserialisable("set"'),)),
    19: ("tuple", ((CALL, 'unserialisable("tuple"'),)),
    20: ("int keys", ((CALL, '"int keys"'),)),
    21: (
        "a key twice, R",
        ((("unit/test_payload_damage.py", "test_of_a_key_stored_twice_the_last_counts"), ""),),
    ),
    22: ("depth 65", ((CALL, '"depth 65"'),)),
    23: ("depth 3,000, R", ((STORED, '"[" * 3000'), (DAMAGED, '"[" * 3000'), (CHAOS, "23:"))),
    24: ("depth 100,000", ((CALL, '"depth 100000"'),)),
    25: ("a circle", ((CALL, '"a circle"'),)),
    26: (
        "256 KiB, and one byte more",
        (
            (CALL, '"256 KiB and a byte"'),
            (
                (
                    "unit/test_payload_refusals.py",
                    "test_a_payload_may_be_exactly_as_large_as_the_limit",
                ),
                "",
            ),
        ),
    ),
    27: ("300 MB; by size alone, so 100 do", ((CALL, '"30 MB"'), (VALUE, '"x" * 100_000_000'))),
    28: ("a million keys; 100,000 are too many", ((CALL, '"many keys"'),)),
    29: ("an empty dict", ((FINE, "None, {}, []"),)),
    30: (
        "a list, a scalar or null in place of all arguments, R; no door takes such a call",
        ((STORED, '"null",'), (STORED, '"7",'), (STORED, '"[]",'), (CHAOS, "30:")),
    ),
    31: (
        "generator, lambda, ORM object, open file, lock",
        (
            (CALL, 'unserialisable("generator"'),
            (CALL, 'unserialisable("lambda"'),
            (CALL, '"ORM object"'),
            (CALL, 'unserialisable("open file"'),
            (CALL, 'unserialisable("lock"'),
        ),
    ),
    32: (
        "subclass of str, Enum",
        (
            (
                (
                    "database/test_bad_input.py",
                    "test_a_text_that_lies_about_itself_is_the_text_it_is",
                ),
                "",
            ),
            (PLAIN, "Suit.HEARTS"),
        ),
    ),
    33: ("dataclass without annotation", ((CALL, '"dataclass without annotation"'),)),
    34: ("raises when looked at", ((CALL, '"raises when looked at"'),)),
    35: ("__proto__ and the like as keys", ((FINE, '"__proto__": 1'),)),
    36: ("py/object and the like", ((FINE, '"py/object": "os.system"'), (DAMAGED, "py/object"))),
    37: ("HTML, ANSI and RTL", ((FINE, "<script>"), (FINE, r"\x1b[31m\u202e"))),
    38: ("formula of a spreadsheet", ((FINE, "=cmd|"),)),
    39: ("forged log line", ((FINE, "ERROR forged"),)),
    40: ("%s {0} $1 ; --", ((FINE, "%s {0} $1 ; --"),)),
    # Names and options
    41: ("queue ''", ((OPTION, '*("", "q" * 65'),)),
    42: ("queue of 65 characters", ((OPTION, '"q" * 65'),)),
    43: ('queue a"b', ((OPTION, "'a\"b'"),)),
    44: ("queue a'; DROP TABLE", ((OPTION, "DROP TABLE jobs;--"),)),
    45: ("queue ../x", ((OPTION, '"../x"'),)),
    46: ("queue with NUL", ((OPTION, r'"a\0b"'),)),
    47: ("queue with emoji", ((OPTION, r'"mail\u2709"'),)),
    48: ("queue with a space at its end", ((OPTION, '*("mail "'),)),
    49: ("queue *", ((OPTION, '"*"'),)),
    50: (
        "queues that differ by case",
        ((("database/test_bad_input.py", "test_queues_that_differ_by_case_are_two"), ""),),
    ),
    51: (
        "an unknown task",
        (
            (
                (
                    "database/test_bad_input.py",
                    "test_an_unknown_task_is_named_with_those_that_are_known",
                ),
                "",
            ),
            (("database/test_claiming.py", "test_a_message_of_an_unknown_task_waits"), ""),
        ),
    ),
    52: (
        "task os.system",
        (
            (
                (
                    "database/test_bad_input.py",
                    "test_an_unknown_task_is_named_with_those_that_are_known",
                ),
                "os.system",
            ),
            (("unit/test_payload_damage.py", "test_nothing_is_imported_by_a_payload"), ""),
        ),
    ),
    53: (
        "a channel of 64 bytes",
        (
            (
                (
                    "database/test_bad_input.py",
                    "test_no_queue_is_named_in_the_channel_of_the_wake_ups",
                ),
                "",
            ),
        ),
    ),
    54: (
        "priority",
        (
            (OPTION, '"priority 32768"'),
            (OPTION, '"priority True"'),
            (OPTION, '"priority text"'),
            (OPTION, '"priority 1.5"'),
        ),
    ),
    55: ("run_at without zone", ((OPTION, '"run_at naive"'),)),
    56: ("run_at in year 1 and 9999", ((OPTION, '"run_at year 1"'), (OPTION, '"run_at last"'))),
    57: (
        "run_at infinity, R",
        (
            (REFUSED, "message_queue SET run_at = 'infinity'"),
            (REFUSED, "message_queue SET run_at = '-infinity'"),
        ),
    ),
    58: ("run_at year 10000 and BC, R", ((REFUSED, "10000-01-01"), (REFUSED, "0044-03-15 BC"))),
    59: (
        "delay",
        (
            (OPTION, '"delay negative"'),
            (OPTION, '"delay NaN"'),
            (OPTION, '"delay 1e308"'),
            (OPTION, '"delay largest"'),
        ),
    ),
    60: (
        "max_attempts",
        (
            (OPTION, '"max_attempts 0"'),
            (OPTION, '"max_attempts -1"'),
            (OPTION, '"max_attempts 2**31"'),
            (OPTION, '"max_attempts None"'),
        ),
    ),
    61: (
        "timeout",
        (
            (DECLARED, '"timeout": timedelta(0)'),
            (DECLARED, '"timeout": timedelta(-1)'),
            (DECLARED, '"timeout": math.inf'),
        ),
    ),
    62: (
        "an answer of a retry function",
        (
            (ANSWER, "[None, math.nan, math.inf, -1"),
            (
                (
                    "unit/test_retry.py",
                    "test_a_function_that_raises_is_replaced_by_the_default_and_logged",
                ),
                "",
            ),
        ),
    ),
    63: (
        "unique_key of a megabyte, with NUL, None and ''",
        (
            (("database/test_bad_input.py", "test_a_key_of_a_megabyte_is_a_key"), ""),
            (OPTION, '"unique_key NUL"'),
            (OPTION, '"unique_key empty"'),
            (("database/test_enqueueing.py", "test_keys_that_are_none_are_not_unique"), ""),
        ),
    ),
    66: ("10,001 in one batch, one bad", ((ROW, "1000, 10_000)"),)),
    67: (
        "a key again with other arguments: the job that holds it, for a key is not a claim about"
        " the arguments",
        (
            (
                (
                    "database/test_bad_input.py",
                    "test_a_key_with_other_arguments_is_that_of_the_job_that_holds_it",
                ),
                "",
            ),
        ),
    ),
    # What a handler returns or raises
    77: (
        "result with NUL, NaN, half a pair",
        ((RETURNED, '"NaN"'), (MENDED, '"half a surrogate"')),
    ),
    78: ("result of 2 GB; given up at 1 MiB, so 64 MB do", ((RETURNED, '"64 MB"'),)),
    79: ("result that is no JSON", ((RETURNED, '"not JSON"'), (RETURNED, '"circular"'))),
    80: (
        "message of 100 MB; the size is never looked at, so 50 do; NUL, half a pair, a secret",
        (
            (RAISED, '"message of 50 MB"'),
            (RAISED, '"message with NUL and half a surrogate"'),
            (("unit/test_reports.py", "test_local_variables_are_not_told"), ""),
        ),
    ),
    81: ("an error that cannot be told", ((RAISED, '"no message"'),)),
    82: (
        "what is no Exception",
        (
            (RAISED, '"SystemExit"'),
            (RAISED, '"KeyboardInterrupt"'),
            (RAISED, '"GeneratorExit"'),
            (RAISED, '"CancelledError"'),
            (RAISED, '"StopIteration"'),
            (RAISED, '"a bare BaseException"'),
        ),
    ),
    83: ("groups 1,000 deep", ((RAISED, '"groups 1,000 deep"'),)),
    84: ("endless recursion", ((RAISED, '"endless recursion"'),)),
    85: ("a coroutine from a sync task", ((RAISED, '"a coroutine returned"'),)),
    86: (
        "changes its arguments",
        (
            (
                (
                    "processes/test_handler_endings.py",
                    "test_a_retry_gets_the_arguments_as_they_were_enqueued",
                ),
                "",
            ),
        ),
    ),
    87: (
        "never returns",
        (
            (
                (
                    "processes/test_worker_timeouts.py",
                    "test_a_worker_whose_threads_are_all_stuck_ends_with_an_error",
                ),
                "",
            ),
            (("../chaos/scenarios/stops.py", "stops_while_handlers_run"), ""),
        ),
    ),
    # Rows
    88: ("an outcome there is not", ((REFUSED, "outcome = 'done'"),)),
    89: ("a message without a job", ((DAMAGED, "DELETE FROM pgqueue.jobs"), (CHAOS, "89"))),
    90: ("a job without a message", ((DAMAGED, '"it has neither"'), (CHAOS, "90"))),
    91: (
        "an attempt set back",
        (
            (
                ("database/test_checking.py", "test_damage_is_reported_with_its_job"),
                "SET attempts = 0",
            ),
        ),
    ),
    92: ("payload null", ((DAMAGED, '"null": "are a JSON NoneType'), (CHAOS, "92:"))),
    93: (
        "more attempts than there are",
        ((DAMAGED, '"more attempts than there are"'), (REFUSED, "SET attempt = 31001")),
    ),
    94: ("many with one time", ((CHAOS, "94:"),)),
    95: ("created in the future", ((DAMAGED, '"times beyond all time"'), (CHAOS, "95:"))),
}

NOT_THERE_YET = {
    64: "limits do not exist yet",
    65: "tags cannot be given at an enqueue yet",
    **dict.fromkeys(range(68, 77), "schedules do not exist yet"),
    **dict.fromkeys(range(96, 106), "there is no dashboard yet"),
}


def test_no_input_of_the_list_is_left_out() -> None:
    assert sorted([*COVERED, *NOT_THERE_YET]) == list(range(1, 106))


@pytest.mark.parametrize("number", COVERED)
def test_each_is_tried_by_a_test_that_is_there(number: int) -> None:
    _, cases = COVERED[number]

    assert cases
    for (file, name), words in cases:
        source = (TESTS / file).read_text()
        assert f"def {name}(" in source, f"{file} has no {name}"
        assert words in source, f"{file} has no case {words}"
