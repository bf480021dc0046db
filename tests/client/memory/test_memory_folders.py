"""Folders of a step in memory, for one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

import ft_client as ft
from rank_monitor.contract import env, memory_files
from tests.client.memory.conftest import Tell


@pytest.fixture(autouse=True)
def nothing_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ft.memory_folder, "_not_whole", 0)


def save(step: int, text: str = "state") -> None:
    with ft.memory_folder(step) as folder:
        (folder / "file").write_text(f"{text} {step}")


def names_in(folder: Path) -> list[str]:
    """All but the lock of this process."""
    return sorted(path.name for path in folder.iterdir() if path.name != memory_files.process_lock_name(""))


def test_the_newest_folder_is_found_again(tell: Tell) -> None:
    tell()
    assert ft.latest_memory_folder() is None
    save(9)
    save(10)
    found = ft.latest_memory_folder()
    assert found is not None
    assert (found / "file").read_text() == "state 10"
    assert found.stat().st_mode & 0o777 == 0o700


def test_so_many_folders_are_kept(tell: Tell) -> None:
    folder = tell(keep=2)
    for step in range(1, 6):
        save(step)
    assert [found.step for found in memory_files.complete_folders(names_in(folder))] == [5, 4]
    assert len(names_in(folder)) == 2


def test_a_body_that_fails_leaves_no_folder_and_the_training_goes_on(
    tell: Tell, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tell()
    save(1)
    with ft.memory_folder(2, is_collective=False) as path:
        (path / "file").write_text("half")
        raise RuntimeError("no room")
    assert len(names_in(folder)) == 1
    assert "step 2 was not saved in memory: RuntimeError: no room" in capfd.readouterr().err
    found = ft.latest_memory_folder()
    assert found is not None
    assert (found / "file").read_text() == "state 1"


def test_what_a_dead_process_left_is_removed(tell: Tell) -> None:
    folder = tell()
    with pytest.raises(KeyboardInterrupt), ft.memory_folder(1) as path:
        (path / "file").write_text("half")
        raise KeyboardInterrupt
    assert names_in(folder) == [path.name]
    assert ft.latest_memory_folder() is None
    save(2)
    assert len(names_in(folder)) == 1


def test_a_folder_that_is_too_large_does_not_stay(tell: Tell, capfd: pytest.CaptureFixture[str]) -> None:
    tell(limit=1000)
    save(1)
    save(2, "x" * 2000)
    found = ft.latest_memory_folder()
    assert found is not None
    assert (found / "file").read_text() == "state 1"
    assert "more than the limit" in capfd.readouterr().err


def test_a_folder_that_is_not_newer_than_the_disk_is_not_returned(tell: Tell) -> None:
    tell()
    save(5)
    assert ft.latest_memory_folder(newer_than=5) is None
    assert ft.latest_memory_folder(newer_than=4) is not None


def test_without_a_launcher_the_folder_is_a_temporary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.MEMORY_FILES, raising=False)
    with ft.memory_folder(3) as folder:
        (folder / "file").write_text("state")
    assert not folder.exists()
    assert ft.latest_memory_folder() is None
    with pytest.raises(ZeroDivisionError), ft.memory_folder(3):
        raise ZeroDivisionError


def test_a_folder_of_the_launcher_that_is_gone_ends_nothing(tell: Tell, capfd: pytest.CaptureFixture[str]) -> None:
    tell().rmdir()
    save(1)
    assert "no folders are kept in memory: rank 0: " in capfd.readouterr().err
    assert ft.latest_memory_folder() is None


def test_a_launcher_without_a_folder_ends_nothing(tell: Tell) -> None:
    folder = tell(refused="/dev/full is no tmpfs, too")
    with ft.memory_folder(3) as path:
        (path / "file").write_text("state")
    assert not path.exists()
    assert names_in(folder) == []
    assert ft.latest_memory_folder() is None


def test_an_exception_of_a_collective_body_goes_on(tell: Tell) -> None:
    """Other ranks may wait in the body for this one, which must not wait for them elsewhere."""
    folder = tell()
    save(1)
    with pytest.raises(RuntimeError, match="no room"), ft.memory_folder(2) as path:
        (path / "file").write_text("half")
        raise RuntimeError("no room")
    found = ft.latest_memory_folder()
    assert found is not None
    assert (found / "file").read_text() == "state 1"
    save(3)
    assert [step.step for step in memory_files.complete_folders(names_in(folder))] == [3, 1]
    assert len(names_in(folder)) == 2


def test_after_three_that_came_to_nothing_no_more_are_kept(tell: Tell, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tell(limit=1000)
    for step in (1, 2, 3):
        assert ft.memory_folder.is_on()
        save(step, "x" * 2000)
    assert not ft.memory_folder.is_on()
    save(4)
    save(5)
    assert names_in(folder) == []
    told = capfd.readouterr().err
    assert told.count("no folders are kept in memory: rank 0: 3 folders in a row were not whole") == 1
    with ft.memory_folder(6) as path:
        assert path.parent != folder


def test_a_folder_of_other_ranks_is_not_returned(tell: Tell) -> None:
    """As where the nodes of a job have changed places: the files are those of other ranks."""
    folder = tell()
    save(5)
    (name,) = names_in(folder)
    found = memory_files.state_folder(name)
    assert found is not None
    other = memory_files.StateFolder(6, 1, memory_files.ranks_in_name([1]), found.series)
    (folder / other.name).mkdir()
    latest = ft.latest_memory_folder()
    assert latest is not None
    assert latest.name == name
