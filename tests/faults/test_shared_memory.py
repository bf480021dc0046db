"""Files in /dev/shm that a killed rank and its child have left are removed at the restart, and nothing else is.

Each job has a /dev/shm of its own, in a mount namespace.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import own_shm
from tests.faults.conftest import StartJob
from tests.faults.job import Place
from tests.faults.training import Plan
from tests.nodes.conftest import require
from tests.patience import patient
from tests.program import clean_environment, run

SCRIPT = """
import json, os, signal, sys, time

LAUNCHER, SHM = os.getppid(), "/dev/shm"
KEPT = {f"torch_{LAUNCHER}_1_1", "model.pt", "torch_model_1_1"}

def of_torch(pids):
    return {name for name in os.listdir(SHM) if name.startswith("torch_") and name.split("_")[1] in pids}

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    import torch, torch.multiprocessing
    torch.set_num_threads(1)  # for the fork
    torch.multiprocessing.set_sharing_strategy("file_system")
    # For the socket of torch's manager, whose path must be short, and which stays when the manager is killed.
    os.environ["TMPDIR"] = f"{SHM}/tmp"
    os.mkdir(f"{SHM}/tmp")
    shared = torch.ones(1 << 20).share_memory_()
    ready, at_work = os.pipe()
    child = os.fork()
    more = torch.ones(1 << 18)
    if child == 0:
        more.share_memory_()
        os.write(at_work, b"1")
        time.sleep(3600)
    os.read(ready, 1)
    pids = {str(os.getpid()), str(child)}
    left = of_torch(pids)
    assert len(left) == 2, left
    for name in KEPT:
        open(f"{SHM}/{name}", "w").close()
    # A name as that of a file of this rank.
    os.mkdir(f"{SHM}/torch_{os.getpid()}_2_2")
    json.dump(sorted(left), open("left", "w"))
    # torch's manager of these files removes them when it has lost this process, if it still lives.
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            is_manager = open(f"/proc/{name}/comm").read().strip() == "torch_shm_manag"
            if is_manager and os.stat(f"/proc/{name}/root/dev/shm").st_dev == os.stat(SHM).st_dev:
                os.kill(int(name), signal.SIGKILL)
        except OSError:
            pass
    os.kill(os.getpid(), signal.SIGKILL)

left = set(json.load(open("left")))
deadline = time.monotonic() + float(os.environ["LIMIT_S"])
while left & set(os.listdir(SHM)) and time.monotonic() < deadline:
    time.sleep(0.02)
there = set(os.listdir(SHM))
assert there >= KEPT, there
assert [name for name in there if os.path.isdir(f"{SHM}/{name}") and name.endswith("_2_2")], there
assert not left & there, there
"""


@pytest.fixture(autouse=True)
def _unshares() -> None:
    require(own_shm.why_not())
    if Path("/proc/self/ns/pid").stat().st_ino != 4026531836:
        require("these processes are in a pid namespace")


def test_what_a_killed_rank_left_is_removed(start_job: StartJob, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    job = start_job(
        Plan(),
        1,
        "--max-restarts=1",
        script=script,
        place=Place(start=own_shm.start_with_own_shm, environ={"LIMIT_S": str(patient(30))}),
    )
    assert job.finish(90) == 0, job.tail()
    (line,) = [line for line in job.output.splitlines() if "left there" in line]
    assert "(4.0 MiB)" in line and "(1.0 MiB)" in line and "more" not in line


USES = """
import mmap, os, subprocess, sys, time
from ft_launcher.node.processes.shared_memory_cleanup import SharedMemoryCleanup

cleanup = SharedMemoryCleanup(is_on=True)
cleanup.cycle_begins()

def leave():
    pid = os.fork()
    if pid == 0:
        with open(f"/dev/shm/torch_{os.getpid()}_1_1", "wb") as file:
            file.write(bytes(4096))
        os._exit(0)
    os.waitpid(pid, 0)
    cleanup.note(pid)
    return f"/dev/shm/torch_{pid}_1_1"

def look(file):
    cleanup.begin()
    removed = cleanup.settle(60)
    assert removed is not os.path.exists(file)
    return "removed" if removed else "left"

def look_until_removed(file):
    # What a process that is just ending has open cannot be read, and nothing is removed while there is such a process.
    deadline = time.monotonic() + float(sys.argv[1])
    while look(file) == "left":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return "removed"

file = leave()
print("free", look_until_removed(file))
file = leave()
with open(file, "r+b") as opened:
    print("open", look(file))
    mapped = mmap.mmap(opened.fileno(), 0)
print("mapped", look(file))
mapped.close()
print("closed", look_until_removed(file))
file = leave()
there, at_work = os.pipe()
namespace = ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", "echo; exec sleep 3600"]
other = subprocess.Popen(namespace, stdout=at_work)
os.close(at_work)
os.read(there, 1)
print("shared", look(file))
other.kill()
other.wait()
print("alone", look_until_removed(file))
"""


def test_what_is_in_use_or_may_be_anothers_stays() -> None:
    """A process that has a file open or mapped, and one of another namespace of pids that sees the folder."""
    found = run(
        [*own_shm.with_own_shm(), sys.executable, "-c", USES, str(patient(30))], environ=clean_environment(), check=True
    ).stdout
    words = found.split()
    assert dict(zip(words[::2], words[1::2], strict=True)) == {
        "free": "removed",
        "open": "left",
        "mapped": "left",
        "closed": "removed",
        "shared": "left",
        "alone": "removed",
    }
