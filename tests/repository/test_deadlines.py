"""The timeout that one enqueue has given, as it stands in the meta of its job."""

from datetime import timedelta

import pytest

from pgqueue.repository.deadlines import timeout_in

OF_TASK = timedelta(minutes=5)


@pytest.mark.parametrize(
    ("meta", "timeout"),
    [
        ('{"pgqueue.timeout": 1.5}', timedelta(seconds=1.5)),
        ('{"pgqueue.timeout": null}', None),
        ('{"by": "Ada"}', OF_TASK),
        *(
            (by_hand, OF_TASK)
            for by_hand in (
                '{"pgqueue.timeout": "soon"}',
                '{"pgqueue.timeout": 1e999}',
                '{"pgqueue.timeout": 1e11}',
                '{"pgqueue.timeout": -1}',
                '{"pgqueue.timeout": [1]}',
                '{"of": {"pgqueue.timeout": 1}}',
                '["pgqueue.timeout"]',
                f'{"[" * 100_000}"pgqueue.timeout"{"]" * 100_000}',
            )
        ),
    ],
)
def test_a_job_has_the_timeout_of_its_meta_or_that_of_its_task(
    meta: str, timeout: timedelta | None
) -> None:
    assert timeout_in(meta, OF_TASK) == timeout
