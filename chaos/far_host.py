"""A host of its own for a worker: a network namespace, whose cable can be cut."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from chaos.environment import Environment
from chaos.running import SETTINGS
from pgqueue.embedded import EmbeddedPostgres


class FarHost:
    """Joined to this machine by one cable.  Needs root, and iproute2."""

    def __init__(self) -> None:
        number = os.getpid() % 2**14
        network = f"10.{64 + number // 256}.{number % 256}"
        self.name = f"pgqueue{os.getpid()}"
        self.near_address, self.far_address = f"{network}.1", f"{network}.2"

    def __enter__(self) -> Self:
        _ip(f"netns add {self.name}")
        _ip(f"link add {self.name} type veth peer name cable netns {self.name}")
        _ip(f"address add {self.near_address}/30 dev {self.name}")
        _ip(f"link set {self.name} up")
        _ip(f"-n {self.name} address add {self.far_address}/30 dev cable")
        _ip(f"-n {self.name} link set cable up")
        # Behind the rule that lets it go deaf.
        _ip(f"-n {self.name} rule add preference 100 lookup local")
        _ip(f"-n {self.name} rule delete preference 0")
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        # Its sockets would keep a namespace in which something still runs.
        _ip(f"link delete {self.name}")
        _ip(f"netns delete {self.name}")

    def go_dark(self) -> None:
        """Nothing it sends arrives any more, nor what it is sent, and nobody is told."""
        _ip(f"-n {self.name} rule add preference 10 from {self.near_address} blackhole")
        _ip(f"-n {self.name} route add blackhole {self.near_address}/32")

    def come_back(self) -> None:
        _ip(f"-n {self.name} route delete blackhole {self.near_address}/32")
        _ip(f"-n {self.name} rule delete preference 10")


@contextmanager
def reachable(environment: Environment, host: FarHost) -> Iterator[str]:
    """Have the environment's own server listen to this host too; its URL from there."""
    environment.server.stop()
    directory = environment.server.directory
    with (directory / "data" / "pg_hba.conf").open("a") as rules:
        rules.write(f"host all all {host.far_address}/32 trust\n")
    settings = {**SETTINGS, "listen_addresses": host.near_address}
    with EmbeddedPostgres(directory, settings=settings):
        yield f"postgresql+psycopg://postgres@{host.near_address}/postgres"


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)
