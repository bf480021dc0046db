"""The key by which ranks are grouped: any hashable value, or the result of the user's function for a rank. Pure.

The layers of a tree and `FilterCountGroupedByKey` use it. Ranks exchange keys as text, so that nothing is unpickled:
equal keys have equal texts in every process.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Hashable
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
