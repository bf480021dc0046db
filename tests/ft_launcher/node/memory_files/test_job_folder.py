"""The folder of a job in a real tmpfs: made, taken over, removed, refused."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ft_launcher.node.memory_files import job_folder
from ft_launcher.node.memory_files.adoption import job_key, names_for
from ft_launcher.node.memory_files.job_folder import JobFolder
from rank_monitor.contract import env
from rank_monitor.contract.memory_files import (
    AUTO,
    MemoryFiles,
    StateFile,
    folder_name,
    no_save_name,
    no_save_until,
    set_aside_from,
    set_aside_name,
)
from rank_monitor.contract.processes import memory_folder, proc, runtime_folder, tmpfs
from rank_monitor.contract.processes.memory_folder import Owner, now_s
from rank_monitor.contract.settings.config import MemorySettings
from rank_monitor.contract.wire.json_record import read_record
from rank_monitor.contract.wire.launcher_messages import NOTHING_LEFT
from tests.patience import until
from tests.program import clean_environment

SHM = "/dev/shm"
KEY = job_key("", os.geteuid(), "/f", ["python", "t.py"], "")
STEP = StateFile(5, 0, 1, 1, "0a1b2c3d").name
BOOT = proc.boot_id().decode().strip()


@pytest.fixture
def top() -> Iterator[Path]:
    """A folder in a tmpfs, as `--ft-memory-dir` may name it."""
    if not Path(SHM).is_dir() or tmpfs.kind_of(SHM) != tmpfs.KIND:
        pytest.skip("/dev/shm is no tmpfs here")
    with tempfile.TemporaryDirectory(dir=SHM) as made:
        yield Path(made)
        while OPENED:
            OPENED.pop().close()


OPENED: list[JobFolder] = []
"""What a test has opened; it is closed at the test's end, if the test has not done it."""


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    return tmp_path


def opened(top: Path, runtime: Path, tag: str = "new", **settings: object) -> JobFolder:
    runtime = Path(tempfile.mkdtemp(dir=runtime))
    OPENED.append(JobFolder.open(MemorySettings(memory_dir=str(top), **settings), KEY, tag, runtime))  # type: ignore[arg-type]
    return OPENED[-1]


def told(folder: JobFolder) -> MemoryFiles:
    return read_record(MemoryFiles, folder.variables()[env.MEMORY_FILES])


def left(
    path: Path, names: tuple[str, ...] = (STEP,), linger_s: float = 600.0, ago_s: float = 1.0, **more: object
) -> Path:
    """What a dead launcher left."""
    owned = memory_folder.make(path)
    assert owned is not None
    facts = {"tag": "dead", "pid": 1, "started": 1, "boot": BOOT, "seen_s": now_s() - ago_s, "linger_s": linger_s}
    owned.write(Owner(**(facts | more)))  # type: ignore[arg-type]
    for name in names:
        (path / name).write_bytes(bytes(1 << 16))
    owned.release()
    return path


def names_in(path: Path) -> list[str]:
    return [found.name for found in path.iterdir()]


def test_a_new_folder_is_told_to_the_ranks_and_to_the_monitors(top: Path, tmp_path: Path) -> None:
    settings = MemorySettings(memory_dir=str(top), memory_keep=3, memory_limit=1 << 20, memory_interval=7)
    folder = JobFolder.open(settings, KEY, "new", tmp_path)
    assert folder.path == top / folder_name(KEY) and folder.path.is_dir()
    assert told(folder) == MemoryFiles(str(folder.path), keep=3, limit=1 << 20, interval=7)
    assert folder.found is None and not folder.refused
    assert runtime_folder.state_in_memory(tmp_path) == folder.path
    owner = memory_folder.read_owner(folder.path)
    assert owner is not None and (owner.tag, owner.pid, owner.linger_s) == ("new", os.getpid(), 600.0)
    folder.close()
    assert not list(top.iterdir())
    folder.close()
    assert told(opened(top, tmp_path)).interval == AUTO


def test_the_default_limit_is_a_part_of_what_is_there(top: Path, runtime: Path) -> None:
    mount = os.statvfs(top)
    assert 0 < told(opened(top, runtime)).limit <= 0.4 * mount.f_blocks * mount.f_frsize


def test_an_earlier_start_is_taken_over(top: Path, runtime: Path) -> None:
    path = left(top / folder_name(KEY))
    folder = opened(top, runtime)
    assert folder.found is not None and folder.found.step == 5
    assert folder.path == path and (path / STEP).exists()
    owner = memory_folder.read_owner(path)
    assert owner is not None and owner.tag == "new" and not owner.is_dead


