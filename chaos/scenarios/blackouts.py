"""Networks go dark under load, two workers at a time, and come back."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from chaos.environment import Environment
from chaos.proxy import Proxy
from chaos.sample_tasks import call, pay, pay_async
from chaos.scenario import Size, scenario

AT_ONCE = 2
"""Workers that are in the dark together: the others have to see to their jobs."""
GRACE = 2.0
"""Seconds without a beat: the others do not wait until the network is back."""
HANDLER = 100
"""Milliseconds: every worker is in the middle of some when its network goes dark."""

HOLDERS = (
    "SELECT count(DISTINCT pid) FROM pgqueue.leases JOIN pgqueue.workers ON id = worker_id"
    " WHERE pid = ANY(:pids)"
)


@scenario(
    promises="P1 P2 P3 P4",
    research="T3",
    full=Size(jobs=2000, workers=4, faults=20, seconds=10),
    short=Size(jobs=240, workers=3, faults=2, seconds=2),
    mutated={"rescue_loses_the_message": "no worker will ever run it"},
)
def networks_that_go_dark(environment: Environment, size: Size) -> None:
    """Two networks of four swallow all for 10 s, ten times: others run the jobs, each ends once."""
    rounds = size.faults // AT_ONCE
    share = size.jobs // rounds // 3
    with ExitStack() as resources:
        proxies = [resources.enter_context(Proxy(environment.url)) for _ in range(size.workers)]
        workers = environment.workers(0, slow_grace=GRACE)
        for proxy in proxies:
            workers.add(url=proxy.url).was_harmed = True
        workers.until_registered()
        for _ in range(rounds):
            _have_work(environment, share)
            dark = environment.dice.sample(
                list(zip(proxies, workers.members, strict=True)), AT_ONCE
            )
            holders = partial(environment.scalar, HOLDERS, pids=[member.pid for _, member in dark])
            both_hold = partial(_are_held_by, environment, holders, AT_ONCE, share)
            environment.until(both_hold, what="both hold jobs")
            for proxy, _ in dark:
                proxy.hold()
                environment.count("partitions")
            time.sleep(size.seconds)  # the fault itself: so long it lasts
            nobody_holds = partial(_hold_nothing, holders)
            environment.until(nobody_holds, what="others rescue their jobs")
            for proxy, _ in dark:
                proxy.pass_on()
            workers.until_registered()  # or the others would do the next jobs without them
        environment.until_ended()
        workers.until_registered()
        workers.stop()
    environment.check()


def _have_work(environment: Environment, share: int) -> None:
    tasks = (task.options(max_attempts=1000) for task in (pay, pay_async, call))
    environment.until_started(
        *(environment.enqueue(task, [(HANDLER,)] * share)[0] for task in tasks)
    )


def _are_held_by(
    environment: Environment, holders: Callable[[], int], count: int, share: int
) -> bool:
    """Whether so many hold jobs; gives out more while one of them is not back at its claims."""
    if holders() == count:
        return True
    if environment.unfinished() < share:
        environment.enqueue(call.options(max_attempts=1000), [(HANDLER,)] * share)
    return False


def _hold_nothing(holders: Callable[[], int]) -> bool:
    return holders() == 0
