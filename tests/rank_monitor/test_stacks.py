"""What faulthandler writes, read."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from rank_monitor.contract.wire.messages import END_OF_STACKS
from rank_monitor.stacks import MAX_FRAMES, read
from tests.program import run

TWO_THREADS = """Thread 0x00007f0000000001 (most recent call first):
  File "/lib/threading.py", line 331 in wait
  File "/lib/threading.py", line 1002 in _bootstrap

Current thread 0x00007f0000000002 (most recent call first):
  File "/srv/my job/train.py", line 42 in step
  File "/srv/my job/train.py", line 7 in <module>
"""
OTHER_CURRENT = """Current thread 0x00007f0000000001 [worker] (most recent call first):
  File "a.py", line 1 in thread

Thread 0x00007f0000000002 [python] (most recent call first):
  File "b.py", line ??? in main
"""
CUT = """Current thread 0x1 (most recent call first):
  File "main.py", line 3 in main

Thread 0x2 (most recent call first):
  File "other.py", line 4 in work
...
"""
BY_WATCHDOG = """Thread 0x00007f0000000003 (most recent call first):
  File "/srv/my job/data.py", line 5 in load

Current thread 0x00007f0000000002 (most recent call first):
  File "/venv/lib/python3.11/site-packages/ft_client/rank/monitoring/stack_writer.py", line 66 in write
  File "/venv/lib/python3.11/site-packages/ft_client/rank/monitoring/watchdog.py", line 171 in _turn

Thread 0x00007f0000000001 (most recent call first):
  File "/srv/my job/train.py", line 42 in step
  File "/srv/my job/train.py", line 7 in <module>
"""
CUT_BY_WATCHDOG = """Thread 0x0000000000000009 (most recent call first):
  File "other.py", line 4 in work
...

Thread 0x0000000000000001 (most recent call first):
  File "main.py", line 3 in main
"""
BY_OUR_COMMAND = """Current thread 0x1 (most recent call first):
  File "train.py", line 3 in <module>
  File "/venv/bin/ft_launcher", line 8 in <module>
