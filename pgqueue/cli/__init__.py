"""The command line; ``pgqueue --help`` lists the commands."""

from pgqueue.cli.commands import main

__all__ = ["main"]
