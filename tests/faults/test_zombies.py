"""Ranks that have ended and do not say so: the launcher ends them as a failure, and never waits for them for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.training import Plan
from tests.nodes.conftest import require

HANG = 85
UNTRACED = "this system lets no process trace its parent"
THREAD = """
import ctypes, platform, threading, time
threading.Thread(target=time.sleep, args=(3600,)).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit, of this thread alone
"""
TRACED = f"""
import ctypes, os, sys, time
PTRACE_SEIZE, PR_SET_PTRACER = 0x4206, 0x59616D61
libc = ctypes.CDLL(None)
libc.prctl(PR_SET_PTRACER, ctypes.c_long(-1), 0, 0, 0)
reader, writer = os.pipe()
rank = os.getpid()
if os.fork() == 0:
    os.write(writer, b"0" if libc.ptrace(PTRACE_SEIZE, rank, 0, 0) else b"1")
    time.sleep(3600)  # and never takes the exit code
if os.read(reader, 1) == b"0":
    print({UNTRACED!r}, flush=True)
os._exit(3)
"""


@pytest.mark.parametrize(
    ("text", "why", "cycles"), [(THREAD, "other threads of it live on", 2), (TRACED, "held by another process", 1)]
)
def test_all_ranks_are_zombies(start_job: StartJob, tmp_path: Path, text: str, why: str, cycles: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    job = start_job(Plan(), 2, f"--max-restarts={cycles - 1}", script=script)
    code = job.finish(120)
    if UNTRACED in job.output:
        require(UNTRACED)
    assert code == HANG, job.tail()
    faults = job.journal("fault")
    assert [(fault["cycle"], fault["kind"]) for fault in faults] == [(cycle, "hang") for cycle in range(cycles)], (
        job.tail()
    )
    assert all(why in fault["what"] for fault in faults), job.tail()
