"""The wrapper's interface for the user's function: state of the restarts, `ping()`, atomic and unprotected sections.

`restart/user_function.py` makes one `CallWrapper` for each call of a wrapped function, and hands it to the function as
an argument. A `CallWrapper` only reports: it never decides when a restart begins. `CallParameters` finds which
parameters of the user's function get the `CallWrapper`, and with which arguments the function is called.
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
"""Parameters that get the `CallWrapper` by their name, whatever their annotation. Megatron-LM uses the second."""

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
    """The methods of the link to the monitor that are used here: those of `restart/monitor_link.py: MonitorLink`."""

    def ping(self) -> None:
        """Reports progress of the function."""

    def expect_progress(self, is_timed: bool) -> None:
        """Reports whether progress of the function is expected from now on."""


class CallWrapper:
    """The wrapper as the user's function sees it. For the thread that runs the function.

    Example:

        @Wrapper(soft_timeout=datetime.timedelta(seconds=60))
        def train(call_wrapper: CallWrapper | None = None) -> None:
            for step in range(steps):
                call_wrapper.ping()
                train_step()
                if step % 100 == 0:
                    with call_wrapper.atomic():      # no restart cuts off the save
                        save_checkpoint(step)

    Args:
        state: the state of this rank; changes from round to round.
        link: the link to the monitor.
        end_reason_of: returns why a round ended, given its number. Takes a few operations in the store.
    """

    def __init__(
        self,
        state: State,
        link: HangProtection,
        end_reason_of: Callable[[int], LastInterruption],
    ) -> None:
        self._state, self._link, self._end_reason_of = state, link, end_reason_of
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
        """Why the function is called again: which ranks are the cause, and what happened; None in the first round.

        Where ranks made no progress, all of them may have waited for one other rank. The launchers find that rank by
        the stacks, and write it a moment after the interruption at the latest. Without launchers only the ranks that
        made no progress are known. Takes a few operations in the store.
        """
        if self._state.iteration == 0:
            return None
        return self._end_reason_of(self._state.iteration - 1)

    def ping(self) -> None:
        """Reports progress of the training. After the first report of a round, further ones are expected: the function
        counts as hung when none comes within `soft_timeout`. Only notes the time; the watchdog sends it."""
        self._link.ping()

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """Returns a context in whose body the function is not interrupted: it may save a checkpoint. Re-entrant.

        Once a restart has begun, entering the context blocks until the function is interrupted. `hard_timeout` still
        applies: a rank that stays in the body for too long is killed.
        """
        with self._atomic:
            yield

    @contextmanager
    def disable_hang_protection(self) -> Iterator[None]:
        """Returns a context in whose body a lack of progress is not a fault, as while loading data. Re-entrant.

        The context may have been left open by a round that was interrupted: then its end, which comes in a later round,
        changes nothing.
        """
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
        """Ends the call. The store is not asked any more, and is not kept alive by a user who keeps this object."""
        self._end_reason_of = lambda _number: LastInterruption()

    def begin(self) -> None:
        """Begins a round: contexts that an interrupted round left open count as closed."""
        self._unprotected = 0


class CallParameters:
    """The parameters of `function` that get the `CallWrapper`.

    A parameter gets it when it is annotated with `CallWrapper` or `CallWrapper | None`, or by its name (`NAMES`).
    Annotations may be texts. A text that cannot be evaluated, because it names what is imported for type checkers
    only, is compared as it is written.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            self._signature = inspect.signature(function)
        except ValueError:  # some functions written in C have no signature: they get what the user gives
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
        """Returns the arguments for the function: the user's, with `call_wrapper` for the parameters that get it.

        The user may leave these parameters out, wherever they stand in the signature, or give any value for them, which
        is replaced. The user's values are passed on as the same objects.

        Raises:
            TypeError: the arguments do not fit the function.
        """
        if not self.names:
            return tuple(args), dict(kwargs)
        passed = {name: value for name, value in kwargs.items() if name not in self.names}
        try:
            bound = self._without.bind(*args, **passed)
        except TypeError:  # the user may have given values for these parameters by position
            bound = self._signature.bind_partial(*args, **passed)
        values = bound.arguments | dict.fromkeys(self.names, call_wrapper)
        ordered = {name: values[name] for name in self._signature.parameters if name in values}
        complete = BoundArguments(self._signature, ordered)
        complete = self._signature.bind(*complete.args, **complete.kwargs)
        return complete.args, complete.kwargs


def _namespace(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the names that the annotations of a function may use: the globals of its module."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__globals__"):
        function = inspect.unwrap(type(function).__call__)
    return getattr(function, "__globals__", {})


def _is_wrapper(annotation: object, namespace: dict[str, Any]) -> bool:
    """Returns whether an annotation means `CallWrapper`, or `CallWrapper` or None."""
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
    """Returns whether a text means `CallWrapper`, or `CallWrapper` or None; with or without modules, quotes, blanks."""
    return re.sub(r"""[\s'"]|\w+\.""", "", text) in _WRITTEN
