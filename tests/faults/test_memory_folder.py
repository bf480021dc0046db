"""The folder of the training's state in memory, through the life and death of real launchers: who makes it, takes it
over, and removes it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rank_monitor.contract import env
from rank_monitor.contract.memory_files import OWNER_NAME, MemoryFiles
from rank_monitor.contract.processes import proc
from rank_monitor.contract.wire.json_record import write_record
from tests.faults.conftest import StartJob
from tests.faults.job import Job, Place, kill
from tests.faults.training import Plan
from tests.patience import until
from tests.program import run

WORKER = Path(__file__).with_name("memory_folder_worker.py")
SHM = Path("/dev/shm")


@pytest.fixture
def top() -> Iterator[Path]:
    """What `--ft-memory-dir` names: a folder in a tmpfs, which a test has for itself."""
    with tempfile.TemporaryDirectory(dir=SHM) as made:
        yield Path(made)


def begin(start_job: StartJob, tmp_path: Path, *flags: str, step: int | None = None, **more: Any) -> Job:
    """A job whose ranks have saved a step, if one is given, and wait."""
    for name in ("step", "go", "found-0", "found-1"):
        (tmp_path / name).unlink(missing_ok=True)
    if step is not None:
        (tmp_path / "step").write_text(str(step))
    job = start_job(Plan(), 2, *flags, script=WORKER, **more)
    job.until(lambda: len(list(tmp_path.glob("found-*"))) == 2, "the ranks")
    return job


def found(job: Job, rank: int = 0) -> dict[str, Any]:
    """What a rank found at its start."""
    facts: dict[str, Any] = json.loads((job.folder / f"found-{rank}").read_text())
    return facts


def ends(job: Job, code: int = 0) -> None:
    """The ranks end with a code, and then the launcher."""
    (job.folder / "go").write_text(str(code))
    assert job.finish() == code, job.tail()


def entries(top: Path) -> list[str]:
    return sorted(path.name for path in top.iterdir())


def kill_all_at_once(job: Job) -> None:
    """Kills every process of the job: nobody is left to do anything. The next launcher with the same TMPDIR removes the
    runtime folder."""
    pids = list(job.processes())
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        kill(pid)
    assert job.finish() == 137


@pytest.mark.parametrize("killed", ["the launcher alone", "everything at once"])
def test_a_launcher_that_is_started_again_takes_over_what_was_left(
    start_job: StartJob, tmp_path: Path, top: Path, killed: str
) -> None:
    flags = (f"--ft-memory-dir={top}",)
    first = begin(start_job, tmp_path, *flags, step=7)
    folder = found(first)["folder"]
    if killed == "the launcher alone":
        first.process.kill()
        assert first.finish() == 137
    else:
        kill_all_at_once(first)
    assert entries(top) == [Path(folder).name]
    second = begin(start_job, tmp_path, *flags, name="second", tmp=first.tmp, step=8)
    assert found(second)["folder"] == folder
    assert len([name for name in found(second)["names"] if name.startswith("step-7_")]) == 2
    (line,) = second.journal("memory_found")
    assert line["step"] == 7 and line["left"]["steps"] == [7], second.tail()
    assert "takes over the state in memory of an earlier start: step 7; its launcher died" in second.output
    ends(second)
    assert not entries(top)


def test_it_is_removed_in_time_where_nobody_comes_back(start_job: StartJob, tmp_path: Path, top: Path) -> None:
    job = begin(start_job, tmp_path, f"--ft-memory-dir={top}", "--ft-memory-linger=1", step=7)
    job.process.kill()
    assert job.finish() == 137
    assert entries(top), "the step is there for its time"
    until(lambda: not entries(top), "the removal by the process that was left behind")


def test_another_job_removes_it_where_nobody_was_left_to(start_job: StartJob, tmp_path: Path, top: Path) -> None:
    job = begin(start_job, tmp_path, f"--ft-memory-dir={top}", "--ft-memory-linger=0.2", step=7)
    folder = Path(found(job)["folder"]).name
    kill_all_at_once(job)
    assert entries(top) == [folder]
    other = begin(start_job, tmp_path, f"--ft-memory-dir={top}", "--rdzv-id=other", name="other", tmp=job.tmp)
    until(lambda: folder not in entries(top), "the removal by another job's launcher")
    ends(other)
    assert not entries(top)


def test_nothing_is_left_of_a_job_that_saved_nothing(start_job: StartJob, tmp_path: Path, top: Path) -> None:
    job = begin(start_job, tmp_path, f"--ft-memory-dir={top}")
    assert entries(top) == [Path(found(job)["folder"]).name]
    job.process.kill()
    assert job.finish() == 137
    until(lambda: not entries(top), "the removal")


@pytest.mark.parametrize("how", ["success", "giving up", "SIGTERM"])
def test_an_orderly_end_removes_it(start_job: StartJob, tmp_path: Path, top: Path, how: str) -> None:
    job = begin(start_job, tmp_path, f"--ft-memory-dir={top}", step=7)
    folder = Path(found(job)["folder"])
    assert folder.stat().st_mode & 0o777 == 0o700 and (folder / OWNER_NAME).exists()
    if how == "SIGTERM":
        job.process.terminate()
        assert job.finish() == 86, job.tail()
    else:
        ends(job, code=0 if how == "success" else 7)
    assert not entries(top)


def sweeper_of(job: Job) -> int:
    """Its pid."""
    (found,) = [pid for pid in job.processes() if proc.name_of(pid) == "ft_sweeper"]
    return found


def test_nothing_is_left_of_a_large_state_even_if_what_outlives_the_launcher_is_killed(
    start_job: StartJob, tmp_path: Path, top: Path
) -> None:
    """As Slurm does once its task has ended, and a container with its first process."""
    (tmp_path / "bytes").write_text(str(40 << 20))
    job = begin(start_job, tmp_path, f"--ft-memory-dir={top}", step=7)
    kill(sweeper_of(job))
    ends(job)
    assert not entries(top)
    assert job.journal("job_end")


def test_after_a_signal_the_sweeper_frees_a_large_state(start_job: StartJob, tmp_path: Path, top: Path) -> None:
    """The launcher has seconds to end. The sweeper stands still here until the template, which ends, continues it."""
    (tmp_path / "bytes").write_text(str(40 << 20))
    job = begin(start_job, tmp_path, f"--ft-memory-dir={top}", step=7)
    os.kill(sweeper_of(job), signal.SIGSTOP)
    job.process.terminate()
    assert job.finish() == 86, job.tail()
    assert job.journal("job_end")
    until(lambda: not entries(top), "the removal by the sweeper")


@pytest.mark.parametrize("killed", ["the launcher alone", "everything at once"])
def test_a_removal_that_a_death_has_cut_off_is_finished(
    start_job: StartJob, tmp_path: Path, top: Path, killed: str
) -> None:
    """Between the new name of the folder and the end of the launcher, or of the sweeper: by those that outlive it, else
    by the next launcher of any job."""
    flags = (f"--ft-memory-dir={top}",)
    job = begin(start_job, tmp_path, *flags, step=7)
    folder = Path(found(job)["folder"])
    folder.rename(folder.with_name(f"{folder.name}.gone-0a1b2c3d"))
    if killed == "the launcher alone":
        job.process.kill()
        assert job.finish() == 137
    else:
        kill_all_at_once(job)
        assert entries(top)
        other = begin(start_job, tmp_path, *flags, "--rdzv-id=other", name="other", tmp=job.tmp)
        ends(other)
    until(lambda: not entries(top), "the removal")


def test_zero_begins_afresh(start_job: StartJob, tmp_path: Path, top: Path) -> None:
    first = begin(start_job, tmp_path, f"--ft-memory-dir={top}", step=7)
    kill_all_at_once(first)
    flags = (f"--ft-memory-dir={top}", "--ft-memory-linger=0")
    second = begin(start_job, tmp_path, *flags, name="second", tmp=first.tmp)
    assert found(second)["names"] == []
    assert "the state in memory of an earlier start, step 7, is removed" in second.output
    ends(second)
    assert not entries(top)


def test_a_restart_of_the_ranks_keeps_the_folder(start_job: StartJob, tmp_path: Path, top: Path) -> None:
    job = begin(start_job, tmp_path, f"--ft-memory-dir={top}", "--max-restarts=1", step=7)
    before = found(job)
    (tmp_path / "found-0").unlink()
    kill(before["pid"])
    job.until((tmp_path / "found-0").exists, "the next cycle")
    assert found(job)["folder"] == before["folder"]
    assert len(found(job)["names"]) == 2
    ends(job)
    assert not entries(top)


def test_two_jobs_with_one_run_id_have_a_folder_each(start_job: StartJob, tmp_path: Path, top: Path) -> None:
    flags = (f"--ft-memory-dir={top}", "--rdzv-id=same")
    first = begin(start_job, tmp_path, *flags, step=7)
    folders = {found(first)["folder"]}
    second = begin(start_job, tmp_path, *flags, name="second")
    folders.add(found(second)["folder"])
    assert len(folders) == 2 and found(second)["names"] == []
    (tmp_path / "go").write_text("0")
    assert (first.finish(), second.finish()) == (0, 0)
    assert not entries(top)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a folder of another user")
def test_another_users_folder_is_not_touched(start_job: StartJob, tmp_path: Path, top: Path) -> None:
    flags = (f"--ft-memory-dir={top}", "--rdzv-id=mine")
    first = begin(start_job, tmp_path, *flags)
    folder = Path(found(first)["folder"])
    ends(first)
    folder.mkdir(0o700)
    os.chown(folder, 4711, 4711)
    second = begin(start_job, tmp_path, *flags, step=7, name="second")
    assert found(second)["folder"] == f"{folder}_1"
    ends(second)
    assert entries(top) == [folder.name]
    assert folder.stat().st_uid == 4711 and not list(folder.iterdir())


def test_a_job_without_a_tmpfs_trains_without(start_job: StartJob, tmp_path: Path) -> None:
    job = begin(start_job, tmp_path, "--ft-memory-dir=/no/such/folder", step=7)
    assert found(job)["folder"] == ""
    ends(job)
    (line,) = [line for line in job.output.splitlines() if "no state is kept in memory" in line]
    assert "/no/such/folder: No such file or directory. Name another tmpfs by --ft-memory-dir" in line


def in_read_only_shm(words: list[str], **more: Any) -> subprocess.Popen[bytes]:
    """Starts a program whose /dev/shm cannot be written to."""
    mount = 'mount -t tmpfs -o ro tmpfs /dev/shm && exec "$@"'
    return subprocess.Popen(["unshare", "--mount", "sh", "-c", mount, "-", *words], **more)


def test_a_job_that_asks_for_nothing_gets_no_line(start_job: StartJob, tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None or run(["unshare", "--mount", "true"]).returncode:
        pytest.skip("needs root and unshare")
    job = begin(start_job, tmp_path, place=Place(start=in_read_only_shm))
    assert "Read-only file system" in found(job)["refused"]
    ends(job)
    assert len(job.journal("memory_refused")) == 1 and "in memory" not in job.output


def test_none_keeps_nothing(start_job: StartJob, tmp_path: Path, top: Path) -> None:
    of_another_job = {env.MEMORY_FILES: write_record(MemoryFiles(str(top), keep=2, limit=1))}
    flags = (f"--ft-memory-dir={top}", "--ft-memory-interval=none")
    job = begin(start_job, tmp_path, *flags, step=7, place=Place(environ=of_another_job))
    assert found(job)["folder"] == found(job)["refused"] == "" and not entries(top)
    ends(job)
