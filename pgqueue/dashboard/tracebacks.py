"""Divides a traceback into the frames of the application and those of libraries."""

import re
from dataclasses import dataclass
from itertools import groupby

LONGEST_END = 50_000
"""Characters at the beginning and at the end of a traceback that are shown."""
_FRAME = re.compile(r'\s*(?:\|\s*)?File "(?P<file>[^"]*)", line \d+')
_LIBRARY = re.compile(r"[/\\](site-packages|dist-packages|lib[/\\]python3[^/\\]*)[/\\]|^<frozen ")


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring frames, or lines that are no frames."""

    text: str
    count: int
    """How many frames it has; 0 for lines such as the error itself."""
    is_library: bool


def frames(traceback: str) -> list[Part]:
    """The parts of a traceback, in its order; of a very long one, of its beginning and its end."""
    if (left_out := len(traceback) - 2 * LONGEST_END) > 0:
        middle = f"\n... {left_out:,} characters are left out ...\n"
        traceback = traceback[:LONGEST_END] + middle + traceback[-LONGEST_END:]
    pieces: list[tuple[bool | None, list[str]]] = []
    for line in traceback.splitlines():
        if found := _FRAME.match(line):
            pieces.append((_LIBRARY.search(found["file"]) is not None, [line]))
        elif pieces and (pieces[-1][0] is None or line.startswith(("    ", "  |     "))):
            pieces[-1][1].append(line)
        else:
            pieces.append((None, [line]))
    parts = []
    for is_library, group in groupby(pieces, key=lambda piece: piece[0]):
        neighbours = [lines for _, lines in group]
        text = "\n".join(line for lines in neighbours for line in lines)
        parts.append(Part(text, 0 if is_library is None else len(neighbours), is_library is True))
    return parts
