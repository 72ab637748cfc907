"""Where a function is found: its module and its name in the module."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pgqueue.errors import TaskDefinitionError

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


def importable_address(function: Callable[..., Any], task_name: str) -> Address:
    """Where a child process finds the function; refuses one that it could not find."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or "<" in name:
        raise TaskDefinitionError(
            f"task {task_name}: executor='process' imports the function in another process, and "
            f"{name or repr(function)} cannot be imported; define it by `def` at the top level of "
            "a module"
        )
    if module == "__main__" and not _has_file(sys.modules["__main__"]):
        raise TaskDefinitionError(
            f"task {task_name}: executor='process' imports the function in another process, and "
            "what was typed into an interpreter cannot be imported; define it in a file"
        )
    return Address("__main__" if module in MAINS else module, name)


def _has_file(main: Any) -> bool:
    path = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is not None or (path is not None and Path(path).exists())
