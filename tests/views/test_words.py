"""Values in words."""

from datetime import timedelta

from pgqueue.views.words import span

SPANS = {
    0.0: "0 ms",
    0.000_04: "0.04 ms",
    0.0123: "12 ms",
    0.9996: "1.0 s",
    9.94: "9.9 s",
    9.96: "10 s",
    59.4: "59 s",
    59.6: "1 min",
    149.0: "2 min",
    3_599.0: "1.0 h",
    -5_400.0: "-1.5 h",
    86_300.0: "1.0 d",
    365 * 86_400.0: "365 d",
}


def test_a_span_is_rounded_before_its_unit_is_chosen() -> None:
    assert {seconds: span(timedelta(seconds=seconds)) for seconds in SPANS} == SPANS
