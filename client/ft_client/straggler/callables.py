"""Callables of the user in place of which stands one that opens a section around it. Knows no timer and no report."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol


class Around(Protocol):
    """A context manager that knows whether its body runs."""

    is_open: bool

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None, /
    ) -> None: ...


@dataclass(frozen=True)
class CallableId:
    """A function, method, class method or static method `name` of a module, class or object `obj`.

    The other fields are accepted for code written against NVIDIA's class; its version 0.4.1 makes no use of them
    either.
    """

    obj: Any
    name: str
    arg_filter_fn: Callable[..., Any] | None = None
    extra_args_fn: Callable[..., Any] | None = None
    ignored_args: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return f"{getattr(self.obj, '__name__', type(self.obj).__name__)}.{self.name}"


class Wrapped:
    """All callables that were wrapped, and what stood in their places."""

    def __init__(self) -> None:
        self._originals: list[tuple[CallableId, Any, bool]] = []

    def check(self, wanted: Sequence[object]) -> None:
        """Nothing when all of them can be wrapped.

        Raises:
            ValueError: naming the argument and the first that is no callable, or is wrapped already.
        """
        seen = [(id(one.obj), one.name) for one, _, _ in self._originals]
        for one in wanted:
            if not isinstance(one, CallableId):
                raise ValueError(f"callable_ids: {one!r} is no CallableId(obj, name)")
            if not callable(getattr(one.obj, one.name, None)):
                raise ValueError(f"callable_ids: {one}: {one.obj!r} has no callable {one.name!r}")
            if (id(one.obj), one.name) in seen:
                raise ValueError(f"callable_ids: {one} is wrapped already")
            seen.append((id(one.obj), one.name))

    def wrap(self, one: CallableId, section: Around) -> None:
        """Puts the wrapper in the callable's place. A call inside another of the same section is not timed.

        Raises:
            ValueError: nothing can be put there.
        """
        original = inspect.getattr_static(one.obj, one.name)
        own = one.name in getattr(one.obj, "__dict__", ())
        wrapper: Any
        if not isinstance(one.obj, type):
            wrapper = _timed(getattr(one.obj, one.name), section)
        elif isinstance(original, (classmethod, staticmethod)):
            wrapper = type(original)(_timed(original.__func__, section))
        else:
            wrapper = _timed(original, section)
        try:
            setattr(one.obj, one.name, wrapper)
        except (AttributeError, TypeError) as problem:
            raise ValueError(f"callable_ids: {one} cannot be wrapped: {problem}") from None
        self._originals.append((one, original, own))

    def restore(self) -> None:
        """Puts every callable back."""
        while self._originals:
            one, original, own = self._originals.pop()
            if own:
                setattr(one.obj, one.name, original)
            else:
                delattr(one.obj, one.name)


def _timed(call: Callable[..., Any], section: Around) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if section.is_open:
            return call(*args, **kwargs)
        with section:
            return call(*args, **kwargs)

    return timed
