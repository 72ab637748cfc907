"""The child processes of one worker: started when a job needs one, kept for the next job.

A child runs the jobs of one task only: a handler affects the process of its own task only, and the
memory limit is that of the task.  There are at most as many children as slots, except while one
replaces another.
"""

import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from subprocess import Popen
from threading import Lock
from typing import Any, Self

from pgqueue import execution
from pgqueue.job_queue import PgQueue
from pgqueue.outcomes import AttemptEnd, Outcome, Released
from pgqueue.tasks import Task
from pgqueue.worker.processes.child import Child, ProcessAttempt


class ProcessPool:
    """The child processes, shared by the slots."""

    def __init__(self, *, home: Mapping[str, str], slots: int) -> None:
        self._home = home
        self._slots = slots
        self._lock = Lock()
        self._idle: list[Child] = []
        self._busy: set[Child] = set()
        self._is_closing = False
        # Not the slots: the kernel kills a child when the thread that started it ends.
        self._starter = ThreadPoolExecutor(1, "pgqueue-children")

    @classmethod
    def of(cls, queue: PgQueue, *, slots: int) -> Self:
        """The pool of a worker; calls ``child_settings()`` only if a task needs a child."""
        are_needed = any(task.address for task in queue.tasks.values())
        return cls(home=queue.child_settings() if are_needed else {}, slots=slots)

    def run(self, run: ProcessAttempt) -> Outcome:
        """Run one attempt in a child."""
        try:
            child = self._taken(run.task)
        except OSError as error:  # no more processes or files
            return execution.after_error(run.task, run.claimed, error)
        if child is None:
            return Released()
        run.begin_in(child)
        outcome = child.run(run)
        run.child = None
        self._put_back(child)
        return outcome

    def interrupt(self) -> bool:
        """Kill busy children, and start no more; returns whether any child was busy."""
        with self._lock:
            self._is_closing = True
            busy = list(self._busy)
        for child in busy:
            child.kill(AttemptEnd.INTERRUPTED)
        return bool(busy)

    def close(self) -> None:
        """End all children."""
        self.interrupt()
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            child.ask_to_leave()
        for child in idle:
            child.reap()
        self._starter.shutdown(wait=True)

    def _taken(self, task: Task[..., Any]) -> Child | None:
        """A child for a job of this task; None when the worker stops."""
        with self._lock:
            if self._is_closing:
                return None
            gone = [child for child in self._idle if not child.may_stay]
            mine = [c for c in self._idle if c.may_stay and c.task_name == task.name]
            if not mine and len(self._idle) - len(gone) + len(self._busy) >= self._slots:
                gone += [child for child in self._idle if child not in gone][:1]
            child = mine[-1] if mine else self._new(task)
            self._idle = [c for c in self._idle if c not in gone and c is not child]
            self._busy.add(child)
        _part_with(gone)
        return child

    def _put_back(self, child: Child) -> None:
        with self._lock:
            self._busy.discard(child)
            stays = child.may_stay and not self._is_closing
            if stays:
                self._idle.append(child)
        if not stays:
            _part_with([child])

    def _new(self, task: Task[..., Any]) -> Child:
        setup = {
            "preparation": _preparation(),
            "task": task.name,
            "address": task.address,
            "home": self._home,
            "memory_limit": task.settings.memory_limit,
        }
        return Child(setup, start=self._start, task_name=task.name)

    def _start(self, *args: Any, **kwargs: Any) -> "Popen[bytes]":
        return self._starter.submit(lambda: Popen(*args, **kwargs)).result()  # noqa: S603  # ours


def _part_with(children: list[Child]) -> None:
    for child in children:
        child.ask_to_leave()
        child.reap()


def _preparation() -> dict[str, Any]:
    """The arguments of ``multiprocessing.spawn.prepare`` that a child needs."""
    here = os.getcwd()
    preparation: dict[str, Any] = {
        "sys_path": [str(entry) or here for entry in sys.path],
        "sys_argv": sys.argv,
        "dir": here,
    }
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        preparation["init_main_from_name"] = spec.name
    elif path is not None and os.path.exists(path):
        preparation["init_main_from_path"] = os.path.abspath(path)
    return preparation
