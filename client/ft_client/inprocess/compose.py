"""`Compose`: several callbacks as one.

Users make a `Compose` for any callback of the wrapper, and `restart_config.py` makes some of its own. A `Compose`
catches nothing: what one of the callbacks raises is raised, and the remaining callbacks are not called.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any


class Compose:
    """Several callbacks as one: `Compose(f, g, h)(x)` is `f(g(h(x)))`, so that the last callback runs first.

    Example. First the process groups are aborted, then what Transformer Engine holds; and first the device is checked,
    then faults are counted:

        Wrapper(
            abort=Compose(AbortTransformerEngine(), AbortTorchDistributed()),
            health_check=Compose(FaultCounter(max_rank_faults=3), CudaHealthCheck()),
        )

    A tuple that a callback returns is unpacked into the arguments of the next. Callbacks without arguments can be
    composed if they return None. A callback that was given something and returns None causes a `UserWarning`, and the
    next callback is called with None, as with NVIDIA's class.

    A `Compose` is also an instance of the closest class that all its callbacks are instances of: a composition of
    `HealthCheck`s is a `HealthCheck`.

    Raises:
        TypeError: there is no callback, one of them cannot be called, or is a class in place of an instance.
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
        """Does nothing. Keeps the constructor of the common base from being called with the callbacks."""

    def __call__(self, *args: Any) -> Any:
        """Calls every callback, last to first. Returns what the first returned."""
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
    """Returns the callbacks of a `Compose`; another callback as the only one; none for None."""
    if callback is None:
        return ()
    if isinstance(callback, Compose):
        return callback.instances
    return (callback,)


def _closest_base(instances: tuple[Callable[..., Any], ...]) -> type:
    """Returns the closest class that all these are instances of; `object` at worst."""
    classes = type(instances[0]).__mro__
    return next(candidate for candidate in classes if all(isinstance(instance, candidate) for instance in instances))


def _with_base(base: type) -> type[Compose]:
    """Returns a subclass of `Compose` and of `base`; `Compose` itself where that cannot be."""
    bases: tuple[type, ...] = (Compose, base)
    if base is object:
        bases = (Compose,)
    try:
        return types.new_class("Compose", bases)
    except TypeError:  # plain functions: their class cannot be a base
        return Compose
