"""An application that stands still between the settle of a job and the COMMIT of both."""

import os
import signal
import threading
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.orm import Session

from chaos.sample_tasks import AT_ONCE, EFFECT, effect, note, queue, until_open
from pgqueue import JobContext

_thread = threading.local()


@queue.task(retry=AT_ONCE)
def pay_and_freeze(session: Session, ctx: JobContext) -> None:
    note("start", ctx)
    session.execute(EFFECT, effect(ctx))
    _thread.will_freeze = ctx.attempt == 1


@event.listens_for(Engine, "commit")
def _freeze(_connection: Any) -> None:
    if getattr(_thread, "will_freeze", False):
        _thread.will_freeze = False
        os.kill(os.getpid(), signal.SIGSTOP)
        until_open("thaw")  # the signal may stop this thread a few lines later
