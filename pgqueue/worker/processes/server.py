"""The server process: forks the children, and tells the worker how they end."""

import ctypes
import faulthandler
import gc
import os
import signal
import socket
import struct
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from multiprocessing.connection import wait
from typing import Any

import psycopg
from sqlalchemy import Engine
from sqlalchemy.util import ThreadLocalRegistry

from pgqueue.database.keepalive import leave_to_parent

PR_SET_PDEATHSIG = 1
FORK = b"f"
"""A request on the control socket.  With it come the ends of the child's three sockets: jobs,
notices, and the one by which the server tells the child's life."""
NUMBER = struct.Struct("!q")
"""What the server tells: first the child's pid, or the negative number of the error of the fork;
at the end the child's exit status."""
OF_WORKER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that the worker handles, also if they are sent to the whole process group."""

STDERR = 2
"""The descriptor: ``sys.stderr`` may be another object of the application."""

RunJobs = Callable[[socket.socket, socket.socket], None]


def start_server(run_jobs: RunJobs) -> tuple[int, socket.socket]:
    """Fork the server; returns its pid and the worker's end of its control socket.

    Call it before the worker starts threads and opens connections.
    """
    control, end_of_server = socket.socketpair()
    worker = os.getpid()

    def serve() -> None:
        control.close()
        _forget_connections()
        ForkServer(end_of_server, run_jobs).serve(worker)

    with end_of_server:
        return fork(serve), control


def fork(run: Callable[[], None]) -> int:
    """Run a function in a new process, which then ends; returns the pid.

    The new process ends without Python's exit handlers: they are the application's in the worker.
    """
    flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12, if there are threads
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        flush()
        os._exit(code)


def flush() -> None:
    """Write out what was printed: a fork would copy it, and ``os._exit`` lose it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # there is none, it is closed, or it is the application's
            stream.flush()


class ForkServer:
    """The server process.  Its one thread runs none of the application's code."""

    def __init__(self, control: socket.socket, run_jobs: RunJobs) -> None:
        self._control = control
        self._run_jobs = run_jobs
        self._children: dict[int, socket.socket] = {}
        """By pid: the sockets by which the worker is told of their ends."""
        # Signals sent to the whole group are handled by the worker, which lets handlers finish.
        # Not SIG_IGN: programs that a handler starts would inherit it, and could not be terminated.
        for number in OF_WORKER:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _ignore)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        self._wake_up, written_by_signals = os.pipe()
        os.set_blocking(written_by_signals, False)
        signal.set_wakeup_fd(written_by_signals, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)

    def serve(self, worker: int) -> None:
        """Fork children until the worker has ended or closes the control socket."""
        # The kernel sends it when the thread that forked this process ends, or the thread that
        # inherits it.  The worker may go on then, so the loop asks for the parent.
        _signal_at_end_of_parent(signal.SIGCHLD)
        while os.getppid() == worker:
            ready = wait([self._control, self._wake_up])
            if self._wake_up in ready:
                os.read(self._wake_up, 4096)
                self._reap()
            if self._control in ready:
                request, ends, *_ = socket.recv_fds(self._control, len(FORK), 3)
                if not request:
                    break
                for end in ends:
                    os.set_inheritable(end, False)
                sockets = [socket.socket(fileno=end) for end in ends]
                if len(sockets) == 3:
                    self._fork(*sockets)
                else:  # this process has too many files open
                    for one in sockets:
                        one.close()
        for pid in self._children:
            kill_group(pid)
        for pid in self._children:  # the first process of a container may wait for none
            os.waitpid(pid, 0)

    def _fork(self, jobs: socket.socket, notices: socket.socket, life: socket.socket) -> None:
        with jobs, notices:
            if wait([life], 0):  # the worker has closed its end: it did not wait so long
                life.close()
                return
            try:
                pid = fork(partial(self._become_child, os.getpid(), jobs, notices, life))
            except OSError as error:  # no more processes or memory
                _tell(life, -(error.errno or 1))
                life.close()
                return
        with suppress(OSError):  # it has ended
            os.setpgid(pid, pid)
        self._children[pid] = life
        _tell(life, pid, with_process=True)

    def _become_child(
        self, server: int, jobs: socket.socket, notices: socket.socket, life: socket.socket
    ) -> None:
        _signal_at_end_of_parent(signal.SIGKILL)
        if os.getppid() != server:
            return  # the server died before the signal was requested
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _let_forks_be_terminated()
        os.close(self._wake_up)
        for other in (self._control, life, *self._children.values()):
            other.close()
        gc.enable()
        faulthandler.register(signal.SIGUSR1, file=STDERR)
        self._run_jobs(jobs, notices)

    def _reap(self) -> None:
        """Tell the worker of children that have ended; kill what their handlers have started."""
        for pid in list(self._children):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                kill_group(pid)  # before the kernel may reuse the number
                _, status = os.waitpid(pid, 0)
                life = self._children.pop(pid)
                _tell(life, os.waitstatus_to_exitcode(status))
                life.close()


def _tell(life: socket.socket, number: int, *, with_process: bool = False) -> None:
    """Tell the worker a number; ``with_process``: it is a pid, and goes with its descriptor.

    The descriptor is opened here, because only the server has the pid's process for certain.
    """
    descriptors = []
    if with_process and sys.platform == "linux":
        with suppress(OSError):  # an old kernel, or one that may not: the number must do
            descriptors.append(os.pidfd_open(number))
    with suppress(OSError):  # the worker has closed its end
        socket.send_fds(life, [NUMBER.pack(number)], descriptors)
    for descriptor in descriptors:
        os.close(descriptor)


def _ignore(_number: int, _frame: object) -> None:
    """Ignore a signal: the worker handles it, or the main loop wakes up by it."""


def _let_forks_be_terminated() -> None:
    """Reset the signals in processes that a handler forks, as exec resets them in programs.

    Until that is done they are blocked: a signal that is sent at once waits.
    """
    masks: list[Any] = []

    def before() -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, OF_WORKER))

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def after_in_child() -> None:
        for number in OF_WORKER:
            if signal.getsignal(number) is _ignore:
                is_interrupt = number is signal.SIGINT
                default = signal.default_int_handler if is_interrupt else signal.SIG_DFL
                signal.signal(number, default)
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)


def _signal_at_end_of_parent(number: signal.Signals) -> None:
    """Ask the kernel for a signal when the parent ends; elsewhere than on Linux, do without."""
    if sys.platform == "linux":
        _libc().prctl(PR_SET_PDEATHSIG, number)


@cache  # the server calls it first: loading takes longer than all else that a child does
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _forget_connections() -> None:
    """Leave the connections that the application has opened to the worker.

    Engines get new pools, and the sessions of a ``scoped_session`` are forgotten.
    """
    gc.disable()  # until a child has started: a collected Session would roll back in the worker
    gc.unfreeze()
    found = gc.get_objects()  # type() below, not isinstance(): a lazy proxy would be evaluated
    leave_to_parent([each for each in found if issubclass(type(each), psycopg.BaseConnection)])
    for each in found:
        if issubclass(type(each), Engine):
            each.dispose(close=False)
        elif issubclass(type(each), ThreadLocalRegistry):
            each.clear()
    del found
    gc.freeze()  # children share the memory of objects that the garbage collector leaves alone


def kill_group(pid: int) -> None:
    """Kill a child, and the processes of its group.

    Call it before anyone has waited for the child: another process may have its number afterwards.
    """
    for kill in (os.killpg, os.kill):  # its handler may have moved it to another group
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
