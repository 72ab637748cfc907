"""Transaction mode: each slot claims, runs and settles in one transaction of its own."""

from collections.abc import Sequence
from threading import Event

from sqlalchemy.engine.interfaces import IsolationLevel

from pgqueue import redaction
from pgqueue.connections.opening import READ_COMMITTED
from pgqueue.worker.config import WorkerConfig
from pgqueue.worker.mode import LAST_CLAIM, Ended
from pgqueue.worker.runtime import WorkerRuntime
from pgqueue.worker.threads import WorkerThread, wait_until
from pgqueue.worker.timeouts import settle_from_outside
from pgqueue.worker.transaction_mode.claim_gate import ClaimGate
from pgqueue.worker.transaction_mode.slot import TransactionSlot

logger = redaction.logger(__name__)


class TransactionMode:
    """Claim, handler and settle are one transaction: the server undoes it after a crash."""

    threads: Sequence[WorkerThread] = ()

    def __init__(self, runtime: WorkerRuntime, config: WorkerConfig, *, until_empty: bool) -> None:
        self._runtime = runtime
        self._batch = config.batch
        poll = config.poll_interval.total_seconds()
        self._claim_gate = ClaimGate(runtime, poll_interval=poll, until_empty=until_empty)
        self.slots = [self._new_slot() for _ in range(config.slots)]

    @property
    def finished(self) -> Event:
        return self._claim_gate.finished

    def use_isolation(self, level: IsolationLevel) -> None:
        if level != READ_COMMITTED:
            logger.warning(
                "the engine's transactions are %s, but in transaction mode handlers run in %s: "
                "their transaction also claims and settles, which could then not see what others "
                "have done; use lease mode for handlers that need %s",
                *(level, READ_COMMITTED, level),
            )

    def start(self) -> None:
        for slot in self.slots:
            slot.start()

    def replace_slot(self, place: int) -> TransactionSlot:
        old, self.slots[place] = self.slots[place], self._new_slot()
        self.slots[place].start()
        return old

    def end_claims(self) -> None:
        wait_until(lambda: not any(slot.is_claiming for slot in self.slots), lambda: LAST_CLAIM)
        for slot in self.slots:
            slot.cancel_claim()

    def end_attempts(self, ended: Sequence[Ended], *, seconds: float) -> list[Ended]:
        return settle_from_outside(self._runtime, ended, seconds=seconds)

    def settle(self, ended: Sequence[Ended]) -> None:
        """Does nothing: :meth:`end_attempts` has settled them."""

    def close(self, *, seconds: float) -> None:
        self._claim_gate.close()

    def _new_slot(self) -> TransactionSlot:
        return TransactionSlot(self._claim_gate, batch=self._batch)
