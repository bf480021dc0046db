"""After which steps a framework's checkpoint is written into a folder, for one rank."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ft_client as ft
from ft_client.memory import folder_saves
from ft_client.memory.folder_saves import FolderSaves, must_be_local, restore_random, write_random
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


@pytest.fixture
def latest(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Returns what a training finds: the content of its newest folder; empty: none. Each test is a process of its
    own."""
    monkeypatch.setenv("MASTER_PORT", str(next(PORTS)))

    def found(training: str) -> str:
        path = folder_saves.latest_folder("latest()", 0, training)
        return "" if path is None else (path / "file").read_text()

    yield found


PORTS = itertools.count(1)


def test_each_training_finds_its_own_state(tell: Tell, latest: Callable[[str], str]) -> None:
    tell(interval=1)
    first = FolderSaves("fit", 0, "fold 1")
    train(first, range(1, 9))
    assert (latest("fold 1"), latest("fold 2"), latest("")) == ("8", "", "")
    first.end()
    second = FolderSaves("fit", 0, "fold 2")
    assert (latest("fold 1"), latest("fold 2")) == ("", "")
    train(second, range(1, 3))
    assert latest("fold 2") == "2"


def test_the_state_of_an_earlier_training_makes_room(tell: Tell, latest: Callable[[str], str]) -> None:
    folder = tell(interval=1)
    train(FolderSaves("fit", 0, "fold 1"), range(1, 9))
    train(FolderSaves("fit", 0, "fold 2"), range(1, 3))
    steps = [found.step for found in memory_files.complete_folders(path.name for path in folder.iterdir())]
    assert steps == [2, 1]


def test_a_second_training_without_a_name_of_its_own_keeps_and_finds_nothing(
    tell: Tell, latest: Callable[[str], str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(interval=1)
    first = FolderSaves("fit", 0)
    train(first, range(1, 9))
    first.end()
    assert latest("") == ""
    second = FolderSaves("fit", 0)
    assert not second.is_on and train(second, range(1, 9)) == []
    assert "a training of this name has ended in this process" in capfd.readouterr().err
    monkeypatch.setenv("MASTER_PORT", str(next(PORTS)))  # the next round of a restart in process
    assert latest("") == "8" and FolderSaves("fit", 8).is_on


def test_the_first_rank_of_a_node_writes_whatever_its_local_number_is(
    tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(interval=1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert FolderSaves("fit", 0).is_first_of_node


def test_a_checkpoint_in_a_remote_file_system_is_given_by_its_step() -> None:
    assert must_be_local("out/checkpoint-3") == "out/checkpoint-3"
    with pytest.raises(ValueError, match="give the step"):
        must_be_local("s3://bucket/out")
