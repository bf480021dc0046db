"""Which folders are taken for abandoned: those whose lock nobody holds, and no others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rank_monitor.contract.processes.runtime_folder import claim, remove_abandoned


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A runtime folder of a dead launcher, with something in it."""
    made = tmp_path / "ft-dead"
    made.mkdir(mode=0o700)
    descriptor = claim(made)
    assert descriptor is not None
    os.close(descriptor)
    (made / "cycle_0").mkdir()
    (made / "cycle_0" / "file").touch()
    yield made


def test_an_abandoned_one_is_removed(folder: Path) -> None:
    assert remove_abandoned(folder.parent) == [folder]
    assert not folder.exists()


def test_one_that_is_claimed_stays(folder: Path) -> None:
    lasting = folder.with_name("ft-lasting")
    lasting.mkdir(mode=0o700)
    descriptor = claim(lasting)
    assert remove_abandoned(folder.parent) == [folder]
    assert lasting.is_dir() and descriptor is not None
    os.close(descriptor)


def test_a_copy_of_the_descriptor_holds_it_too(tmp_path: Path) -> None:
    """Those of a fork of the launcher, which may be about to become a rank."""
    lasting = tmp_path / "ft-lasting"
    lasting.mkdir(mode=0o700)
    descriptor = claim(lasting)
    assert descriptor is not None
    copy = os.dup(descriptor)
    os.close(descriptor)
    assert remove_abandoned(tmp_path) == []
    os.close(copy)
    assert remove_abandoned(tmp_path) == [lasting]


def test_what_is_not_surely_ours_stays(folder: Path) -> None:
    """No lock (it is being made, or is another program's), open to others, of another machine, a link, a pipe."""
    names = {name: folder.with_name(f"ft-{name}") for name in ("bare", "open", "elsewhere", "pipe")}
    for path in names.values():
        path.mkdir(mode=0o700)
    names["open"].chmod(0o755)
    (names["open"] / "lock").write_bytes((folder / "lock").read_bytes())
    (names["elsewhere"] / "lock").write_text("another boot of another machine")
    os.mkfifo(names["pipe"] / "lock")
    folder.with_name("ft-link").symlink_to(folder)
    (folder.parent / "other").mkdir(mode=0o700)
    (folder.parent / "other" / "lock").write_bytes((folder / "lock").read_bytes())
    assert remove_abandoned(folder.parent) == [folder]
    assert all(path.is_dir() for path in (*names.values(), folder.parent / "other"))


def test_a_folder_that_is_not_there_is_harmless(tmp_path: Path) -> None:
    assert claim(tmp_path / "gone") is None
    assert remove_abandoned(tmp_path / "gone") == []
