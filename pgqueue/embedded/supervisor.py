"""The parent process of a private server.  Stops the server when the starting process has ended.

It runs as a script and imports nothing else of pgqueue, so that it starts in a few milliseconds.
Its stdin is a pipe from the starting process, which closes however the starting process ends.
"""

# ruff: noqa: S603 - starting programs is what this module is for

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import Any

_PATIENCE = 20.0  # seconds for a clean shutdown


def supervise(
    *, command: list[str], process_options: dict[str, Any], log: str, temporary: str | None
) -> None:
    """Run the server, and stop it when the starting process has ended."""
    # Held until this process ends, and not inherited: a server without this lock has no supervisor.
    fcntl.flock(os.open(log, os.O_RDONLY | os.O_NOFOLLOW), fcntl.LOCK_SH)
    is_left = threading.Event()
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, **process_options)
    signal.signal(signal.SIGTERM, lambda *_: server.send_signal(signal.SIGINT))
    threading.Thread(target=_follow_the_pipe, args=(server, is_left), daemon=True).start()
    server.wait()
    if is_left.is_set() and temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)


def _follow_the_pipe(server: subprocess.Popen[bytes], is_left: threading.Event) -> None:
    os.read(0, 1)
    is_left.set()
    server.send_signal(signal.SIGINT)
    time.sleep(_PATIENCE)
    server.send_signal(signal.SIGQUIT)


if __name__ == "__main__":
    supervise(**json.loads(sys.argv[1]))
