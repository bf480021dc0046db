"""Keys and layers that may be, and the tree of layers: pictures of losses, properties of any layers and losses."""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_client.inprocess.assignment.topology import Branch, Layer, LayerFlag, Leaf, Topology, check_key, group_key
from ft_client.inprocess.state import Mode, State
from tests.program import python

RESERVE, BACKFILL = LayerFlag.RESERVE, LayerFlag.BACKFILL
BOTH = RESERVE | BACKFILL


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


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"min_ranks": "8"}, TypeError, "min_ranks='8'"),
        ({"min_ranks": None}, TypeError, "min_ranks=None"),
        ({"max_ranks": 8.0}, TypeError, "max_ranks=8.0"),
        ({"max_ranks": True}, TypeError, "max_ranks=True"),
        ({"key_or_fn": [3]}, TypeError, r"key_or_fn=\[3\]"),
        ({"flag": "RESERVE"}, TypeError, "flag='RESERVE'"),
        ({"min_ranks": 8, "max_ranks": 4}, ValueError, "max_ranks=4 is below min_ranks=8"),
        ({"min_ranks": 0, "max_ranks": 0}, ValueError, "max_ranks=0"),
    ],
)
def test_layers_that_cannot_be(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Layer(**given)


def test_defaults_and_flags() -> None:
    layer = Layer()
    assert (layer.min_ranks, layer.max_ranks, layer.key_or_fn, layer.flag) == (1, None, "", None)
    both = Layer(flag=LayerFlag.RESERVE | LayerFlag.BACKFILL)
    assert both.has(LayerFlag.RESERVE) and both.has(LayerFlag.BACKFILL)
    assert not layer.has(LayerFlag.RESERVE) and not Layer(flag=LayerFlag.BACKFILL).has(LayerFlag.RESERVE)


def nodes(count: int, per_node: int) -> dict[int, list[str]]:
    """Ranks of nodes that follow each other, in two layers."""
    return {rank: ["root", f"node{rank // per_node}"] for rank in range(count * per_node)}


def picture(topology: Topology) -> str:
    """Ranks at entry in the order of their active numbers, then spares."""
    leaves = [topology.leaf(rank) for rank in topology.initial_ranks]
    active = sorted((leaf.active_rank, leaf.initial_rank) for leaf in leaves if leaf.active_rank is not None)
    spares = [str(leaf.initial_rank) for leaf in leaves if leaf.mode is Mode.INACTIVE]
    return " ".join([*(str(initial) for _, initial in active), *(["|", *spares] if spares else [])])


def after(
    layers: Sequence[Layer],
    losses: Sequence[Sequence[int]],
    paths: dict[int, list[str]],
    size_filter: Callable[[int], int] | None = None,
) -> str:
    """The picture after losses, given by numbers at entry."""
    topology = Topology(layers, paths)
    topology.start(size_filter)
    for lost in losses:
        ranks = [rank for initial in lost if (rank := topology.leaf(initial).rank) is not None]
        topology.lose(ranks, size_filter)
    return picture(topology)


@pytest.mark.parametrize(
    ("layers", "losses", "expected"),
    [
        # two nodes of four ranks
        ([Layer(), Layer()], [], "0 1 2 3 4 5 6 7"),
        ([Layer(max_ranks=6), Layer()], [], "0 1 2 3 4 5 | 6 7"),
        ([Layer(), Layer(max_ranks=3)], [], "0 1 2 4 5 6 | 3 7"),
        ([Layer(max_ranks=4), Layer(max_ranks=3)], [], "0 1 2 4 | 3 5 6 7"),
        # nothing but closing up
        ([Layer(), Layer()], [[1, 4]], "0 2 3 5 6 7"),
        ([Layer(max_ranks=6), Layer()], [[1]], "0 2 3 4 5 | 6 7"),
        # min_ranks
        ([Layer(), Layer(min_ranks=4)], [[1]], "4 5 6 7"),
        ([Layer(min_ranks=5), Layer(min_ranks=4)], [[1]], ""),
        ([Layer(min_ranks=5), Layer(min_ranks=3)], [[1], [4]], "0 2 3 5 6 7"),
        ([Layer(min_ranks=5), Layer(min_ranks=3)], [[1], [4], [5]], ""),
        # a spare of the node
        ([Layer(), Layer(max_ranks=3, flag=RESERVE)], [[1]], "0 3 2 4 5 6 | 7"),
        ([Layer(), Layer(max_ranks=3, flag=RESERVE)], [[1], [2]], "0 3 4 5 6 | 7"),
        ([Layer(), Layer(max_ranks=3, flag=RESERVE)], [[1, 5, 6]], "0 3 2 4 7"),
        # a spare that is lost is not a loss
        ([Layer(), Layer(max_ranks=3, flag=RESERVE)], [[3], [0]], "1 2 4 5 6 | 7"),
        # the node first, then any node
        ([Layer(max_ranks=5, flag=RESERVE), Layer(max_ranks=3, flag=RESERVE)], [[1]], "0 3 2 4 5 | 6 7"),
        ([Layer(max_ranks=5, flag=RESERVE), Layer(max_ranks=3, flag=RESERVE)], [[1], [2]], "0 3 6 4 5 | 7"),
        # but no node above its max_ranks
        ([Layer(max_ranks=5, flag=RESERVE), Layer(max_ranks=3, flag=RESERVE)], [[1], [2], [0]], "3 6 4 5 | 7"),
        # a flag above a layer without it does nothing
        ([Layer(max_ranks=6, flag=RESERVE), Layer()], [[1]], "0 2 3 4 5 | 6 7"),
        # a whole node is replaced in place
        ([Layer(max_ranks=4, flag=RESERVE), Layer(min_ranks=4, flag=RESERVE)], [[1]], "4 5 6 7"),
        # from the end of the branch
        ([Layer(flag=BACKFILL), Layer(flag=BACKFILL)], [[1, 4]], "0 6 2 3 7 5"),
        ([Layer(), Layer(flag=BACKFILL)], [[1, 4]], "0 3 2 7 5 6"),
        ([Layer(flag=BACKFILL), Layer()], [[1, 4]], "0 2 3 5 6 7"),
        ([Layer(flag=BACKFILL), Layer(flag=BACKFILL)], [[6, 7]], "0 1 2 3 4 5"),
        ([Layer(flag=BACKFILL), Layer(flag=BACKFILL)], [[0], [1]], "7 6 2 3 4 5"),
        # spares first, then from the end
        ([Layer(max_ranks=7, flag=BOTH), Layer(flag=BOTH)], [[0, 1]], "7 6 2 3 4 5"),
    ],
)
def test_two_nodes(layers: list[Layer], losses: list[list[int]], expected: str) -> None:
    assert after(layers, losses, nodes(2, 4)) == expected


def test_three_layers() -> None:
    paths = {rank: ["root", f"rack{rank // 4}", f"node{rank // 2}"] for rank in range(8)}
    layers = [Layer(max_ranks=6), Layer(flag=RESERVE), Layer(min_ranks=2, flag=RESERVE)]
    assert after(layers, [], paths) == "0 1 2 3 4 5 | 6 7"
    assert after(layers, [[0]], paths) == "2 3 4 5 | 6 7"
    assert after(layers, [[4]], paths) == "0 1 2 3 6 7"


def test_nodes_that_do_not_follow_each_other() -> None:
    """Numbers go by node, nodes in the order of their first ranks."""
    paths = {rank: ["root", f"node{rank % 2}"] for rank in range(6)}
    topology = Topology([Layer(), Layer(min_ranks=3)], paths)
    topology.start()
    assert topology.initial_ranks == [0, 2, 4, 1, 3, 5]
    topology.lose([1])
    assert picture(topology) == "1 3 5"


def test_too_small_at_the_start() -> None:
    paths = nodes(2, 4)
    del paths[6]
    assert after([Layer(), Layer(min_ranks=4)], [], paths) == "0 1 2 3"
    assert after([Layer(max_ranks=4, flag=RESERVE), Layer(min_ranks=4, flag=RESERVE)], [], paths) == "0 1 2 3"


@pytest.mark.parametrize(
    ("flag", "losses", "expected"),
    [
        (None, [], "0 1 2 3 4 5 | 6 7"),
        (None, [[0]], "1 2 3 | 4 5 6 7"),
        (RESERVE, [[0]], "6 1 2 3 4 5 | 7"),
        (RESERVE, [[0], [1]], "6 7 2 3 4 5"),
        (RESERVE, [[0], [1], [2]], "6 7 3 | 4 5"),
        (RESERVE, [[0], [1], [2], [3]], "6 7 4 | 5"),
    ],
)
def test_a_filter_makes_spares(flag: LayerFlag | None, losses: list[list[int]], expected: str) -> None:
    layers = [Layer(flag=flag), Layer(flag=flag)]
    assert after(layers, losses, nodes(2, 4), lambda size: size // 3 * 3) == expected


@pytest.mark.parametrize("size", [9, -1, None, 4.0, True])
def test_a_filter_that_asks_for_what_cannot_be(size: object) -> None:
    with pytest.raises(ValueError, match=f"world_size_filter returned {size!r} for 8 active ranks"):
        after([Layer(), Layer()], [], nodes(2, 4), lambda _: size)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ({0: ["a"], 1: ["b"]}, r"same key in the first layer, and these are a, b"),
        ({0: ["a"], 1: ["a", "b"]}, "rank 1 has 2 keys for 1 layers"),
    ],
)
def test_paths_that_do_not_fit(paths: dict[int, list[str]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Topology([Layer()], paths)


@pytest.mark.parametrize("flag", [None, RESERVE, BACKFILL, BOTH])
def test_many_ranks(flag: LayerFlag | None) -> None:
    paths = {rank: ["root", f"rack{rank // 256}", f"node{rank // 8}"] for rank in range(16_384)}
    layers = [Layer(128, 16_000, flag=flag), Layer(flag=flag), Layer(8, 8, flag=flag)]
    topology = Topology(layers, paths)
    topology.start()
    assert (topology.world_size, topology.active_world_size) == (16_384, 16_000)
    topology.lose(range(0, 16_384, 100))
    assert topology.world_size == 16_384 - 164 * 8
    check(topology)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Layer], dict[int, list[str]]]:
    """Some layers, and the keys of some ranks."""
    depth, size = draw(st.integers(0, 2)), draw(st.integers(1, 16))
    layers = []
    for _ in range(depth + 1):
        least = draw(st.integers(0, 4))
        most = draw(st.none() | st.integers(max(least, 1), 12))
        layers.append(Layer(least, most, flag=draw(st.sampled_from([None, RESERVE, BACKFILL, BOTH]))))
    paths = {rank: ["root", *(draw(st.sampled_from("abc")) for _ in range(depth))] for rank in range(size)}
    return layers, paths


