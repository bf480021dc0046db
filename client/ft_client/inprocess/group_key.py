"""The key by which a rank is grouped with others: a text, or what a function of the user's makes of the rank. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ft_client.inprocess.state import State

KeyOrFn = str | Callable[..., Any]


def check_key(key_or_fn: object) -> None:
    """Raises TypeError when it is neither a text nor a function of `(state)` or `(rank, world_size)`."""
    if callable(key_or_fn):
        _takes_rank_and_world_size(key_or_fn)
    elif not isinstance(key_or_fn, str):
        raise TypeError(f"key_or_fn={key_or_fn!r} is neither a text nor a function")


def group_key(key_or_fn: KeyOrFn, state: State) -> str:
    """The key of the rank in this state, as text."""
    if isinstance(key_or_fn, str):
        return key_or_fn
    if _takes_rank_and_world_size(key_or_fn):
        return str(key_or_fn(state.rank, state.world_size))
    return str(key_or_fn(state.freeze()))


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
