"""Which lines of a program certainly wait for a lock of its own: tables of programs, each with the line `HERE`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_launcher.decide.attribution.own_lock import waits_in_own_lock

PROGRAM = """
import threading
{more}
lock = threading.Lock()

def step(work, names):
    {here}  # HERE
        pass

def keep():
    with lock: print()
"""


def asked(source: str, function: str = "step") -> bool:
    line = next(number for number, line in enumerate(source.splitlines(), 1) if "HERE" in line)
    return waits_in_own_lock(source, f"train.py:{line} in {function}")


def of_lines(here: str, more: str = "") -> str:
    source = PROGRAM.format(here=here, more=more)
    if here.endswith(":"):
        return source
    return source.replace("        pass\n", "")


@pytest.mark.parametrize(
    "source",
    [
        of_lines("lock.acquire()"),
        of_lines("with lock:"),
        of_lines("with lock:", "from threading import Thread"),
        of_lines("lock.acquire()", "def other():\n    lock.acquire()\n    lock.release()\n    print(lock.locked())"),
        "from threading import RLock\nguard: RLock = RLock()\nwith guard, guard:  # HERE\n    pass\n",
        """
import threading
class Store:
    def __init__(self):
        self._lock = threading.RLock()
    def step(self):
        try:
            text = "\\d, which warns"; other = "é"
            with self._lock:  # HERE
                self._lock.acquire()
        finally:
            self._lock.release()
""",
    ],
)
def test_certainly_a_lock(source: str) -> None:
    assert asked(source, "<module>" if "guard" in source else "step")


@pytest.mark.parametrize(
    "here",
    [
        "work.wait()",
        "work.acquire()",
        "work.wait(); lock.acquire()",
        "lock.acquire(); work.wait()",
        "lock.acquire(timeout=5)",
        "lock.acquire(False)",
        "lock.release()",
        "taken = lock.acquire()",
        "(work.wait(), lock.acquire())",
        "lock.acquire() or work.wait()",
        "if lock.acquire(): work.wait()",
        "with lock: work.wait()",
        "with lock, work:",
        "with lock, names.open():",
        "with lock as taken:",
        "with work.wait() or lock:",
        "for name in names: lock.acquire()",
        "names[0].lock.acquire()",
        "names().lock.acquire()",
        "dist.barrier()",
        "x = (1,\n    lock.acquire())",
    ],
)
def test_it_may_wait_for_another_rank(here: str) -> None:
    assert not asked(of_lines(here))


@pytest.mark.parametrize(
    "more",
    [
        "lock = multiprocessing.Lock()",
        "lock = threading.Semaphore(0)",
        "lock = None",
        "def make(lock): pass",
        "def lock(): pass",
        "from locks import lock",
        "from locks import *",
        "import redis as lock",
        "import locks as threading",
        "from locks import threading",
        "from . import threading",
        "threading = 3",
        "for lock in []: pass",
        "use(lock)",
        "kept = [lock]",
        "run(lock.release)",
        "def done(future):\n    lock.release()",
        "future.then(lambda: lock.release())",
        "del lock",
        "match 1:\n    case lock: pass",
        "try: pass\nexcept Exception as lock: pass",
        "other.lock = multiprocessing.Lock()",
        "with open() as lock: pass",
        "async def held():\n    async with lock: pass",
        "async def held(reader):\n    with lock: await reader.read(1)",
        "def held():\n    with lock: yield",
    ],
)
def test_the_name_may_be_that_of_another_lock_or_somebody_else_may_have_it(more: str) -> None:
    assert not asked(of_lines("lock.acquire()", more))


def test_another_file_may_release_it() -> None:
    assert not asked(of_lines("lock.acquire()").replace("with lock:", "print()\n    if True:"))


def test_a_lock_of_another_kind() -> None:
    source = of_lines("lock.acquire()")
    assert not asked(source.replace("import threading", "from threading import Lock as threading"))
    assert not asked(source.replace("import threading", ""))
    assert not asked(source.replace("threading.Lock()", "threading.Condition()"))
    by_name = source.replace("threading.Lock", "Lock")
    assert asked(by_name.replace("import threading", "from threading import Lock"))
    assert not asked(by_name.replace("import threading", "from locks import Lock"))
    assert not asked(by_name.replace("import threading", "from .threading import Lock"))


@pytest.mark.parametrize(
    ("source", "frame"),
    [
        (of_lines("lock.acquire()"), "train.py:7 in other"),
        (of_lines("lock.acquire()"), "train.py:8 in step"),
        (of_lines("lock.acquire()"), "train.py:0 in step"),
        (of_lines("lock.acquire()"), "train.py:999 in step"),
        (of_lines("lock.acquire()"), "train.py:??? in step"),
        (of_lines("lock.acquire()"), ""),
        (of_lines("lock.acquire()").replace("def step", "async def step"), "train.py:7 in step"),
        (of_lines("lock.acquire()") + "\nthis is no Python", "train.py:7 in step"),
        ("(" * 100_000, "train.py:1 in <module>"),
        ("\0", "train.py:1 in <module>"),
        ("", "train.py:1 in <module>"),
    ],
)
def test_a_text_that_is_not_the_one_that_runs(source: str, frame: str) -> None:
    assert not waits_in_own_lock(source, frame)


def test_the_worker_of_the_grid() -> None:
    source = Path(__file__).parents[3].joinpath("faults/hang_worker.py").read_text()
    lines = source.splitlines()
    waits = next(number for number, line in enumerate(lines, 1) if line.strip() == "lock.acquire()")
    assert waits_in_own_lock(source, f"hang_worker.py:{waits} in load")
    others = {f"hang_worker.py:{number} in pass_on" for number in range(1, len(lines) + 1)}
    assert not any(waits_in_own_lock(source, frame) for frame in sorted(others))
