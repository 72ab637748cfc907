"""The type that ``queue.task(...)`` with options returns."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from sqlalchemy.orm import Session

from pgqueue.context import JobContext
from pgqueue.tasks import Task

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

P = ParamSpec("P")
R = TypeVar("R")


class TaskDecorator(Protocol):
    """Makes a function a task; type checkers see the parameters of the function."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Session, JobContext, P], R], /
    ) -> Task[P, R]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[JobContext, Session, P], R], /
    ) -> Task[P, R]: ...
    @overload
    def __call__(
        self, function: "Callable[Concatenate[AsyncSession, JobContext, P], R]", /
    ) -> Task[P, R]: ...
    @overload
    def __call__(
        self, function: "Callable[Concatenate[JobContext, AsyncSession, P], R]", /
    ) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Session, P], R], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: "Callable[Concatenate[AsyncSession, P], R]", /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[JobContext, P], R], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...
    def __call__(self, function: Any, /) -> Any: ...
