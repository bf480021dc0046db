"""Storage paths on real file systems: fine, missing, full, read-only, gone while in use; and network mounts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ft_launcher.decide.health.reading import Reading, node_state
from ft_launcher.node.health.node_health import NodeHealth, Places
from ft_launcher.node.health.storage import Mount, free_space, is_local, mounts_of
from rank_monitor.contract.settings.config import HealthSettings
from tests.ft_launcher.node.health.hanging_mount import hanging
from tests.patience import until
from tests.program import run

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
        if run(command).returncode:
            pytest.skip("tmpfs cannot be mounted here")
        points.append(point)
        return point

    yield mount
    for point in points:
        run(["umount", "--lazy", str(point)], check=True)


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
    run(["mount", "-o", "remount,ro", str(folder)], check=True)
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


def test_a_node_alone_does_not_leave_for_memory_that_its_ranks_filled(
    places: Places, mounted: Callable[[str], Path]
) -> None:
    shm = mounted("size=1m")
    for is_alone, later in ((True, "warning"), (False, "unhealthy")):
        for before, states in (("empty", ["ok", later]), ("full", ["unhealthy", later])):
            health = NodeHealth(HealthSettings(), places=dataclasses.replace(places, shm=str(shm)), is_alone=is_alone)
            (shm / "filler").unlink(missing_ok=True)
            if before == "full":
                fill(shm)
            found = [health.check()]
            fill(shm)
            found.append(health.check())
            assert [reading.state for readings in found for reading in readings if reading.check == "space"] == states


def test_only_what_the_training_needs_is_a_reason_to_leave(places: Places, mounted: Callable[[str], Path]) -> None:
    full = mounted("size=1m")
    fill(full)
    logs = node_state(NodeHealth(HealthSettings(), [str(full)], places=places).check())
    assert (logs.healthy, logs.reason) == (True, "space warning")
    shared_memory = dataclasses.replace(places, shm=str(full))
    assert not node_state(NodeHealth(HealthSettings(), places=shared_memory).check()).healthy


RECORDED = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
28 22 0:25 / /proc rw - proc proc rw
40 22 0:45 / /scratch rw,relatime shared:9 master:1 - lustre 10.0.0.1@o2ib:/scratch rw,flock
41 22 0:46 /home /mnt/my\040home rw - nfs4 server:/export/home rw,vers=4.2,hard
42 41 0:47 / /mnt/my\040home/local rw - tmpfs tmpfs rw
43 22 0:48 / /mnt/s3 rw - fuse.s3fs s3fs rw
"""


def row(point: Path, kind: str = "nfs4") -> str:
    return f"50 22 0:50 / {point} rw - {kind} server:/export rw\n"


def test_the_kernels_table() -> None:
    mounts = mounts_of(RECORDED)
    assert len(mounts) == 6
    assert mounts[3] == Mount("/mnt/my home", "nfs4", "server:/export/home")
    assert mounts_of(Path("/proc/self/mountinfo").read_text())
    assert mounts_of("rubbish\n - \n1 2 3 - x\n") == []


@pytest.mark.parametrize(
    ("path", "local"),
    [
        ("/tmp", True),
        ("/", True),
        ("/scratch", False),
        ("/scratch/a/../b", False),
        ("/scratch/../tmp", True),
        ("/scratches", True),
        ("/mnt/my home/logs", False),
        ("/mnt/my home/local/logs", True),
        ("/mnt/s3/x", False),
    ],
)
def test_which_paths_are_local(path: str, local: bool) -> None:
    assert is_local(path, mounts_of(RECORDED)) is local


def test_no_network_mount(reading_of: Check) -> None:
    assert reading_of("mounts", enable_dist_storage_healthcheck=True).state == "not present"


@pytest.mark.parametrize(
    ("kind", "state", "reason"),
    [
        ("folder", "ok", ""),
        ("missing", "unknown", "No such file or directory"),
        ("file", "unhealthy", "(nfs4 from server:/export): Not a directory"),
    ],
)
def test_a_mount(reading_of: Check, places: Places, tmp_path: Path, kind: str, state: str, reason: str) -> None:
    point = tmp_path / kind
    if kind == "folder":
        point.mkdir()
    if kind == "file":
        point.touch()
    Path(places.mountinfo).write_text(RECORDED.replace("lustre", "ext4").replace("nfs4", "ext4") + row(point))
    reading = reading_of("mounts", enable_dist_storage_healthcheck=True)
    assert reading.state == state
    assert reason in reading.reason


def test_a_mount_that_hangs(places: Places, tmp_path: Path) -> None:
    """Nothing that a job does by default asks it; the agent never does."""
    point = tmp_path / "hanging"
    Path(places.mountinfo).write_text(row(tmp_path / "gone") + row(point))
    with hanging(point) as hangs:
        assert {reading.state for reading in NodeHealth(HealthSettings(), places=places).check()} == {
            "ok",
            "not present",
        }
        assert not hangs.is_set()
        settings = HealthSettings(enable_dist_storage_healthcheck=True, health_timeout=3.0)
        (reading,) = [found for found in NodeHealth(settings, places=places).check() if found.check == "mounts"]
        assert hangs.is_set()
    assert reading.state == "unhealthy"
    assert f"the last it said: {point} (nfs4 from server:/export)" in reading.reason


def test_a_pipe_is_no_storage(places: Places, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    settings = HealthSettings(storage_health_check_path=(str(tmp_path / "pipe"),), health_timeout=60.0)
    (reading,) = [found for found in NodeHealth(settings, places=places).check() if found.check == "storage"]
    assert (reading.state, "is a FIFO" in reading.reason) == ("unhealthy", True)


def test_a_folder_of_the_job_on_a_mount_that_hangs(places: Places, tmp_path: Path) -> None:
    """The training does without logs and temporary files of the launcher: the node stays."""
    point = tmp_path / "hanging"
    Path(places.mountinfo).write_text(row(point))
    with hanging(point):
        health = NodeHealth(HealthSettings(health_timeout=1.0), (str(point / "logs"),), places=places)
        found, left = health.check(), health.pids()
        again = health.check()
        assert health.pids() == left and len(left) == 1, "nobody asks again before there is an answer"
    assert [node_state(readings).healthy for readings in (found, again)] == [True, True]
    by_process = [reading for reading in found + again if reading.check == "space" and reading.took_s > 0]
    assert [reading.state for reading in by_process] == ["warning", "warning"]
    assert all(f"the last it said: {point / 'logs'}" in reading.reason for reading in by_process)
    until(lambda: psutil.Process(*left).status() == psutil.STATUS_ZOMBIE, "the end of the process that hung")
    assert node_state(health.check()).healthy and health.pids() == set(), "it answers again"


def test_a_job_folder_on_a_network_mount(places: Places, tmp_path: Path) -> None:
    Path(places.mountinfo).write_text(row(tmp_path))
    remote = dataclasses.replace(places, shm="/dev/shm")
    found = NodeHealth(HealthSettings(health_timeout=60.0), (str(tmp_path),), places=remote).check()
    assert [(reading.state, reading.took_s > 0) for reading in found if reading.check == "space"] == [
        ("ok", False),
        ("ok", True),
    ]
