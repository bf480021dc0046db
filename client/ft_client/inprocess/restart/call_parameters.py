"""Finds the parameters of the user's function that get the CallWrapper, and builds the arguments of a call. Pure.

`wrapper.py` uses it. The user's function is never called here.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from inspect import BoundArguments, Parameter
from typing import Any

NAMES = frozenset({"call_wrapper", "inprocess_call_wrapper"})
"""Parameters that get it by their name, whatever their annotation."""

_WRITTEN = {
    "CallWrapper",
    "CallWrapper|None",
    "None|CallWrapper",
    "Optional[CallWrapper]",
    "Union[CallWrapper,None]",
    "Union[None,CallWrapper]",
}
_UNIONS = (typing.Union, types.UnionType)
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


class CallParameters:
    """The parameters of `function` that get a `call_wrapper_class`: annotated with it, or with it or None; or by name.

    Annotations may be texts. One that cannot be evaluated, because what it names is imported for type checkers only,
    is read as it is written.
    """

    def __init__(self, function: Callable[..., Any], call_wrapper_class: type) -> None:
        try:
            self._signature = inspect.signature(function)
        except ValueError:  # some functions written in C do not say; they get what the user gives
            self.names: tuple[str, ...] = ()
            return
        namespace = _namespace(function)
        self.names = tuple(
            name
            for name, parameter in self._signature.parameters.items()
            if parameter.kind not in _VARIADIC
            and (name in NAMES or _is_wrapper(parameter.annotation, call_wrapper_class, namespace))
        )
        others = [parameter for name, parameter in self._signature.parameters.items() if name not in self.names]
        self._without = self._signature.replace(parameters=others)

    def bind(
        self, call_wrapper: object, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for the function: the user's, with `call_wrapper` for the parameters that get it.

        The user may leave these parameters out, wherever they stand, or give any value for them, which is replaced.
        The user's values are passed as the same objects.

        Raises:
            TypeError: the arguments do not fit the function.
        """
        if not self.names:
            return tuple(args), dict(kwargs)
        passed = {name: value for name, value in kwargs.items() if name not in self.names}
        try:
            bound = self._without.bind(*args, **passed)
        except TypeError:  # the user may have given values for them by place
            bound = self._signature.bind_partial(*args, **passed)
        values = bound.arguments | dict.fromkeys(self.names, call_wrapper)
        ordered = {name: values[name] for name in self._signature.parameters if name in values}
        complete = BoundArguments(self._signature, ordered)
        complete = self._signature.bind(*complete.args, **complete.kwargs)
        return complete.args, complete.kwargs


def _namespace(function: Callable[..., Any]) -> dict[str, Any]:
    """The names that the annotations of a function may use."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__globals__"):
        function = inspect.unwrap(type(function).__call__)
    return getattr(function, "__globals__", {})


def _is_wrapper(annotation: object, wrapper: type, namespace: dict[str, Any]) -> bool:
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        written = annotation
        try:
            annotation = eval(written, dict(namespace))
        except Exception:  # whatever the user's text does
            return _reads_as_wrapper(written)
        return not isinstance(annotation, str) and _is_wrapper(annotation, wrapper, namespace)
    if typing.get_origin(annotation) in _UNIONS:
        others = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        return len(others) == 1 and _is_wrapper(others[0], wrapper, namespace)
    return annotation is wrapper


def _reads_as_wrapper(text: str) -> bool:
    """Whether a text is `CallWrapper`, or that or None; with or without modules, quotes and blanks."""
    return re.sub(r"""[\s'"]|\w+\.""", "", text) in _WRITTEN
