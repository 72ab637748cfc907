"""What pruning reads and deletes."""

from typing import Any, NamedTuple

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from pgqueue.retention import Retention
from pgqueue.statements import pruning
from pgqueue.statements.pruning import Reference


class Stretch(NamedTuple):
    """Some jobs with consecutive ids, and what pruning has done to them."""

    up_to: int | None
    """The last of their ids; None if there were no more jobs."""
    are_young: bool | None
    """Whether all of them are too young to be deleted; then so are those that follow."""
    deleted: int


class DueJobs(NamedTuple):
    """The jobs of a task with the same outcome whose time is over."""

    task: str
    outcome: str
    jobs: int


class Pruning:
    """The ended jobs behind one Session or Connection."""

    def __init__(self, executor: Session | Connection) -> None:
        self._executor = executor

    def try_lock(self) -> bool:
        """Take the lock of this transaction; False if another one prunes."""
        return bool(self._executor.execute(pruning.try_lock()).scalar())

    def references(self) -> tuple[Reference, ...]:
        """The columns of the application whose rows keep jobs from being deleted."""
        return tuple(Reference(*row) for row in self._executor.execute(pruning.references()))

    def prune(
        self,
        retention: Retention,
        references: tuple[Reference, ...],
        *,
        dead: bool,
        after: int,
        size: int,
    ) -> Stretch:
        """Delete the jobs whose time is over among the next ``size`` jobs after this id.

        ``dead``: among the next failed and cancelled ones.
        """
        parameters: dict[str, Any] = {**retention.parameters(), "after": after, "size": size}
        if not dead:
            parameters["shortest"] = retention.shortest
        statement = pruning.prune(references, dead=dead)
        return Stretch(*self._executor.execute(statement, parameters).one())

    def next_job(self, after: int, *, dead: bool) -> int | None:
        """The first id after another."""
        statement = pruning.next_job(dead=dead)
        found: int | None = self._executor.execute(statement, {"after": after}).scalar()
        return found

    def due(self, retention: Retention, references: tuple[Reference, ...]) -> list[DueJobs]:
        """The jobs whose time is over.  Reads all jobs."""
        statement = pruning.count_due(references)
        rows = self._executor.execute(statement, retention.parameters())
        return [DueJobs(*row) for row in rows]
