"""Signed tokens of jobs, for pages."""

from datetime import timedelta

import pytest

from pgqueue import ArgumentsError, BadToken, Job, OptionError, PgQueue

queue = PgQueue(secret="one")


def test_a_token_gives_its_id_back_within_its_time() -> None:
    token = queue.token(Job(id=4711))

    assert queue.job_id(token) == 4711
    assert queue.job_id(queue.token(2**63 - 1)) == 2**63 - 1
    with pytest.raises(BadToken, match="expired"):
        queue.job_id(token, max_age=timedelta(seconds=-1))


def test_a_token_of_another_secret_is_refused() -> None:
    with pytest.raises(BadToken, match="not made by this application"):
        queue.job_id(PgQueue(secret="other").token(4711))


def test_a_changed_token_is_refused_whatever_was_changed() -> None:
    token = queue.token(4711)
    payload, _, signature = token.partition(".")
    of_another = queue.token(4712).partition(".")[0]
    for wrong in [
        f"x{token}",
        token[:-3],
        f"{of_another}.{signature}",
        payload,
        "",
        "4711",
        "\xe9",
        None,
    ]:
        with pytest.raises(BadToken):
            queue.job_id(wrong)  # type: ignore[arg-type]  # None too


def test_what_makes_no_sense_is_refused() -> None:
    for secret in ("", b"bytes", 7):
        with pytest.raises(OptionError, match="secret must be a text"):
            PgQueue(secret=secret)  # type: ignore[arg-type]  # the wrong type
    with pytest.raises(OptionError, match="no secret to sign tokens"):
        PgQueue().token(4711)
    with pytest.raises(OptionError, match="no secret to sign tokens"):
        PgQueue().job_id(queue.token(4711))
    with pytest.raises(ArgumentsError, match="a job's id is needed"):
        queue.token(Job())
    with pytest.raises(OptionError, match="max_age is 60; give a timedelta"):
        queue.job_id(queue.token(1), max_age=60)  # type: ignore[arg-type]  # the wrong type