def branches_of(topology: Topology) -> set[Branch]:
    return {branch for rank in topology.initial_ranks for branch in topology.leaf(rank).branches}


def check(topology: Topology) -> None:
    """What holds at any time."""
    leaves = [topology.leaf(rank) for rank in topology.initial_ranks]
    healthy = [leaf for leaf in leaves if leaf.mode is not Mode.TERMINATED]
    assert [leaf.rank for leaf in healthy] == list(range(topology.world_size))
    assert all(leaf.rank is None for leaf in leaves if leaf.mode is Mode.TERMINATED)
    active = sorted(leaf.active_rank for leaf in leaves if leaf.active_rank is not None)
    assert active == list(range(topology.active_world_size))
    assert all((leaf.active_rank is not None) == (leaf.mode is Mode.ACTIVE) for leaf in leaves)
    for branch in branches_of(topology):
        modes = [leaf.mode for leaf in branch.leaves]
        assert branch.active == modes.count(Mode.ACTIVE)
        assert branch.healthy == len(modes) - modes.count(Mode.TERMINATED)
        assert branch.healthy == 0 or branch.healthy >= branch.layer.min_ranks
        assert branch.layer.max_ranks is None or branch.active <= branch.layer.max_ranks


def reserve_of(leaf: Leaf) -> Branch | None:
    """The largest branch that a replacement may come from."""
    return [None, *leaf.ancestors(RESERVE)][-1]


