"""An application in a directory, and the command line beside it, as a shell has them."""

import io
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from chaos.workers import FORKS
from chaos.workers import PATIENCE as PATIENCE
from chaos.workers import wait_until as wait_until
from pgqueue import Lease, PgQueue
from pgqueue.cli import main
from pgqueue.cli.app_loader import CliState

APP = """
    import asyncio
    import concurrent.futures
    import os
    import pathlib
    import threading
    import time

    from pgqueue import PgQueue, Retry

    queue = PgQueue(os.environ.get("SHOP_DATABASE"))
    unbound = PgQueue()
    number = 7


    class nested:
        jobs = queue


    def make_queue():
        return queue


    def broken_factory():
        raise RuntimeError("no settings")


    @queue.task
    def add(a: int, b: int) -> int:
        return a + b


    @queue.task(queue="mail")
    def post(to: str) -> None:
        pass


    @queue.task
    def wait_for_file(path: str) -> None:
        while not pathlib.Path(path).exists():
            time.sleep(0.01)


    @queue.task
    def never_end(daemon: bool) -> None:
        threading.Thread(target=threading.Event().wait, daemon=daemon).start()
        threading.Event().wait()


    @queue.task(max_attempts=1)
    def exit_with(code: int) -> None:
        os._exit(code)


    @queue.task
    def never_end_in_pool() -> None:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            pool.submit(threading.Event().wait).result()


    @queue.task
    async def never_end_in_thread() -> None:
        await asyncio.to_thread(threading.Event().wait)


    @unbound.task
    def nothing() -> None:
        pass
"""

UNMAPPED = """
    from __future__ import annotations

    from sqlalchemy import ForeignKey
    from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

    from pgqueue import Job
    from shop import queue


    class Base(DeclarativeBase): ...


    class Receipt(Base):
        __tablename__ = "receipts"
        id: Mapped[int] = mapped_column(primary_key=True)
        job_id: Mapped[int] = mapped_column(ForeignKey(Job.id))
        job: Mapped[Job | None] = relationship()
"""


def write_shop(directory: Path) -> Path:
    """An application, and some modules in which nothing works."""
    (directory / "shop.py").write_text(textwrap.dedent(APP))
    (directory / "single.py").write_text("from shop import queue\nfrom pgqueue import PgQueue\n")
    (directory / "without_tasks.py").write_text(
        "import os\nfrom pgqueue import PgQueue\nqueue = PgQueue(os.environ['SHOP_DATABASE'])\n"
    )
    (directory / "exploding.py").write_text("raise ValueError('two\\nlines')\n")
    (directory / "hasty.py").write_text("from shop import add, queue\nadd.delay(1, 2)\n")
    (directory / "needy.py").write_text("import a_module_nobody_has\n")
    (directory / "web.py").write_text("from flask import Flask\napp = Flask('web')\n")
    (directory / "torn.py").write_text("def (:\n")
    (directory / "unmapped.py").write_text(textwrap.dedent(UNMAPPED))
    (directory / "chatty.py").write_text("print('hello')\nfrom shop import queue\n")
    return directory


def environment(database_url: str | None) -> dict[str, str]:
    """That of the tests, without what would name a database or a width."""
    dropped = ("PGQUEUE", "COLUMNS", "NO_COLOR")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return kept | ({"SHOP_DATABASE": database_url} if database_url else {})


def command(queue: PgQueue, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, on a queue that needs no --app, as ``flask pgqueue`` does."""
    out, err = io.StringIO(), io.StringIO()
    code: int | str | None = 0
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(out), redirect_stderr(err):
        patched.delenv("COLUMNS", raising=False)  # as in a pipe, whose tables have no width
        try:
            main(list(words), prog_name="pgqueue", obj=CliState(queue=queue))
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def pgqueue(
    shop: Path, *arguments: str, database_url: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process that is forked from one which has imported pgqueue.

    To import it takes longer than most commands.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        values = environment(database_url) | variables
        process = FORKS.Process(target=_command, args=(shop, values, arguments, out, err))
        process.start()
        process.join(60)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(arguments, 60)
        return subprocess.CompletedProcess(
            arguments, process.exitcode, out.read_text(), err.read_text()
        )


def _command(
    shop: Path, values: dict[str, str], arguments: Sequence[str], out: Path, err: Path
) -> None:
    os.chdir(shop)
    sys.path.insert(0, str(shop))
    os.environ.clear()
    os.environ.update(values)
    for number, path in enumerate((Path(os.devnull), out, err)):
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(file, number)
    sys.argv = ["pgqueue", *arguments]
    main(prog_name="pgqueue")


def enqueue(engine: Engine, shop: Path, name: str, *calls: tuple[object, ...]) -> None:
    """Enqueue by the application's own signature, without importing it into the tests."""
    queue = PgQueue(engine)
    names = {"add": "a: int, b: int", "wait_for_file": "path: str", "never_end": "daemon: bool"}
    names |= {"never_end_in_pool": "", "never_end_in_thread": "", "exit_with": "code: int"}
    scope: dict[str, object] = {"__name__": "shop"}
    exec(f"def {name}({names[name]}) -> None: ...", scope)
    task = queue.task(scope[name])  # type: ignore[call-overload]  # made by exec
    with Session(engine) as session, session.begin():
        task.enqueue_many(session, list(calls))


@contextmanager
def running_worker(shop: Path, database_url: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    worker = subprocess.Popen(
        [sys.executable, "-m", "pgqueue", "--app", "shop:queue", "worker", *options],
        cwd=shop,
        env=environment(database_url),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield worker
    finally:
        worker.kill()
        worker.communicate()


def running(engine: Engine, number: int) -> Callable[[], bool]:
    def are_running() -> bool:
        with Session(engine) as session:
            return session.scalar(select(func.count()).select_from(Lease)) == number

    return are_running


def assert_one_line(ended: subprocess.CompletedProcess[str], *words: str) -> None:
    """One line says what is wrong; above it Click shows the usage, if the command line is wrong."""
    *usage, line = ended.stderr.strip().splitlines()
    assert ended.returncode != 0
    assert not usage or (ended.returncode == 2 and usage[0].startswith("Usage: ")), ended.stderr
    assert line.startswith("Error: ")
    for word in words:
        assert word in line
