"""After which steps a framework's checkpoint is written into a folder, for one rank."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import ft_client as ft
from ft_client.memory.folder_saves import FolderSaves, restore_random, write_random
from rank_monitor.contract import env, memory_files
from tests.client.memory.conftest import Tell


def train(saves: FolderSaves, steps: range) -> list[int]:
    """Trains, and returns after which steps a folder was written."""
    written = []
    for step in steps:
        if saves.is_due(step):
            with saves.folder(step, is_collective=False) as folder:
                (folder / "file").write_text(str(step))
            written.append(step)
    return written


def test_a_folder_is_written_at_the_interval(tell: Tell) -> None:
    tell(interval=3)
    assert train(FolderSaves("fit", 4), range(5, 13)) == [6, 9, 12]
    found = ft.latest_memory_folder()
    assert found is not None
    assert (found / "file").read_text() == "12"


def test_a_step_that_is_said_twice_is_saved_once(tell: Tell) -> None:
    """As in batches without a step of the optimizer."""
    tell(interval=1)
    saves = FolderSaves("fit", 0)
    assert train(saves, range(1, 3)) + train(saves, range(2, 4)) == [1, 2, 3]


def test_by_auto_the_first_step_is_saved_and_then_each_tenth(tell: Tell) -> None:
    tell(interval=memory_files.AUTO)
    assert train(FolderSaves("fit", 0), range(1, 15)) == [1, 11]


def test_nothing_is_saved_before_the_step_of_a_fault_is_passed(tell: Tell) -> None:
    folder = tell(interval=1)
    (folder / memory_files.no_save_name(3)).touch()
    assert train(FolderSaves("fit", 0), range(1, 6)) == [4, 5]


def test_without_a_launcher_or_a_folder_nothing_is_due(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    tell(refused="--ft-memory-dir is missing")
    assert not FolderSaves("fit", 0).is_on
    assert train(FolderSaves("fit", 0), range(1, 4)) == []
    monkeypatch.delenv(env.MEMORY_FILES)
    assert train(FolderSaves("fit", 0), range(1, 4)) == []


def test_random_numbers_come_back(tmp_path: Path) -> None:
    restore_random(tmp_path, 0)
    write_random(tmp_path, 0)
    drawn = random.random()
    restore_random(tmp_path, 0)
    assert random.random() == drawn
