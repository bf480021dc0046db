"""Who takes part, in which order, and where the ranks of a faulty node go: tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_launcher.job.coordinator.formation import Size, choose, choose_relocated, how_many
from tests.ft_launcher.job.nodes_of_a_test import node


def chosen(came: str, previous: str, size: Size) -> str:
    return "".join(one.node for one in choose([node(name) for name in came], list(previous), size))


@pytest.mark.parametrize(
    ("came", "previous", "size", "members"),
    [
        ("cab", "", Size(3, 3), "abc"),
        ("ab", "", Size(3, 3), ""),
        ("dcba", "", Size(2, 3), "abc"),
        ("cab", "bca", Size(3, 3), "bca"),
        ("acd", "abc", Size(3, 3), "adc"),
        ("bcd", "abc", Size(3, 3), "dbc"),
        ("def", "abc", Size(3, 3), "def"),
        ("ac", "abc", Size(2, 3), "ac"),
        ("abcd", "ca", Size(2, 4), "cabd"),
        ("abcd", "ab", Size(2, 4, may_grow=False), "ab"),
        ("ab", "abc", Size(2, 4, may_shrink=False), ""),
        ("abd", "abc", Size(2, 4, may_shrink=False), "abd"),
        ("abcd", "", Size(2, 4, held_back=1), "abc"),
        ("abc", "", Size(2, 4, held_back=2), "ab"),
        ("ab", "", Size(2, 4, held_back=2), "ab"),
        ("abd", "abc", Size(3, 4, held_back=1), "abd"),
        ("abcd", "cdab", Size(1, 2), "cd"),
        ("", "", Size(1, 2), ""),
    ],
)
def test_members_keep_their_places_and_newcomers_take_those_of_the_lost(
    came: str, previous: str, size: Size, members: str
) -> None:
    assert chosen(came, previous, size) == members


@pytest.mark.parametrize(
    ("came", "previous", "size", "members"),
    [
        ("a1 b1 c2 d2", "", Size(4, 4, segment=2), "abcd"),
        ("a1 b2 c1 d2", "", Size(4, 4, segment=2), "acbd"),
        ("a1 b1 c1 d2", "", Size(2, 4, segment=2), "ab"),
        ("a1 b2 c3 d4", "", Size(2, 4, segment=2), ""),
        ("a1 b1 c2 d2", "cdab", Size(2, 2, segment=2), "cd"),
        ("a1 c2 d2 e1", "abcd", Size(4, 4, segment=2), "aecd"),
        ("a1 b1 c2 d2 e2", "", Size(2, 5, segment=2), "abcd"),
    ],
)
def test_a_segment_takes_part_as_a_whole(came: str, previous: str, size: Size, members: str) -> None:
    nodes = [node(text[0], group=text[1]) for text in came.split()]
    assert "".join(one.node for one in choose(nodes, list(previous), size)) == members


def test_nodes_that_insist_on_a_rank_have_it() -> None:
    came = [node("a", rank=2), node("b", rank=0), node("c", rank=1)]
    assert [one.node for one in choose(came, [], Size(3, 3))] == ["b", "c", "a"]
    assert [one.node for one in choose(came, ["a", "x", "y"], Size(3, 3))] == ["b", "c", "a"]


names = st.lists(st.sampled_from("abcdefghijkl"), unique=True)


@given(names, names, st.integers(1, 6), st.integers(0, 6), st.integers(0, 3), st.integers(1, 3), st.booleans())
def test_any_choice_is_of_those_who_came_each_once_and_within_the_limits(
    came: list[str], previous: list[str], minimum: int, more: int, held_back: int, segment: int, may_grow: bool
) -> None:
    size = Size(minimum, minimum + more, held_back, segment, may_grow=may_grow)
    nodes = [node(name, group=str(ord(name) % 2)) for name in came]
    members = [one.node for one in choose(nodes, previous, size)]
    assert len(set(members)) == len(members) == how_many(nodes, len(previous), size)
    assert set(members) <= set(came)
    assert not members or minimum <= len(members) <= minimum + more
    assert len(members) % segment == 0
    if segment == 1:
        stayed = [name for name in members if name in previous]
        assert stayed == [name for name in previous if name in stayed], "previous members keep their order"
        if members and previous and previous[0] in came:
            assert members[0] == previous[0], "rank 0 stays where it was"


@pytest.mark.parametrize(
    ("came", "previous", "faulty_node", "size", "members"),
    [
        ("abs", "ab", "a", Size(2, 2), "sb"),
        ("abs", "ab", "b", Size(2, 2), "as"),
        ("ab", "ab", "a", Size(2, 2), "ab"),
        ("ab", "ab", "a", Size(1, 2), "ab"),
        ("a", "a", "a", Size(1, 1), "a"),
        ("ab", "ab", "", Size(2, 2), "ab"),
        ("bc", "abc", "b", Size(2, 3), "bc"),
    ],
)
def test_a_spare_takes_the_place_of_a_suspect(
    came: str, previous: str, faulty_node: str, size: Size, members: str
) -> None:
    nodes = [node(name) for name in came]
    assert "".join(one.node for one in choose_relocated(nodes, list(previous), size, faulty_node)) == members
