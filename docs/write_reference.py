"""Write the pages of docs/reference from the docstrings: ``make reference``.

With ``--check``, write nothing and fail when a page does not say what the docstrings say.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import griffe
from griffe2md import ConfigDict, render_object_docs

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "reference"
STYLE = ConfigDict(
    filters=["!^_", "!^(metadata|registry|type_annotation_map)$"],
    heading_level=2,
    members_order="source",
    show_root_full_path=False,
    show_signature_annotations=True,
    inherited_members=False,
    summary=False,
)

TIDY = (
    # a role of reStructuredText: the name is what matters here
    (re.compile(r":(?:class|meth|func|attr|mod):`~?\.?([^`]+)`"), r"`\1`"),
    # where a class lives inside of the package is nobody's business
    (re.compile(r"^(#+) `pgqueue\.(?:[a-z_]+\.)*(\w+(?:\.\w+)?)`", re.MULTILINE), r"\1 `\2`"),
    (re.compile(r"<code>\[(\w+)\]\(#[^)]*\)</code>"), r"`\1`"),
    (re.compile(r"^Bases: .*Generic.*\n\n", re.MULTILINE), ""),
    # how a column is declared: its type says what a reader needs
    (re.compile(r"^(\w+: Mapped\[.*?\]) = .*$", re.MULTILINE), r"\1"),
    # a signature is not a program
    (re.compile(r"^```python$", re.MULTILINE), "```py"),
)


@dataclass(frozen=True)
class Page:
    """One page: its title, what it is about, and the public names it explains."""

    file: str
    title: str
    about: str
    names: tuple[str, ...]


TABLES = Page(
    "tables.md",
    "Tables",
    (
        "The Declarative models, to query and to relate to. Write to them through the queue.\n\n"
        "For psql and programs that are not written in Python there are views, without arguments "
        "and results: `job_overview` (every job with its status), `invariant_violations` (every "
        "row that breaks a rule: `rule`, `job_id`, `detail`; empty when all is sound) and "
        "`invariant_violations_in_flight`, the part of it that reads messages and leases and "
        "reaches jobs by key only. What each rule reads is told in "
        "[guarantees](../explanation/guarantees.md#check)."
    ),
    (
        "Job",
        "JobStatus",
        "JobAttempt",
        "MessageQueue",
        "Lease",
        "DeadLetter",
        "UnreadableJob",
        "WorkerProcess",
        "QueueSettings",
        "PausedTask",
        "Schedule",
        "WaitingMessage",
        "LimitPlace",
        "LimitBucket",
        "LimitSettings",
        "Batch",
        "BatchJob",
        "LimitState",
        "Change",
        "Violation",
    ),
)
CONTENTS = (
    Page(
        "queue-and-tasks.md",
        "Queue and tasks",
        "What an application holds: the queue, its tasks, and what enqueues them.",
        (
            *("PgQueue", "Schedules", "ScheduleState", "Task", "Unique", "Limit"),
            *("ClaimedJob", "OpenBatch", "BatchState"),
            *("TaskOptions", "Options", "Keep"),
        ),
    ),
    Page(
        "handlers.md",
        "Handlers and retries",
        "What a handler is given, how it may end, and what follows when it fails.",
        ("JobContext", "Secret", "Cancel", "Discard", "Snooze", "Retry"),
    ),
    Page(
        "worker.md",
        "Worker",
        "The process that runs jobs. On the command line: `pgqueue --app module:queue worker`.",
        ("Worker", "WorkerHealth"),
    ),
    Page(
        "testing.md",
        "Testing",
        "What tests import from `pgqueue.testing`. The fixtures and the marker for pytest are on "
        "the page [test your jobs](../how-to/testing.md).",
        (
            "run_jobs",
            "enqueued",
            "assert_enqueued",
            "crash_job",
            "time_out_job",
            "lose_lease",
        ),
    ),
    Page(
        "events.md",
        "Events",
        "What a worker tells an application: `@queue.on_attempt_end`.",
        ("AttemptEnded", "AttemptOutcome", "AttemptEnd", "ErrorReport"),
    ),
    TABLES,
    Page(
        "errors.md",
        "Errors",
        "What may be caught. Every message says what happened, to which job, and what to do next.",
        (
            "PgQueueError",
            "ArgumentsError",
            "PayloadError",
            "OptionError",
            "UnknownOption",
            "UnknownTask",
            "TaskDefinitionError",
            "DuplicateJob",
            "JobNotFound",
            "BatchEnded",
            "BatchNotFound",
            "DuplicateSchedule",
            "ScheduleNotFound",
            "LeaseLost",
            "NotBound",
            "NoTransaction",
            "SchemaError",
            "SchemaMissing",
            "SchemaTooOld",
            "SchemaTooNew",
            "TooManyStuck",
            "UsedAcrossFork",
            "WorkerBroken",
            "AttemptFailed",
            "DelayInTransaction",
        ),
    ),
)


def text_of(page: Page, package: griffe.Module) -> str:
    parts = [
        f"# {page.title}",
        page.about,
        "<!-- Written by `make reference` from the docstrings: change those. -->",
    ]
    for name in page.names:
        target = _public(package, name)
        # A column says enough by its name and type; everything else needs words.
        style = STYLE | {"show_if_no_docstring": page is TABLES}
        parts.append(render_object_docs(target, style).strip())
    text = "\n\n".join(parts)
    for found_text, instead in TIDY:
        text = found_text.sub(instead, text)
    return text.rstrip() + "\n"


def _public(package: griffe.Module, name: str) -> griffe.Object:
    holders = (package, package["options"], package["testing"])
    holder = next(each for each in holders if name in each.members)
    found: griffe.Object | griffe.Alias = holder[name]
    return found.final_target if isinstance(found, griffe.Alias) else found


def main() -> int:
    package = griffe.load("pgqueue", search_paths=[ROOT], resolve_aliases=True)
    assert isinstance(package, griffe.Module)
    stale = []
    for page in CONTENTS:
        path, text = PAGES / page.file, text_of(page, package)
        if not path.exists() or path.read_text("utf-8") != text:
            stale.append(page.file)
            if "--check" not in sys.argv:
                path.write_text(text, "utf-8")
    if stale and "--check" in sys.argv:
        print(f"docs/reference is behind the docstrings ({', '.join(stale)}): `make reference`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
