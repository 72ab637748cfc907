"""``--nodes``: a command runs once for each node of the queue, one after the other."""

import io
import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial, wraps
from typing import Any, NamedTuple

import click
from click.exceptions import Exit

from pgqueue.cli.app_loader import CliState
from pgqueue.cli.error_words import in_words
from pgqueue.job_queue import PgQueue
from pgqueue.nodes import Node
from pgqueue.terminal import harmless, print_json

nodes_option = click.option(
    "--nodes",
    metavar="NAMES",
    help="On which nodes of the app's PgQueue: all, or hosts or names, as n1,n2:5432/shop.",
)


def chosen_nodes(queue: PgQueue, words: str) -> list[Node]:
    """The nodes that --nodes names; raises UsageError."""
    names_of = {node: {"all", node.host, node.name} for node in queue.nodes}
    if not names_of:
        raise click.UsageError("--nodes needs the nodes: in the app, PgQueue(nodes=[...])")
    names = {word.strip() for word in words.split(",")}
    if unknown := names.difference(*names_of.values()):
        known = ", ".join(node.name for node in names_of)
        raise click.UsageError(f"--nodes: there is no {min(unknown)!r}; the nodes are {known}")
    return [node for node in names_of if names & names_of[node]]


def on_nodes(summary: Callable[..., None] | None = None) -> Callable[[Any], Any]:
    """Add --nodes to a command.

    A node on which the command fails is named, the others go on, and the exit code is 1.  With
    --json, the documents of the nodes are one document.  ``summary`` prints what concerns all nodes
    together: it takes those on which the command has come to its end, each with what it returned
    there, and whether to print JSON.
    """

    def decorate(command: Any) -> Any:
        @nodes_option
        @wraps(command)
        def on_each(given: CliState, /, *, nodes: str | None, **options: Any) -> None:
            if nodes is None:
                command(given, **options)
                return
            queue, as_json = given.database(), options.get("as_json", False)
            state = replace(given, queue=queue)

            def run_on(node: Node) -> Any:
                with queue.bound_to(node.engine()):
                    return command(state, **options)

            ends = {
                node: _ended(node.name, partial(run_on, node), state, as_json=as_json)
                for node in chosen_nodes(queue, nodes)
            }
            values = {n: end.value for n, end in ends.items() if "error" not in end.document}
            of_all = _End()
            if summary is not None and values:
                add_up = partial(summary, values, as_json)
                of_all = _ended("All nodes", add_up, state, as_json=as_json)
            if as_json:
                each = [{"node": node.name, **end.document} for node, end in ends.items()]
                print_json({**of_all.document, "nodes": each})
            codes = [end.code for end in ends.values()]
            click.get_current_context().exit(max(*codes, of_all.code))

        return on_each

    return decorate


class _End(NamedTuple):
    """How a command has ended on a node."""

    value: Any = None
    document: Mapping[str, Any] = {}
    """With --json, what it has printed."""
    code: int = 0


def _ended(heading: str, run: Callable[[], Any], given: CliState, *, as_json: bool) -> _End:
    """Run a command under a heading, or with what it prints kept as a document."""
    if not as_json:
        click.secho(heading, bold=True)
    printed, value, code = io.StringIO(), None, 0
    try:
        with redirect_stdout(printed) if as_json else nullcontext(), in_words(given):
            value = run()
    except Exit as end:
        code = end.exit_code
    except click.UsageError:
        raise  # the same on every node
    except click.ClickException as error:
        words = error.format_message()
        click.echo(harmless(f"Error: {heading}: {words}"), err=True)
        return _End(None, {"error": words}, 1)
    finally:
        if not as_json:
            click.echo()
    return _End(value, json.loads(printed.getvalue() or "{}"), code)
