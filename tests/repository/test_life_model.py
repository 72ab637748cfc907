"""Every state that the life of a job can reach, and what must hold in each of them."""

from collections import deque

import life_model
import pytest
from life_model import IDLE, MAX_ATTEMPTS, STEPS, State

CREWS = {"two workers": (0, 1), "two slots of one worker": (0, 0)}


def wrong_with(state: State) -> str | None:
    """The rule that a state breaks."""
    if state.wrong is not None:
        return state.wrong
    if state.attempts > MAX_ATTEMPTS:
        return "attempts exceed max_attempts"
    if state.outcome is not None:
        return None
    if not state.messages and state.lease is None:
        return "an unfinished job has neither message nor lease"
    if len(state.messages) > 1:
        return "an unfinished job has two messages"
    if state.messages and state.lease is not None:
        return "an unfinished job has a message and a lease"
    return None


def explore(start: State) -> tuple[dict[State, tuple[State, str] | None], State | None]:
    """All states, each with how it was reached first, and the first that breaks a rule."""
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        if wrong_with(state) is not None:
            return came_from, state
        for name, step in STEPS.items():
            for slot, _ in enumerate(state.slots):
                for then in step(state, slot):
                    if then not in came_from:
                        came_from[then] = state, f"{name} ({slot})"
                        waiting.append(then)
    return came_from, None


def path_to(state: State, came_from: dict[State, tuple[State, str] | None]) -> list[str]:
    steps = []
    while (before := came_from[state]) is not None:
        state, name = before
        steps.append(name)
    return steps[::-1]


def can_end(state: State) -> bool:
    """All workers die; a rescue, and a worker that nobody has seen before, end the job."""
    everybody = frozenset(state.workers) | {lease.worker for lease in [state.lease] if lease}
    state = state._replace(dead=everybody, slots=(IDLE,), workers=(9,), claims_left=9)
    while state.outcome is None:
        rescued = next(life_model.rescue(state, 0), state)
        claimed = next(life_model.claim(rescued, 0), rescued)
        settled = next(life_model.settle(claimed, 0), claimed)
        if settled == state:
            return False
        state = settled
    return True


@pytest.mark.parametrize("runtime", CREWS.values(), ids=list(CREWS))
def test_every_state_keeps_the_rules_and_can_still_end(runtime: tuple[int, ...]) -> None:
    came_from, broken = explore(State(workers=runtime))

    print(f"{len(came_from):,} states")
    assert broken is None, f"{wrong_with(broken)}: {path_to(broken, came_from)}"
    assert len(came_from) > 100
    for state in came_from:
        assert can_end(state), path_to(state, came_from)


def test_without_the_fence_a_rule_breaks() -> None:
    came_from, broken = explore(State(has_fence=False))

    assert broken is not None, "the model stays sound without it"
    print(f"{wrong_with(broken)}: {', '.join(path_to(broken, came_from))}")


@pytest.mark.parametrize("step", STEPS)
def test_every_step_is_taken(step: str) -> None:
    came_from, _ = explore(State(claims_left=2))

    assert any(before and before[1].startswith(step) for before in came_from.values())
