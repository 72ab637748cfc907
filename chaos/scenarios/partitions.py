"""A worker is cut off from the database, and neither of them is told."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from chaos.environment import Environment
from chaos.far_host import FarHost, reachable
from chaos.history import END, START
from chaos.mutations import Patch, mutation
from chaos.proxy import Proxy
from chaos.sample_tasks import (
    AT_A_GATE,
    AT_ONCE,
    EFFECT,
    attend,
    effect,
    note,
    queue,
    until_open,
    worker_name,
)
from chaos.scenario import Server, Size, scenario
from chaos.workers import Member, Workers
from pgqueue import JobContext
from pgqueue.database import opening
from pgqueue.database.keepalive import BRIEF, NETWORK
from pgqueue.worker import liveness

HASTY = {
    "tcp_user_timeout": "1000",
    "tcp_keepalives_idle": "1",
    "tcp_keepalives_interval": "1",
}
RESCUER = float(BRIEF["idle_in_transaction_session_timeout"]) / 1000
"""Seconds until others may rescue, if the worker that was cut off was about to."""
PURSE = text("UPDATE purse SET spent = spent + 1")


@queue.task(retry=AT_ONCE)
def linger(ctx: JobContext, gate: str) -> int:
    """Ends when the gate of this attempt on this worker opens."""
    return attend(ctx, lambda: _wait_at(gate, ctx))


@queue.task(retry=AT_ONCE)
def pay_and_linger(session: Session, ctx: JobContext, gate: str) -> int:
    session.execute(EFFECT, effect(ctx))
    return attend(ctx, lambda: _wait_at(gate, ctx))


@queue.task(retry=AT_ONCE)
def pay_from_one_purse(session: Session, ctx: JobContext, gate: str) -> int:
    """Holds a row that its next attempt needs as well."""
    note(START, ctx)
    session.execute(PURSE)
    session.execute(EFFECT, effect(ctx))
    note(END, ctx)
    _wait_at(gate, ctx)
    return ctx.attempt


def _wait_at(gate: str, ctx: JobContext) -> None:
    until_open(gate_of(gate, ctx.attempt, worker_name()))


def gate_of(gate: str, attempt: int, worker: str) -> str:
    return f"{gate}-{attempt}-{worker}"


@mutation
def settles_by_job_alone(patch: Patch) -> None:
    """A settle takes whatever lease the job has now, be it another worker's."""
    from pgqueue.repository.settle import Attempts

    current = text("SELECT message_id, attempt, worker_id FROM pgqueue.leases WHERE target_id = :j")

    def settle(self, settlements):  # type: ignore[no-untyped-def]
        settled = []
        for claimed, outcome in settlements:
            for lease in self._executor.execute(current, {"j": claimed.job_id}).all():
                theirs = claimed._replace(message_id=lease[0], attempt=lease[1])
                owner = Attempts(self._executor, lease[2])
                settled += fenced(owner, [(theirs, outcome)])
        return settled

    fenced = patch.set(Attempts, "settle", settle)


@mutation
def dead_hosts_are_waited_for(patch: Patch) -> None:
    """Connections are opened without telling the server how soon to give a silent client up."""

    def configure(connection, settings):  # type: ignore[no-untyped-def]
        configured(connection, {k: v for k, v in settings.items() if k not in NETWORK})

    configured = patch.set(opening, "configure", configure)


@mutation
def servers_are_waited_for(patch: Patch) -> None:
    """Connections are opened without telling this machine how soon to give a silent server up."""
    from pgqueue.database import opening

    patch.set(opening, "notice_loss_of_server", lambda fileno, settings: None)


@scenario(
    promises="P1 P3 P4",
    full=Size(jobs=6, workers=3, faults=4, seconds=3),
    short=Size(jobs=4, workers=1, faults=1, seconds=1.2),
    mutated={"settles_by_job_alone": "a late result was accepted"},
)
def half_open(environment: Environment, size: Size) -> None:
    """A worker's network swallows all: others rescue its jobs, its late results are refused."""
    with Proxy(environment.url) as proxy:
        alone = environment.workers(
            0,
            slow_grace=size.seconds,
            concurrency=2 * size.jobs,
            alone_for=AT_A_GATE,
        )
        far = alone.add(url=proxy.url)
        far.was_harmed = True
        for number in range(size.faults):
            _cut_off(environment, alone, far, proxy, size, gate=f"round{number}")
        alone.stop()
    environment.judge()


