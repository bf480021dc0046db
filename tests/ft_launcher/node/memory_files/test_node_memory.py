"""What the ranks of a node keep, read off what they have left."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_launcher.node.memory_files import node_memory
from ft_launcher.node.memory_files.node_memory import NodeMemory
from rank_monitor.contract.memory_files import StateFile, StateFolder, unfinished_name
from rank_monitor.contract.processes.rank_progress import RankProgress, pack, progress_name

LIMIT = 1 << 20


def test_of_two_ranks(tmp_path: Path) -> None:
    for step, ranks in ((5, (0, 1)), (6, (0, 1)), (7, (0,))):
        for rank in ranks:
            (tmp_path / StateFile(step, rank, 2, 2, "aaaaaaaa").name).write_bytes(bytes(8192))
    (tmp_path / unfinished_name(1, 0)).write_bytes(b"")
    first = RankProgress(step=8, saves=3, failed=0, cost_ns=20, first_cost_ns=100, size=8192, began_ns=50, at_ns=2150)
    second = RankProgress(step=7, saves=2, failed=1, cost_ns=40, first_cost_ns=90, size=100, began_ns=50, at_ns=2140)
    (tmp_path / progress_name(0)).write_bytes(pack(first))
    (tmp_path / progress_name(1)).write_bytes(pack(second))
    found = node_memory.read(tmp_path, LIMIT, 50)
    assert (found.newest, found.reached, found.limit) == (6, 8, LIMIT)
    assert (found.saves, found.failed, found.size) == (2, 1, 8292)
    assert (found.cost_s, found.first_cost_s) == (130e-9, 100e-9)
    assert found.share == 0.02
    assert found.in_use >= 5 * 8192


def test_a_folder_of_a_step_counts(tmp_path: Path) -> None:
    (tmp_path / StateFolder(9, 2, "00000000", "aaaaaaaa").name).mkdir()
    assert node_memory.read(tmp_path, LIMIT, 0).newest == 9


def test_what_the_ranks_before_have_noted_does_not_count(tmp_path: Path) -> None:
    (tmp_path / progress_name(0)).write_bytes(pack(RankProgress(step=8, saves=3, began_ns=50)))
    found = node_memory.read(tmp_path, LIMIT, 51)
    assert found == NodeMemory(None, found.in_use, LIMIT, {})
    assert (found.reached, found.saves, found.failed, found.size, found.share) == (None, 0, 0, 0, None)


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        node_memory.read(tmp_path / "gone", LIMIT, 0)
