"""The docstrings as the site shows them: the roles of reStructuredText (``:meth:`enqueue```) as
code, and ``Example:`` as the section of examples.
"""

import re

import griffe

ROLE = re.compile(r":(?:attr|class|exc|func|meth|mod):`~?\.?([^`]+)`")
EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = EXAMPLE.sub("Examples:", obj.docstring.value)
