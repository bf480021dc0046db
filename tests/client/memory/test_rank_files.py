"""Which file of a rank is written next, and what is never written again."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_client.memory.rank_files import RankFiles
from ft_client.memory.room import NoRoom
from rank_monitor.contract import memory_files
from rank_monitor.contract.memory_files import Generation, MemoryFiles, StateFile

SERIES = "0a1b2c3d"
SIZE = 10_000


def files(folder: Path, rank: int = 0, keep: int = 2, limit: int = 1 << 30) -> RankFiles:
    return RankFiles(MemoryFiles(str(folder), keep, limit), rank)


def name(step: int, rank: int = 0) -> StateFile:
    return StateFile(step, rank, 2, 2, SERIES)


def save(rank_files: RankFiles, step: int, rank: int = 0) -> int:
    """Saves a step; returns the file's inode."""
    file = rank_files.next_file(SIZE)
    assert memory_files.state_file(file.path.name) is None, "a file that is written has no good name"
    rank_files.give_name(file, name(step, rank))
    return file.path.stat().st_ino


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {memory_files.LOCK_NAME}


def test_the_oldest_file_is_written_again(tmp_path: Path) -> None:
    own = files(tmp_path)
    inodes = [save(own, step) for step in range(1, 8)]
    assert len(set(inodes)) == 3
    assert inodes[:4] == inodes[3:7]
    assert names_in(tmp_path) == {name(step).name for step in (5, 6, 7)}


def test_files_that_a_dead_process_left_are_taken_over(tmp_path: Path) -> None:
    dead = files(tmp_path)
    inodes = {save(dead, step) for step in range(1, 4)}
    dead.next_file(SIZE)
    assert names_in(tmp_path) == {memory_files.unfinished_name(0, 0), name(2).name, name(3).name}
    own = files(tmp_path)
    assert {save(own, step) for step in (4, 5, 6)} == inodes


def test_all_files_have_their_size_at_once_so_that_other_ranks_count_it(tmp_path: Path) -> None:
    files(tmp_path, rank=0, limit=7 * SIZE).next_file(SIZE)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 3 * SIZE
    files(tmp_path, rank=1, limit=7 * SIZE).next_file(SIZE)
    with pytest.raises(NoRoom):
        files(tmp_path, rank=2, limit=7 * SIZE).next_file(SIZE)


def test_only_files_of_kept_generations_keep_their_names(tmp_path: Path) -> None:
    own = files(tmp_path)
    for step in (1, 2, 3):
        save(own, step)
    again = files(tmp_path)
    again.keep_only(memory_files.complete_generations([name(2).name, name(2, rank=1).name]))
    assert {found for found in names_in(tmp_path) if memory_files.state_file(found)} == {name(2).name}
    assert len(names_in(tmp_path)) == 3


def test_a_generation_that_is_dropped_is_written_next(tmp_path: Path) -> None:
    own = files(tmp_path)
    inodes = {step: save(own, step) for step in (1, 2, 3)}
    own.make_unfinished(SERIES, 3)
    assert save(own, 4) == inodes[3]
    assert names_in(tmp_path) == {name(step).name for step in (1, 2, 4)}


def test_a_whole_series_may_be_dropped(tmp_path: Path) -> None:
    own = files(tmp_path)
    for step in (1, 2):
        save(own, step)
    own.make_unfinished("ffffffff")
    assert {found for found in names_in(tmp_path) if memory_files.state_file(found)} == {name(1).name, name(2).name}
    own.make_unfinished(SERIES)
    assert not any(memory_files.state_file(found) for found in names_in(tmp_path))


def test_files_of_other_ranks_are_left_alone(tmp_path: Path) -> None:
    other = files(tmp_path, rank=1)
    for step in (1, 2, 3):
        save(other, step, rank=1)
    own = files(tmp_path)
    own.keep_only([])
    own.make_unfinished(SERIES, 3)
    own.remove_others([0, 1])
    for step in (1, 2, 3, 4):
        save(own, step)
    assert {name(step, rank=1).name for step in (1, 2, 3)} < names_in(tmp_path)
    own.remove_others([0])
    assert names_in(tmp_path) == {name(step).name for step in (2, 3, 4)}


