"""A rank writes its stacks when its monitor asks: whole, by the watchdog, whatever its threads do."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from ft_client.rank.monitoring.stack_writer import of_environment
from rank_monitor import stacks
from rank_monitor.contract import env
from rank_monitor.contract.wire import codec
from rank_monitor.contract.wire.messages import END_OF_STACKS, Hello, StacksAsked
from tests.client.fake_monitor import FakeMonitor
from tests.client.rank_of_a_test import started
from tests.patience import until

BUSY = """
import random, sys, threading

def deep(depth):
    return 1 + deep(depth - 1) if depth else 0

def generate(depth):
    if depth:
        yield from generate(depth - 1)
    yield depth

def compute():
    while True:
        deep(random.choice((5, 50, 700)))
        sum(generate(random.choice((3, 80))))
        sorted(range(100), key=lambda number: -number)

sys.setrecursionlimit(5000)
for _ in range(3):
    threading.Thread(target=compute, daemon=True).start()
print("computes", flush=True)
compute()
"""
MANY = """
import threading, time
for _ in range(150):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
def waits():
    print("waits", flush=True)
    time.sleep(600)
waits()
"""
TIMES = 100


def ask(monitor: FakeMonitor, number: int) -> None:
    monitor.say(codec.encode(StacksAsked(), number, time.monotonic_ns()))


def answered(file: Path, times: int) -> None:
    until(lambda: file.read_text().count(END_OF_STACKS) == times, lambda: f"answer {times}")


def test_busy_threads_are_asked_again_and_again(monitor: FakeMonitor, tmp_path: Path) -> None:
    """By the signal, a rank like this one died after some hundreds of questions."""
    file = tmp_path / "stacks.txt"
    with started(BUSY, tmp_path, monitor.path) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "computes\n"
        monitor.wait_for(Hello)
        begin = 0
        for number in range(1, TIMES + 1):
            ask(monitor, number)
            answered(file, number)
            found = stacks.read(file.read_text()[begin:])
            begin = len(file.read_text())
            assert found.is_whole
            assert found.frames[-1].startswith("script.py:")
            assert found.frames[-1].endswith(" in <module>") or len(found.frames) == stacks.MAX_FRAMES
        assert rank.poll() is None


def test_the_main_thread_is_shown_beside_many_others(monitor: FakeMonitor, tmp_path: Path) -> None:
    """faulthandler leaves out all threads after the hundredth, and lists the main thread last."""
    file = tmp_path / "stacks.txt"
    with started(MANY, tmp_path, monitor.path) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "waits\n"
        monitor.wait_for(Hello)
        ask(monitor, 1)
        answered(file, 1)
        found = stacks.read(file.read_text())
        assert found.frames == ["script.py:7 in waits", "script.py:8 in <module>"]
        assert (found.others, found.is_whole) == (["?"], True)


def test_a_script_that_closes_every_descriptor(monitor: FakeMonitor, tmp_path: Path) -> None:
    """The number of the stack file is then that of the next connection."""
    script = "import os, time\nos.closerange(3, 65536)\nprint('closed', flush=True)\ntime.sleep(600)\n"
    file = tmp_path / "stacks.txt"
    with started(script, tmp_path, monitor.path) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "closed\n"
        with contextlib.suppress(BrokenPipeError):  # wakes the watchdog, unless its connection is gone already
            ask(monitor, 1)
        until(lambda: monitor.connections == 2, "another connection")
        monitor.wait_for(Hello, 2)
        ask(monitor, 2)
        until(lambda: END_OF_STACKS in file.read_text(), "the answer")
        assert stacks.read(file.read_text()).frames == ["script.py:4 in <module>"]


def test_where_no_file_is_named_nothing_is_written(fresh: None, tmp_path: Path) -> None:
    assert of_environment({}) is None
    assert of_environment({env.STACK_FILE: str(tmp_path / "stacks")}) is None
    assert of_environment({env.STACK_FILE: str(tmp_path / "no" / "stacks"), env.STACK_SIGNAL: "41"}) is None
    assert of_environment({env.STACK_FILE: str(tmp_path / "stacks"), env.STACK_SIGNAL: "9"}) is None
