"""What becomes of the state in memory after a launcher's death, by real processes that are left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rank_monitor.contract.memory_files import OWNER_NAME, StateFile
from rank_monitor.contract.processes import memory_folder, proc, runtime_folder
from rank_monitor.contract.processes.memory_folder import Owner, now_s
from tests.patience import patient, until
from tests.program import clean_environment

TAG = "0123456789abcdef"
STEP = StateFile(5, 0, 1, 1, "0a1b2c3d").name
LONG_S = 3600.0
AFTER = (
    "import sys; from pathlib import Path; from rank_monitor.memory_linger import after_death\n"
    "after_death(Path(sys.argv[1]), sys.argv[2])"
)


def left(tmp_path: Path, linger_s: float, names: tuple[str, ...] = (STEP,), tag: str = TAG) -> Path:
    """The folder of a dead launcher."""
    owned = memory_folder.make(tmp_path / "f")
    assert owned is not None
    owned.write(Owner(tag, pid=1, started=1, boot="b", seen_s=0.0, linger_s=linger_s))
    for name in names:
        (owned.path / name).write_bytes(bytes(100))
    owned.release()
    return owned.path


def survives(path: Path) -> None:
    """A process that has outlived the launcher does its part, and ends. Nobody waits for its pipe afterwards."""
    done = subprocess.run(
        [sys.executable, "-c", AFTER, str(path), TAG],
        env=clean_environment(),
        capture_output=True,
        timeout=patient(30),
        check=True,
    )
    assert not done.stderr


def waiters(path: Path) -> list[int]:
    """The processes that wait for the end of a folder's time."""
    return [
        pid
        for pid in proc.pids()
        if proc.name_of(pid) == "ft_memory" and str(path).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def test_it_is_removed_when_its_time_is_over(tmp_path: Path) -> None:
    path = left(tmp_path, linger_s=0.5)
    began_s = now_s()
    survives(path)
    until(lambda: not path.exists(), "the removal")
    assert now_s() - began_s >= 0.5
    assert not list(tmp_path.iterdir())
    until(lambda: not waiters(path), "the end of the process that waits")


@pytest.mark.parametrize(
    ("names", "linger_s"),
    [((), LONG_S), ((f"{STEP}.unfinished",), LONG_S), ((STEP,), 0.0)],
    ids=["nothing saved", "no step complete", "no time"],
)
def test_what_nobody_can_use_is_removed_at_once(tmp_path: Path, names: tuple[str, ...], linger_s: float) -> None:
    path = left(tmp_path, linger_s, names)
    survives(path)
    assert not list(tmp_path.iterdir()) and not waiters(path)


def test_one_of_many_survivors_waits_and_notes_when(tmp_path: Path) -> None:
    path = left(tmp_path, LONG_S)
    began_s = now_s()
    for _ in range(3):
        survives(path)
    (waiter,) = until(lambda: waiters(path), "the process that waits")
    owner = memory_folder.read_owner(path)
    assert owner is not None and owner.is_dead and began_s <= owner.seen_s <= now_s()
    assert (path / STEP).exists()
    # It keeps nothing: no pipe, no folder.
    kept = {os.readlink(f"/proc/{waiter}/fd/{number}") for number in os.listdir(f"/proc/{waiter}/fd")}  # noqa: PTH115, PTH208
    assert kept == {"/dev/null"} and Path(f"/proc/{waiter}/cwd").resolve() == Path("/")
    assert os.getsid(waiter) == waiter
    os.kill(waiter, 15)
    until(lambda: not waiters(path), "its end by SIGTERM")
    assert (path / STEP).exists()


def test_it_leaves_alone_what_another_launcher_has_taken(tmp_path: Path) -> None:
    path = left(tmp_path, LONG_S)
    survives(path)
    until(lambda: waiters(path), "the process that waits")
    taken = memory_folder.make(path)
    assert taken is not None
    taken.write(Owner("another", pid=2, started=1, boot="b", seen_s=now_s(), linger_s=LONG_S))
    until(lambda: not waiters(path), "the end of the process that waits", limit_s=10)
    assert (path / STEP).exists()
    survives(path)
    taken.release()
    survives(path)
    assert (path / STEP).exists() and not waiters(path)
    assert memory_folder.read_owner(path) is not None and (path / OWNER_NAME).exists()


def test_a_removal_that_was_cut_off_is_finished(tmp_path: Path) -> None:
    """The launcher was killed while it removed the folder; another job's folder stays."""
    path = left(tmp_path, LONG_S)
    owned = memory_folder.take(path)
    assert owned is not None
    aside = owned.set_aside()
    assert (aside / STEP).exists() and aside.exists()
    (tmp_path / "f2").mkdir()
    survives(path)
    assert [found.name for found in tmp_path.iterdir()] == ["f2"]


def test_nothing_happens_where_nothing_is(tmp_path: Path) -> None:
    survives(tmp_path / "missing")
    assert not list(tmp_path.iterdir())


def test_a_package_that_is_gone_does_not_hinder_the_end(tmp_path: Path) -> None:
    """It was replaced, or its file server is gone with the launcher. The runtime folder goes all the same."""
    path, runtime = left(tmp_path, LONG_S), tmp_path / "runtime"
    runtime.mkdir()
    runtime_folder.link_state_in_memory(runtime, path)
    code = (
        "import sys; from rank_monitor.lost_launcher import MonitoredJob; from rank_monitor.log import Log; "
        "sys.modules['rank_monitor.memory_linger'] = None; MonitoredJob(*sys.argv[1:]).end(Log(''))"
    )
    subprocess.run(
        [sys.executable, "-c", code, TAG, str(runtime)], env=clean_environment(), timeout=patient(30), check=True
    )
    assert not runtime.exists() and (path / STEP).exists()
