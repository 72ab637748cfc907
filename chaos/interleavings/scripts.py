"""The scripts of the interleavings: what one session does to a job, from its first statement."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations_with_replacement
from typing import NamedTuple

from chaos.interleavings.sessions import AGAIN, FAIL, ScriptedSession
from pgqueue.outcomes import Outcome, Released, Succeeded

Script = Callable[[ScriptedSession], None]

SUCCEED = Succeeded()


def lease(outcome: Outcome) -> Script:
    """A worker: claim, settle."""

    def script(session: ScriptedSession) -> None:
        for claimed in session.claim():
            session.settle(claimed, outcome)

    return script


def lease_leanly(session: ScriptedSession) -> None:
    """The same, settled by the statement of plain successes."""
    for claimed in session.claim():
        session.settle_leanly(claimed)


def lose_the_claim(session: ScriptedSession) -> None:
    """The answer to the claim is lost; a reconcile finds the lease."""
    session.claim()
    session.reconcile()


def hold(outcome: Outcome) -> Script:
    """Claim, settle and commit in one transaction, as ``queue.claim()`` does."""

    def script(session: ScriptedSession) -> None:
        for claimed in session.claim_in_transaction():
            session.settle_in_transaction(claimed, outcome)
            return
        session.main.rollback()

    return script


def crash_in_transaction(session: ScriptedSession) -> None:
    """Claim in a transaction that the server ends."""
    session.claim_in_transaction()
    session.main.rollback()


def settle_too_late(session: ScriptedSession) -> None:
    """The transaction of a claim breaks; its claimer settles all the same, in a new one."""
    for claimed in session.claim_in_transaction():
        session.main.rollback()
        session.settle_in_transaction(claimed, SUCCEED)


def cancel(session: ScriptedSession) -> None:
    session.cancel()


def cancel_and_requeue(session: ScriptedSession) -> None:
    session.cancel()
    session.requeue()


def cancel_and_requeue_with_others(session: ScriptedSession) -> None:
    session.cancel()
    session.requeue_with_others()


def begin_again(session: ScriptedSession) -> None:
    """Requeue, and the first attempt of the next message: the numbers of attempts come again."""
    session.requeue()
    lease(SUCCEED)(session)


def requeue(session: ScriptedSession) -> None:
    session.requeue()


def delete(session: ScriptedSession) -> None:
    session.delete()


def rescue(session: ScriptedSession) -> None:
    """Declare all others dead, who go on as zombies, and give back what they held."""
    session.rescue()


def rescue_and_lease(session: ScriptedSession) -> None:
    session.rescue()
    lease(SUCCEED)(session)


SCRIPTS: dict[str, Script] = {
    "lease and succeed": lease(SUCCEED),
    "lease and succeed leanly": lease_leanly,
    "lease and retry": lease(AGAIN),
    "lease and fail": lease(FAIL),
    "lease and release": lease(Released()),
    "lose the claim": lose_the_claim,
    "hold and succeed": hold(SUCCEED),
    "hold and retry": hold(AGAIN),
    "crash in transaction": crash_in_transaction,
    "settle too late": settle_too_late,
    "cancel": cancel,
    "cancel and requeue": cancel_and_requeue,
    "cancel and requeue with others": cancel_and_requeue_with_others,
    "begin again": begin_again,
    "delete": delete,
    "rescue": rescue,
    "rescue and lease": rescue_and_lease,
}


def ready(_session: ScriptedSession) -> None:
    """A message, and nobody has it."""


def leased_by_the_dead(session: ScriptedSession) -> None:
    """The worker that claimed it is gone, and not yet declared dead."""
    session.claim()


def failed(session: ScriptedSession) -> None:
    lease(FAIL)(session)


OPENINGS: dict[str, Script] = {
    "ready": ready,
    "leased by the dead": leased_by_the_dead,
    "failed": failed,
}


class Pair(NamedTuple):
    """Where a job stands when two sessions come to it, and what they do."""

    opening: str
    first: str
    second: str
    max_attempts: int = 5

    @property
    def name(self) -> str:
        last = ", last attempt" if self.max_attempts == 1 else ""
        return f"{self.opening}{last}: {self.first} / {self.second}"


MOVES = [name for name in SCRIPTS if name not in ("begin again",)]
AFTER_A_DEATH = ["rescue", "rescue and lease", "cancel", "delete", "hold and succeed"]
AFTER_THE_END = [
    *("cancel", "begin again", "cancel and requeue", "cancel and requeue with others"),
    *("delete", "hold and retry"),
]


def all_pairs() -> list[Pair]:
    """Every two of the moves from every state in which they can do something."""
    found = [Pair("ready", *two) for two in combinations_with_replacement(MOVES, 2)]
    found += [
        Pair("leased by the dead", *two) for two in combinations_with_replacement(AFTER_A_DEATH, 2)
    ]
    found += [Pair("failed", *two) for two in combinations_with_replacement(AFTER_THE_END, 2)]
    # Two deletions by two Sessions: SQLAlchemy itself warns the second.
    return [pair for pair in found if (pair.first, pair.second) != ("delete", "delete")]
