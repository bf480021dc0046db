"""Names of the files of state in memory, and which of them are a complete generation."""

from __future__ import annotations

import pytest

from rank_monitor.contract import memory_files
from rank_monitor.contract.memory_files import Generation, HeldFiles, MemoryFiles, PartsMark, StateFile, StateFolder
from rank_monitor.contract.wire.json_record import read_record, write_record


def names(step: int, ranks: list[int], world: int = 4, node: int = 2, series: str = "0a1b2c3d") -> list[str]:
    return [StateFile(step, rank, world, node, series).name for rank in ranks]


def test_a_name_says_what_was_put_into_it() -> None:
    file = StateFile(step=120, rank=3, world=8, node_ranks=4, series="0a1b2c3d")
    assert file.name == "step-120_rank-3-of-8_node-4_series-0a1b2c3d.safetensors"
    assert memory_files.state_file(file.name) == file
    folder = StateFolder(step=7, world=8, ranks="00000001", series="ffffffff")
    assert memory_files.state_folder(folder.name) == folder
    named = StateFolder(7, 8, "00000001", "ffffffff", memory_files.training_in_name("fold 2"))
    assert memory_files.state_folder(named.name) == named != folder
    assert memory_files.training_in_name("") == ""


@pytest.mark.parametrize(
    "name",
    [
        "",
        memory_files.LOCK_NAME,
        memory_files.unfinished_name(3, 0),
        names(120, [3])[0] + memory_files.UNFINISHED,
        StateFolder(120, 8, "00000001", "0a1b2c3d").name + memory_files.UNFINISHED,
        "step--1_rank-3-of-8_node-4_series-0a1b2c3d.safetensors",
        "step-1_rank-3-of-8_node-4_series-0A1B2C3D.safetensors",
        "step-1_rank-3-of-8_node-4_series-0a1b2c3d.safetensors\n",
        "step-" + "9" * 1000 + "_rank-3-of-8_node-4_series-0a1b2c3d.safetensors",
        "step-\u0661_rank-3-of-8_node-4_series-0a1b2c3d.safetensors",
    ],
)
def test_other_names_are_not_of_whole_files(name: str) -> None:
    assert memory_files.state_file(name) is None
    assert memory_files.state_folder(name) is None


@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        ([], []),
        (names(10, [0]), []),
        (names(10, [0, 1]), [(10, (0, 1))]),
        # The ranks of a node need not follow each other.
        (names(10, [3, 1]), [(10, (1, 3))]),
        (names(10, [0, 1]) + names(20, [0, 1]), [(20, (0, 1)), (10, (0, 1))]),
        (names(10, [0, 1]) + names(20, [0]), [(10, (0, 1))]),
        # A step number is compared as a number.
        (names(9, [0, 1]) + names(10, [0, 1]), [(10, (0, 1)), (9, (0, 1))]),
        # The same step of two series is not one generation, and neither are files of two worlds or nodes.
        (names(10, [0]) + names(10, [1], series="00000000"), []),
        (names(10, [0]) + names(10, [1], world=2), []),
        (names(10, [0]) + names(10, [1], node=1), [(10, (1,))]),
        # More ranks than the node has: somebody else's files are among them.
        (names(10, [0, 1, 2]), []),
        ([*names(10, [0]), memory_files.unfinished_name(1, 0), "lock", "notes.txt"], []),
    ],
)
def test_a_generation_is_complete_when_each_rank_of_the_node_has_its_file(
    listing: list[str], expected: list[tuple[int, tuple[int, ...]]]
) -> None:
    found = memory_files.complete_generations(listing)
    assert [(generation.step, generation.ranks) for generation in found] == expected


def test_a_generation_says_of_which_world_and_series_it_is() -> None:
    assert memory_files.complete_generations(names(10, [2, 3])) == [Generation(10, 4, "0a1b2c3d", (2, 3))]


def test_folders_are_ordered_by_their_steps() -> None:
    listing = [StateFolder(step, 4, "00000001", "0a1b2c3d").name for step in (9, 10, 8)]
    listing.append(StateFolder(11, 4, "00000001", "0a1b2c3d").name + memory_files.UNFINISHED)
    assert [folder.step for folder in memory_files.complete_folders(listing)] == [10, 9, 8]


def test_marks_say_which_local_checkpoint_is_complete() -> None:
    mark = PartsMark(120, "0a1b2c3d")
    assert mark.name == "step-120_parts-0a1b2c3d.mark"
    listing = [mark.name, memory_files.parts_name("0a1b2c3d"), mark.name + "x", *names(10, [0, 1])]
    assert memory_files.parts_marks(listing) == [mark]
    assert memory_files.parts_marks([*listing, memory_files.set_aside_name(121)]) == [mark]
    assert memory_files.parts_marks([*listing, memory_files.set_aside_name(120)]) == []


def test_states_from_a_marked_step_on_are_left_out() -> None:
    listing = names(9, [0, 1]) + names(10, [0, 1]) + names(20, [0, 1])
    listing += [StateFolder(step, 4, "00000001", "0a1b2c3d").name for step in (8, 10)]
    assert memory_files.set_aside_from(listing) is None
    listing.append(memory_files.set_aside_name(10))
    assert memory_files.set_aside_from(listing) == 10
    assert [found.step for found in memory_files.complete_generations(iter(listing))] == [9]
    assert [found.step for found in memory_files.complete_folders(iter(listing))] == [8]
    listing.append(memory_files.set_aside_name(9))
    assert memory_files.complete_generations(listing) == []


def test_of_several_marks_the_one_with_the_latest_step_holds_up_saves() -> None:
    assert memory_files.no_save_until(["lock"]) == 0
    listing = [memory_files.no_save_name(7), memory_files.no_save_name(12), "no-save_until-99x"]
    assert memory_files.no_save_until(listing) == 12
    assert all(memory_files.state_file(name) is None for name in listing)


def test_what_the_launcher_tells_is_read_as_it_was_written() -> None:
    told = MemoryFiles(folder="/dev/shm/" + memory_files.folder_name("job"), keep=2, limit=1 << 30)
    assert told.interval == memory_files.AUTO
    assert read_record(MemoryFiles, write_record(told)) == told


def test_files_are_known_also_where_their_node_has_lost_others() -> None:
    listing = [*names(10, [1]), *names(20, [0, 1]), *names(30, [0]), memory_files.set_aside_name(30)]
    assert memory_files.held_files(listing) == [
        HeldFiles(20, 4, 2, "0a1b2c3d", (0, 1)),
        HeldFiles(10, 4, 2, "0a1b2c3d", (1,)),
    ]
    assert [found.step for found in memory_files.complete_generations(listing)] == [20]
