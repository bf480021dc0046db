"""The wrapper's interface for the user's function: state of the restarts, `ping()`, atomic and unprotected sections.

`restart/user_function.py` makes one for each call. It only reports: when a restart begins is decided elsewhere. Which
parameters of the user's function get it, and with which arguments that is called, is found by `CallParameters`.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import BoundArguments, Parameter
from typing import Any, Protocol

from ft_client.inprocess.attribution import LastInterruption
from ft_client.inprocess.state import FrozenState, State

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


class HangProtection(Protocol):
    """The methods of the link to the monitor that are used here."""

    def ping(self) -> None:
        """Reports progress of the function."""

    def expect_progress(self, is_timed: bool) -> None:
        """Reports whether progress of the function is expected from now on."""


class CallWrapper:
    """Handed to each parameter of the wrapped function that asks for it. For the thread that runs the function.

    Args:
        state: of this rank; changes from round to round.
        link: the link to the monitor.
        why: returns why a round ended.
    """

    def __init__(
        self,
        state: State,
        link: HangProtection,
        why: Callable[[int], LastInterruption],
    ) -> None:
        self._state, self._link, self._why = state, link, why
        self._atomic = threading.RLock()
        self._unprotected = 0

    @property
    def iteration(self) -> int:
        """The number of our round: how many times the function was called again, on any rank."""
        return self._state.iteration

    @property
    def state(self) -> FrozenState:
        """The numbers of this rank in this round."""
        return self._state.freeze()

    @property
    def last_interruption(self) -> LastInterruption | None:
        """Why the function is called again: who is to blame, and what happened; None in the first call.

        Where ranks made no progress, the launchers say who held up the others, a moment after the interruption at the
        latest; without them only who made no progress is known. Takes a few operations in the store.
        """
        if self._state.iteration == 0:
            return None
        return self._why(self._state.iteration - 1)

    def ping(self) -> None:
        """Reports progress of the training. After the first one of a round, further ones are expected."""
        self._link.ping()

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """A context in whose body no restart begins; once one has begun, it cannot be entered. Re-entrant.

        The hard timeout still applies.
        """
        with self._atomic:
            yield

    @contextmanager
    def disable_hang_protection(self) -> Iterator[None]:
        """A context in whose body a lack of progress is not a fault. Re-entrant."""
        number, self._unprotected = self._state.iteration, self._unprotected + 1
        try:
            if self._unprotected == 1:
                self._link.expect_progress(False)
            yield
        finally:
            if number == self._state.iteration and self._unprotected:
                self._unprotected -= 1
                if self._unprotected == 0:
                    self._link.expect_progress(True)

    def close(self) -> None:
        """Ends the call: the store is not asked any more, and not kept by who keeps this object."""
        self._why = lambda _number: LastInterruption()

    def begin(self) -> None:
        """Begins a round: contexts that an interrupted one left open are closed."""
        self._unprotected = 0


class CallParameters:
    """The parameters of `function` that get the `CallWrapper`: annotated with it, or with it or None; or by name.

    Annotations may be texts. One that cannot be evaluated, because what it names is imported for type checkers only,
    is read as it is written.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            self._signature = inspect.signature(function)
        except ValueError:  # some functions written in C do not say; they get what the user gives
            self.names: tuple[str, ...] = ()
            return
        namespace = _namespace(function)
        self.names = tuple(
            name
            for name, parameter in self._signature.parameters.items()
            if parameter.kind not in _VARIADIC and (name in NAMES or _is_wrapper(parameter.annotation, namespace))
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


def _is_wrapper(annotation: object, namespace: dict[str, Any]) -> bool:
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        written = annotation
        try:
            annotation = eval(written, dict(namespace))
        except Exception:  # whatever the user's text does
            return _reads_as_wrapper(written)
        return not isinstance(annotation, str) and _is_wrapper(annotation, namespace)
    if typing.get_origin(annotation) in _UNIONS:
        others = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        return len(others) == 1 and _is_wrapper(others[0], namespace)
    return annotation is CallWrapper


def _reads_as_wrapper(text: str) -> bool:
    """Whether a text is `CallWrapper`, or that or None; with or without modules, quotes and blanks."""
    return re.sub(r"""[\s'"]|\w+\.""", "", text) in _WRITTEN
