"""One run of one scenario, and its verdict."""

from __future__ import annotations

import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from chaos.broken import Broken
from chaos.environment import Environment, describe
from chaos.mutations import mutated
from chaos.scenario import Scenario, Server, Size
from pgqueue import PgQueueError
from pgqueue.embedded import EmbeddedPostgres

SETTINGS = {"max_connections": "500", "max_wal_size": "512MB", "max_prepared_transactions": "10"}


@dataclass(frozen=True)
class Verdict:
    """What a run has shown."""

    scenario: str
    seconds: float
    counts: dict[str, int] = field(default_factory=dict)
    broken: str | None = None


def play(
    one: Scenario,
    size: Size,
    folder: Path,
    *,
    seed: int,
    url: str | None = None,
    cluster: Path | None = None,
    mutation: str | None = None,
) -> Verdict:
    """Run a scenario in a folder of its own; without a URL on a server of its own.

    That begins as a copy of the cluster, the directory of a server that was stopped, if given.
    """
    began = time.monotonic()
    broken = None
    counts: dict[str, int] = {}
    with ExitStack() as resources:
        server = None
        if url is None:
            settings = {**SETTINGS, **one.settings}
            directory = folder / "postgres"
            if cluster is not None:
                subprocess.run(["cp", "-a", cluster, directory], check=True)
            server = resources.enter_context(EmbeddedPostgres(directory, settings=settings))
            url = server.url
        else:
            assert one.server is Server.ANY, "it would harm a server that is not its own"
        resources.enter_context(mutated(mutation))
        environment = Environment(url, folder, seed=seed, mutation=mutation, server=server)
        try:
            with environment:
                one.run(environment, size)
        # A bug may also show as an error: of a statement that fails, of what a caller is told.
        except (Broken, SQLAlchemyError, PgQueueError) as error:
            broken = describe(error)
        counts = dict(environment.counts)
    return Verdict(one.name, time.monotonic() - began, counts, broken)
