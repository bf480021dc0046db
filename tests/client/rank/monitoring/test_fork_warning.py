"""A script that forks in a rank is warned of threads as it is without us: of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rank_monitor.contract import env
from tests.client.fake_monitor import FakeMonitor
from tests.client.rank_of_a_test import started
from tests.program import ended

WARNED = "is multi-threaded, use of fork() may lead to deadlocks"
FORKS = """
import os, sys, threading, warnings
HOW
before = list(warnings.filters)
for _ in range(2):
    child = os.fork()
    if child == 0:
        own = threading.Thread(target=len, args=((),))
        own.start(); own.join()
        os._exit(int(list(warnings.filters) != before))
    assert os.waitpid(child, 0)[1] == 0, "a child has other filters"
assert list(warnings.filters) == before
assert len(os.listdir("/proc/self/task")) >= THREADS
"""
OWN_THREAD = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
warns = pytest.mark.skipif(sys.version_info < (3, 12), reason="Python before 3.12 does not warn of forks")


def stderr_of(folder: Path, monitor: FakeMonitor, how: str, threads: int) -> str:
    """What a rank writes that forks; it must have so many threads or more (torch's server has a pool)."""
    variables = {env.FLIGHT_RECORDER_SOCKET: str(folder / "recorder"), "OPENBLAS_NUM_THREADS": "1"}
    with started(FORKS.replace("HOW", how).replace("THREADS", str(threads)), folder, monitor.path, **variables) as rank:
        code, _, err = ended(rank, limit_s=240.0)
    assert code == 0, err
    return err


@warns
@pytest.mark.parametrize(
    ("how", "threads"),
    [
        ("", 2),
        ("warnings.simplefilter('error')", 2),
        ("import torch.distributed", 3),
    ],
    ids=["at once", "warnings as errors", "with torch's server"],
)
def test_a_script_without_a_thread_is_not_warned(monitor: FakeMonitor, tmp_path: Path, how: str, threads: int) -> None:
    assert stderr_of(tmp_path, monitor, how, threads) == ""


@warns
def test_a_script_with_a_thread_is_warned(monitor: FakeMonitor, tmp_path: Path) -> None:
    assert WARNED in stderr_of(tmp_path, monitor, OWN_THREAD, 3)