def test_what_is_of_no_complete_generation_is_freed(tmp_path: Path) -> None:
    own = files(tmp_path)
    for step in (1, 2):
        save(own, step)
    (tmp_path / name(1, rank=1).name).touch()
    own.remove_useless()
    assert names_in(tmp_path) == {name(1).name, name(1, rank=1).name}


def test_a_larger_state_is_accounted_before_it_is_written(tmp_path: Path) -> None:
    """Into a file of the start before, with a smaller state."""
    save(files(tmp_path), 1)
    own = files(tmp_path, limit=4 * SIZE)
    file = own.next_file(2 * SIZE)
    with pytest.raises(NoRoom):
        own.promise(file, 2 * SIZE)
    assert file.size() == SIZE


def test_folders_of_steps_count(tmp_path: Path) -> None:
    """Those of `memory_folder`, with all that is in them."""
    (tmp_path / "a.folder" / "deep").mkdir(parents=True)
    (tmp_path / "a.folder" / "deep" / "file").write_bytes(bytes(5 * SIZE))
    with pytest.raises(NoRoom):
        files(tmp_path, limit=7 * SIZE).next_file(SIZE)
    files(tmp_path, limit=10 * SIZE).next_file(SIZE)


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("somebody's")
    (tmp_path / memory_files.unfinished_name(0, 0)).symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        files(tmp_path).next_file(SIZE)
    assert target.read_text() == "somebody's"


def test_a_mapping_stays_when_its_file_gets_another_name(tmp_path: Path) -> None:
    own = files(tmp_path)
    file = own.next_file(SIZE)
    own.grow(file, SIZE)
    mapping = file.map(SIZE)
    mapping[0] = 7
    own.give_name(file, name(1))
    assert file.map(SIZE) is mapping
    assert (tmp_path / name(1).name).read_bytes()[0] == 7
    own.grow(file, 3 * SIZE)
    assert file.map(3 * SIZE) is not mapping
    assert file.map(3 * SIZE)[0] == 7


def save_of(folder: Path, rank: int, world: int, step: int) -> StateFile:
    """Makes a whole file of a job with some number of ranks."""
    made = StateFile(step, rank, world, world, SERIES)
    (folder / made.name).write_bytes(b"state")
    return made


def test_files_of_ranks_that_are_gone_stay_as_long_as_they_are_needed(tmp_path: Path) -> None:
    old = [save_of(tmp_path, rank, 4, 10) for rank in range(4)]
    for rank in range(4):
        save_of(tmp_path, rank, 4, 5)
    (tmp_path / memory_files.unfinished_name(3, 0)).write_bytes(b"half")
    kept = [Generation(10, 4, SERIES, (0, 1, 2, 3))]
    for rank in (0, 1):
        files(tmp_path, rank).keep_only(kept)
    files(tmp_path).remove_others((0, 1), kept)
    slots = {memory_files.unfinished_name(rank, 0) for rank in (0, 1)}
    assert names_in(tmp_path) == {file.name for file in old} | slots
    for rank in (0, 1):
        files(tmp_path, rank).make_unfinished_but(2)
    files(tmp_path).remove_others((0, 1))
    assert names_in(tmp_path) == slots | {memory_files.unfinished_name(rank, 1) for rank in (0, 1)}


def test_files_of_this_number_of_ranks_stay_whole(tmp_path: Path) -> None:
    own = save_of(tmp_path, 0, 2, 20)
    save_of(tmp_path, 0, 4, 30)
    files(tmp_path).make_unfinished_but(2)
    assert names_in(tmp_path) == {own.name, memory_files.unfinished_name(0, 0)}
