"""Databases that are not in UTF8: what they can store works, and the rest is refused."""

from collections.abc import Callable

import pytest
from sqlalchemy import Engine, NullPool, create_engine, make_url, text

from pgqueue import PayloadError, PgQueue, PgQueueError, Worker

MADE = "CREATE DATABASE {} ENCODING '{}' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"


@pytest.fixture
def in_encoding(empty_engine: Engine) -> "Callable[..., PgQueue]":
    """Makes a queue on a database in an encoding, in place of the test's own."""

    def make(encoding: str, **query: str) -> PgQueue:
        url = make_url(empty_engine.url)
        empty_engine.dispose()
        admin = create_engine(
            url.set(database="postgres"), isolation_level="AUTOCOMMIT", poolclass=NullPool
        )
        with admin.connect() as connection:
            connection.execute(text(f"DROP DATABASE {url.database}"))
            connection.execute(text(MADE.format(url.database, encoding)))
        return PgQueue(create_engine(url.update_query_dict(query), poolclass=NullPool))

    return make


@pytest.mark.parametrize("query", [{}, {"client_encoding": "utf8"}])
def test_a_character_that_the_encoding_lacks_is_refused_at_the_enqueue(
    in_encoding: "Callable[..., PgQueue]", query: dict[str, str]
) -> None:
    queue, words = in_encoding("LATIN1", **query), []
    queue.upgrade()

    @queue.task
    def note(word: str) -> None:
        words.append(word)

    note.delay("caf\u00e9")
    with pytest.raises(PayloadError, match="encoding UTF8"):
        note.delay("\u65e5\u672c")
    with queue.session() as session, pytest.raises(PayloadError, match="encoding UTF8"):
        note.enqueue_many(session, [("\u65e5\u672c",)])

    assert Worker(queue).run_until_empty(timeout=60) == {"succeeded": 1}
    assert words == ["caf\u00e9"]


def test_a_database_without_an_encoding_needs_one_in_the_url(
    in_encoding: "Callable[..., PgQueue]",
) -> None:
    with pytest.raises(PgQueueError, match="add client_encoding=utf8 to the URL"):
        in_encoding("SQL_ASCII").upgrade()
    queue, words = in_encoding("SQL_ASCII", client_encoding="utf8"), []
    queue.upgrade()

    @queue.task
    def note(word: str) -> None:
        words.append(word)

    note.delay("\u65e5\u672c")

    assert Worker(queue).run_until_empty(timeout=60) == {"succeeded": 1}
    assert words == ["\u65e5\u672c"]
