"""A real Slurm for tests: the development cluster, two nodes on free ports of loopback, in a temporary folder.

Starts and ends it; says what of it is left. Knows no job.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.ports import free_port
from tests.program import ROOT, run

SCRIPTS = ROOT / "scripts" / "slurm"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
_TRIES = 5
_LIMIT_S = 120.0
_MARK = "SLURM_DEV_DIR"


@contextmanager
def running_slurm() -> Iterator[dict[str, str]]:
    """What leads Slurm's commands to the cluster. Without its programs the test is skipped; in CI it fails."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
    if missing := [program for program in _PROGRAMS if shutil.which(program, path=path) is None]:
        problem = f"{', '.join(missing)} not installed (apt-get install slurmctld slurmd slurm-client munge)"
        pytest.fail(problem) if os.environ.get("CI") else pytest.skip(problem)
    if os.geteuid():
        pytest.skip("slurmd needs root")
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as parent:
        Path(parent).chmod(0o711)  # munged wants its socket to be within reach of all
        folder = Path(parent) / "cluster"
        for _ in range(_TRIES):  # somebody may take a free port before a daemon does
            ports = " ".join(str(free_port()) for _ in range(3))
            environ = dict(os.environ) | {"PATH": path, _MARK: str(folder), "SLURM_DEV_PORTS": ports}
            up = _dev_cluster("up", environ)
            if up.returncode == 0:
                break
            logs = [file.read_text(errors="replace")[-2000:] for file in folder.glob("log/*")]
            _dev_cluster("down", environ)
        else:
            raise AssertionError(f"Slurm does not start: {up.stderr}\n{logs}")
        try:
            yield {"SLURM_CONF": str(folder / "slurm.conf")}
        finally:
            _dev_cluster("down", environ)
        left = marked(f"{_MARK}={folder}")
        assert not left, f"of the cluster are left: {left}"
        assert not folder.exists()


def marked(word: str) -> dict[int, list[str]]:
    """Living processes with this word in their environment."""
    found = {}
    for process in psutil.process_iter():
        try:
            words = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if word.encode() in words and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = process.cmdline()
        except (OSError, psutil.Error):
            pass
    return found


def _dev_cluster(word: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = ["bash", SCRIPTS / "dev_cluster.sh", word]
    return run(command, environ=environ, limit_s=_LIMIT_S)
