"""What /proc says of this process, of one that it starts, and of none."""

from __future__ import annotations

import os
import signal
import sys

from rank_monitor.contract.processes import proc
from tests.patience import until
from tests.program import ended, started

NO_PID = 1 << 30
CHILD = """
import os, sys
from rank_monitor.contract.processes import proc
proc.name_this_process("a_name_of_more_than_15_bytes")
print(proc.name_of(os.getpid()), flush=True)
sys.stdin.read()
"""


def test_a_child() -> None:
    variables = {**os.environ, "OF_THIS_TEST": "x" * 100_000}
    with started([sys.executable, "-c", CHILD], env=variables) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "a_name_of_more_\n"
        assert child.pid in proc.pids()
        assert proc.name_of(child.pid) == "a_name_of_more_"
        assert f"OF_THIS_TEST={'x' * 100_000}".encode() in proc.environ(child.pid).split(b"\0")
        assert proc.status(child.pid)["Pid"] == str(child.pid)
        assert {0, 1, 2} <= set(proc.descriptors_of(child.pid))
        child.send_signal(signal.SIGSTOP)
        until(lambda: proc.is_stopped(child.pid))
        child.send_signal(signal.SIGCONT)
        until(lambda: not proc.is_stopped(child.pid))
        assert ended(child) == (0, "", "")
    assert child.pid not in proc.pids()


COMPUTES = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
ctypes.CDLL(None).prctl(15, b"a) R 1 2 (b", 0, 0, 0)  # PR_SET_NAME
print("computes", flush=True)
while True:
    pass
"""


def test_threads_of_a_process() -> None:
    with started([sys.executable, "-c", COMPUTES]) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "computes\n"
        before = proc.threads(child.pid)
        until(lambda: proc.threads(child.pid)[child.pid][1] > before[child.pid][1], "CPU time of the main thread")
        (other,) = proc.threads(child.pid).keys() - {child.pid}
        assert proc.threads(child.pid)[other][0] == "S"
        assert proc.threads(child.pid)[child.pid][0] == "R"


def test_a_process_that_is_gone_has_empty_values() -> None:
    assert not proc.is_stopped(NO_PID)
    assert (proc.environ(NO_PID), proc.status(NO_PID), proc.name_of(NO_PID)) == (b"", {}, "")
    assert proc.threads(NO_PID) == {}
    assert (proc.waits_in(NO_PID), proc.kernel_stack(NO_PID), proc.descriptors_of(NO_PID)) == ("", [], [])


def test_own_descriptors_are_complete() -> None:
    reading, writing = os.pipe()
    try:
        assert {reading, writing} <= set(proc.own_descriptors())
    finally:
        os.close(reading)
        os.close(writing)


def test_the_boot_has_one_line() -> None:
    assert proc.boot_id() == proc.boot_id()
    assert proc.boot_id().count(b"\n") == 1
