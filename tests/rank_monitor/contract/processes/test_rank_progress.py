"""How far each rank is, read off what ranks have left, whatever that is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rank_monitor.contract.processes import rank_progress
from rank_monitor.contract.processes.rank_progress import OFFSETS, SIZE, RankProgress, pack, progress_name, unpack

SAID = RankProgress(step=7, saves=3, failed=1, cost_ns=40, first_cost_ns=90, size=12, began_ns=1000, at_ns=5000)


def test_what_is_packed_is_unpacked() -> None:
    assert unpack(pack(SAID)) == SAID
    content = pack(SAID)
    assert int.from_bytes(content[OFFSETS["at_ns"] :][:8], "little") == 5000
    assert all(offset % 8 == 0 for offset in OFFSETS.values())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        bytes(SIZE),
        pack(SAID)[:-1],
        pack(SAID) + b"\0",
        b"ftprogr9" + pack(SAID)[8:],
        pack(SAID)[:-8] + b"\xff" * 8,
    ],
)
def test_what_is_no_record_of_ours_says_nothing(content: bytes) -> None:
    assert unpack(content) is None


@pytest.mark.parametrize(
    ("name", "rank"),
    [("progress_rank-3", 3), ("progress_rank--3", None), ("progress_rank-", None), ("rank-3_slot-0.unfinished", None)],
)
def test_a_name_says_the_rank(name: str, rank: int | None) -> None:
    assert rank_progress.rank_of(name) == rank


def test_the_files_of_a_node_are_read_whatever_lies_beside_them(tmp_path: Path) -> None:
    (tmp_path / progress_name(0)).write_bytes(pack(SAID))
    (tmp_path / progress_name(1)).write_bytes(b"half")
    (tmp_path / progress_name(2)).symlink_to("/dev/zero")
    os.mkfifo(tmp_path / progress_name(3))
    (tmp_path / progress_name(4)).write_bytes(bytes(1 << 20))
    names = [*(path.name for path in tmp_path.iterdir()), progress_name(5)]
    assert rank_progress.read_all(str(tmp_path), names) == {0: SAID}


@pytest.mark.parametrize(
    ("progress", "share"),
    [
        (RankProgress(), None),
        (RankProgress(saves=1, first_cost_ns=50, began_ns=100, at_ns=1150), None),
        (RankProgress(saves=2, cost_ns=10, first_cost_ns=50, began_ns=100, at_ns=1150), 0.01),
        (RankProgress(saves=3, cost_ns=5000, first_cost_ns=50, began_ns=100, at_ns=1150), 1.0),
        (RankProgress(saves=3, cost_ns=10, first_cost_ns=50, began_ns=100, at_ns=120), None),
    ],
)
def test_the_share_of_the_time_leaves_the_first_save_out(progress: RankProgress, share: float | None) -> None:
    assert progress.share == share
