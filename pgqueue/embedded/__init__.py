"""A private PostgreSQL for the demo and the tests.  It ends when its starting process ends."""

from pgqueue.embedded.account import PostgresFailed
from pgqueue.embedded.programs import NoPostgres, find_binaries
from pgqueue.embedded.server import EmbeddedPostgres

__all__ = ["EmbeddedPostgres", "NoPostgres", "PostgresFailed", "find_binaries"]
