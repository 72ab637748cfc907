"""The first steps of a child process, run as a script by its path.

Imports only the standard library until the child is set to die with its worker and has its
worker's module search path.
"""

import ctypes
import json
import os
import signal
import socket
import sys
from multiprocessing import process, spawn

PR_SET_PDEATHSIG = 1


def main() -> None:
    link, worker = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    _die_with(worker)
    # Signals sent to the whole group are handled by the worker, which lets handlers finish.  Not
    # SIG_IGN: programs that the handler starts would inherit it and could not be terminated.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _heed_not)
    lines = link.makefile("rb")
    setup = json.loads(lines.readline())
    failure = _prepare(setup["preparation"])
    from pgqueue.worker.processes.serve import serve

    serve(link, lines, setup, failure)


def _die_with(worker: int) -> None:
    """Ask the kernel to kill this process when the worker dies.

    The signal comes when the *thread* that started this process ends: see ProcessPool.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != worker:
        os._exit(1)  # the worker died before the signal was requested


def _heed_not(_number: int, _frame: object) -> None:
    """Ignore a signal: the worker handles it."""


def _prepare(preparation: dict[str, object]) -> BaseException | None:
    """Import the worker's main module, as multiprocessing does; returns the error, if any."""
    current = process.current_process()
    # Read by Worker and by multiprocessing: a script without `if __name__ == "__main__"` would
    # otherwise start itself for ever.
    current._inheriting = True  # type: ignore[attr-defined]  # as multiprocessing.spawn does it
    try:
        spawn.prepare(preparation)
    except BaseException as error:  # the application's code, which may even exit
        return error
    finally:
        del current._inheriting  # type: ignore[attr-defined]  # set above
    return None


if __name__ == "__main__":
    main()
