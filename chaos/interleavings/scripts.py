"""The scripts of the interleavings: what one session does to a job, from its first statement."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations_with_replacement
from typing import NamedTuple

from chaos.interleavings.actors import AGAIN, FAIL, Actor
from pgqueue.outcomes import Outcome, Released, Succeeded

Script = Callable[[Actor], None]

SUCCEED = Succeeded()


def lease(outcome: Outcome) -> Script:
    """A worker: claim, settle."""

    def script(actor: Actor) -> None:
        for claimed in actor.claim():
            actor.settle(claimed, outcome)

    return script


def lease_leanly(actor: Actor) -> None:
    """The same, settled by the statement of plain successes."""
    for claimed in actor.claim():
        actor.settle_leanly(claimed)


def lose_the_claim(actor: Actor) -> None:
    """The answer to the claim is lost; a reconcile finds the lease."""
    actor.claim()
    actor.reconcile()


def hold(outcome: Outcome) -> Script:
    """Claim, settle and commit in one transaction, as ``queue.claim()`` does."""

    def script(actor: Actor) -> None:
        for claimed in actor.claim_in_transaction():
            actor.settle_in_transaction(claimed, outcome)
            return
        actor.main.rollback()

    return script


def crash_in_transaction(actor: Actor) -> None:
    """Claim in a transaction that the server ends."""
    actor.claim_in_transaction()
    actor.main.rollback()


def settle_too_late(actor: Actor) -> None:
    """The transaction of a claim breaks; its claimer settles all the same, in a new one."""
    for claimed in actor.claim_in_transaction():
        actor.main.rollback()
        actor.settle_in_transaction(claimed, SUCCEED)


def cancel(actor: Actor) -> None:
    actor.cancel()


def cancel_and_requeue(actor: Actor) -> None:
    actor.cancel()
    actor.requeue()


def begin_again(actor: Actor) -> None:
    """Requeue, and the first attempt of the next message: the numbers of attempts come again."""
    actor.requeue()
    lease(SUCCEED)(actor)


def requeue(actor: Actor) -> None:
    actor.requeue()


def delete(actor: Actor) -> None:
    actor.delete()


def rescue(actor: Actor) -> None:
    """Declare all others dead, who go on as zombies, and give back what they held."""
    actor.rescue()


def rescue_and_lease(actor: Actor) -> None:
    actor.rescue()
    lease(SUCCEED)(actor)


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
    "begin again": begin_again,
    "delete": delete,
    "rescue": rescue,
    "rescue and lease": rescue_and_lease,
}


def ready(_actor: Actor) -> None:
    """A message, and nobody has it."""


def leased_by_the_dead(actor: Actor) -> None:
    """The worker that claimed it is gone, and not yet declared dead."""
    actor.claim()


def failed(actor: Actor) -> None:
    lease(FAIL)(actor)


OPENINGS: dict[str, Script] = {
    "ready": ready,
    "leased by the dead": leased_by_the_dead,
    "failed": failed,
}


class Play(NamedTuple):
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
AFTER_THE_END = ["cancel", "begin again", "cancel and requeue", "delete", "hold and retry"]


def repertoire() -> list[Play]:
    """Every two of the moves from every state in which they can do something."""
    plays = [Play("ready", *two) for two in combinations_with_replacement(MOVES, 2)]
    plays += [
        Play("leased by the dead", *two) for two in combinations_with_replacement(AFTER_A_DEATH, 2)
    ]
    plays += [Play("failed", *two) for two in combinations_with_replacement(AFTER_THE_END, 2)]
    # Two deletions by two Sessions: SQLAlchemy itself warns the second.
    return [play for play in plays if (play.first, play.second) != ("delete", "delete")]
