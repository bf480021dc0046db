"""What the processes of a rank use, and what of it is activity."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ft_launcher.node.processes.rank_usage import RankUsage, Usage, usage_of
from tests.patience import patient


def used(main_cpu_s: float, io_bytes: int, descendants: frozenset[int], descendants_cpu_s: float) -> Usage:
    return Usage(main_cpu_s, 3.0, io_bytes, descendants, descendants_cpu_s)


@pytest.mark.parametrize(
    ("after", "passed_s", "is_active"),
    [
        (used(1.0, 100, frozenset({7}), 2.0), 10.0, False),
        (used(1.06, 100, frozenset({7}), 2.0), 10.0, False),
        (used(1.3, 100, frozenset({7}), 2.0), 10.0, True),
        (used(1.0, 101, frozenset({7}), 2.0), 10.0, True),
        (used(1.0, 100, frozenset({7, 8}), 2.0), 10.0, True),
        (used(1.0, 100, frozenset(), 0.0), 10.0, False),
        (used(1.0, 100, frozenset({7}), 2.3), 10.0, True),
        (used(1.2, 100, frozenset({7}), 2.2), 100.0, False),
        (used(1.0, 100, frozenset({7}), 2.4), 40.0, True),
        (Usage(1.0, 3.9, 100, frozenset({7}), 2.0), 10.0, False),
        (Usage(1.0, 4.1, 100, frozenset({7}), 2.0), 10.0, True),
        (Usage(1.0, 4.1, 100, frozenset({7}), 2.0), 40.0, False),
        (Usage(1.0, 3.0, 100, frozenset({7}), 2.0, 10**9), 10.0, False),
    ],
    ids=[
        "nothing",
        "a dump of stacks",
        "computes",
        "I/O",
        "starts a child",
        "a child ends",
        "a child works",
        "idles",
        "a child works a little",
        "threads of libraries wake",
        "another thread computes",
        "another thread computed, and stopped",
        "a child writes",
    ],
)
def test_what_is_activity(after: Usage, passed_s: float, is_active: bool) -> None:
    before = used(1.0, 100, frozenset({7}), 2.0)
    assert after.is_beyond(before, passed_s) == is_active


RANK = """
import subprocess, sys, threading, time
from pathlib import Path

def burn(cpu_s, name):
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
    while time.thread_time() < cpu_s:
        pass
    done.release()
    threading.Event().wait()

BURN = "import time\\nwhile time.process_time() < 0.5: pass"
done = threading.Semaphore(0)
threading.Thread(target=burn, args=(0.3, "python"), daemon=True).start()
threading.Thread(target=burn, args=(2.0, "gloo_loop"), daemon=True).start()
threading.Thread(target=burn, args=(0.3, "pt_autograd_0"), daemon=True).start()
done.acquire(), done.acquire(), done.acquire()
subprocess.run([sys.executable, "-c", BURN])
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
for line in sys.stdin:
    Path("/dev/null").write_text(line)
    print("written", flush=True)
child.communicate()
"""


@contextmanager
def rank() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A rank with threads, a child that it has waited for, and one that lives, whose pid comes with it."""
    process = subprocess.Popen([sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.communicate(timeout=patient(20))


def test_threads_that_poll_do_not_count_and_children_that_have_ended_do() -> None:
    with rank() as (process, child):
        usage = usage_of([process.pid, 2**22 + 1])
        found = usage[process.pid]
    assert 0.55 < found.threads_cpu_s < 2.0
    assert found.descendants == frozenset({child})
    assert found.descendants_cpu_s >= 0.45 and found.main_cpu_s > 0 and found.io_bytes > 0
    assert usage[2**22 + 1] == Usage()


def test_a_rank_stands_still_until_it_writes_anything_but_its_stacks(tmp_path: Path) -> None:
    stacks = tmp_path / "stacks"
    stacks.touch()
    usage = RankUsage(lambda local_rank: stacks)
    with rank() as (process, _):
        assert process.stdin is not None and process.stdout is not None
        assert usage.still_s({0: process.pid}) == {0: 0.0}
        assert usage.still_s({0: process.pid})[0] > 0
        process.stdin.write("line\n")
        process.stdin.flush()
        process.stdout.readline()
        assert usage.still_s({0: process.pid}) == {0: 0.0}
        assert usage.still_s({0: process.pid})[0] > 0
        usage.reset()
        assert usage.still_s({0: process.pid}) == {0: 0.0}
