"""Which file system a folder is in, and how much memory its files take, in a real tmpfs."""

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


def test_the_memory_of_files(folder: Path) -> None:
    assert tmpfs.bytes_in(str(folder)) == 0
    (folder / "below").mkdir()
    for path in (folder / "file", folder / "below" / "file"):
        path.write_bytes(bytes(1 << 20))
    # A hole takes no memory.
    os.truncate(folder / "file", 1 << 30)
    assert tmpfs.bytes_in(str(folder)) == 2 << 20
    assert tmpfs.bytes_in(str(folder / "missing")) == 0
