"""Read the roles of reStructuredText in docstrings (``:meth:`enqueue```) as code, for the site."""

import re

import griffe

ROLE = re.compile(r":(?:attr|class|exc|func|meth|mod):`~?\.?([^`]+)`")


class Roles(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)
