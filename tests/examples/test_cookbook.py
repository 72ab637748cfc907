"""The queries of the cookbook count what they say, and its commands exist."""

import re
from collections.abc import Iterator
from datetime import timedelta
from functools import cache

import pytest
from click.testing import CliRunner
from documents import ROOT, documents
from sqlalchemy import text
from sqlalchemy.orm import Session

from pgqueue import PgQueue
from pgqueue.cli import main

PAGE = (ROOT / "docs" / "how-to" / "cookbook.md").read_text("utf-8")
QUERY = re.compile(r"^<!-- keda -->\n```yaml\n.*?query: >-\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"`pgqueue (?:--app \S+ )?([a-z][a-z-]*)((?: [^`|]*)?)`")
OPTION = re.compile(r"(?<![\w-])--[a-z-]+")


def test_the_queries_for_autoscalers_tell_how_long_and_how_many_jobs_are_due(
    session: Session,
) -> None:
    queue = PgQueue(session.get_bind())

    @queue.task(queue="mail")
    def mail(number: int) -> None: ...

    @queue.task(queue="other")
    def other(number: int) -> None: ...

    age, number = QUERY.findall(PAGE)
    assert (session.scalar(text(age)), session.scalar(text(number))) == (0, 0)

    mail.enqueue_many(session, [(number,) for number in range(3)])
    mail.options(delay=timedelta(hours=1)).enqueue(session, 3)
    other.enqueue(session, 4)
    session.commit()
    session.execute(
        text(
            "UPDATE pgqueue.message_queue SET run_at = now() - interval '5 minutes' "
            "WHERE (queue, id) IN (SELECT queue, min(id) FROM pgqueue.message_queue "
            "WHERE queue = 'mail' GROUP BY queue)"
        )
    )

    assert session.scalar(text(age)) == pytest.approx(300)
    assert session.scalar(text(number)) == 3


def test_the_commands_in_the_sentences_of_our_documents_have_these_options() -> None:
    assert list(_unknown()) == []


def _unknown() -> Iterator[str]:
    for document in documents():
        for name, rest in COMMAND.findall(document.read_text("utf-8")):
            known = set(OPTION.findall(_help_of(name)))
            for option in [name] if not known else set(OPTION.findall(rest)) - known:
                yield f"{document.name}: pgqueue {name}: {option}"


@cache
def _help_of(command: str) -> str:
    words = ["jobs", "list"] if command == "jobs" else [command]  # `pgqueue jobs` means its list
    return CliRunner().invoke(main, [*words, "--help"]).output
