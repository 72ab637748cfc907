"""The first steps of a child process.  It is run as a script, by its path.

Only the standard library is imported before the child has taken care that it dies with its
worker, and before it looks for modules where its worker does.
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
    # To the whole group, a Ctrl-C or a stop is for the worker, which lets handlers finish.  Not
    # SIG_IGN: programs that the handler starts would inherit it, and could not be terminated.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _heed_not)
    lines = link.makefile("rb")
    told = json.loads(lines.readline())
    failure = _prepare(told["preparation"])
    from pgqueue.worker.processes.serve import serve

    serve(link, lines, told, failure)


def _die_with(worker: int) -> None:
    """Be killed when the worker dies, whatever the handler does then.

    The signal comes when the *thread* ends that has started this process: see Children.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != worker:
        os._exit(1)  # it has died before the signal was asked for


def _heed_not(_number: int, _frame: object) -> None:
    """For the worker, not for us."""


def _prepare(preparation: dict[str, object]) -> BaseException | None:
    """Import the worker's main module again, as multiprocessing does; what that failed with."""
    current = process.current_process()
    # Read by Worker and by multiprocessing: a script without `if __name__ == "__main__"` would
    # start itself for ever.
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
