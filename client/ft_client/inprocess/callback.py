"""The base class of the wrapper's callbacks, and the function that calls one.

`restart/user_function.py` calls them; the restart machine decides when.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable

from ft_client.inprocess.state import FrozenState

logger = logging.getLogger("ft_client.inprocess")

_reported: set[str] = set()
"""Arguments whose callback returned something else than a state: reported once, not in each iteration."""


class Callback(abc.ABC):
    """Called with the state of the rank; returns it for the next callback in a `Compose`."""

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Does its work and returns `state`."""


def called(name: str, callback: Callable[[FrozenState], object] | None, state: FrozenState) -> None:
    """Calls the callback for argument `name` of the wrapper, if there is one.

    What it returns matters to a `Compose` only. Anything else than a state is logged, once for each argument.

    Raises:
        BaseException: whatever it raises.
    """
    if callback is None:
        return
    result = callback(state)
    if not isinstance(result, FrozenState) and name not in _reported:
        _reported.add(name)
        logger.warning("%s returned %r; a callback returns the state that it was given", name, result)
