"""The file of a part, who may read it, and what all ranks agree upon: tables, and real files."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ft_client.integrations.local_checkpoints import part_files, part_format
from ft_client.integrations.local_checkpoints.agreement import (
    Bid,
    Save,
    common_saves,
    decide_save,
    newest_left_out,
)
from ft_client.integrations.local_checkpoints.part_files import NotReadable, Overtaken, TornPart
from ft_client.integrations.local_checkpoints.part_format import SavedPart

TOKEN = "00112233aabbccdd"
PART = SavedPart(iteration=10, rank=3, world=8, token=TOKEN, size=0, checksum=0)


def written(folder: Path, state: object) -> Path:
    """A whole part."""
    part_files.make_folder(folder)
    path = folder / part_format.file_name(10, 3)
    part_files.write(state, folder / part_format.dirty_name(10, 3, TOKEN), path, PART)
    return path


@pytest.mark.parametrize(
    ("name", "is_whole", "is_dirty", "is_leftover"),
    [
        (part_format.file_name(10, 3), True, False, False),
        (part_format.file_name(12345678, 3), True, False, False),
        (part_format.dirty_name(10, 3, TOKEN), False, True, True),
        (part_format.torn_name(10, 3), False, False, True),
        (part_format.file_name(10, 3, "some suffix"), False, False, False),
        ("iter_0000010_3_local.dirty-0.pt", False, False, False),
        ("iter_0000010_3_local.pt.bak", False, False, False),
        ("model.pt", False, False, False),
    ],
)
def test_names_say_what_a_file_is(name: str, is_whole: bool, is_dirty: bool, is_leftover: bool) -> None:
    assert (part_format.whole(name) is not None) == is_whole
    assert part_format.is_dirty(name) == is_dirty
    assert part_format.is_leftover(name) == is_leftover


def test_the_record_at_the_end_comes_back_and_nothing_else_passes_for_one() -> None:
    part = SavedPart(iteration=1 << 40, rank=70000, world=100000, token=TOKEN, size=1 << 36, checksum=0xFFFFFFFF)
    record = part.pack()
    assert len(record) == part_format.RECORD_BYTES
    assert part_format.unpack(record, part.size + len(record)) == part
    assert part_format.unpack(record, part.size + len(record) + 1) is None, "cut off, or something was appended"
    assert part_format.unpack(record[:-1], part.size + len(record)) is None
    for at in range(len(record)):
        flipped = bytearray(record)
        flipped[at] ^= 1
        assert part_format.unpack(bytes(flipped), part.size + len(record)) is None, at


def test_a_part_comes_back_also_by_torch_alone(tmp_path: Path) -> None:
    state = {"weight": torch.arange(100000.0), "steps": [1, "two"]}
    path = written(tmp_path / "3", state)
    found, part = part_files.read(path)
    assert torch.equal(found["weight"], state["weight"]) and found["steps"] == [1, "two"]
    assert (part.iteration, part.rank, part.world, part.token) == (10, 3, 8, TOKEN)
    assert part_files.part_of(path) == part
    assert torch.equal(torch.load(path)["weight"], found["weight"])
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert [other.name for other in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("at", [0, 100, -200, -60], ids=str)
def test_a_flipped_byte_is_found_before_anything_is_unpickled(tmp_path: Path, at: int) -> None:
    path = written(tmp_path / "3", {"weight": torch.zeros(1000)})
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(TornPart):
        part_files.read(path)


@pytest.mark.parametrize("left", [0, 10, 56, 57, 500], ids=str)
def test_a_file_that_is_cut_off_is_torn(tmp_path: Path, left: int) -> None:
    path = written(tmp_path / "3", {"weight": torch.zeros(1000)})
    os.truncate(path, left)
    assert part_files.part_of(path) is None
    with pytest.raises(TornPart):
        part_files.read(path)


def test_only_files_that_nobody_else_can_write_are_read(tmp_path: Path) -> None:
    path = written(tmp_path / "3", {"weight": torch.zeros(10)})
    path.chmod(0o620)
    with pytest.raises(NotReadable):
        part_files.read(path)
    path.chmod(0o600)
    path.parent.chmod(0o710)
    with pytest.raises(NotReadable):
        part_files.read(path)
    part_files.make_folder(path.parent)
    assert part_files.read(path)
    link = path.with_name(part_format.file_name(11, 3))
    link.symlink_to(path)
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        part_files.read(link)
    assert part_files.part_of(link) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
def test_what_another_user_owns_is_not_read(tmp_path: Path) -> None:
    path = written(tmp_path / "3", {"weight": torch.zeros(10)})
    os.chown(path, 4711, 4711)
    with pytest.raises(NotReadable):
        part_files.read(path)
    os.chown(path, os.geteuid(), -1)
    os.chown(path.parent, 4711, 4711)
    with pytest.raises(NotReadable):
        part_files.read(path)
    with pytest.raises(NotReadable):
        part_files.make_folder(path.parent)


class Unwritable:
    def __reduce__(self) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_write_that_fails_leaves_no_file_and_the_old_part(tmp_path: Path) -> None:
    path = written(tmp_path / "3", "old")
    with pytest.raises(OSError, match="No space"):
        written(tmp_path / "3", [torch.zeros(1000), Unwritable()])
    assert [other.name for other in path.parent.iterdir()] == [path.name]
    assert part_files.read(path)[0] == "old"


def bid(
    node: str = "a", need: int = 10, files: int = 100, memory: int = 100, copies: int = 100, refused: str = ""
) -> Bid:
    return Bid(node, TOKEN, need, files, memory, copies, refused)


@pytest.mark.parametrize(
    ("bids", "refused"),
    [
        ([bid()], ""),
        ([bid(), bid(files=20, memory=40)], ""),
        ([bid(), bid(refused="why")], "rank 1: why"),
        ([bid(), bid(files=19)], "parts of 20 bytes do not fit into the 19 bytes that are left on the node of rank 0"),
        ([bid(), bid("b", files=10), bid("b")], "do not fit into the 10 bytes that are left on the node of rank 1"),
        ([bid(), bid(memory=39)], "parts of 20 bytes and their copies do not fit into the 39 bytes of memory"),
        ([bid(need=0, files=0, memory=0)], ""),
    ],
)
def test_a_save_begins_where_it_fits_on_all_nodes(bids: list[Bid], refused: str) -> None:
    verdict = decide_save(bids)
    assert verdict.token == TOKEN
    assert refused in verdict.refused and bool(refused) == bool(verdict.refused)


@pytest.mark.parametrize(
    ("bids", "copies_fit"),
    [
        ([bid(copies=10)], True),
        ([bid(copies=20), bid()], True),
        ([bid(copies=19), bid()], False),
        ([bid(copies=19), bid("b"), bid("c", copies=9)], False),
    ],
)
def test_copies_for_a_persistent_worker_must_fit_on_all_nodes(bids: list[Bid], copies_fit: bool) -> None:
    verdict = decide_save(bids)
    assert verdict.copies_fit == copies_fit and not verdict.refused, "a forked worker needs none"


def test_a_part_of_another_save_than_was_found_is_not_replaced(tmp_path: Path) -> None:
    path = written(tmp_path / "3", "old")
    dirty = path.with_name(part_format.dirty_name(10, 3, 16 * "0"))
    with pytest.raises(Overtaken):
        part_files.write("new", dirty, path, PART, found="")
    assert part_files.read(path)[0] == "old" and not dirty.exists()
    part_files.write("new", dirty, path, PART, found=TOKEN)
    assert part_files.read(path)[0] == "new"


A10, B10, A5, C20 = Save(10, "a"), Save(10, "b"), Save(5, "a"), Save(20, "c")


@pytest.mark.parametrize(
    ("offers", "common", "left_out"),
    [
        ([[A10], [A10]], [A10], None),
        ([[A10], [B10]], [], 10),
        ([[A5, A10], [A5, B10]], [A5], 10),
        ([[A5, A10], [A10, A5]], [A10, A5], None),
        ([[A10, C20], [A10]], [A10], 20),
        ([[A10], []], [], 10),
        ([[], []], [], None),
    ],
)
def test_only_parts_of_one_save_are_loaded_together(
    offers: list[list[Save]], common: list[Save], left_out: int | None
) -> None:
    assert common_saves(offers) == common
    assert newest_left_out(offers, common) == left_out
