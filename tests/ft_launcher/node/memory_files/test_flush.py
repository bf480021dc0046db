"""State in memory that is written to storage and brought back, by the real process; the storage may stand still."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import ANY, Mock

import pytest

from ft_launcher.agent.ranks import Ranks
from ft_launcher.node.memory_files import flush as flush_module
from ft_launcher.node.memory_files.flush import EndTime, Flush
from ft_launcher.node.memory_files.job_folder import JobFolder
from rank_monitor import memory_flush
from rank_monitor.contract import memory_files
from rank_monitor.contract.flush_order import WRITE, FlushOrder, FlushResult
from rank_monitor.contract.memory_files import StateFile
from rank_monitor.contract.settings.config import MemorySettings, Settings
from rank_monitor.contract.wire.json_record import write_record
from tests.faults.test_stalled_disk import QUEUED, SERVED, Stall
from tests.patience import patient, until
from tests.program import ROOT

SERIES = "0a1b2c3d"
KEY = f"{os.geteuid()}_key"


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    (tmp_path / "storage").mkdir()
    return tmp_path / "storage"


def save(memory: Path, step: int, ranks: tuple[int, ...] = (0, 1), world: int = 2, size: int = 1 << 20) -> None:
    """A generation of a node."""
    for rank in ranks:
        file = memory / StateFile(step, rank, world, len(ranks), SERIES).name
        file.write_bytes(bytes([rank]) * size)


def clear(memory: Path) -> None:
    for path in memory.iterdir():
        path.unlink()


def steps_in(folder: Path) -> list[int]:
    return [found.step for found in memory_files.complete_generations(path.name for path in folder.iterdir())]


def on_storage(storage: Path) -> list[int]:
    """The steps that are whole there."""
    names = [path.name for home in storage.iterdir() for path in home.iterdir()]
    return [found.step for found in memory_files.complete_folders(names)]


def flush(storage: Path, memory: Path, key: str = KEY, command: str = "c", limit: int = 1 << 30) -> Flush:
    still_s = patient(30.0)
    return Flush(storage, key, command, memory, limit, (still_s, still_s))


def write(of: Flush, below: int = 0) -> FlushResult:
    return of.write(below, lambda: float("inf"))


@pytest.fixture
def interrupt() -> Iterator[int]:
    """A descriptor that becomes readable when something is written to its pipe."""
    read, write = os.pipe()
    yield read
    os.close(read)
    os.close(write)


def bring_back(of: Flush, interrupt: int, world: int = 2, ranks: tuple[int, ...] = (0, 1)) -> FlushResult:
    return of.bring_back(world, ranks, interrupt)


def test_the_newest_state_comes_back(storage: Path, memory: Path, interrupt: int) -> None:
    save(memory, 5)
    save(memory, 10, size=20 << 20)
    one = flush(storage, memory)
    assert write(one) == FlushResult(10, 40 << 20)
    (home,) = storage.iterdir()
    assert home.stat().st_mode & 0o777 == 0o700
    clear(memory)
    found = bring_back(one, interrupt)
    assert (found.step, found.size, found.reason) == (10, 40 << 20, "")
    assert steps_in(memory) == [10, 5]
    assert (memory / StateFile(10, 1, 2, 2, SERIES).name).read_bytes() == bytes([1]) * (20 << 20)
    assert (memory / memory_files.flushed_name(10, SERIES)).exists()
    assert one.forget() == ""
    assert not list(storage.iterdir())


def test_two_states_are_kept_and_other_nodes_have_their_own(storage: Path, memory: Path, interrupt: int) -> None:
    for step, kept in ((5, [5]), (10, [10, 5]), (15, [15, 10])):
        clear(memory)
        save(memory, step)
        write(flush(storage, memory))
        assert on_storage(storage) == kept
    clear(memory)
    save(memory, 10)
    write(flush(storage, memory))
    assert on_storage(storage) == [10], "the training has not gone on from step 15"
    other = memory.with_name("other")
    other.mkdir()
    save(other, 10, ranks=(2, 3), world=4)
    write(flush(storage, other))
    assert on_storage(storage) == [10, 10]
    assert bring_back(flush(storage, other), interrupt, 4, (0, 1)).step is None
    clear(other)
    assert bring_back(flush(storage, other), interrupt, 4, (2, 3)).step == 10


def test_what_was_cut_off_is_not_read(storage: Path, memory: Path, interrupt: int) -> None:
    save(memory, 5)
    one = flush(storage, memory)
    write(one)
    (home,) = storage.iterdir()
    (folder,) = home.iterdir()
    folder.rename(home / (folder.name + memory_files.UNFINISHED))
    (memory / StateFile(5, 0, 2, 2, SERIES).name).unlink()
    assert bring_back(one, interrupt) == FlushResult()
    assert steps_in(memory) == []


def test_a_file_that_is_missing_brings_nothing_back(storage: Path, memory: Path, interrupt: int) -> None:
    save(memory, 5)
    one = flush(storage, memory)
    write(one)
    next(storage.glob("*/*/step-5_rank-1-*")).unlink()
    clear(memory)
    found = bring_back(one, interrupt)
    assert found.step is None and "No such file" in found.reason
    assert list(memory.iterdir()) == []


def test_nodes_that_are_a_save_apart_have_a_step_in_common(storage: Path, memory: Path, interrupt: int) -> None:
    """The job was ended while its ranks saved: the newest state of one node is not complete on the other one."""
    nodes = [(memory, (0, 1), [15, 10]), (memory.with_name("other"), (2, 3), [10, 5])]
    nodes[1][0].mkdir()
    for folder, ranks, steps in nodes:
        for step in steps:
            save(folder, step, ranks, world=4)
        assert write(flush(storage, folder)).step == steps[0]
        clear(folder)
    for folder, ranks, steps in nodes:
        assert bring_back(flush(storage, folder), interrupt, 4, ranks).step == steps[0]
        assert steps_in(folder) == steps


def test_what_is_in_memory_is_not_copied_and_what_is_older_is(storage: Path, memory: Path, interrupt: int) -> None:
    """Another node may have lost what this one has in memory, and only what was written is there on both."""
    save(memory, 5)
    one = flush(storage, memory)
    write(one)
    found = bring_back(one, interrupt)
    assert (found.step, found.reason) == (None, "step 5 there is in memory already")
    clear(memory)
    save(memory, 10)
    found = bring_back(one, interrupt)
    assert (found.step, found.reason) == (5, "")
    assert steps_in(memory) == [10, 5]


def test_a_state_that_is_set_aside_in_memory_does_not_come_back(storage: Path, memory: Path, interrupt: int) -> None:
    save(memory, 5)
    save(memory, 10)
    one = flush(storage, memory)
    write(one)
    clear(memory)
    (memory / memory_files.set_aside_name(7)).touch()
    assert bring_back(one, interrupt).step == 5


def test_a_newer_state_that_is_damaged_does_not_hide_an_older_one(storage: Path, memory: Path, interrupt: int) -> None:
    save(memory, 5)
    save(memory, 10)
    one = flush(storage, memory)
    write(one)
    clear(memory)
    next(storage.glob("*/*/step-10_rank-1-*")).unlink()
    found = bring_back(one, interrupt)
    assert found.step == 5 and "No such file" in found.reason
    assert steps_in(memory) == [5]


def test_a_state_that_is_set_aside_is_neither_written_nor_kept(storage: Path, memory: Path) -> None:
    save(memory, 10)
    one = flush(storage, memory)
    write(one)
    save(memory, 5)
    (memory / memory_files.set_aside_name(7)).touch()
    assert write(one, below=7).step == 5
    assert on_storage(storage) == [5]
    (memory / memory_files.set_aside_name(2)).touch()
    assert write(one, below=2) == FlushResult()
    assert on_storage(storage) == []


@pytest.mark.parametrize("newest", [15, 5])
def test_a_state_that_is_set_aside_goes_on_this_node_only(storage: Path, memory: Path, newest: int) -> None:
    """Another node has just written its own, or does it now."""
    other = memory.with_name("other")
    other.mkdir()
    save(other, 15, ranks=(2, 3), world=4)
    write(flush(storage, other))
    (home,) = storage.iterdir()
    (done,) = home.iterdir()
    half = done.with_name(done.name.replace("step-15", "step-16") + memory_files.UNFINISHED)
    shutil.copytree(done, half)
    save(memory, 10, ranks=(0, 1), world=4)
    one = flush(storage, memory)
    write(one)
    (memory / memory_files.set_aside_name(7)).touch()
    one.remove(below=7)
    until(lambda: not one.pids(), "the end of the removal")
    assert on_storage(storage) == [15] and half.is_dir()
    (memory / memory_files.set_aside_name(7)).unlink()
    clear(memory)
    save(memory, newest, ranks=(0, 1), world=4)
    assert write(one, below=7).step == newest
    assert sorted(on_storage(storage)) == sorted([15, newest]) and half.is_dir()


def test_a_removal_that_is_late_does_not_remove_what_is_written_then(
    storage: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(memory, 10)
    one = flush(storage, memory)
    with monkeypatch.context() as slow:
        slow.setattr(flush_module, "START", "import time; time.sleep(600)")
        one.remove(below=5)
    assert len(one.pids()) == 1
    assert write(one).step == 10
    until(lambda: not one.pids(), "the end of the removal")


def test_the_folder_of_the_job_is_made_again_where_another_process_removes_it(
    storage: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(memory, 5)
    home, make, made = storage / "job", Path.mkdir, []

    def make_and_remove(path: Path, *args: int) -> None:
        make(path, *args)
        made.append(path)
        if made == [home]:
            path.rmdir()

    order = FlushOrder(WRITE, str(storage), str(memory), home.name, os.geteuid(), "c")
    monkeypatch.setattr(sys, "argv", ["", write_record(order)])
    monkeypatch.setattr(Path, "mkdir", make_and_remove)
    memory_flush.main()
    assert on_storage(storage) == [5]


def test_another_command_of_the_same_key_does_not_go_on_from_it(storage: Path, memory: Path, interrupt: int) -> None:
    save(memory, 5)
    write(flush(storage, memory, command="one"))
    clear(memory)
    other = flush(storage, memory, command="other")
    found = bring_back(other, interrupt)
    assert found.step is None and "was written by another command" in found.reason
    other.remove(below=1)
    assert bring_back(flush(storage, memory, key="another"), interrupt) == FlushResult()
    assert bring_back(flush(storage, memory, command="one"), interrupt).step == 5


def test_commands_of_one_key_do_not_hide_or_remove_what_the_other_has(
    storage: Path, memory: Path, interrupt: int
) -> None:
    own, other = flush(storage, memory, command="own"), flush(storage, memory, command="other")
    save(memory, 5)
    write(own)
    clear(memory)
    save(memory, 50)
    write(other)
    clear(memory)
    assert bring_back(own, interrupt) == FlushResult(5, 2 << 20, "", ANY, ANY)
    clear(memory)
    for step in (6, 7, 8):
        save(memory, step)
        write(own)
    clear(memory)
    assert own.forget() == ""
    assert bring_back(other, interrupt).step == 50


def test_what_does_not_fit_is_refused_with_numbers(storage: Path, memory: Path, interrupt: int) -> None:
    save(memory, 5)
    one = flush(storage, memory, limit=1 << 20)
    write(one)
    clear(memory)
    assert bring_back(one, interrupt).reason == "step 5 there has 2.0 MiB, and memory has room for 1.0 MiB"
    save(memory, 6, size=0)
    for path in memory.iterdir():
        os.truncate(path, 1 << 42)
    found = write(one)
    assert found.step is None and "step 6 has 8192.0 GiB, and" in found.reason and "free" in found.reason
    assert on_storage(storage) == [5]


@pytest.mark.parametrize("what", ["link", "file", "mode"])
def test_a_name_that_is_taken_is_left_alone(storage: Path, memory: Path, interrupt: int, what: str) -> None:
    save(memory, 5)
    home, elsewhere = storage / memory_files.folder_name(KEY), memory.with_name("elsewhere")
    elsewhere.mkdir()
    if what == "link":
        home.symlink_to(elsewhere)
    elif what == "file":
        home.touch()
    else:
        home.mkdir()
        home.chmod(0o755)
    one = flush(storage, memory)
    for found in (write(one), bring_back(one, interrupt)):
        assert found.step is None
        assert ("may be entered by other users" if what == "mode" else "is no folder") in found.reason
    assert not list(elsewhere.iterdir())


def test_without_the_folder_one_reason_says_so(tmp_path: Path, memory: Path, interrupt: int) -> None:
    save(memory, 5)
    one = flush(tmp_path / "missing", memory)
    assert write(one).reason == bring_back(one, interrupt).reason == f"{tmp_path / 'missing'} is no folder"


BUSY = "import itertools\nfor number in itertools.count(): print(number, flush=True)"
"""A program that makes progress without end."""


def test_a_signal_ends_the_wait_while_bytes_flow(storage: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush_module, "START", BUSY)
    read, write_end = os.pipe()
    os.write(write_end, b"x")
    assert bring_back(flush(storage, memory), read).reason == "this launcher got a signal"
    os.close(read)
    os.close(write_end)


def test_the_time_ends_while_bytes_flow(storage: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush_module, "START", BUSY)
    ends = iter([math.inf] * 5)
    assert "the time was over" in flush(storage, memory).write(0, lambda: next(ends, -math.inf)).reason
    assert flush(storage, memory).write(0, lambda: -math.inf).reason == "no time was left"


def test_what_was_written_counts_when_the_time_ends(
    storage: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time ends while the second state is written."""
    said = storage / "said"
    program = (
        f"import pathlib; print({write_record(FlushResult(5, 7))!r}, flush=True); pathlib.Path({str(said)!r}).touch()"
    )
    monkeypatch.setattr(flush_module, "START", f"{program}\n{BUSY}".replace("{", "{{").replace("}", "}}"))
    found = flush(storage, memory).write(0, lambda: -math.inf if said.exists() else math.inf)
    assert found == FlushResult(5, 7)


