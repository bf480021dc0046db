"""Folders of a step in memory, for one rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import ft_client as ft
from rank_monitor.contract import env, memory_files
from tests.client.memory.conftest import Tell


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ft.memory_folder, "_is_off_said", False)


def save(step: int, text: str = "state") -> None:
    with ft.memory_folder(step) as folder:
        (folder / "file").write_text(f"{text} {step}")


def names_in(folder: Path) -> list[str]:
    """All but the lock of this process."""
    return sorted(path.name for path in folder.iterdir() if path.name != memory_files.process_lock_name(""))


def whole_in(folder: Path) -> list[int]:
    """The steps of the whole folders."""
    return [found.step for found in memory_files.complete_folders(names_in(folder))]


def left_by_another(folder: Path, step: int, size: int = 0, world: int = 1, ranks: tuple[int, ...] = (0,)) -> Path:
    """A whole folder of an earlier cycle of the job."""
    path = folder / memory_files.StateFolder(step, world, memory_files.ranks_in_name(ranks), f"{step:08x}").name
    path.mkdir()
    (path / "file").write_bytes(bytes(size))
    return path


def left_unfinished(folder: Path, step: int, size: int = 0) -> Path:
    """What a rank left that was killed in the block."""
    path = left_by_another(folder, step, size)
    return path.rename(path.with_name(path.name + memory_files.UNFINISHED))


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
    assert whole_in(folder) == [1]
    assert "step 2 was not saved in memory: RuntimeError: no room" in capfd.readouterr().err
    assert not (path / "file").exists()
    found = ft.latest_memory_folder()
    assert found is not None
    assert (found / "file").read_text() == "state 1"


def test_what_a_dead_process_left_is_freed_before_the_next_one_is_written(tell: Tell) -> None:
    folder = tell()
    with pytest.raises(KeyboardInterrupt), ft.memory_folder(1) as path:
        (path / "file").write_text("half")
        raise KeyboardInterrupt
    assert names_in(folder) == [path.name]
    assert ft.latest_memory_folder() is None
    with ft.memory_folder(2) as new:
        assert not (path / "file").exists() and new.exists()
    assert len(names_in(folder)) == 1


def test_after_the_job_has_gone_back_the_new_folders_are_kept(tell: Tell) -> None:
    """Another world is left with folders of later steps, as after the loss of a node; nobody loads them any more."""
    folder = tell(keep=2)
    left_by_another(folder, 10, world=2)
    left_by_another(folder, 9, world=2)
    save(3)
    latest = ft.latest_memory_folder()
    assert latest is not None and (latest / "file").read_text() == "state 3"
    left_by_another(folder, 7)
    save(4)
    assert whole_in(folder) == [4, 3]


def test_a_folder_for_which_there_is_no_room_is_not_begun(tell: Tell, capfd: pytest.CaptureFixture[str]) -> None:
    """Else an exception of the body would end the rank, in each cycle again."""
    folder = tell(limit=5000)
    left_by_another(folder, 1, size=2000)
    left_by_another(folder, 2, size=2000)
    left_by_another(folder, 3, size=90, world=4)
    for _ in range(2):
        assert not ft.memory_folder.is_on()
        with ft.memory_folder(3) as path:
            assert path.parent != folder
    said = capfd.readouterr().err
    assert said.count("no folders are kept in memory: rank 0: 910 bytes are left for one more folder") == 1
    assert "the largest so far has 2.0 KiB; --ft-memory-keep 1" in said
    tell(limit=10000)
    save(3)
    assert whole_in(folder) == [3, 2]


def test_a_size_that_did_not_fit_is_known_to_the_next_process(tell: Tell) -> None:
    folder = tell(limit=1000)
    path = left_unfinished(folder, 1, size=2000)
    for _ in range(2):
        assert not ft.memory_folder.is_on()
        assert not (path / "file").exists()
    tell(limit=10000)
    assert ft.memory_folder.is_on()


def test_what_came_to_nothing_in_other_processes_is_counted(tell: Tell, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tell()
    left_unfinished(folder, 1)
    left_unfinished(folder, 2)
    save(3)
    for step in (4, 5, 6):
        assert ft.memory_folder.is_on()
        left_unfinished(folder, step)
    assert not ft.memory_folder.is_on()
    assert "rank 0: 3 folders in a row were not whole" in capfd.readouterr().err


@pytest.mark.parametrize(
    "call",
    [ft.latest_memory_folder, ft.memory_folder.is_on, lambda: ft.memory_folder(1)],
    ids=["latest", "is_on", "new"],
)
def test_before_the_process_group_there_is_no_folder(
    tell: Tell, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]
) -> None:
    """A rank that believes itself to be alone would remove what other ranks of the node write."""
    tell()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="must be called after"):
        call()
    tell(refused="/dev/full is no tmpfs")
    call()


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
        with ft.memory_folder(step, is_collective=False) as path:
            (path / "file").write_text("half")
            raise RuntimeError("on purpose")
    assert not ft.memory_folder.is_on()
    save(4)
    save(5)
    assert whole_in(folder) == [] and not list(folder.rglob("file"))
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


def test_a_line_that_cannot_be_written_ends_nothing(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    """stderr is on a full disk, and then closed."""
    folder = tell()
    full = Path("/dev/full").open("w")  # noqa: SIM115 - closing it fails
    monkeypatch.setattr(sys, "stderr", full)
    for step in (1, 2):
        with ft.memory_folder(step, is_collective=False):
            raise RuntimeError("no room")
        with suppress(OSError):
            full.close()
    monkeypatch.undo()
    assert whole_in(folder) == []


def test_a_folder_that_is_set_aside_is_not_found_and_makes_room_for_later_ones(
    tell: Tell, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tell(keep=2)
    save(4)
    save(5)
    for name in (memory_files.set_aside_name(5), memory_files.no_save_name(7)):
        (folder / name).touch()
    found = ft.latest_memory_folder()
    assert found is not None and (found / "file").read_text() == "state 4"
    for step in (6, 7):
        assert ft.memory_folder.is_on() and not ft.memory_folder.is_on(step)
        with ft.memory_folder(step) as path:
            assert path.parent == folder, "a whole state may not fit elsewhere"
        with ft.memory_folder(step, is_collective=False) as path:
            raise RuntimeError("no room")
    assert whole_in(folder) == [4], "nothing is kept before the step of the fault is passed"
    assert not path.exists() and not [name for name in names_in(folder) if name.endswith(memory_files.UNFINISHED)]
    assert ft.memory_folder.is_on(8)
    assert capfd.readouterr().err.count("no folders are kept in memory before step 7 is passed") == 1
    with pytest.raises(TypeError):
        ft.memory_folder.is_on("8")  # type: ignore[arg-type]
    save(8)
    assert whole_in(folder) == [8, 4]
    assert memory_files.set_aside_from(names_in(folder)) is None
