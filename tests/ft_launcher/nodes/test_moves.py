"""Where the ranks of a faulty node go: tables."""

from __future__ import annotations

import pytest

from ft_launcher.nodes.membership import Size
from ft_launcher.nodes.moves import can_exchange, choose_moved
from tests.ft_launcher.nodes.nodes_of_a_test import node


@pytest.mark.parametrize(
    ("came", "former", "culprit", "size", "members"),
    [
        ("abs", "ab", "a", Size(2, 2), "sb"),
        ("abs", "ab", "b", Size(2, 2), "as"),
        ("ab", "ab", "a", Size(2, 2), "ba"),
        ("cab", "abc", "b", Size(3, 3), "bac"),
        ("abcd", "abcd", "d", Size(4, 4), "adcb"),
        ("ab", "ab", "a", Size(1, 2), "ba"),
        ("a", "a", "a", Size(1, 1), "a"),
        ("ab", "ab", "", Size(2, 2), "ab"),
        ("bc", "abc", "b", Size(2, 3), "cb"),
    ],
)
def test_they_move(came: str, former: str, culprit: str, size: Size, members: str) -> None:
    """`b` and `d` are of one group."""
    nodes = [node(name, group="one" if name in "bd" else name) for name in came]
    assert "".join(one.node for one in choose_moved(nodes, list(former), size, culprit, exchange=True)) == members


def test_where_hardware_is_suspected_only_a_spare_helps() -> None:
    came = [node(name) for name in "abs"]
    for count, members in ((3, "sb"), (2, "ab")):
        chosen = choose_moved(came[:count], ["a", "b"], Size(2, 2), "a", exchange=False)
        assert "".join(one.node for one in chosen) == members


def test_where_nobody_can_change_places() -> None:
    def can(*nodes: object, former: str = "ab") -> bool:
        return can_exchange(list(nodes), former)  # type: ignore[arg-type]

    assert can(node("a"), node("b"))
    assert not can(node("a")), "alone"
    assert not can(node("a"), node("s"), former="ab"), "the other one is gone, and its replacement is needed"
    assert not can(node("a"), node("b", nprocs=4)), "rank 5 would be another rank's neighbour"
    assert not can(node("a", rank=0), node("b", rank=1)), "they insist on their ranks"