def _cut_off(
    environment: Environment, alone: Workers, far: Member, proxy: Proxy, size: Size, *, gate: str
) -> None:
    jobs = environment.enqueue(linger, [(gate,)] * size.jobs)
    environment.until_started(*jobs, *environment.enqueue(pay_and_linger, [(gate,)] * size.jobs))
    rescuers = environment.workers(size.workers, **alone.options)
    rescuers.until_registered()
    proxy.hold()
    environment.count("partitions")
    environment.open(gate_of(gate, 1, far.name))
    environment.until_started(*jobs, attempt=2, seconds=size.seconds + RESCUER + 4)
    proxy.pass_on()
    ended = f"SELECT count(*) FROM pgqueue.jobs WHERE outcome IS NOT NULL AND id >= {jobs[0]}"
    environment.until(
        lambda: _refused(far, jobs) or environment.scalar(ended), what="its late results come in"
    )
    environment.expect(
        environment.scalar(ended) == 0, f"a late result was accepted: one of jobs {jobs}"
    )
    for worker in (*rescuers.members, far):  # which is back, under a new name
        environment.open(gate_of(gate, 2, worker.name))
    environment.until_ended()
    alone.until_registered()
    rescuers.stop()


def _refused(member: Member, jobs: list[int]) -> bool:
    log = member.log.read_text(errors="replace")
    return all(f"job {job}: its result is not kept" in log for job in jobs)


SHORT = Size(workers=1, seconds=1.5)


@scenario(
    promises="P1 P2 P3 P4",
    full=Size(workers=2, seconds=liveness.SLOW_GRACE.total_seconds()),
    short=SHORT,
    mutated={
        "servers_are_waited_for": "not within .* attempt 1 .* starts",
        "dead_hosts_are_waited_for": "not within .* the server has ended its claim",
    },
    server=Server.OWN,
    programs=("linux", "root", "ip"),
)
def dark_host(environment: Environment, size: Size) -> None:
    """A host goes dark: no answer of it is waited for, and its job runs elsewhere."""
    network = {**NETWORK, **(HASTY if size == SHORT else {})}
    with FarHost() as host, reachable(environment, host) as url:
        environment.execute("CREATE TABLE purse AS SELECT 0 AS spent")
        workers = environment.workers(0, slow_grace=size.seconds, network=network)
        far = workers.add(url=url, host=host.name)
        far.was_harmed = True
        workers.until_registered()
        _lose_the_answer_to_a_claim(environment, host, far, network)
        _go_dark_with_a_row(environment, host, workers, far, size)
        environment.finish(workers)
        paid = environment.scalar("SELECT spent FROM purse")
        environment.expect(paid == 1, f"the purse was paid from {paid} times")
        # Where the network was cut in the middle of a claim, the server asks a last time.
        environment.until(
            lambda: environment.scalar(CONNECTIONS, name=far.name) == 0,
            what="the server has noticed",
        )
        environment.judge()


def _lose_the_answer_to_a_claim(
    environment: Environment, host: FarHost, far: Member, network: dict[str, Any]
) -> None:
    """For ever, with its connection: the worker claims again."""
    seconds = int(network["tcp_keepalives_idle"]) + 3 * int(network["tcp_keepalives_interval"]) + 5
    with environment.engine.connect() as connection:
        connection.execute(text("LOCK TABLE pgqueue.message_queue IN ACCESS EXCLUSIVE MODE"))
        environment.until(lambda: environment.scalar(WAITING), what="its claim waits")
        host.go_dark()
        environment.count("partitions")
        environment.until(
            lambda: not environment.scalar(WAITING),
            seconds=seconds,
            what="the server has ended its claim",
        )
        connection.rollback()
    host.come_back()
    environment.open(gate_of("answer", 1, far.name))
    environment.until_started(*environment.enqueue(linger, [("answer",)]), seconds=seconds)
    environment.until_ended()


def _go_dark_with_a_row(
    environment: Environment, host: FarHost, workers: Workers, far: Member, size: Size
) -> None:
    """While its handler has locked a row, which the next attempt of its job needs."""
    [job] = environment.enqueue(pay_from_one_purse, [("dark",)])
    environment.until(
        lambda: any(event.job == job for event in environment.history(END)),
        what="it holds the purse",
    )
    for _ in range(size.workers):
        environment.open(gate_of("dark", 2, workers.add().name))
    workers.until_registered()
    host.go_dark()
    began = time.monotonic()
    environment.count("partitions")
    seconds = size.seconds + 5
    environment.until_started(job, attempt=2, seconds=seconds)
    environment.until_ended(seconds=max(began + seconds - time.monotonic(), 2))
    dead = "SELECT count(*) FROM pgqueue.workers WHERE dead_at IS NOT NULL AND pid != :pid"
    environment.expect(environment.scalar(dead, pid=far.pid) == 0, "another was declared dead")
    host.come_back()
    environment.open(gate_of("dark", 1, far.name))
    workers.until_registered()
    environment.enqueue(linger, [("back",)])
    for member in workers.members:
        environment.open(gate_of("back", 1, member.name))


CONNECTIONS = (
    "SELECT count(*) FROM pg_stat_activity WHERE split_part(application_name, ' ', 1) = :name"
)
WAITING = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE application_name LIKE 'w% claimer' AND wait_event_type = 'Lock'"
)
"""Not another connection of the worker: its upkeep reads the messages too, and waits as well."""
