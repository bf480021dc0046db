"""Which steps the whole job can put together."""

from __future__ import annotations

import dataclasses

import pytest

from ft_client.memory.agreed_steps import Offer, OtherWorld, agree
from rank_monitor.contract.memory_files import Generation, HeldFiles

A, B = "aaaaaaaa", "bbbbbbbb"


def generations(*steps: int, ranks: tuple[int, ...] = (0, 1), world: int = 2, series: str = A) -> list[Generation]:
    return [Generation(step, world, series, ranks) for step in steps]


def offers(
    *of_ranks: list[Generation], nodes: str = "xx", newer_than: int = 0, refused: tuple[str, ...] = ("", "", "", "")
) -> list[Offer]:
    given = zip(nodes, of_ranks, refused, strict=False)
    return [Offer(node, found, [], newer_than, B, 7, why, 0, 0, None) for node, found, why in given]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (offers([], []), []),
        (offers(generations(10), generations(10)), [10]),
        (offers(generations(10, 20), generations(10, 20)), [20, 10]),
        # A rank listed the folder before the last file got its name.
        (offers(generations(10), generations(10, 20)), [10]),
        (offers(generations(10), generations(20)), []),
        (offers(generations(10), generations(10, series=B)), []),
        # Of another world, or of ranks that lay otherwise on the nodes.
        (offers(generations(10, world=4), generations(10, world=4)), []),
        (offers(generations(10, ranks=(0,)), generations(10, ranks=(0,))), []),
        # Two nodes with one rank each.
        (offers(generations(10, ranks=(0,)), generations(10, ranks=(1,)), nodes="xy"), [10]),
        (offers(generations(10, 20, ranks=(0,)), generations(10, ranks=(1,)), nodes="xy"), [10]),
        (offers(generations(10, ranks=(0,)), [], nodes="xy"), []),
        # The ranks changed nodes.
        (offers(generations(10, ranks=(1,)), generations(10, ranks=(0,)), nodes="xy"), []),
        # Not newer than the disk's.
        (offers(generations(10, 20), generations(10, 20), newer_than=10), [20]),
        (offers(generations(10, 20), generations(10, 20), newer_than=20), []),
        # A rank cannot keep its state.
        (offers(generations(10), generations(10), refused=("", "no room")), []),
    ],
)
def test_what_all_nodes_have_is_agreed(given: list[Offer], expected: list[int]) -> None:
    for rank in range(len(given)):
        assert [found.step for found in agree(given, rank).candidates] == expected


def test_the_largest_step_on_disk_counts_and_series_and_interval_of_rank_0() -> None:
    given = [
        Offer("x", generations(10, 20), [], 5, A, 3, "", 31, 40, None),
        Offer("x", generations(10, 20), [], 15, B, 4, "", 30, 0, None),
    ]
    agreed = agree(given, 1)
    assert [found.step for found in agreed.candidates] == [20]
    assert agreed.older == (10,)
    assert (agreed.newer_than, agreed.series, agreed.interval, agreed.node_ranks) == (15, A, 3, (0, 1))
    assert agreed.refusing_rank is None
    assert (agreed.reached, agreed.no_save_until) == (31, 40)


def test_all_ranks_know_the_first_that_can_keep_nothing() -> None:
    given = offers([], [], [], nodes="xxx", refused=("", "no room", "no folder"))
    for rank in range(3):
        agreed = agree(given, rank)
        assert (agreed.refusing_rank, agreed.refused) == (1, "no room")


def test_what_is_left_out_is_known_on_a_node_that_never_had_it() -> None:
    """As on a spare that has become the node of rank 0, which tells the user."""
    given = offers([], generations(10, 20, ranks=(1,)), nodes="xy", newer_than=10)
    for rank in range(2):
        assert [found.step for found in agree(given, rank).left_out] == [20]


def test_what_is_left_out_is_known_beside_an_older_step_that_is_used() -> None:
    given = offers(generations(10, ranks=(0,)), generations(10, 20, ranks=(1,)), nodes="xy")
    agreed = agree(given, 0)
    assert [found.step for found in agreed.candidates] == [10]
    assert [found.step for found in agreed.left_out] == [20]


def test_each_rank_knows_the_ranks_of_its_node() -> None:
    given = offers([], [], [], [], nodes="xyxy")
    assert [agree(given, rank).node_ranks for rank in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]


def held(*ranks: int, step: int = 10, world: int = 4, node_ranks: int = 4) -> HeldFiles:
    return HeldFiles(step, world, node_ranks, A, ranks)


def files_of(given: list[Offer], rank: int = 0) -> list[tuple[int, list[tuple[int, tuple[tuple[int, ...], ...]]]]]:
    """Step, and for each file the old rank and the present ranks of the nodes that have it."""
    return [
        (found.step, [(file.rank, file.nodes) for file in found.files])
        for found in agree(given, rank).candidates
        if isinstance(found, OtherWorld)
    ]


def others(*of_ranks: list[HeldFiles], nodes: str, newer_than: int = 0, why: str = "") -> list[Offer]:
    return [
        Offer(node, [], found, newer_than, B, 7, why, 0, 0, None) for node, found in zip(nodes, of_ranks, strict=True)
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # One node, whose ranks have become fewer.
        (others(*[[held(0, 1, 2, 3)]] * 2, nodes="xx"), [(10, [(rank, ((0, 1),)) for rank in range(4)])]),
        # Two nodes with two files each; and one of them has lost a file.
        (
            others([held(0, 1, node_ranks=2)], [held(2, 3, node_ranks=2)], nodes="xy"),
            [(10, [(0, ((0,),)), (1, ((0,),)), (2, ((1,),)), (3, ((1,),))])],
        ),
        (others([], [held(3, node_ranks=2)], nodes="xy"), [(10, [(3, ((1,),))])]),
        # A file that two nodes have.
        (others([held(0)], [held(0)], nodes="yx"), [(10, [(0, ((0,), (1,)))])]),
        # The newest first; not newer than the disk's; of this job's own number of ranks.
        (others(*[[held(0), held(0, step=20)]] * 2, nodes="xx"), [(20, [(0, ((0, 1),))]), (10, [(0, ((0, 1),))])]),
        (others([held(0)], [held(0)], nodes="xx", newer_than=10), []),
        (others([held(0, world=2)], [held(0, world=2)], nodes="xx"), []),
        (others([held(0)], [held(0)], nodes="xx", why="no room"), []),
    ],
)
def test_files_of_another_number_of_ranks_count_wherever_they_lie(given: list[Offer], expected: object) -> None:
    for rank in range(len(given)):
        assert files_of(given, rank) == expected


def test_of_one_step_that_of_this_job_comes_first() -> None:
    given = [Offer("x", generations(10, series=A), [HeldFiles(10, 4, 4, B, (0,))], 0, B, 7, "", 0, 0, None)] * 2
    assert [found.world for found in agree(given, 0).candidates] == [2, 4]


def test_what_one_node_has_set_aside_is_not_taken_from_another_one() -> None:
    """As from a node that was not in the job when the step was set aside."""
    first, second = others([], [held(0), held(0, step=20)], nodes="xy")
    given = [dataclasses.replace(first, set_aside_from=20), second]
    assert [step for step, _ in files_of(given)] == [10]
