"""Where ranks are at a fault: equal stacks together, and who has not come to a collective."""

from __future__ import annotations

from typing import Any

from ft_launcher.tools.status.fault_scene import collectives, merged_stacks, packed, scene_of, unpacked


def rank(number: int, frames: list[str], **groups: tuple[int, int, str]) -> dict[str, Any]:
    states = {
        name: {"entered": entered, "finished": finished, "operation": operation, "shape": "[[4]]", "description": ""}
        for name, (entered, finished, operation) in groups.items()
    }
    return {"rank": number, "place": "collective", "frames": frames, "process": {}, "groups": states}


def test_ranks_at_the_same_place_are_one_group_and_the_smallest_comes_first() -> None:
    ranks = [rank(number, ["all_reduce", "step"]) for number in range(4)]
    ranks += [rank(4, ["read"]), rank(5, []) | {"process": {"stacks": "none: stopped"}}]
    found = merged_stacks(ranks)
    assert [group["ranks"] for group in found] == [[4], [5], [0, 1, 2, 3]]
    assert found[2]["frames"] == ["all_reduce", "step"] and found[1]["process"] == {"stacks": "none: stopped"}


def test_the_group_in_which_ranks_wait_comes_first_and_in_it_who_has_not_come() -> None:
    ranks = [rank(number, [], a=(9, 9, "broadcast"), b=(5, 4, "all_reduce")) for number in range(3)]
    ranks.append(rank(3, [], a=(9, 9, "broadcast"), b=(4, 4, "all_reduce")))
    assert [tuple(row.values()) for row in collectives(ranks)] == [
        ("b", [3], 4, 4, "all_reduce", "[[4]]", 0),
        ("b", [0, 1, 2], 5, 4, "all_reduce", "[[4]]", 0),
        ("a", [0, 1, 2, 3], 9, 9, "broadcast", "[[4]]", 0),
    ]


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
