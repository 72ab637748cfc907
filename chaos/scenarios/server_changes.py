"""The server has no room left, or another takes over from it."""

from __future__ import annotations

import time

from chaos.environment import Environment
from chaos.proxy import Proxy
from chaos.scenario import Server, Size, scenario
from chaos.scenarios.server_faults import LATE_TO_DISK, interrupt
from chaos.servers import hot_standby, small_disk
from chaos.under_load import (
    call_slowly,
    ends_of_logs,
    goes_on,
    load,
    said_briefly,
    standing_still,
    until_all_say,
)


@scenario(
    promises="P1 P2 P4 P5",
    research="T18",
    full=Size(jobs=1000, workers=2, faults=3, seconds=3),
    short=Size(jobs=300, workers=1, faults=1, seconds=0.3),
    mutated={"loops_end_with_their_connection": "has ended by itself"},
    server=Server.OWN,
    programs=("linux", "root", "mount"),
)
def disk_full(environment: Environment, size: Size) -> None:
    """The disk is full for a while: workers wait, say so, and go on when there is room."""
    with small_disk(environment) as disk, load(environment, size):
        for _ in range(size.faults):
            # Settled meanwhile, their rows need room; enqueuers are refused.
            environment.enqueue(call_slowly.options(max_attempts=1000), [()] * size.jobs)
            since = ends_of_logs(environment)
            disk.fill()
            until_all_say(environment, "No space left on device", since=since)
            time.sleep(size.seconds)  # the outage
            disk.free()
            environment.count("outages")
            goes_on(environment)
        said_briefly(environment, size.faults, few=30)  # each connection tells what it is refused


@scenario(
    promises="P1 P2 P4 P5",
    research="T18",
    full=Size(workers=3, faults=1),
    short=Size(workers=1, faults=1),
    mutated={
        "commits_are_acknowledged_early": "F1: .* acknowledged jobs are gone",
        "witness_outlives_its_connection": "declared dead, and all were well",
    },
    server=Server.OWN,
    settings=LATE_TO_DISK,
)
def promotion_of_a_standby(environment: Environment, size: Size) -> None:
    """A synchronous standby takes over: nothing acknowledged is lost, nobody taken for dead."""
    with (
        hot_standby(environment) as standby,
        Proxy(environment.url) as proxy,
        load(environment, size, url=proxy.url, every=0.005) as (workers, enqueuer),
    ):

        def take_over() -> None:
            with standing_still(environment.members):
                enqueuer.until_acknowledged()
                environment.server.crash()
            environment.count("server crashes")
            standby.promote()
            proxy.lead_to(standby.url)
            environment.lead_to(standby.url)

        interrupt(environment, workers.members[0], take_over)
        environment.count("promotions")
        goes_on(environment)
        said_briefly(environment, size.faults)
