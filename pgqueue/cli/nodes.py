"""``--nodes``: a command runs once for each node of the queue, one after the other."""

import io
import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any

import click
from click.exceptions import Exit

from pgqueue.cli.app_loader import CliState
from pgqueue.cli.error_words import show_traceback, words_for
from pgqueue.job_queue import PgQueue
from pgqueue.nodes import Node
from pgqueue.terminal import harmless, print_json

ALL = "all"

nodes_option = click.option(
    "--nodes",
    "nodes",
    metavar="NAMES",
    help="On which nodes of the app's PgQueue: all, or parts of their names, as n1,n2.",
)

Summary = Callable[[Mapping[Node, Any], bool], None]
"""Prints what concerns all nodes together.  Takes the nodes on which the command has come to its
end, each with what it returned there, and whether to print JSON."""


def chosen_nodes(queue: PgQueue, words: str) -> list[Node]:
    """The nodes that --nodes names; raises UsageError."""
    nodes = queue.nodes
    if not nodes:
        raise click.UsageError("--nodes needs the nodes: in the app, PgQueue(nodes=[...])")
    if words == ALL:
        return nodes
    return list(dict.fromkeys(_named(word.strip(), nodes) for word in words.split(",")))


def _named(word: str, nodes: list[Node]) -> Node:
    found = [node for node in nodes if node.name == word] or [
        node for node in nodes if word in node.name
    ]
    if len(found) != 1:
        names = ", ".join(node.name for node in nodes)
        raise click.UsageError(
            f"--nodes {word} is a part of {len(found)} names; the nodes are {names}"
        )
    return found[0]


def on_nodes(summary: Summary | None = None) -> Callable[[Any], Any]:
    """Add --nodes to a command.

    A node on which the command fails is named, the others go on, and the exit code is 1.  With
    --json, the documents of the nodes are one document.
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
                with queue.bound_to(node.patient_url):
                    return command(state, **options)

            ends = {
                node: _ended(node.name, partial(run_on, node), state, as_json=as_json)
                for node in chosen_nodes(queue, nodes)
            }
            ended = {node: end.value for node, end in ends.items() if end.error is None}
            codes = [end.code for end in ends.values()]
            together = _End()
            if summary is not None and ended:
                add_up = partial(summary, ended, as_json)
                together = _ended("All nodes", add_up, state, as_json=as_json)
            if as_json:
                each = [{"node": node.name, **end.document} for node, end in ends.items()]
                print_json({**together.document, "nodes": each})
            click.get_current_context().exit(max(*codes, together.code))

        return on_each

    return decorate


@dataclass(frozen=True, slots=True)
class _End:
    """How a command has ended on a node."""

    value: Any = None
    document: Mapping[str, Any] = field(default_factory=dict)
    """With --json, what it has printed."""
    code: int = 0
    error: str | None = None


def _ended(heading: str, run: Callable[[], Any], given: CliState, *, as_json: bool) -> _End:
    """Run a command under a heading, or with what it prints kept as a document."""
    if not as_json:
        click.secho(heading, bold=True)
    printed, value, code = io.StringIO(), None, 0
    try:
        with redirect_stdout(printed) if as_json else nullcontext():
            value = run()
    except Exit as end:
        code = end.exit_code
    except click.UsageError:
        raise  # the same on every node
    except Exception as error:
        words = words_for(error)
        if words is None:
            raise
        show_traceback(error, given)
        click.echo(harmless(f"Error: {heading}: {words}"), err=True)
        return _End(document={"error": words}, code=1, error=words)
    finally:
        if not as_json:
            click.echo()
    return _End(value, json.loads(printed.getvalue() or "{}"), code)
