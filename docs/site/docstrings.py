"""The docstrings as the site shows them: the roles of reStructuredText (``:meth:`enqueue```) as
code, and for ``pgqueue.options`` the table of its declarations.
"""

import re

import griffe

from pgqueue.options import OPTIONS, OPTIONS_OF_WORKER

ROLE = re.compile(r":(?:attr|class|exc|func|meth|mod):`~?\.?([^`]+)`")


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is None:
            return
        if obj.path == "pgqueue.options":
            obj.docstring.value = table_of_options()
        obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)


def table_of_options() -> str:
    rows = [
        f"| `{each.name}` | {each.metadata['is_for']} | {each.metadata['help']} | {default} |"
        for each in (*OPTIONS, *OPTIONS_OF_WORKER)
        for default in [each.metadata["by_default"] or _shown(each.default)]
    ]
    return "\n".join(["| option | for | meaning | default |", "|---|---|---|---|", *rows])


def _shown(default: object) -> str:
    return f"`{default!r}`" if isinstance(default, str | int | bool) else "none"
