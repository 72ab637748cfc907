"""Where a function is found: its module and its name in the module."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

MAINS = ("__main__", "__mp_main__")
"""The script that a process was started with; the same in a child process that reimports it."""


class Address(NamedTuple):
    module: str
    name: str


def address_of(function: Callable[..., Any]) -> Address:
    return Address(function.__module__, function.__qualname__)


def default_name(function: Callable[..., Any]) -> str:
    """Module and function."""
    return f"{module_of(function)}.{address_of(function).name}"


def module_of(function: Callable[..., Any]) -> str:
    """The module; of a script, the module name under which a worker imports it."""
    module = address_of(function).module
    if module in MAINS:
        main = sys.modules[module]
        spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec else Path(path).stem if path else module
    return module
