"""Notifications are lost, each in another way: jobs are found by polling all the same."""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlalchemy import text

from chaos.environment import Environment
from chaos.mutations import Patch, mutation
from chaos.proxy import Proxy
from chaos.sample_tasks import call
from chaos.scenario import Size, scenario
from pgqueue.database.notifications import DEADLINE
from pgqueue.repository.tables import CHANNEL, SLEEPERS
from pgqueue.worker.claiming.sleep import BRIEF
from pgqueue.worker.claiming.sweeps import LATEST_SWEEP

POLL = 0.5
LONG_POLL = 1.0
"""So long that a busy machine meets a worker asleep."""
ASLEEP = 0.15
MARGIN = 1.0
"""Seconds a busy machine needs to start a job that has been found."""
RECONNECT = 1.0
"""Seconds a busy machine needs to open the connection of the claims again."""
BURST = 12
"""More jobs than a worker has slots: it stops listening while it is busy."""
FLOOD = 10_000


@mutation
def waits_for_notifications_only(patch: Patch) -> None:
    """A worker with nothing to do sleeps until it is woken; there is no poll."""
    from pgqueue.database.notifications import Listener

    def wait(self, seconds):  # type: ignore[no-untyped-def]
        return in_time(self, 60.0 if seconds > max(BRIEF) else seconds)

    in_time = patch.set(Listener, "wait", wait)


@mutation
def silence_is_waited_out(patch: Patch) -> None:
    """A worker that has slept asks whether a job is due without a look at its connection."""
    from pgqueue.database.notifications import Listener

    patch.set(Listener, "_probe", lambda self: None)


@mutation
def frontiers_are_never_rewound(patch: Patch) -> None:
    """A worker never looks behind what it has claimed."""
    from pgqueue.worker.claiming.sweeps import Sweeps

    patch.set(Sweeps, "is_due", lambda self, now, *, elected: False)
    patch.set(Sweeps, "is_cheap", lambda self, now: False)


@scenario(
    promises="P7",
    full=Size(jobs=FLOOD, faults=5),
    long=Size(jobs=FLOOD, faults=25),
    short=Size(jobs=FLOOD, faults=1),
    mutated={
        "waits_for_notifications_only": "not within .* attempt 1 .* starts",
        "silence_is_waited_out": "not within .* attempt 1 .* starts",
    },
)
def lost_notifications(environment: Environment, size: Size) -> None:
    """Listeners flooded and terminated, cut off, and switched off: pick-up takes a poll."""
    with environment.engine.connect() as stranger:
        stranger.execute(text(f"LISTEN {CHANNEL}"))
        stranger.commit()
        stranger.execute(text("SELECT 1"))  # and stays: the server keeps all that it has not heard
        _pick_up_in_time(environment, size, lambda: _flood_and_terminate(environment, size.jobs))
        usage = environment.scalar("SELECT pg_notification_queue_usage()")
        environment.expect(
            0 < usage < 0.01, f"{usage:.0%} of the server's notification queue is used"
        )
    with Proxy(environment.url) as proxy:

        def hold() -> None:
            _until_just_asleep(environment, poll=LONG_POLL)
            held = proxy.hold(after=f"LISTEN {CHANNEL}".encode())
            environment.count("partitions", held)

        _pick_up_in_time(
            environment,
            size,
            hold,
            proxy.pass_on,
            url=proxy.url,
            poll=LONG_POLL,
            slower_by=DEADLINE + RECONNECT,
        )
    environment.queue.notify = False
    _pick_up_in_time(environment, size, lambda: None, listens=False)
    environment.judge()


def _flood_and_terminate(environment: Environment, count: int) -> None:
    with environment.engine.begin() as connection:
        flood = f"SELECT pg_notify('{CHANNEL}', 'x' || n) FROM generate_series(1, :n) AS n"
        connection.execute(text(flood), {"n": count})
    for sleeper in _sleepers(environment):
        environment.execute("SELECT pg_terminate_backend(:pid, 5000)", pid=sleeper)
        environment.count("terminated connections")


def _pick_up_in_time(
    environment: Environment,
    size: Size,
    harm: Callable[[], None],
    relent: Callable[[], None] = lambda: None,
    *,
    url: str | None = None,
    listens: bool = True,
    poll: float = POLL,
    slower_by: float = 0.0,
) -> None:
    for _ in range(size.faults):
        workers = environment.workers(0, poll_interval=poll, notify=listens)
        workers.add(url=url)
        workers.until_registered()
        if listens:
            environment.until(lambda: _sleepers(environment), what="the worker listens")
        harm()
        for jobs in (1, BURST, 1):
            _pick_up(environment, jobs, seconds=poll + slower_by + MARGIN)
        relent()
        workers.stop()


def _pick_up(environment: Environment, jobs: int, *, seconds: float) -> None:
    time.sleep(ASLEEP)  # idle for so long, the worker sleeps by now
    began = time.monotonic()
    ids = environment.enqueue(call, [(1,)] * jobs)
    environment.until_started(*ids, seconds=seconds)
    environment.timed(began)
    environment.until_ended()


def _until_just_asleep(environment: Environment, *, poll: float) -> None:
    """The only worker has found nothing right now, and sends nothing before the next poll.

    Else it might be in the middle of a statement, which waits as long as the network says.
    """
    time.sleep(2 * poll)  # each sleep lasts until the next poll by now; the first are shorter
    last = """
        SELECT max(query_start) FILTER (WHERE state = 'idle') FROM pg_stat_activity
        WHERE datname = current_database() AND application_name ~ ' worker .* claimer$'
    """
    before = environment.scalar(last)
    over_at = time.monotonic() + 5 * poll  # with a bug planted, it may not poll at all
    environment.until(
        lambda: environment.scalar(last) not in (None, before) or time.monotonic() > over_at,
        what="the worker polls",
    )


def _sleepers(environment: Environment) -> list[int]:
    """The server processes of the connections by which workers listen."""
    held = """
        SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock' AND granted
            AND ((classid::bigint << 32) | objid::bigint) = :key
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    """
    return [row[0] for row in environment.rows(held, key=SLEEPERS)]


@scenario(
    promises="P7",
    full=Size(jobs=300, workers=2, faults=3),
    short=Size(jobs=30, workers=1, faults=1),
    mutated={"frontiers_are_never_rewound": "not within .* attempt 1 .* starts"},
)
def late_commits(environment: Environment, size: Size) -> None:
    """Others overtake a long transaction: its jobs start a sweep after its COMMIT at the latest."""
    # Without prefetch: a prefetched job that waits too long is released, which rewinds the cursors.
    workers = environment.workers(size.workers, poll_interval=POLL, concurrency=2, ahead=0)
    workers.until_registered()
    for _ in range(size.faults):
        with environment.queue.session() as late:
            jobs = call.enqueue_many(late, [(1,)] * size.jobs)
            _overtake(environment)
            environment.enqueue(call, [(10,)] * 100)
            late.commit()
        environment.acknowledged.update(jobs)
        began = time.monotonic()
        environment.until_started(*jobs, seconds=POLL + LATEST_SWEEP + MARGIN)
        environment.timed(began)
        environment.until_ended()
    workers.stop()
    environment.judge()


def _overtake(environment: Environment) -> None:
    """Have others committed and claimed for longer than the second that a cursor lags behind."""
    over_at = time.monotonic() + 1.3
    while time.monotonic() < over_at:
        environment.until_started(*environment.enqueue(call, [(1,)] * 4))
