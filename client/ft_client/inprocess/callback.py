"""What the callbacks of the wrapper have in common, and how one is called. Knows no kind of callback."""

from __future__ import annotations

import abc
from collections.abc import Callable

from ft_client.inprocess.state import FrozenState


class Callback(abc.ABC):
    """Called with the state of the rank; returns it for the next callback in a `Compose`."""

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Does its work and returns `state`."""


class BrokenCallback(TypeError):
    """A callback returned something else than a state: another try would do the same."""


def called(name: str, callback: Callable[[FrozenState], object] | None, state: FrozenState) -> FrozenState:
    """What the callback for argument `name` of the wrapper returned; `state` when there is none.

    Raises:
        BrokenCallback: it returned something else than a state.
        BaseException: whatever it raises.
    """
    result = state if callback is None else callback(state)
    if not isinstance(result, FrozenState):
        raise BrokenCallback(f"{name} returned {result!r}; a callback returns the state that it was given")
    return result
