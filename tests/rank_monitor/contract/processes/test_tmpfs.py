"""The room for files in a tmpfs, of a real one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rank_monitor.contract.processes import tmpfs

SHM = Path("/dev/shm")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in this machine's tmpfs, removed after the test."""
    if not SHM.is_dir() or tmpfs.kind_of(str(SHM)) != tmpfs.KIND:
        pytest.skip("/dev/shm is no tmpfs here")
    with tempfile.TemporaryDirectory(dir=SHM) as made:
        yield Path(made)


def test_the_kind_of_a_file_system(folder: Path) -> None:
    assert tmpfs.kind_of(str(folder)) == "tmpfs"
    assert tmpfs.kind_of("/proc") == "proc"
    with pytest.raises(FileNotFoundError):
        tmpfs.kind_of(str(folder / "missing"))


def test_room_counts_what_is_held(folder: Path) -> None:
    before = tmpfs.look(str(folder), limit=77)
    assert (before.limit, before.held, before.folder) == (77, 0, str(folder))
    assert 0 < before.tmpfs_free <= before.tmpfs_size
    (folder / "below").mkdir()
    for path in (folder / "file", folder / "below" / "file"):
        path.write_bytes(bytes(1 << 20))
    # A hole takes no memory.
    os.truncate(folder / "file", 1 << 30)
    assert tmpfs.look(str(folder), limit=77).held == 2 << 20
    assert tmpfs.bytes_in(str(folder / "missing")) == 0
