"""Networks go dark under load, two workers at a time, and come back."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from chaos.environment import Environment
from chaos.far_host import FarHost, reachable
from chaos.proxy import Proxy
from chaos.sample_tasks import call, pay, pay_async
from chaos.scenario import Server, Size, scenario
from chaos.scenarios.partitions import HASTY
from pgqueue.connections.keepalive import NETWORK

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


FAR_AWAY = 4
"""Workers on the host that goes dark."""
LET_GO = 10.0
"""Seconds.  Two are for the probes, and in 77 rounds it took no longer, also beside a busy disk and
four busy loops; the rest is for a machine that stands still."""
OPEN_FAR_AWAY = (
    "SELECT count(DISTINCT split_part(application_name, ' ', 1)) FROM pg_stat_activity"
    " WHERE client_addr = CAST(:address AS inet) AND xact_start IS NOT NULL"
)


@scenario(
    promises="P1 P2 P4",
    research="T3",
    full=Size(jobs=2000, workers=2, faults=20, seconds=10),
    short=Size(jobs=240, workers=1, faults=4, seconds=1),
    mutated={"dead_hosts_are_waited_for": "not within .* the server lets go"},
    server=Server.OWN,
    programs=("linux", "root", "ip"),
)
def hosts_that_go_dark(environment: Environment, size: Size) -> None:
    """The host of four workers goes dark: their locks are free in 10 seconds."""
    rounds = size.faults // FAR_AWAY
    with FarHost() as host, reachable(environment, host) as url:
        workers = environment.workers(size.workers, network={**NETWORK, **HASTY})
        for _ in range(FAR_AWAY):
            workers.add(url=url, host=host.name).was_harmed = True
        workers.until_registered()
        open_there = partial(environment.scalar, OPEN_FAR_AWAY, address=host.far_address)
        for _ in range(rounds):
            _have_work(environment, size.jobs // rounds // 3)
            all_hold = partial(_are_held_by, environment, open_there, FAR_AWAY, size.jobs // rounds)
            environment.until(all_hold, what="all of them hold jobs")
            host.go_dark()
            dark_since = time.monotonic()
            environment.count("partitions", FAR_AWAY)
            environment.until(lambda: open_there() == 0, seconds=LET_GO, what="the server lets go")
            environment.timed(dark_since)
            time.sleep(max(dark_since + size.seconds - time.monotonic(), 0))  # the fault itself
            host.come_back()
            workers.until_registered()
        environment.finish(workers)
        environment.check()


def _hold_nothing(holders: Callable[[], int]) -> bool:
    return holders() == 0
