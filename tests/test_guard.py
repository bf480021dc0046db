"""A pytest that is killed leaves nothing of what its tests started: real runs of pytest, on a test of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.job import kill, lives
from tests.patience import until
from tests.program import ROOT, ended, run, started

STARTS = """
import os, subprocess, sys, time
from pathlib import Path

TOLD = Path(__file__).with_name("told")

def test_it(tmp_path):
    folder = tmp_path
    for kind in ("tmpfs", "fuse"):
        (folder / kind).mkdir()
    daemon = "import subprocess; print(subprocess.Popen(['sleep', '3600'], stdout=-3, start_new_session=True).pid)"
    found = [int(subprocess.run([sys.executable, "-c", daemon], stdout=subprocess.PIPE).stdout)]
    subprocess.run(["mount", "-t", "tmpfs", "none", str(folder / "tmpfs")])
    words = ["unshare", "--mount", sys.executable, "-m", "tests.stalled_disk", str(folder / "fuse")]
    server = subprocess.Popen(words, stdout=subprocess.PIPE)
    if server.stdout.readline() == b"mounted\\n":  # a user who may not mount has neither
        within = ["nsenter", f"--mount=/proc/{server.pid}/ns/mnt", "sh", "-c", 'echo $$ && cd "$1" && exec sleep 3600']
        user = subprocess.Popen([*within, "sh", str(folder / "fuse")], stdout=subprocess.PIPE)
        found += [server.pid, int(user.stdout.readline())]
    found.append(subprocess.Popen(
        [sys.executable, "-m", "ft_launcher", "--nproc-per-node=2", "rank.py", str(folder)], cwd=TOLD.parent).pid)
    ranks = []
    while len(ranks) < 2:
        time.sleep(0.01)
        ranks = list(folder.glob("rank-*"))
    found += [int(file.name.partition("-")[2]) for file in ranks]
    TOLD.with_suffix(".new").write_text(" ".join(map(str, [os.getpid(), *found])))
    TOLD.with_suffix(".new").rename(TOLD)
    time.sleep(3600)
"""
RANK = """
import os, sys, time
from pathlib import Path

Path(sys.argv[1], f"rank-{os.getpid()}").touch()
time.sleep(3600)
"""
GUARDED = """
from tests.conftest import _guarded
"""


@contextmanager
def running(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A run of pytest on a test that starts all sorts of things."""
    for name, text in (("test_it.py", STARTS), ("rank.py", RANK), ("conftest.py", GUARDED)):
        (folder / name).write_text(text)
    (folder / "pytest.ini").touch()
    command = [sys.executable, "-m", "pytest", f"--rootdir={folder}", f"--basetemp={folder}/base", *words]
    environ = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}"}
    with started([*command, str(folder)], cwd=folder, env=environ) as process:
        yield process


@pytest.mark.parametrize(
    ("words", "who"),
    [(("-p", "no:xdist"), "pytest"), (("-n1",), "pytest"), (("-n1", "--max-worker-restart=0"), "worker")],
    ids=["without workers", "with a worker", "the worker alone"],
)
def test_a_killed_pytest_leaves_nothing(tmp_path: Path, words: tuple[str, ...], who: str) -> None:
    with running(tmp_path, *words) as process:
        told = tmp_path / "told"
        until(lambda: told.exists() or process.poll() is not None, "the test runs", 120)
        assert told.exists(), ended(process)
        worker, *pids = map(int, told.read_text().split())
        assert all(lives(pid) for pid in pids), pids
        kill(process.pid if who == "pytest" else worker)
        until(lambda: not [pid for pid in (worker, *pids) if lives(pid)], lambda: f"one of {pids} lives")
        until(lambda: str(tmp_path) not in Path("/proc/self/mountinfo").read_text(), "nothing is mounted")


def test_what_another_pytest_started_is_spared(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(GUARDED)
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_it.py").write_text("def test_it(): ...\n")
    with started(["sleep", "3600"]) as ours:
        words = [sys.executable, "-m", "pytest", "-p", "no:xdist", f"--rootdir={tmp_path}", str(tmp_path)]
        environ = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}"}
        run(words, folder=tmp_path, environ=environ, check=True)
        assert ours.poll() is None
