"""What a worker does at this moment: each slot with its job, each thread with its stack."""

import asyncio
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from traceback import StackSummary, extract_stack
from types import FrameType
from typing import Any

from pgqueue.handler.attempt import RunningAttempt
from pgqueue.worker.slot import Slot

OF_HANDLER = 8
"""Calls of a handler that are shown, the innermost ones."""
OF_OTHERS = 3


def activity(worker: str, slots: Sequence[Slot], abandoned: Sequence[Slot]) -> str:
    """Describe what these slots, and all threads of the process, are doing, in lines of text.

    ``worker``: the first line.  ``abandoned``: slots that were replaced, whose handlers run.
    """
    frames, now = sys._current_frames(), time.monotonic()
    lines = [worker]
    for number, slot in enumerate(slots, 1):
        lines += _of_slot(f"slot {number}", slot, frames, now)
    for slot in abandoned:
        lines += _of_slot("abandoned, because it is past its timeout", slot, frames, now)
    known = {slot.ident for slot in (*slots, *abandoned)} | {threading.get_ident()}
    for thread in threading.enumerate():
        if thread.ident is not None and thread.ident not in known and thread.ident in frames:
            lines.append(f"thread {thread.name}")
            lines += _in_lines(extract_stack(frames[thread.ident]), OF_OTHERS)
    return "\n".join(lines)


def _of_slot(name: str, slot: Slot, frames: Mapping[int, FrameType], now: float) -> Iterator[str]:
    run = slot.current
    if run is None:
        yield f"{name}: free"
        return
    yield f"{name}: {_in_words(run, now)}"
    clock = run.clock  # its handler may end meanwhile
    task = None if clock is None else clock.task
    if task is not None:
        yield from _in_lines(_stack_of_coroutine(task), OF_HANDLER)
    elif slot.ident is not None and slot.ident in frames and run.child is None:
        yield from _in_lines(extract_stack(frames[slot.ident]), OF_HANDLER)


def _in_words(run: RunningAttempt, now: float) -> str:
    claimed = run.claimed
    words = [f"job {claimed.job_id} {run.task.name}, attempt {claimed.attempt}"]
    words.append(f"for {now - run.started_at:.1f} s")
    if run.task.is_transactional and not run.has_begun:
        words.append("not begun: it waits for a connection")
    if (child := run.child) is not None:
        words.append(f"in process {child.pid}")
    if run.deadline is not None:
        words.append(f"{run.deadline - now:.1f} s until its timeout")
    if run.stopped_for is not None:
        words.append(f"asked to stop ({type(run.stopped_for).__name__})")
    return ", ".join(words)


def _stack_of_coroutine(task: "asyncio.Task[Any]") -> StackSummary:
    """The calls of an asyncio task that is suspended, the innermost one last."""
    frames, awaited = [], task.get_coro()
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        frames.append((frame, frame.f_lineno))
        awaited = awaited.cr_await  # type: ignore[union-attr]  # it has a frame, so it has this
    return StackSummary.extract(iter(frames))


def _in_lines(stack: StackSummary, most: int) -> list[str]:
    entries = StackSummary.from_list(stack[-most:]).format()
    return [line for entry in entries for line in entry.rstrip().splitlines()]
