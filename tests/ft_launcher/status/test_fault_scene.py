"""Where ranks are at a fault: equal stacks together, and who has not come to a collective."""

from __future__ import annotations

from typing import Any

import pytest

from ft_launcher.status.fault_scene import CollectiveRow, collectives, merged_stacks, scene_of
from ft_launcher.status.node_status import RankReading


def rank(number: int, frames: list[str], **groups: tuple[int, int, str]) -> dict[str, Any]:
    states = {
        name: {"entered": entered, "finished": finished, "operation": operation, "shape": "[[4]]", "description": ""}
        for name, (entered, finished, operation) in groups.items()
    }
    return {"rank": number, "place": "collective", "frames": frames, "process": {}, "groups": states}


def test_ranks_at_the_same_place_are_one_group_and_the_smallest_comes_first() -> None:
    frames = ("all_reduce", "step")
    readings = [RankReading(rank, rank, rank, frames=frames) for rank in range(4)]
    readings += [RankReading(4, 4, 4, frames=("read",)), RankReading(5, 5, 5, process={"stacks": "none: stopped"})]
    assert [ranks for ranks, _ in merged_stacks(readings)] == [[4], [5], [0, 1, 2, 3]]


def test_the_group_in_which_ranks_wait_comes_first_and_in_it_who_has_not_come() -> None:
    ranks = [rank(number, [], a=(9, 9, "broadcast"), b=(5, 4, "all_reduce")) for number in range(3)]
    ranks.append(rank(3, [], a=(9, 9, "broadcast"), b=(4, 4, "all_reduce")))
    assert collectives(ranks) == (
        CollectiveRow("b", (3,), 4, 4, "all_reduce", "[[4]]"),
        CollectiveRow("b", range(3), 5, 4, "all_reduce", "[[4]]"),
        CollectiveRow("a", range(4), 9, 9, "broadcast", "[[4]]"),
    )


@pytest.mark.parametrize("ranks", [[4], [4, 5], [4, 5, 6], [1, 3, 5, 7], [1, 2, 4], [1, 3, 4], [6, 5, 4], [2, 2, 2]])
def test_ranks_are_kept_as_they_are(ranks: list[int]) -> None:
    (row,) = collectives([rank(number, [], a=(9, 8, "broadcast")) for number in ranks])
    assert list(row.ranks) == ranks


def test_whatever_ranks_have_written_it_stays_small() -> None:
    ranks = [
        rank(number, [f"{number} {'x' * 5000}"] * 100, **{"g" * 5000: (number, 0, "y" * 5000)}) for number in range(500)
    ]
    scene = scene_of(ranks)
    assert (len(scene.stacks), len(scene.collectives)) == (32, 64)
    assert {len(first.frames) for _, first in scene.stacks} == {32}
    assert max(len(frame) for _, first in scene.stacks for frame in first.frames) == 200
    assert len(scene.collectives[0].group) == len(scene.collectives[0].operation) == 200