@pytest.mark.parametrize(
    ("names", "linger_s", "facts"),
    [
        ((STEP,), 0.0, {}),
        ((STEP,), 600.0, {"ago_s": 700.0}),
        ((STEP,), 600.0, {"boot": "another"}),
        ((f"{STEP}.unfinished",), 600.0, {}),
    ],
    ids=["afresh", "too old", "another boot", "nothing complete"],
)
def test_else_it_begins_empty(
    top: Path, runtime: Path, names: tuple[str, ...], linger_s: float, facts: dict[str, object]
) -> None:
    path = left(top / folder_name(KEY), names, **facts)  # type: ignore[arg-type]
    folder = opened(top, runtime, memory_linger=linger_s)
    assert folder.path == path and folder.found is not None and folder.found.step is None
    assert [file.name for file in path.iterdir()] == ["owner"]
    until(lambda: [file.name for file in top.iterdir()] == [path.name], "the removal of what was left")


def test_what_the_dead_launcher_left_running_is_killed_first(top: Path, runtime: Path) -> None:
    """A process of the dead job, which has the lock of its launcher, as a forked rank has."""
    path = left(top / folder_name(KEY), tag="tag-of-the-dead", pid=1 << 22)
    code = "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, 2); print(1, flush=True); time.sleep(600)"
    writer = subprocess.Popen(
        [sys.executable, "-c", code, str(path / "owner")],
        env={**os.environ, env.JOB_TAG: "tag-of-the-dead"},
        stdout=subprocess.PIPE,
    )
    assert writer.stdout is not None and writer.stdout.readline()
    folder = opened(top, runtime)
    assert writer.wait(10) == -9
    writer.stdout.close()
    assert folder.path == path and folder.found is not None and folder.found.step == 5


def test_two_launchers_of_one_key_have_a_folder_each(top: Path, runtime: Path) -> None:
    first, second = opened(top, runtime), opened(top, runtime, tag="second")
    assert [folder.path for folder in (first, second)] == [top / name for name in names_for(KEY)[:2]]
    assert second.found is None
    first.close()
    assert second.path is not None and second.path.is_dir()
    second.close()
    assert not list(top.iterdir())


def test_folders_of_others_are_removed_once_their_time_is_over(top: Path, runtime: Path) -> None:
    uid = os.geteuid()
    over, young, unreadable, gone = (top / folder_name(f"{uid}_{name}") for name in ("a", "b", "c", "d.gone-1"))
    left(over, linger_s=5.0, ago_s=6.0)
    left(young, linger_s=600.0, ago_s=6.0)
    left(unreadable)
    (unreadable / "owner").write_text("?")
    gone.mkdir(0o700)
    (top / "mine").mkdir()
    lives = memory_folder.make(top / folder_name(f"{uid}_e"))
    assert lives is not None
    folder = opened(top, runtime)
    assert folder.path is not None
    stay = {young.name, "mine", lives.path.name, folder.path.name}
    until(lambda: {path.name for path in top.iterdir()} == stay, "the removal of folders whose time is over")


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda path: path.symlink_to("/tmp"), "it is a link"),
        (lambda path: path.write_text("x"), "it is no folder"),
    ],
    ids=["a link", "a file"],
)
def test_what_is_not_ours_is_left_and_another_name_is_taken(
    top: Path, runtime: Path, prepare: Callable[[Path], object], says: str
) -> None:
    """Any user of the machine can make something with the name of a job's folder."""
    first, second, *others = (top / name for name in names_for(KEY))
    prepare(first)
    folder = opened(top, runtime)
    assert folder.path == second and not folder.refused
    folder.close()
    for path in (second, *others):
        prepare(path)
    refused = opened(top, runtime)
    assert refused.path is None and says in refused.refused and "--ft-memory-dir" in refused.refused
    assert "\n" not in refused.refused
    assert told(refused) == MemoryFiles("", keep=2, limit=told(refused).limit, refused=refused.refused)
    refused.note_alive()
    refused.close()
    assert all(os.path.lexists(path) for path in (first, second, *others))


@pytest.mark.parametrize(
    ("place", "says"),
    [("/proc", "proc"), ("/no/such/folder", "No such file or directory")],
    ids=["no tmpfs", "missing"],
)
def test_a_folder_that_is_no_tmpfs_is_refused(runtime: Path, place: str, says: str) -> None:
    folder = opened(Path(place), runtime)
    assert folder.path is None and says in folder.refused and place in folder.refused


