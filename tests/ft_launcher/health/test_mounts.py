"""Network mounts: the kernel's table, which paths are local, and mounts that answer, fail or hang."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from ft_launcher.health.mounts import Mount, is_local, parse
from ft_launcher.health.node_health import NodeHealth
from ft_launcher.health.plan import Places
from ft_launcher.health.reading import Reading
from rank_monitor.contract.settings.config import HealthSettings
from tests.ft_launcher.health.hanging_mount import hanging

Check = Callable[..., Reading]

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
    mounts = parse(RECORDED)
    assert len(mounts) == 6
    assert mounts[3] == Mount("/mnt/my home", "nfs4", "server:/export/home")
    assert parse(Path("/proc/self/mountinfo").read_text())
    assert parse("rubbish\n - \n1 2 3 - x\n") == []


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
    assert is_local(path, parse(RECORDED)) is local


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


def test_a_folder_of_the_job_on_a_mount_that_hangs(places: Places, tmp_path: Path) -> None:
    """Its room is unknown or it hangs in the kernel; either way the agent goes on."""
    point = tmp_path / "hanging"
    Path(places.mountinfo).write_text(row(point))
    with hanging(point):
        found = NodeHealth(HealthSettings(health_timeout=3.0), (str(point / "logs"),), places=places).check()
    by_process = [reading for reading in found if reading.check == "space" and reading.took_s > 0]
    assert [reading.state for reading in by_process] == ["unhealthy"]
    assert "hangs in the kernel" in by_process[0].reason


def test_a_job_folder_on_a_network_mount(places: Places, tmp_path: Path) -> None:
    Path(places.mountinfo).write_text(row(tmp_path))
    remote = dataclasses.replace(places, shm="/dev/shm")
    found = NodeHealth(HealthSettings(health_timeout=60.0), (str(tmp_path),), places=remote).check()
    assert [(reading.state, reading.took_s > 0) for reading in found if reading.check == "space"] == [
        ("ok", False),
        ("ok", True),
    ]
