"""`inject_fault` in processes of their own: what each kind does to one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from typing import Any

import pytest

from ft_client.inject import SimulatedFaultParams, inject_fault
from tests import program
from tests.program import clean_environment

HEAD = "import os, sys, threading, time\nfrom ft_client.inject import *\n"


def running(script: str, **variables: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """A Python process as the fourth of eight ranks."""
    environ = clean_environment("SLURM_", **{"RANK": "3", "WORLD_SIZE": "8", **variables})
    return program.started([sys.executable, "-c", HEAD + script], env=environ)


def ended(script: str, **variables: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    with running(script, **variables) as process:
        return program.ended(process)


@pytest.mark.parametrize(
    ("kind", "name", "code"),
    [
        *((name, name, -signal.Signals[name.upper()]) for name in ("sigkill", "sigterm", "sigsegv", "sigabrt")),
        ("rank_killed", "rank_killed", -9),
        ("kind:exit,code:3", "exit", 3),
    ],
)
def test_kinds_that_end_the_process(kind: str, name: str, code: int) -> None:
    line = f"FT: Simulating fault: {name}; rank to fail: 3\n"
    assert ended(f"inject_fault({kind!r})\nprint('unharmed')") == (code, "", line)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("exception", "FaultOnPurpose: a fault on purpose: kind:exception"),
        ("base_exception", "BaseFaultOnPurpose: a fault on purpose: kind:base_exception"),
        ("oom", "MemoryError"),
        ("sigint", "KeyboardInterrupt"),
    ],
)
def test_kinds_that_raise(kind: str, error: str) -> None:
    code, _, err = ended(f"inject_fault({kind!r})\ntime.sleep(60)")
    assert code == (-signal.SIGINT if kind == "sigint" else 1) and err.splitlines()[-1].endswith(error), err


@pytest.mark.parametrize("kind", ["sleep", "livelock", "gil_sleep"])
def test_kinds_that_last_as_long_as_they_are_told(kind: str) -> None:
    code, out, _ = ended(f"inject_fault('kind:{kind},for:0.1')\nprint('over')")
    assert (code, out) == (0, "over\n")


def test_a_hang_with_the_gil_lets_no_thread_run() -> None:
    code, out, _ = ended("""
turns = 0
def turn():
    global turns
    while True:
        turns += 1
threading.Thread(target=turn, daemon=True).start()
sys.setswitchinterval(1e-4)
time.sleep(0.1)
seen = []
inject_fault('kind:gil_sleep,for:0.5', callback=lambda: seen.append(turns))
print(seen[0] > 0, turns - seen[0] < seen[0])
""")
    assert (code, out) == (0, "True True\n")


def test_a_stopped_rank() -> None:
    with running("inject_fault('rank_hung')") as process:
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])


def test_a_device_error_without_a_device_says_so() -> None:
    code, out, err = ended("inject_fault('device_error')\nprint('unharmed')", CUDA_VISIBLE_DEVICES="")
    assert (code, out) == (0, "unharmed\n") and "there is no CUDA device here, so nothing happens" in err


def test_a_fault_of_the_system_without_a_launcher_says_so() -> None:
    code, out, err = ended("inject_fault('kill_agent')\nprint('unharmed')")
    assert (code, out) == (0, "unharmed\n") and "kill_agent needs ft_launcher" in err


def test_after_a_delay_it_happens_in_the_main_thread() -> None:
    """Twice: each is raised where the training is then."""
    code, out, err = ended("""
inject_fault('exception', delay_s=0.05)
inject_fault('kind:oom', delay_s=0.1)
for _ in range(2):
    try:
        time.sleep(60)
    except Exception as error:
        print(type(error).__name__)
""")
    assert (code, out) == (0, "FaultOnPurpose\nMemoryError\n"), err
    assert "FT: Simulating fault: exception; rank to fail: 3; after 0.05 s" in err


def test_after_a_delay_a_signal_needs_no_main_thread() -> None:
    code, _, err = ended("inject_fault('sigkill', delay_s=0.05)\nwhile True: time.sleep(1)")
    assert code == -9 and "after 0.05 s" in err


def test_a_callback_that_logs_after_a_delay_leaves_no_thread_that_the_script_sees() -> None:
    code, out, err = ended("""
import logging
called = threading.Event()
def callback():
    logging.warning("now")
    called.set()
inject_fault("kind:straggle,factor:2", delay_s=0.01, callback=callback)
called.wait(20)
give_up_at = time.monotonic() + 20
while threading.active_count() > 1 and time.monotonic() < give_up_at:
    time.sleep(0.01)
print([thread.name for thread in threading.enumerate()])
""")
    assert (code, out) == (0, "['MainThread']\n") and "WARNING:root:now" in err, err


@pytest.mark.parametrize(("rank", "code"), [(3, -9), (2, 0)])
def test_only_the_rank_that_is_meant(rank: int, code: int) -> None:
    assert ended(f"inject_fault('sigkill', rank={rank}, callback=lambda: print('now', flush=True))")[:2] == (
        code,
        "now\n" if code else "",
    )


def test_misuse() -> None:
    with pytest.raises(ValueError, match="no kind is named 'wrong'"):
        inject_fault("wrong")
    with pytest.raises(ValueError, match="delay_s=-1 must not be negative"):
        inject_fault("sigkill", delay_s=-1)
    code, _, err = ended("""
def late():
    try:
        inject_fault('exception', delay_s=0.01)
    except ValueError as error:
        print(error, file=sys.stderr)
thread = threading.Thread(target=late); thread.start(); thread.join()
""")
    assert code == 0 and "main thread" in err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("rank_lost", 1.0), "no kind is named 'rank_lost'"),
        (("rank_killed", -1.0), "base_delay=-1.0"),
        (("rank_killed", 1.0, -2.0), "rand_delay=-2.0"),
        (("rank_killed", 1.0, 0.0, -2), "rank_to_fail=-2"),
    ],
)
def test_simulated_faults_that_are_none(arguments: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        SimulatedFaultParams(*arguments)


def test_a_simulated_fault_happens_a_little_after_its_delay() -> None:
    code, _, err = ended("simulate_fault(SimulatedFaultParams('rank_killed', 0.1, 0.02, 3))\ntime.sleep(60)")
    assert code == -9
    assert err.startswith("FT: Simulating fault: rank_killed; rank to fail: 3; after 0.1")


def test_a_simulated_fault_of_a_random_kind_is_named_as_what_it_is() -> None:
    with running("simulate_fault(SimulatedFaultParams('random', 0.01, rank_to_fail=3))\ntime.sleep(60)") as process:
        stopped = os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        process.kill()
        name = "rank_hung" if stopped else "rank_killed"
        assert process.stderr and process.stderr.read().startswith(f"FT: Simulating fault: {name}; rank to fail: 3")
