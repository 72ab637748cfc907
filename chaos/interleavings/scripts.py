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
    """A worker of lease mode: claim, settle."""

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
    """A worker of transaction mode: lock, stamp, take the message, settle, COMMIT."""

    def script(actor: Actor) -> None:
        for locked in actor.lock():
            claimed = actor.stamp(locked)
            if claimed is None:
                break
            actor.settle_in_transaction(claimed, outcome)
            return
        actor.main.rollback()

    return script


def crash_in_transaction(actor: Actor) -> None:
    """Lock, stamp, and the server ends the transaction."""
    for locked in actor.lock():
        actor.stamp(locked)
    actor.main.rollback()


def stamp_too_late(actor: Actor) -> None:
    """The transaction breaks between lock and stamp, and the worker knows it only afterwards."""
    locked = actor.lock()
    actor.main.rollback()
    for row in locked:
        actor.stamp_without_transaction(row)


def settle_too_late(actor: Actor) -> None:
    """The transaction breaks under the handler; the worker settles all the same, in a new one."""
    for locked in actor.lock():
        claimed = actor.stamp(locked)
        actor.main.rollback()
        if claimed is not None:
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


def drop_left_stamps(actor: Actor) -> None:
    """What every rescuer does, whoever lives."""
    actor.drop_left_stamps()


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
    "stamp too late": stamp_too_late,
    "settle too late": settle_too_late,
    "cancel": cancel,
    "cancel and requeue": cancel_and_requeue,
    "begin again": begin_again,
    "delete": delete,
    "rescue": rescue,
    "rescue and lease": rescue_and_lease,
    "drop left stamps": drop_left_stamps,
}


def ready(_actor: Actor) -> None:
    """S0: a message, and nobody has it."""


def left_over(actor: Actor) -> None:
    """S3: a crash in transaction mode has left its stamp beside the message."""
    crash_in_transaction(actor)


def leased_by_the_dead(actor: Actor) -> None:
    """Lease mode: whoever claimed it is gone, and not yet declared dead."""
    actor.claim()


def failed(actor: Actor) -> None:
    lease(FAIL)(actor)


OPENINGS: dict[str, Script] = {
    "ready": ready,
    "left over": left_over,
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
AFTER_A_CRASH = [
    "lease and succeed",
    "lease and retry",
    "hold and succeed",
    "hold and retry",
    "stamp too late",
    "settle too late",
    "cancel",
    "delete",
    "rescue",
    "drop left stamps",
]
AFTER_A_DEATH = ["rescue", "rescue and lease", "cancel", "delete", "hold and succeed"]
AFTER_THE_END = ["cancel", "begin again", "cancel and requeue", "delete", "hold and retry"]


def repertoire() -> list[Play]:
    """Every two of the moves from every state in which they can do something."""
    plays = [Play("ready", *two) for two in combinations_with_replacement(MOVES, 2)]
    for attempts in (5, 1):
        two_of = combinations_with_replacement(AFTER_A_CRASH, 2)
        plays += [Play("left over", *two, max_attempts=attempts) for two in two_of]
    plays += [
        Play("leased by the dead", *two) for two in combinations_with_replacement(AFTER_A_DEATH, 2)
    ]
    plays += [Play("failed", *two) for two in combinations_with_replacement(AFTER_THE_END, 2)]
    # Two deletions by two Sessions: SQLAlchemy itself warns the second.
    return [play for play in plays if (play.first, play.second) != ("delete", "delete")]
