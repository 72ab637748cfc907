"""The meta and the tags of a job: what an application notes beside the arguments."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pgqueue.arguments.json_copy import JsonCopy
from pgqueue.arguments.refusals import Refusal
from pgqueue.arguments.text import size_of, write
from pgqueue.errors import OptionError, TaskDefinitionError

MAX_META_BYTES = 16_384
MAX_TAGS = 32
LONGEST_TAG = 100

RESERVED = "pgqueue."
"""Keys of meta that begin so are written by pgqueue only."""

BY_META = "meta."
"""What begins so in ``by`` names a key of meta.  The name of a parameter has no dot."""

OF_BATCH = f"{RESERVED}batch"
"""The key of a job's batch: a claim returns the meta, so its worker knows the batch."""
OF_WORKFLOW = f"{RESERVED}workflow"
"""The key of a job's workflow."""
COPY_OF = f"{RESERVED}copy_of"
"""The key of the job of which a restart of its workflow has made this copy."""
RUNS_WHEN = f"{RESERVED}when"
"""The key of the outcomes with which a job runs, of what it waits for.  Without it: succeeded."""


def checked_meta(where: str, meta: Any) -> dict[str, Any]:
    """Return a copy of meta as plain JSON data; raises OptionError."""
    if not isinstance(meta, Mapping):
        raise OptionError(f"{where}meta is {type(meta).__name__}; give a dict with str keys")
    try:
        copy: dict[str, Any] = JsonCopy().of(dict(meta))
    except Refusal as refusal:
        raise OptionError(f"{where}meta{refusal.path} {refusal.reason}") from None
    for key in copy:
        if key.startswith(RESERVED):
            raise OptionError(
                f"{where}meta has the key {key!r}; keys that begin with {RESERVED} are reserved"
            )
    return copy


def names_key_of_meta(name: str) -> bool:
    """Whether a name in ``by`` is that of a key of meta, as ``meta.tenant``, and not of a
    parameter.  Raises OptionError for a key that no enqueue may give."""
    if not name.startswith(BY_META):
        return False
    key = name.removeprefix(BY_META)
    if not key or key.startswith(RESERVED):
        raise OptionError(
            f"by has {name!r}; give a key of meta behind the dot, which does not begin with "
            f"{RESERVED}"
        )
    return True


def check_names_in_by(what: str, names: Iterable[str], parameters: Iterable[str]) -> None:
    """Raise TaskDefinitionError for a name that is neither a parameter of the task nor a key of
    meta.  ``what``: the beginning of the message, before the name."""
    known = [*parameters]
    for name in names:
        if not names_key_of_meta(name) and name not in known:
            raise TaskDefinitionError(
                f"{what} {name!r}, which is not a parameter of the task; it may name "
                f"{', '.join([*known, 'a key of meta as meta.tenant'])}"
            )


def values_of_keys(args: Mapping[str, Any], meta: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the stored values of which keys are made, by their names in ``by``."""
    return {**args, **{f"{BY_META}{name}": meta[name] for name in meta}} if meta else args


def meta_text(where: str, meta: Mapping[str, Any]) -> str | None:
    """Return checked meta as JSON text; None if it is empty.  Raises OptionError."""
    if not meta:
        return None
    text = write(meta)
    if size_of(text) > MAX_META_BYTES:
        raise OptionError(
            f"{where}meta takes {size_of(text):,} bytes as JSON, more than {MAX_META_BYTES:,}; "
            "pass large values as arguments, or keep them in a table of yours"
        )
    return text


def noted_outcomes(outcomes: Sequence[str]) -> dict[str, Any]:
    """What the meta notes of the outcomes with which a job runs: nothing for success alone."""
    return {} if list(outcomes) == ["succeeded"] else {RUNS_WHEN: list(outcomes)}


def outcomes_noted(text: str | None) -> Sequence[str]:
    """The outcomes with which a job runs, from what its meta notes as JSON text."""
    noted = json.loads(text) if text is not None else None
    return noted if isinstance(noted, list) else ["succeeded"]


def meta_with(text: str | None, more: Mapping[str, Any]) -> str:
    """Return the stored meta of a job with what pgqueue notes there."""
    return write({**json.loads(text or "{}"), **more})


def batches_in(texts: Iterable[str], keys: Sequence[str] = (OF_BATCH, OF_WORKFLOW)) -> set[int]:
    """Return the batches and workflows that stored metas name.  A row written by hand may name
    anything.

    A batch to which an enqueue has added the job that held its unique key is not named there.
    """
    found: set[int] = set()
    for text in texts:
        with suppress(ValueError, RecursionError):
            meta = json.loads(text)
            named = [meta.get(key) for key in keys] if isinstance(meta, dict) else []
            found.update(id for id in named if isinstance(id, int) and 0 < id < 2**63)
    return found


def workflow_in(text: str | None) -> int | None:
    """Return the workflow that a stored meta names."""
    if text is None or OF_WORKFLOW not in text:
        return None
    return next(iter(batches_in([text], [OF_WORKFLOW])), None)


def read_meta(text: str | None) -> dict[str, Any]:
    """Return the stored meta of a job, without the keys of pgqueue.

    A row written by hand may have anything there, and must not fail its job.  What no enqueue would
    have stored, such as nesting that is too deep for a log record, counts as none.
    """
    if text is None:
        return {}
    try:
        meta = JsonCopy().of(json.loads(text))
    except (ValueError, RecursionError):  # a Refusal is a ValueError
        return {}
    if not isinstance(meta, dict):
        return {}
    return {key: value for key, value in meta.items() if not key.startswith(RESERVED)}


def checked_tags(where: str, tags: Any) -> list[str]:
    """Return tags in their order, each once; raises OptionError."""
    if not isinstance(tags, list | tuple | set | frozenset) or len(tags) > MAX_TAGS:
        raise OptionError(f"{where}tags is {tags!r:.80}; give a list of at most {MAX_TAGS} texts")
    for tag in tags:
        is_text = isinstance(tag, str) and tag.isprintable()
        if not is_text or not 0 < len(tag) <= LONGEST_TAG:
            raise OptionError(
                f"{where}tags has {tag!r:.120}; a tag has 1 to {LONGEST_TAG} printable characters"
            )
    return list(dict.fromkeys(tags))
