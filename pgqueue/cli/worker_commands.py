"""The commands for running workers: workers, quiet."""

import json
from uuid import UUID

import click

from pgqueue.cli.group import CliState, on_database


@click.command()
@on_database
def workers(given: CliState, as_json: bool) -> None:
    """List the live workers with their ids.

    \b
    Example:  pgqueue --app shop.jobs:queue workers
    """
    from pgqueue.cli.app_loader import opened
    from pgqueue.cli.status import QUIET, live_workers
    from pgqueue.terminal import print_table

    with opened(given.database()) as session:
        found = live_workers(session)
    if as_json:
        click.echo(json.dumps({"workers": found}, indent=2))
        return
    if not found:
        click.echo("No worker lives.")
        return
    rows = [
        [
            worker["id"],
            f"{worker['hostname']}:{worker['pid']}",
            QUIET if worker["is_quiet"] else ", ".join(worker["queues"]),
            f"{worker['jobs']}/{worker['slots']}",
            f"{worker['heartbeat_age']:.1f} s ago",
        ]
        for worker in found
    ]
    print_table(["id", "worker", "queues", "jobs/slots", "last heartbeat"], rows)


@click.command()
@click.argument("worker_ids", metavar="ID...", nargs=-1, required=True, type=click.UUID)
@on_database
def quiet(given: CliState, as_json: bool, worker_ids: tuple[UUID, ...]) -> None:
    """Make workers claim no more jobs, within a second.

    A quiet worker ends the jobs that it has claimed and then idles; stop it with SIGTERM when
    `pgqueue workers` shows that it has no jobs.  This cannot be undone: start another worker.

    \b
    Example:  pgqueue --app shop.jobs:queue quiet 6f9619ff-8b86-d011-b42d-00c04fc964ff
    """
    from pgqueue.cli.app_loader import opened

    queue = given.database()
    with opened(queue) as session:
        are_quiet = {id: queue.quiet(session, id) for id in worker_ids}
        session.commit()
    if as_json:
        found = [{"id": str(id), "is_quiet": is_quiet} for id, is_quiet in are_quiet.items()]
        click.echo(json.dumps({"workers": found}, indent=2))
    else:
        for id, is_quiet in are_quiet.items():
            words = "quiet" if is_quiet else "no live worker has this id"
            click.echo(f"{id}: {words}", err=not is_quiet)
    if not all(are_quiet.values()):
        click.get_current_context().exit(1)
