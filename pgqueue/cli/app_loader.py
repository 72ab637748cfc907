"""Finds the application's PgQueue, or creates one for a URL, by the options of a command."""

import importlib
import inspect
import logging
import os
import sys
import tomllib
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import ModuleType

import click
from sqlalchemy.orm import Session

from pgqueue import schema
from pgqueue.database.opening import end_open_transactions, on_psycopg
from pgqueue.errors import NotBound, SchemaError
from pgqueue.job_queue import PgQueue
from pgqueue.terminal import one_line


@dataclass
class CliState:
    """The options given before or after the command's name.

    It is the ``ctx.obj`` of every command, and the only place where a command gets its queue.
    """

    app: str | None = None
    url: str | None = None
    url_of_environment: str | None = None
    is_verbose: bool = False
    queue: PgQueue | None = None
    """The application's queue, if it is known without --app, as in ``flask pgqueue``."""
    replaced_handler: tuple[logging.Logger, logging.Handler] | None = None
    """The logger of a Flask application and Flask's own handler, which the worker's replaces."""

    def application(self) -> PgQueue:
        """The queue of --app: on the database of --url, else on its own, else on PGQUEUE_URL."""
        if self.queue is not None:
            return self.queue
        app = self.named_application()
        try:
            queue = find_queue(app)
        except click.ClickException as error:
            if self.app is not None:
                raise
            raise click.ClickException(f"{_PROJECT}, {_KEY}: {error.message}") from error
        url = self.url
        if url is None:
            try:
                queue.sessions  # noqa: B018  # raises if it has no database
            except NotBound:
                url = self.url_of_environment
        if url is not None:
            # psycopg is always installed, whatever driver the URL names.
            queue.bind(on_psycopg(url, "--url", always=True))
        return queue

    def named_application(self) -> str:
        """The value of --app, of PGQUEUE_APP or of pyproject.toml; without one, a UsageError."""
        app = self.app or app_of_project()
        if app is None:
            raise click.UsageError(
                "This needs your application: say --app module:queue, or set PGQUEUE_APP, or app "
                "in [tool.pgqueue] of pyproject.toml"
            )
        return app

    def database(self) -> PgQueue:
        """A queue on the database of --url, or of --app, with or without tasks."""
        if self.queue is not None or (self.url is None and (self.app or app_of_project())):
            return self.application()
        if url := self.url or self.url_of_environment:
            return PgQueue(on_psycopg(url, "--url", always=True), nodes="citus")  # for --nodes
        raise click.UsageError(
            "Which database? Say --url postgresql://user@host/database or --app module:queue"
        )


@contextmanager
def opened(queue: PgQueue) -> Iterator[Session]:
    """A session, after a check that this code can work with the tables."""
    if queue.connection is None:
        end_open_transactions(queue.engine)  # or the isolation level could not be set
    with queue.session() as session:
        # Whatever the default of the application's engine: the steps of an operation must see what
        # others have committed meanwhile.
        read_committed = {"isolation_level": "READ COMMITTED"}
        schema.verify(session.connection(execution_options=read_committed))
        yield session


@contextmanager
def committed(queue: PgQueue) -> Iterator[Session]:
    """The same, committed at the end of the block."""
    with opened(queue) as session:
        yield session
        session.commit()


_PROJECT = "pyproject.toml"
_KEY = "app in [tool.pgqueue]"


def app_of_project() -> str | None:
    """The application that pyproject.toml of the current directory names; None if it names none.

    Raises ClickException for a file that cannot be read, or a value that is not a text.
    """
    try:
        project = tomllib.loads(Path(_PROJECT).read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{_PROJECT} cannot be read: {error}") from error
    settings = project.get("tool", {}).get("pgqueue", {})
    if not isinstance(settings, dict) or (unknown := settings.keys() - {"app"}):
        raise click.ClickException(
            f'{_PROJECT}: [tool.pgqueue] has one key, app = "module:queue"'
            + (f", and no {min(unknown)!r}" if isinstance(settings, dict) else "")
        )
    app = settings.get("app")
    if app is not None and (not isinstance(app, str) or not app):
        raise click.ClickException(
            f'{_PROJECT}: {_KEY} is {app!r}; write a text, as app = "module:queue"'
        )
    return app


def find_queue(app: str) -> PgQueue:
    """Import ``module:queue``; queue may be dotted, a function that returns it, or omitted."""
    module_name, _, path = app.partition(":")
    if not module_name:
        raise click.ClickException(f"--app {app!r} names no module; write it as shop.jobs:queue")
    module = _imported(module_name)
    if not path:
        return _only_queue_in(module)
    try:
        found = reduce(getattr, path.split("."), module)
    except AttributeError as error:
        raise click.ClickException(
            f"{module_name} has no {path!r}; --app names the PgQueue in it, as in "
            f"{module_name}:queue"
        ) from error
    if inspect.isroutine(found):
        with _application_code(f"Calling {app}"):
            found = found()
    if _is_flask(found):
        raise _for_flask(app)
    if not isinstance(found, PgQueue):
        raise click.ClickException(
            f"{app} is {type(found).__name__}, not a PgQueue, nor a function that returns one"
        )
    return found


def _imported(module_name: str) -> ModuleType:
    # As `python -m` does, so that an application in the current directory need not be installed.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with _application_code(f"Importing {module_name}"):
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise click.ClickException(
                f"There is no module {module_name!r} here; run this where `python -c 'import "
                f"{module_name}'` works"
            ) from error
        except SchemaError as error:  # its own remedy is the command that imports the module
            raise click.ClickException(
                f"Importing {module_name} failed: it uses pgqueue's tables when it is imported, "
                "and they are missing or of another version. Run `pgqueue --url URL upgrade`, "
                'without --app, and move the code that uses them under `if __name__ == "__main__":`'
            ) from error


@contextmanager
def _application_code(what: str) -> Iterator[None]:
    """Print the application's output on stderr, beside no JSON, and its error in one line."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except click.ClickException:
        raise
    except (Exception, SystemExit) as error:  # an application may raise anything
        # Of frozen modules, such as that of os.environ, nobody has the file.
        frames = traceback.extract_tb(error.__traceback__)
        where = next(each for each in reversed(frames) if not each.filename.startswith("<frozen "))
        at = f"{where.filename}:{where.lineno}"
        if isinstance(error, SyntaxError) and error.filename:
            at = f"{error.filename}:{error.lineno}"
        raise click.ClickException(
            f"{what} failed: {type(error).__name__}: {one_line(error)} "
            f"(in {at}; -v shows the whole traceback)"
        ) from error


def _only_queue_in(module: ModuleType) -> PgQueue:
    queues = {name: value for name, value in vars(module).items() if isinstance(value, PgQueue)}
    if len({id(queue) for queue in queues.values()}) == 1:
        return next(iter(queues.values()))
    if not queues and any(_is_flask(value) for value in vars(module).values()):
        raise _for_flask(module.__name__)
    found = f"holds {', '.join(sorted(queues))}" if queues else "holds no PgQueue"
    raise click.ClickException(
        f"{module.__name__} {found}; say which one, as in --app {module.__name__}:queue"
    )


def _is_flask(value: object) -> bool:
    """Whether a value is a Flask application; asks without importing Flask."""
    bases = type(value).__mro__
    return any((base.__module__, base.__name__) == ("flask.app", "Flask") for base in bases)


def _for_flask(app: str) -> click.ClickException:
    return click.ClickException(
        f"{app} is a Flask application: run `flask --app {app} pgqueue` with the same command"
    )
