"""Composes several callbacks into one.

Users make one for any callback of the wrapper, and `restart_config.py` does for its own. It catches nothing: what one
of them raises is raised, and the rest is not called.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any


class Compose:
    """`Compose(f, g, h)(x)` is `f(g(h(x)))`: the last one runs first. A tuple is unpacked into arguments.

    Callbacks without arguments can be composed if they return None. A callback that was given something and returns
    None causes a `UserWarning`, and the next one is called with None, as with NVIDIA's class.

    The result is also an instance of the closest class that all operands are instances of, so that a composition of
    `HealthCheck`s is a `HealthCheck`.

    Raises:
        TypeError: no operand, one that cannot be called, or a class in place of an instance.
    """

    instances: tuple[Callable[..., Any], ...]

    def __new__(cls, *instances: Callable[..., Any]) -> Compose:
        for instance in instances:
            if not callable(instance) or isinstance(instance, type):
                raise TypeError(f"Compose: {instance!r} is not a callable instance")
        if not instances:
            raise TypeError("Compose: nothing to compose")
        parts: list[Callable[..., Any]] = []
        for instance in instances:
            parts.extend(parts_of(instance))
        flat = tuple(parts)
        composed = object.__new__(_with_base(_closest_base(flat)))
        composed.instances = flat
        return composed

    def __init__(self, *_instances: Callable[..., Any]) -> None:
        """Stands before the constructor of the common base, which has no business with the operands."""

    def __call__(self, *args: Any) -> Any:
        """Calls every operand, last to first; returns what the first one returned."""
        result: Any = None
        for instance in reversed(self.instances):
            result = instance(*args)
            if result is None and any(argument is not None for argument in args):
                warnings.warn(f"{instance!r} returned None; a callback returns what it was given", stacklevel=2)
            if isinstance(result, tuple):
                args = result
            elif args or result is not None:
                args = (result,)
        return result

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.instances))})"


def parts_of(callback: Callable[..., Any] | None) -> tuple[Callable[..., Any], ...]:
    """Returns the operands of a `Compose`; of another callback itself, and nothing of None."""
    if callback is None:
        return ()
    if isinstance(callback, Compose):
        return callback.instances
    return (callback,)


def _closest_base(instances: tuple[Callable[..., Any], ...]) -> type:
    classes = type(instances[0]).__mro__
    return next(candidate for candidate in classes if all(isinstance(instance, candidate) for instance in instances))


def _with_base(base: type) -> type[Compose]:
    bases: tuple[type, ...] = (Compose, base)
    if base is object:
        bases = (Compose,)
    try:
        return types.new_class("Compose", bases)
    except TypeError:  # plain functions: their class cannot be a base
        return Compose
