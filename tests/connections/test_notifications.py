"""The listener on the connection of the claims: it hears, and notices that nobody answers."""

from collections.abc import Iterator
from contextlib import closing, suppress

import psycopg
import pytest
from sqlalchemy import Connection, Engine, create_engine, select, text
from sqlalchemy.exc import DBAPIError

from chaos.proxy import Proxy
from chaos.workers import PATIENCE
from pgqueue.database import notifications
from pgqueue.database.notifications import Listener
from pgqueue.database.opening import driver_connection, own_connection
from pgqueue.database.settings import CLAIMING
from pgqueue.repository.tables import CHANNEL, notify


@pytest.fixture
def proxy(database_url: str) -> Iterator[Proxy]:
    with Proxy(database_url) as proxy:
        yield proxy


@pytest.fixture
def claiming(proxy: Proxy) -> Iterator[Connection]:
    """The connection of the claims."""
    engine = create_engine(proxy.url)
    with suppress(DBAPIError), own_connection(engine, CLAIMING) as connection:
        yield connection


def test_what_comes_together_with_a_claim_or_after_it_is_heard(
    engine: Engine, claiming: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "DEADLINE", PATIENCE)
    with closing(Listener(enabled=True)) as listener, engine.connect() as other:
        listener.share(claiming)
        assert listener.arm()

        other.execute(select(notify("before")))
        other.commit()
        claiming.execute(text("SELECT pg_sleep(0.1)"))  # the server sends it with the answer
        heard = listener.wait(PATIENCE)
        other.execute(select(notify("after")))
        other.commit()

        assert (heard, listener.wait(PATIENCE)) == ({"before"}, {"after"})


@pytest.mark.parametrize("has_pipelines", [True, False], ids=["Sync", "empty query"])
def test_a_shared_connection_that_does_not_answer_is_closed(
    engine: Engine,
    proxy: Proxy,
    claiming: Connection,
    monkeypatch: pytest.MonkeyPatch,
    has_pipelines: bool,
) -> None:
    monkeypatch.setattr(notifications, "DEADLINE", PATIENCE)
    monkeypatch.setattr(psycopg.Pipeline, "is_supported", lambda: has_pipelines)
    with closing(Listener(enabled=True)) as listener:
        listener.share(claiming)
        assert [listener.arm() for _ in range(3)] == [True, False, False]
        assert claiming.scalar(text("SELECT 1")) == 1

        monkeypatch.setattr(notifications, "DEADLINE", 0.2)
        proxy.hold()

        assert not listener.arm()
        assert driver_connection(claiming).closed


def test_a_connection_that_is_shared_is_probed_where_nobody_notifies_too(
    engine: Engine, proxy: Proxy, claiming: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "DEADLINE", 0.2)
    with closing(Listener(enabled=False)) as listener:
        listener.share(claiming)
        proxy.hold()

        assert not listener.arm()
        assert driver_connection(claiming).closed


def test_a_notification_of_another_channel_wakes_nobody(
    engine: Engine, claiming: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "DEADLINE", PATIENCE)
    aside: list[str] = []
    listening = Listener(enabled=True, aside={"pgqueue_aside": aside.append})
    with closing(listening) as listener, engine.connect() as other:
        listener.share(claiming)
        assert listener.arm()

        for word, channel in [("7", "pgqueue_aside"), ("enqueued", CHANNEL)]:
            other.execute(select(notify(word, channel)))
            other.commit()

        assert listener.wait(PATIENCE) == {"enqueued"}
        assert aside == ["7"]


def test_a_poke_ends_the_wait_beside_notifications_of_another_channel(
    engine: Engine, claiming: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "DEADLINE", PATIENCE)
    listening = Listener(enabled=True, aside={"pgqueue_aside": lambda _: None})
    with closing(listening) as listener, engine.connect() as other:
        listener.share(claiming)
        assert listener.arm()
        other.execute(select(notify("7", "pgqueue_aside")))
        other.commit()
        listener.poke()

        assert listener.wait(2 * PATIENCE) == set()
