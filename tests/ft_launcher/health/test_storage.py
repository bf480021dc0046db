"""Storage paths on real file systems: fine, missing, full, read-only, gone while in use."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ft_launcher.health.node_health import NodeHealth
from ft_launcher.health.plan import Places
from ft_launcher.health.reading import Reading, judge
from ft_launcher.health.storage import free_space
from rank_monitor.contract.settings.config import HealthSettings
from tests.ft_launcher.health.hanging_mount import hanging

Check = Callable[..., Reading]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Options -> a tmpfs with them."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    points: list[Path] = []

    def mount(options: str) -> Path:
        point = tmp_path / f"mount{len(points)}"
        point.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(point)]
        if subprocess.run(command, check=False).returncode:
            pytest.skip("tmpfs cannot be mounted here")
        points.append(point)
        return point

    yield mount
    for point in points:
        subprocess.run(["umount", "--lazy", str(point)], check=True)


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))


def test_paths_that_are_fine(reading_of: Check, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    before = sorted(tmp_path.iterdir())
    reading = reading_of("storage", storage_health_check_path=(str(tmp_path), str(tmp_path / "file")))
    assert (reading.state, reading.reason) == ("ok", "")
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "file").read_bytes() == b"x"


def test_a_path_is_taken_from_the_current_folder(
    reading_of: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert reading_of("storage", storage_health_check_path=("here",)).state == "ok"


def test_a_missing_path(reading_of: Check, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    reading = reading_of("storage", storage_health_check_path=(str(tmp_path), missing))
    assert (reading.state, reading.reason) == ("unhealthy", f"{missing}: No such file or directory")


def test_a_full_path(reading_of: Check, mounted: Callable[[str], Path]) -> None:
    full = mounted("size=1m")
    fill(full)
    reading = reading_of("storage", storage_health_check_path=(str(full),))
    assert (reading.state, reading.reason) == ("unhealthy", f"{full}: No space left on device")
    assert [file.name for file in full.iterdir()] == ["filler"]


def test_a_read_only_path(reading_of: Check, mounted: Callable[[str], Path]) -> None:
    folder = mounted("size=1m")
    (folder / "data").write_bytes(b"x")
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    reading = reading_of("storage", storage_health_check_path=(str(folder),))
    assert reading.state == "unhealthy"
    assert reading.reason.startswith(f"{folder}: Read-only file system (name a file in it")
    assert reading_of("storage", storage_health_check_path=(str(folder / "data"),)).state == "ok"


def test_a_path_that_hangs(reading_of: Check, tmp_path: Path) -> None:
    with hanging(tmp_path / "hanging") as hangs:
        reading = reading_of("storage", storage_health_check_path=(str(tmp_path / "hanging"),), health_timeout=3.0)
        assert hangs.is_set()
    assert reading.state == "unhealthy"
    assert f"the last it said: {tmp_path}/hanging" in reading.reason


def test_full_folders_of_the_job(reading_of: Check, mounted: Callable[[str], Path]) -> None:
    full, small, no_inode = mounted("size=1m"), mounted("size=64k"), mounted("size=1m,nr_inodes=1")
    assert free_space(str(small), needed=True)[0] == "ok"
    fill(full)
    for needed, state in ((True, "unhealthy"), (False, "warning")):
        assert free_space(str(full), needed) == (state, f"{full} is full: 0 bytes are free")
        assert free_space(str(no_inode), needed) == (state, f"{no_inode} is full: no inode is free")
        assert free_space(str(full / "missing"), needed)[0] == "not present"
        assert free_space(str(full / "filler" / "x"), needed)[0] == "unknown"


def test_only_what_the_training_needs_is_a_reason_to_leave(places: Places, mounted: Callable[[str], Path]) -> None:
    full = mounted("size=1m")
    fill(full)
    logs = judge(NodeHealth(HealthSettings(), [str(full)], places=places).check())
    assert (logs.healthy, logs.reason) == (True, "space warning")
    shared_memory = dataclasses.replace(places, shm=str(full))
    assert not judge(NodeHealth(HealthSettings(), places=shared_memory).check()).healthy