def test_a_process_that_is_left_behind_is_the_launchers_own(
    storage: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each stop of ranks would wait for one that the kernel does not let go."""
    monkeypatch.setattr(flush_module, "START", "import time; time.sleep(600)")
    folder = JobFolder(MemorySettings(), "tag")
    assert folder.pids() == set()
    folder.flush = flush(storage, memory)
    folder.flush.remove(below=1)
    (pid,) = folder.pids()
    parts = Mock(state_in_memory=folder, adopt_orphans=True, health_watch=None, settings=Settings())
    for other in (parts.health, parts.memory, parts.zygotes):
        other.pids.return_value = set()
    parts.runtime.tag = "tag"
    ranks = Ranks(parts, Mock(ranks=[]), None, False)
    assert ranks.tree(among=lambda member, session: member == pid).members() == set()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not folder.pids(), "the end of the process")


def test_a_further_signal_shortens_the_end() -> None:
    arrived: list[int] = []
    end = EndTime(float("inf"), lambda: arrived, lambda numbers: 100.0 / len(numbers))
    assert end() == float("inf")
    arrived.append(15)
    first = end()
    assert first == end() < float("inf")
    arrived.append(15)
    assert end() < first


PROGRAM = """
import sys, time
from pathlib import Path
from ft_launcher.node.memory_files.flush import Flush

storage, memory, still_s = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
one = Flush(storage, "key", "c", memory, 1 << 30, (still_s, still_s))
print(one.write(0, lambda: float("inf")).reason)
print(one.bring_back(2, [0, 1], sys.stdin.fileno()).reason)
print(one.forget())
one.remove(1)
print(one.write(0, lambda: time.monotonic() + 1).reason)
"""


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse")
@pytest.mark.parametrize("stall", [QUEUED, SERVED], ids=lambda stall: stall.name)
def test_storage_that_stands_still_holds_nobody(tmp_path: Path, memory: Path, stall: Stall) -> None:
    """The program ends, whatever the process does that it has left behind."""
    save(memory, 5)
    disk, said = tmp_path / "disk", tmp_path / "said"
    disk.mkdir()
    with said.open("w") as out:
        serve = ["unshare", "--mount", sys.executable, "-m", "tests.stalled_disk", str(disk)]
        server = subprocess.Popen(serve, stdout=out, cwd=ROOT)
    silent, quiet = os.pipe()
    try:
        until(lambda: "mounted" in said.read_text(), "a mount", 30)
        server.send_signal(stall.begins)
        within = ["nsenter", f"--mount=/proc/{server.pid}/ns/mnt", f"--wd={ROOT}", sys.executable, "-c", PROGRAM]
        program = [*within, str(disk), str(memory), "1.0"]
        ended = subprocess.run(program, stdin=silent, capture_output=True, text=True, timeout=patient(60), check=True)
    finally:
        server.kill()
        server.wait()
        os.close(silent)
        os.close(quiet)
    stood, still, forgotten, late = ended.stdout.splitlines()
    assert f"{disk} has not answered" in forgotten or "the time was over" in forgotten
    assert stood.startswith(f"{disk} has not answered for") and still.startswith(f"{disk} has not answered for")
    assert "the time was over" in late or "has not answered" in late
