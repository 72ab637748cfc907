"""What the log of operators says, in words: of what an action was, by which error it chose."""

from pgqueue.errors import OptionError
from pgqueue.filter_line import FINGERPRINT, LAST_ID, read_fingerprint
from pgqueue.operations.selection import Selection
from pgqueue.repository.operator_actions import LogEntry as LogEntry
from pgqueue.rules.limits import without_values


def target_in_words(entry: LogEntry, *, show_arguments: bool) -> str:
    """What an action was done to: the line of a filter, or what was named."""
    if "filter" in entry.target:
        try:
            selection = Selection.from_target(entry.target)
        except OptionError:  # code of another version has written it
            return str(entry.target["filter"]) if show_arguments else "a filter"
        if selection.which.names_arguments and not show_arguments:
            line = Selection.of(selection.which.without_arguments()).line
            return f"{line} and some arguments".strip()
        return selection.line
    words = []
    for name, value in entry.target.items():
        if name in ("limit", "key") and not show_arguments:
            value = without_values(str(value))
        if isinstance(value, list):
            name = name.removesuffix("s") if len(value) == 1 else name
            value = ", ".join(map(str, value))
        words.append(f"{name} {value}")
    return "; ".join(words)


def error_of(entry: LogEntry) -> int | None:
    """The fingerprint of the error by which an action chooses its jobs."""
    named = entry.target.get("filter", entry.target)
    error = named.get("error") if isinstance(named, dict) else None
    if isinstance(error, str) and FINGERPRINT.fullmatch(error):
        return read_fingerprint(error)
    is_fingerprint = type(error) is int and -LAST_ID <= error <= LAST_ID
    return error if is_fingerprint else None
