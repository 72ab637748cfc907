"""The command line.  ``pgqueue --help`` is its table of contents."""

from pgqueue.cli.commands import main

__all__ = ["main"]
