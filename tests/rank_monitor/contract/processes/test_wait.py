"""What is known of processes that end, and of some that have ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from rank_monitor.contract.processes.wait import end_of, readable
from tests.patience import patient


def test_the_end_of_a_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        descriptor = end_of(process.pid)
        assert not readable([descriptor], 0.0)
        process.communicate(b"\n")
        assert readable([descriptor], patient(20)) == {descriptor}
        os.close(descriptor)


def test_the_end_that_another_process_has_taken() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    descriptor = end_of(process.pid)
    assert readable([descriptor], 0.0) == {descriptor}
    with pytest.raises(OSError):
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    os.close(descriptor)
