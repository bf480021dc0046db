"""Where ranks are at a fault: equal stacks together, and who has not come to a collective."""

from __future__ import annotations

from typing import Any

from ft_launcher.status.fault_scene import CollectiveRow, collectives, merged_stacks, packed, scene_of, unpacked
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
        CollectiveRow("b", (0, 1, 2), 5, 4, "all_reduce", "[[4]]"),
        CollectiveRow("a", (0, 1, 2, 3), 9, 9, "broadcast", "[[4]]"),
    )


def test_whatever_ranks_have_written_it_stays_small() -> None:
    ranks = [
        rank(number, [f"{number} {'x' * 5000}"] * 100, **{"g" * 5000: (number, 0, "y" * 5000)}) for number in range(500)
    ]
    scene = unpacked(packed(scene_of(ranks)))
    stacks, rows = scene["stacks"], scene["collectives"]
    assert (len(stacks), len(rows)) == (32, 64)
    assert {len(stack["frames"]) for stack in stacks} == {32}
    assert max(len(frame) for stack in stacks for frame in stack["frames"]) == 200
    assert len(rows[0]["group"]) == len(rows[0]["operation"]) == 200