"""


@pytest.mark.parametrize(
    ("text", "frames"),
    [
        (BY_OUR_COMMAND, ["train.py:3 in <module>"]),
        (TWO_THREADS, ["train.py:42 in step", "train.py:7 in <module>"]),
        (OTHER_CURRENT, ["b.py:??? in main"]),
        (CUT, ["main.py:3 in main"]),
        (BY_WATCHDOG + END_OF_STACKS, ["train.py:42 in step", "train.py:7 in <module>"]),
        (BY_WATCHDOG + END_OF_STACKS + TWO_THREADS, ["train.py:42 in step", "train.py:7 in <module>"]),
        (CUT_BY_WATCHDOG + END_OF_STACKS, ["main.py:3 in main"]),
        (END_OF_STACKS, []),
        ("", []),
        ("no stacks at all\n", []),
        ('  File "a.py", line 1 in f\n', []),
        ("Current thread 0x1 (most recent call first):\n  <no Python frame>\n", []),
    ],
)
def test_the_main_threads_frames(text: str, frames: list[str]) -> None:
    assert read(text).frames == frames


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/srv/job/train.py", "train.py"),
        ("train.py", "train.py"),
        ("/srv/torch/train.py", "train.py"),
        ("/venv/lib/python3.11/site-packages/torch/distributed/utils.py", "torch/distributed/utils.py"),
        ("/usr/lib/python3/dist-packages/torch/nn/parallel/distributed.py", "torch/nn/parallel/distributed.py"),
        ("/venv/lib64/python3.11/site-packages/six.py", "site-packages/six.py"),
        ("/usr/lib/python3.10/threading.py", "python3.10/threading.py"),
        ("/opt/lib/python3.13t/queue.py", "python3.13t/queue.py"),
        ("/opt/pytorch/torch/distributed/utils.py", "torch/distributed/utils.py"),
        ("/opt/pytorch/torch/_ops.py", "torch/_ops.py"),
        ("/src/client/ft_client/rank/agreement/group.py", "ft_client/rank/agreement/group.py"),
        ("<string>", "<string>"),
        ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap>"),
    ],
)
def test_a_librarys_file_is_shown_with_its_path_there(path: str, shown: str) -> None:
    text = f'Current thread 0x1 (most recent call first):\n  File "{path}", line 7 in f\n'
    assert read(text).frames == [f"{shown}:7 in f"]


@pytest.mark.parametrize(("text", "whole"), [(TWO_THREADS, True), (OTHER_CURRENT, False), (CUT, False), ("", False)])
def test_a_dump_is_whole_once_the_current_thread_is_the_last(text: str, whole: bool) -> None:
    assert read(text).is_whole is whole
    assert not any(read(text[:length]).is_whole for length in range(text.rfind("Current") + 60))


@pytest.mark.parametrize(
    ("text", "shows"), [(TWO_THREADS, True), (OTHER_CURRENT, True), (CUT, True), ("", False), ("no stacks\n", False)]
)
def test_a_dump_that_is_not_known_to_be_whole_may_show_the_main_thread(text: str, shows: bool) -> None:
    assert bool(read(text).frames) is shows


def test_the_beginning_of_a_dump_says_nothing_of_the_main_thread() -> None:
    """Its last block is another thread as long as the current one, which is the main thread, is not written."""
    for length in range(TWO_THREADS.index("Current")):
        begun = TWO_THREADS[:length]
        assert (read(begun).frames, read(begun).others) == ([], ["?"])


@pytest.mark.parametrize("text", [BY_WATCHDOG + END_OF_STACKS, CUT_BY_WATCHDOG + END_OF_STACKS])
def test_a_dump_by_the_watchdog_is_whole_with_its_last_line(text: str) -> None:
    assert read(text).is_whole
    for length in range(len(text) - 1):
        begun = read(text[:length])
        assert (begun.frames, begun.others, begun.is_whole) == ([], ["?"], False)


def test_the_last_thread_before_a_cut_is_not_the_main_thread() -> None:
    """The watchdog adds the main thread to a dump that was cut, where it sees the cut: most of the hundred threads may
    have no frame."""
    text = BY_WATCHDOG + "...\n" + END_OF_STACKS
    assert (read(text).frames, read(text).others, read(text).is_whole) == ([], ["?"], False)


def test_the_other_threads_in_a_dump_by_the_watchdog() -> None:
    found = read(BY_WATCHDOG + END_OF_STACKS)
    assert found.file == "/srv/my job/train.py"
    assert found.others == ["data.py:5 in load", "ft_client/rank/monitoring/stack_writer.py:66 in write"]
    assert read(CUT_BY_WATCHDOG + END_OF_STACKS).others == ["?"]


def thread(*frames: str, is_current: bool = False) -> str:
    lines = [f'  File "{frame}", line 7 in f\n' for frame in frames] or ["  <no Python frame>\n"]
    return f"{'Current thread' if is_current else 'Thread'} 0x1 (most recent call first):\n{''.join(lines)}\n"


@pytest.mark.parametrize(
    ("others", "places"),
    [
        ([], []),
        ([("/usr/lib/python3.11/threading.py", "/a/tb.py")], ["python3.11/threading.py:7 in f"]),
        ([("/usr/lib/python3.11/threading.py", "/a/train.py")], ["train.py:7 in f"]),
        ([("/b/train.py",), ("/b/train.py",), ("/c/x.py",)], ["train.py:7 in f", "x.py:7 in f"]),
        ([()], ["?"]),
        ([(f"/{number}.py",) for number in range(17)], ["?"]),
    ],
)
def test_where_the_other_threads_are(others: list[tuple[str, ...]], places: list[str]) -> None:
    """One that has called something from the main thread's file is there, wherever it waits."""
    text = "".join(thread(*frames) for frames in others) + thread("/a/train.py", "/b/main.py", is_current=True)
    assert (read(text).file, read(text).others) == ("/a/train.py", places)


@pytest.mark.parametrize("text", [OTHER_CURRENT, CUT, "", "Current thread 0x1 (most recent call first):\n"])
def test_where_not_all_threads_are_known_nothing_is_certain(text: str) -> None:
    assert (read(text).file, read(text).others) == ("", ["?"])


def test_a_deep_stack_is_cut() -> None:
    text = "Current thread 0x1 (most recent call first):\n" + '  File "a.py", line 1 in f\n' * 1000
    assert len(read(text).frames) == MAX_FRAMES


STACKS_OF_ITS_OWN = """
import faulthandler, sys, threading
def dump():
    with open(sys.argv[1], "w") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
wait = threading.Event()
thread = threading.Thread(target=wait.wait)
thread.start()
dump()
wait.set()
"""


def test_as_this_interpreter_writes_it(tmp_path: Path) -> None:
    script, stacks = tmp_path / "own_stacks.py", tmp_path / "stacks"
    script.write_text(STACKS_OF_ITS_OWN)
    run([sys.executable, script, stacks], check=True)
    text = stacks.read_text()
    assert read(text).frames == ["own_stacks.py:5 in dump", "own_stacks.py:9 in <module>"]
    assert read(text).file == str(script)
    (other,) = read(text).others
    assert re.fullmatch(r"python3[.\dt]*/threading\.py:\d+ in wait", other)