@pytest.mark.parametrize("is_told_to_end", [False, True])
def test_a_large_state_is_freed_by_the_launcher_or_by_the_sweeper(
    top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_told_to_end: bool
) -> None:
    """`close` has only renamed the folder: the end of the job is recorded without a wait. A launcher that has got a
    signal to end leaves the rest to the sweeper."""
    monkeypatch.setattr(job_folder, "REMOVED_AT_ONCE", 1 << 15)
    folder = JobFolder.open(MemorySettings(memory_dir=str(top)), KEY, "new", tmp_path)
    path = folder.path
    assert path is not None
    (path / STEP).write_bytes(bytes(1 << 16))
    folder.close()
    (aside,) = memory_folder.aside_of(path)
    assert (aside / STEP).exists() and not path.exists()
    folder.free(lambda: is_told_to_end)
    if not is_told_to_end:
        assert not list(top.iterdir()) and folder.goodbye() == NOTHING_LEFT
        return
    assert (aside / STEP).exists() and folder.goodbye() == os.fsencode(aside)
    after_goodbye = "import sys; from pathlib import Path; from rank_monitor.memory_linger import after_goodbye"
    code = f"{after_goodbye}; after_goodbye(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(aside)], env=clean_environment(), check=True)
    until(lambda: not list(top.iterdir()), "the removal by the sweeper's fork")


def test_a_limit_of_processes_ends_no_launcher(top: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left(top / folder_name(f"{os.geteuid()}_a"), linger_s=0.0)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        folder = opened(top, runtime)
    assert folder.path is not None
    folder.close()


def test_a_launcher_of_another_container_is_not_judged_by_its_pid(top: Path, runtime: Path) -> None:
    """Its process has another pid there, and lives: it holds the lock."""
    path = left(top / folder_name(KEY), pid=1 << 22, pids="pid:[1]", tag="tag-of-the-container")
    code = "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, 2); print(1, flush=True); time.sleep(600)"
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, str(path / "owner")],
        env={**os.environ, env.JOB_TAG: "tag-of-the-container"},
        stdout=subprocess.PIPE,
    )
    assert launcher.stdout is not None and launcher.stdout.readline()
    folder = opened(top, runtime)
    assert launcher.poll() is None
    assert folder.path == top / names_for(KEY)[1]
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()


def test_the_launcher_notes_that_it_lives_without_being_asked(top: Path, runtime: Path) -> None:
    """Also while it waits for a node between two cycles."""
    folder = opened(top, runtime, memory_linger=1.0)
    assert folder.path is not None
    path = folder.path

    def seen_s() -> float:
        owner = memory_folder.read_owner(path)
        assert owner is not None
        return owner.seen_s

    before = seen_s()
    until(lambda: seen_s() > before, "the note of the launcher's thread")
    folder.close()
    assert not any(thread.name == "ft_memory_alive" for thread in threading.enumerate())


def test_a_sign_of_life_is_kept(top: Path, runtime: Path) -> None:
    folder = opened(top, runtime)
    assert folder.path is not None
    before = memory_folder.read_owner(folder.path)
    folder.note_alive()
    after = memory_folder.read_owner(folder.path)
    assert before is not None and after is not None and after.seen_s > before.seen_s


def test_marks_are_there_for_the_ranks_and_for_a_launcher_that_takes_the_folder_over(top: Path, runtime: Path) -> None:
    later = StateFile(7, 0, 1, 1, "0a1b2c3d").name
    path = left(top / folder_name(KEY), names=(STEP, later, set_aside_name(6), no_save_name(9)))
    folder = opened(top, runtime)
    assert folder.found is not None and folder.found.step == 5
    folder.mark(0, 12)
    folder.mark(0, 11)
    names = names_in(path)
    assert (set_aside_from(names), no_save_until(names)) == (6, 12)
    assert no_save_name(9) not in names
    folder.mark(5, 12)
    folder.mark(0, 0)
    names = names_in(path)
    assert (set_aside_from(names), no_save_until(names)) == (5, 12)
    assert all((path / name).stat().st_mode & 0o777 == 0o600 for name in (set_aside_name(5), no_save_name(12)))


def test_a_folder_with_nothing_but_a_bad_state_is_not_taken_over(top: Path, runtime: Path) -> None:
    path = left(top / folder_name(KEY), names=(STEP, set_aside_name(5)))
    folder = opened(top, runtime)
    assert folder.found is not None and folder.found.step is None
    assert set_aside_from(names_in(path)) is None


def test_a_mark_that_cannot_be_made_is_said(top: Path, runtime: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = opened(top, runtime)
    assert folder.path is not None
    (folder.path / set_aside_name(5)).symlink_to("elsewhere")
    folder.mark(5, 0)
    assert "cannot be marked as bad" in caplog.text
    assert not (folder.path / "elsewhere").exists()


def test_without_a_folder_nothing_is_marked() -> None:
    JobFolder(MemorySettings(), "tag").mark(5, 5)
