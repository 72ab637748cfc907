"""The parameters of a task, and how a call is bound to them."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pgqueue.errors import ArgumentsError, TaskDefinitionError

_REMEDIES: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "takes any number of arguments: take a list instead",
    inspect.Parameter.VAR_KEYWORD: "takes any keyword: take a dict instead",
    inspect.Parameter.POSITIONAL_ONLY: "is positional-only, and arguments are stored by name: "
    "remove the slash after it",
}


class Signature:
    """The parameters whose values are stored, in the order of the task's signature."""

    def __init__(self, task_name: str, parameters: Mapping[str, inspect.Parameter]) -> None:
        self.task_name = task_name
        self.names = tuple(parameters)
        self.defaults = {
            name: parameter.default
            for name, parameter in parameters.items()
            if parameter.default is not parameter.empty
        }
        self.required = frozenset(parameters) - self.defaults.keys()
        self._positional = tuple(
            name
            for name, parameter in parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        )
        self._fewest = len(self.required.intersection(self._positional))
        if self.required.difference(self._positional):
            self._fewest = len(parameters) + 1  # never reached: an argument is required by name
        self._known = frozenset(parameters)
        self._signature = inspect.Signature(list(parameters.values()))

    @classmethod
    def of(cls, function: Callable[..., Any], *, task_name: str, injected: int) -> "Signature":
        """Read the parameters of a function after the injected ones."""
        try:
            parameters = list(inspect.signature(function).parameters.values())[injected:]
        except (TypeError, ValueError) as error:
            raise TaskDefinitionError(
                f"task {task_name}: its signature cannot be read; make the task a plain function"
            ) from error
        for parameter in parameters:
            if remedy := _REMEDIES.get(parameter.kind):
                raise TaskDefinitionError(
                    f"task {task_name}: parameter {parameter.name!r} {remedy}"
                )
        return cls(task_name, {parameter.name: parameter for parameter in parameters})

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Bind the given arguments to parameter names, as a call would."""
        if not kwargs and self._fewest <= len(args) <= len(self._positional):
            return dict(zip(self._positional, args, strict=False))
        if len(args) > len(self._positional):
            raise self._mismatch(args, kwargs)
        named = dict(zip(self._positional, args, strict=False))
        if kwargs:
            if not named.keys().isdisjoint(kwargs) or not self._known.issuperset(kwargs):
                raise self._mismatch(args, kwargs)
            named.update(kwargs)
        if not self.required <= named.keys():
            raise self._mismatch(args, kwargs)
        return named

    def _mismatch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ArgumentsError:
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = [name for name in kwargs if type(name) is str and name not in self.names]
            reason = f"it has no argument {unknown[0]!r}" if unknown else str(error)
            if unknown and unknown[0] in ("delay", "run_at", "priority", "queue", "unique_key"):
                reason += f" (an option goes there: .options({unknown[0]}=...).enqueue(...))"
        else:
            reason = "got arguments it does not take"
        called = ", ".join(f"{name}=..." if name in self.defaults else name for name in self.names)
        return ArgumentsError(f"task {self.task_name}: {reason}; its arguments are ({called})")