def check_replacements(topology: Topology, modes_before: dict[int, Mode], is_filtered: bool) -> None:
    """Who became active took the place of somebody of the same reserve; no place stayed empty beside a spare."""
    came: dict[Branch | None, int] = {}
    went: dict[Branch | None, int] = {}
    for rank, before in modes_before.items():
        leaf = topology.leaf(rank)
        if before is Mode.INACTIVE and leaf.mode is Mode.ACTIVE:
            came[reserve_of(leaf)] = came.get(reserve_of(leaf), 0) + 1
        if before is Mode.ACTIVE and leaf.mode is Mode.TERMINATED:
            went[reserve_of(leaf)] = went.get(reserve_of(leaf), 0) + 1
    assert None not in came
    assert all(count <= went.get(branch, 0) for branch, count in came.items())
    for branch, count in went.items():
        if branch is not None and came.get(branch, 0) < count and not is_filtered:
            assert not any(leaf.mode is Mode.INACTIVE and leaf.has_room() for leaf in branch.leaves)


@settings(deadline=None, max_examples=300)
@given(worlds(), st.data(), st.none() | st.integers(1, 8))
def test_any_layers_and_losses(
    world: tuple[list[Layer], dict[int, list[str]]], data: st.DataObject, largest: int | None
) -> None:
    layers, paths = world
    size_filter = None if largest is None else lambda size: min(size, largest)
    topology = Topology(layers, paths)
    twin = Topology(layers, dict(reversed(paths.items())))
    topology.start(size_filter)
    twin.start(size_filter)
    check(topology)
    for _ in range(data.draw(st.integers(1, 4))):
        before = {rank: topology.leaf(rank).mode for rank in paths}
        lost = data.draw(st.sets(st.integers(0, topology.world_size - 1))) if topology.world_size else set()
        gone = {rank for rank in paths if topology.leaf(rank).rank in lost}
        topology.lose(lost, size_filter)
        twin.lose(lost, size_filter)
        check(topology)
        assert picture(topology) == picture(twin)
        assert largest is None or topology.active_world_size <= largest
        assert all(topology.leaf(rank).mode is Mode.TERMINATED for rank in gone)
        assert all(topology.leaf(rank).mode is mode for rank, mode in before.items() if mode is Mode.TERMINATED)
        check_replacements(topology, before, largest is not None)
