"""``ctx.finish()`` in a child process: a transaction on a connection of the process's engine.

The process tells its worker of the COMMIT, and the worker asks the database whether it is so.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from threading import Event
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine
from sqlalchemy.engine.interfaces import IsolationLevel
from sqlalchemy.orm import Session, sessionmaker

from pgqueue.connections.opening import (
    isolation_of,
    leave_autocommit,
    let_server_notice_loss,
    worker_engine,
)
from pgqueue.job_queue import PgQueue
from pgqueue.outcomes import Succeeded
from pgqueue.repository import Claimed
from pgqueue.sessions.handlers import joining_sessions
from pgqueue.tasks import Task
from pgqueue.unit_of_work import begin_for_handler, time_limits
from pgqueue.worker.finishing import Finishing
from pgqueue.worker.unknown_commits import was_committed


class ChildDatabase:
    """What the blocks of one process share; opened by the first of them."""

    def __init__(self, queue: PgQueue) -> None:
        self.queue = queue

    @cached_property
    def engine(self) -> Engine:
        return worker_engine(self.queue.engine)

    @cached_property
    def isolation_level(self) -> IsolationLevel:
        return isolation_of(self.queue.engine)

    @cached_property
    def sessions(self) -> sessionmaker[Session]:
        return joining_sessions(self.queue.sessions, self.queue.engine)


class ChildFinishing(Finishing):
    """Begins a transaction in the process of the handler."""

    def __init__(
        self,
        task: Task[..., Any],
        claimed: Claimed,
        worker_id: UUID,
        database: ChildDatabase,
        *,
        on_done: Callable[[], None],
    ) -> None:
        retention = database.queue.retention
        is_kept = not retention.deletes_at_once(claimed.task, claimed.queue)
        super().__init__(
            task, claimed, worker_id=worker_id, sessions=database.sessions, is_kept=is_kept
        )
        self._database = database
        self._on_done = on_done

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with self._database.engine.connect() as connection:
            leave_autocommit(connection)
            let_server_notice_loss(connection)
            self._begin(connection)
            yield connection

    def _begin(self, connection: Connection) -> None:
        limits = time_limits(self.task.settings.timeout, connection)
        begin_for_handler(connection, limits, isolation_level=self._database.isolation_level)

    def _was_committed(self) -> bool:
        return was_committed(self._database.engine, self.worker_id, self.claimed, stopping=Event())

    def _done(self, outcome: Succeeded) -> None:
        super()._done(outcome)
        self._on_done()
