"""Wraps callables of the user so that each call opens a section. Knows no timer and no report.

`Detector.wrap_callables` uses it, for scripts whose training loop cannot be changed. A callable is replaced where it
was found, in its module, class or object, and put back by `restore`: so code that took a reference to the callable
before is not timed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol


class SectionContext(Protocol):
    """A context manager that says whether its body runs: `section_timers.py: SectionTimer`."""

    is_open: bool

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None, /
    ) -> None: ...


@dataclass(frozen=True)
class CallableId:
    """A function, method, class method or static method `name` of a module, class or object `obj`.

    The fields `arg_filter_fn`, `extra_args_fn` and `ignored_args` are accepted for code written against NVIDIA's class,
    whose version 0.4.1 makes no use of them either.
    """

    obj: Any
    name: str
    arg_filter_fn: Callable[..., Any] | None = None
    extra_args_fn: Callable[..., Any] | None = None
    ignored_args: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return f"{getattr(self.obj, '__name__', type(self.obj).__name__)}.{self.name}"


class Wrapped:
    """The callables that are wrapped, with the originals to restore, in the order in which they were wrapped."""

    def __init__(self) -> None:
        self._originals: list[tuple[CallableId, Any, bool]] = []

    def check(self, wanted: Sequence[object]) -> None:
        """Checks that all of `wanted` can be wrapped, before the first of them is.

        Raises:
            ValueError: naming the argument and the first that is not a callable, or is wrapped already.
        """
        seen = [(id(target.obj), target.name) for target, _, _ in self._originals]
        for target in wanted:
            if not isinstance(target, CallableId):
                raise ValueError(f"callable_ids: {target!r} is not a CallableId(obj, name)")
            if not callable(getattr(target.obj, target.name, None)):
                raise ValueError(f"callable_ids: {target}: {target.obj!r} has no callable {target.name!r}")
            if (id(target.obj), target.name) in seen:
                raise ValueError(f"callable_ids: {target} is wrapped already")
            seen.append((id(target.obj), target.name))

    def wrap(self, target: CallableId, section: SectionContext) -> None:
        """Replaces the callable by one that opens `section`.

        A call inside another call of the same section, as of a recursive function, is not timed. A class method or
        static method of a class stays one.

        Raises:
            ValueError: nothing can be put there, as with a class written in C.
        """
        original = inspect.getattr_static(target.obj, target.name)
        own = target.name in getattr(target.obj, "__dict__", ())
        wrapper: Any
        if not isinstance(target.obj, type):
            wrapper = _timed(getattr(target.obj, target.name), section)
        elif isinstance(original, (classmethod, staticmethod)):
            wrapper = type(original)(_timed(original.__func__, section))
        else:
            wrapper = _timed(original, section)
        try:
            setattr(target.obj, target.name, wrapper)
        except (AttributeError, TypeError) as problem:
            raise ValueError(f"callable_ids: {target} cannot be wrapped: {problem}") from None
        self._originals.append((target, original, own))

    def restore(self) -> None:
        """Puts every callable back. What an object had only by its class is removed from the object again."""
        while self._originals:
            target, original, own = self._originals.pop()
            if own:
                setattr(target.obj, target.name, original)
            else:
                delattr(target.obj, target.name)


def _timed(call: Callable[..., Any], section: SectionContext) -> Callable[..., Any]:
    """Returns a function that calls `call` within `section`, unless the section is open already."""

    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if section.is_open:
            return call(*args, **kwargs)
        with section:
            return call(*args, **kwargs)

    return timed
