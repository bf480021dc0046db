"""The user's description of one layer of a `Tree`, and the key by which it groups ranks. Pure.

A key is any hashable value, or the result of the user's function for a rank; `FilterCountGroupedByKey` has one, too.
Ranks exchange keys as text, so that nothing is unpickled: equal keys have equal texts in every process. What a layer
does to ranks is in `topology.py`.
"""

from __future__ import annotations

import enum
import inspect
import numbers
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from ft_client.inprocess.state import State

KeyOrFn = Hashable | Callable[..., Any]


def check_key(key_or_fn: object) -> None:
    """Checks a key or function.

    Raises:
        TypeError: it is neither hashable nor a function of `(state)` or `(rank, world_size)`.
    """
    if callable(key_or_fn):
        _takes_rank_and_world_size(key_or_fn)
        return
    try:
        hash(key_or_fn)
    except TypeError:
        raise TypeError(f"key_or_fn={key_or_fn!r} is neither hashable nor a function") from None


def group_key(key_or_fn: KeyOrFn, state: State) -> str:
    """The key of the rank in this state, as text."""
    if not callable(key_or_fn):
        return text_of(key_or_fn)
    if _takes_rank_and_world_size(key_or_fn):
        return text_of(key_or_fn(state.rank, state.world_size))
    return text_of(key_or_fn(state.freeze()))


def text_of(key: object) -> str:
    """The text of a key. `1`, `1.0` and True are the same key, as in a dict; `1` and `"1"` are different keys.

    The items of a frozenset are sorted, since their order differs between processes.
    """
    if isinstance(key, tuple):
        return f"({', '.join(map(text_of, key))})"
    if isinstance(key, frozenset):
        return f"{{{', '.join(sorted(map(text_of, key)))}}}"
    if isinstance(key, numbers.Integral):
        return repr(int(key))
    if isinstance(key, numbers.Real):
        number = float(key)
        if number.is_integer():
            return repr(int(number))
        return repr(number)
    return repr(key)


def _takes_rank_and_world_size(function: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C do not say
        return False
    for arguments in (1, 2):
        try:
            signature.bind(*[None] * arguments)
        except TypeError:
            continue
        return arguments == 2
    raise TypeError(f"key_or_fn={function!r} takes neither (state) nor (rank, world_size)")


class LayerFlag(enum.Flag):
    """How a terminated active rank may be replaced within its own branch of this layer."""

    RESERVE = enum.auto()
    """By a spare of the branch."""
    BACKFILL = enum.auto()
    """By the active rank of the branch with the highest number."""


@dataclass(frozen=True)
class Layer:
    """One grouping of ranks: by node, by rack, or all of them.

    Args:
        min_ranks: a branch with fewer healthy ranks is terminated as a whole.
        max_ranks: maximum number of active ranks in a branch; None: no limit.
        key_or_fn: the key of a rank's branch: any hashable value, or a function of `(state)` or `(rank, world_size)`.
        flag: has an effect in a layer only if all layers below have it too.

    Raises:
        TypeError: a field has another type.
        ValueError: `max_ranks` is below 1 or below `min_ranks`.
    """

    min_ranks: int = 1
    max_ranks: int | None = None
    key_or_fn: KeyOrFn = ""
    flag: LayerFlag | None = None

    def __post_init__(self) -> None:
        check_key(self.key_or_fn)
        for name, value in (("min_ranks", self.min_ranks), ("max_ranks", self.max_ranks)):
            if type(value) is not int and not (value is None and name == "max_ranks"):
                raise TypeError(f"{name}={value!r} is not a whole number")
        if self.flag is not None and not isinstance(self.flag, LayerFlag):
            raise TypeError(f"flag={self.flag!r} is not a LayerFlag")
        if self.max_ranks is not None and self.max_ranks < max(self.min_ranks, 1):
            raise ValueError(f"max_ranks={self.max_ranks} is below min_ranks={self.min_ranks} or 1")

    def has(self, flag: LayerFlag) -> bool:
        """Whether the layer has this flag."""
        return self.flag is not None and flag in self.flag
