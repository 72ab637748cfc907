"""``ctx.finish()`` in a task that is called as a function: there is no job to end."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy.orm import Session

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession


class PlainFinishing:
    """Opens a session of its own, committed at the end of the block."""

    is_done = False

    def __init__(
        self, session: Callable[[], Session], async_session: "Callable[[], AsyncSession]"
    ) -> None:
        self._session = session
        self._async_session = async_session

    @contextmanager
    def begin(self, _result: Any) -> Iterator[Session]:
        with self._session() as session, session.begin():
            yield session

    @asynccontextmanager
    async def begin_async(self, _result: Any) -> "AsyncIterator[AsyncSession]":
        async with self._async_session() as session, session.begin():
            yield session
