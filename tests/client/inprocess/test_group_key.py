"""Keys: a text, or either kind of function."""

from __future__ import annotations

import functools
import socket
from typing import Any

import pytest

from ft_client.inprocess.group_key import check_key, group_key
from ft_client.inprocess.state import State


class Node:
    def __call__(self, rank: int, world_size: int) -> str:
        return f"{rank}/{world_size}"


@pytest.mark.parametrize(
    ("key_or_fn", "key"),
    [
        ("root", "root"),
        ("", ""),
        (lambda state: state.rank // 4, "1"),
        (lambda _: socket.gethostname(), socket.gethostname()),
        (lambda state, size=3: size, "3"),
        (lambda rank, world_size: rank * world_size, "40"),
        (lambda *given: len(given), "1"),
        (Node(), "5/8"),
        (functools.partial(lambda width, rank, world_size: rank // width, 2), "2"),
    ],
)
def test_key(key_or_fn: Any, key: str) -> None:
    check_key(key_or_fn)
    assert group_key(key_or_fn, State(5, 8)) == key


@pytest.mark.parametrize("key_or_fn", [None, 3, lambda: 1, lambda a, b, c: 1])
def test_no_key(key_or_fn: object) -> None:
    with pytest.raises(TypeError, match="key_or_fn="):
        check_key(key_or_fn)
