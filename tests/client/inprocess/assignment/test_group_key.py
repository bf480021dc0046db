"""Keys: any hashable value, or either kind of function."""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
from typing import Any

import pytest

from ft_client.inprocess.assignment.topology import check_key, group_key
from ft_client.inprocess.state import State
from tests.program import python


class Node:
    def __call__(self, rank: int, world_size: int) -> str:
        return f"{rank}/{world_size}"


@dataclasses.dataclass(frozen=True)
class Rack:
    row: int
    name: str


@pytest.mark.parametrize(
    ("key_or_fn", "key"),
    [
        ("root", "'root'"),
        ("", "''"),
        (3, "3"),
        (None, "None"),
        ((1, "a", (True, 2.0)), "(1, 'a', (1, 2))"),
        (Rack(2, "b"), "Rack(row=2, name='b')"),
        (float("inf"), "inf"),
        (0.5, "0.5"),
        (lambda state: state.rank // 4, "1"),
        (lambda state: state.rank / 5, "1"),
        (lambda state: str(state.rank), "'5'"),
        (lambda _: socket.gethostname(), repr(socket.gethostname())),
        (lambda state, size=3: size, "3"),
        (lambda rank, world_size: (rank, world_size), "(5, 8)"),
        (lambda *given: len(given), "1"),
        (Node(), "'5/8'"),
        (functools.partial(lambda width, rank, world_size: rank // width, 2), "2"),
    ],
)
def test_key(key_or_fn: Any, key: str) -> None:
    check_key(key_or_fn)
    assert group_key(key_or_fn, State(5, 8)) == key


def test_a_set_has_the_same_text_in_every_process() -> None:
    program = "from ft_client.inprocess.assignment.topology import text_of; print(text_of(frozenset('abcdefgh')))"
    texts = {python(program, environ=os.environ | {"PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")}
    assert texts == {"{'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}\n"}


@pytest.mark.parametrize("key_or_fn", [[3], {"a": 1}, lambda: 1, lambda a, b, c: 1])
def test_no_key(key_or_fn: object) -> None:
    with pytest.raises(TypeError, match="key_or_fn="):
        check_key(key_or_fn)
