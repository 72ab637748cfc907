"""The frames of a traceback, those of the application apart from those of libraries."""

import sys
from traceback import format_exc

from pgqueue.dashboard.tracebacks import LONGEST_END, frames


def test_frames_of_libraries_are_apart_and_no_line_is_lost() -> None:
    try:
        import json

        json.loads("{")
    except ValueError:
        text = format_exc()

    parts = frames(text)

    assert "\n".join(part.text for part in parts) == text.rstrip("\n")
    assert [part.is_library for part in parts] == [False, False, True, False]
    assert __file__ in parts[1].text
    assert parts[2].count == text.count(f'File "{sys.base_prefix}/lib/python')
    assert parts[3].text.startswith("json.decoder.JSONDecodeError")


def test_an_error_that_led_to_another_is_a_part_of_its_own() -> None:
    try:
        try:
            int("x")
        except ValueError as error:
            raise KeyError("y") from error
    except KeyError:
        text = format_exc()

    parts = frames(text)

    assert "\n".join(part.text for part in parts) == text.rstrip("\n")
    assert [part.count for part in parts] == [0, 1, 0, 1, 0]
    assert "direct cause" in parts[2].text


def test_a_very_long_traceback_has_its_beginning_and_its_end() -> None:
    lines = [f'  File "/shop/jobs.py", line {n}, in send\n    send()' for n in range(20_000)]

    shown = "\n".join(part.text for part in frames("\n".join(lines)))

    assert len(shown) < 2.1 * LONGEST_END
    assert "line 0, in send" in shown
    assert "line 19999, in send" in shown
    assert "characters are left out" in shown
