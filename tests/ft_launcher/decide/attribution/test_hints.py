"""Signals, exit codes and stacks to likely causes, by tables."""

from __future__ import annotations

import pytest

from ft_launcher.decide.attribution.fault import FaultClass
from ft_launcher.decide.attribution.hints import NodeEvidence, number_of, of_exit, of_hang, of_signal

NODE = NodeEvidence()
FULL = NodeEvidence(shm_free=3 << 20)
ROOMY = NodeEvidence(shm_free=1 << 40)
KILLS = NodeEvidence(oom_kills=2)
UNKNOWN = NodeEvidence(oom_kills=None)


USER, HANG, HARDWARE, MEMORY = FaultClass.USER_ERROR, FaultClass.HANG, FaultClass.HARDWARE, FaultClass.MEMORY
TOLD, AROUND, UNSURE = FaultClass.PREEMPTION, FaultClass.INFRASTRUCTURE, FaultClass.UNKNOWN


@pytest.mark.parametrize(
    ("number", "node", "fault_class", "hint"),
    [
        (1, NODE, TOLD, "terminal"),
        (2, NODE, TOLD, "interrupted it"),
        (4, NODE, UNSURE, "another processor"),
        (6, NODE, UNSURE, "collective that timed out or ranks out of step"),
        (7, FULL, MEMORY, "/dev/shm is full (3 MiB free)"),
        (7, ROOMY, UNSURE, "look at /dev/shm"),
        (7, NODE, UNSURE, "look at /dev/shm"),
        (8, NODE, UNSURE, "arithmetic"),
        (9, KILLS, MEMORY, "out of memory: the kernel killed 2"),
        (9, NODE, UNSURE, "not by us: the kernel's memory killer (no kill counted here)"),
        (9, UNKNOWN, UNSURE, "not by us: the kernel's memory killer (its kills cannot be read here)"),
        (10, NODE, TOLD, "scheduler's warning"),
        (11, NODE, UNSURE, "native code"),
        (12, NODE, TOLD, "scheduler's warning"),
        (13, NODE, UNSURE, ""),
        (15, NODE, TOLD, "outside the launcher"),
        (24, NODE, TOLD, "processor time"),
        (25, NODE, AROUND, "ulimit -f"),
        (31, NODE, AROUND, "system call"),
        (41, NODE, UNSURE, ""),
        (0, NODE, UNSURE, ""),
    ],
)
def test_signals(number: int, node: NodeEvidence, fault_class: FaultClass, hint: str) -> None:
    found = of_signal(number, node)
    assert found.fault_class is fault_class
    assert hint in found.hint and bool(hint) == bool(found.hint)


@pytest.mark.parametrize(
    ("code", "fault_class", "hint"),
    [
        (1, UNSURE, ""),
        (2, USER, "wrong arguments"),
        (3, UNSURE, ""),
        (16, HARDWARE, "other hardware has to show"),
        (17, HARDWARE, "17: result could not be validated; "),
        (80, AROUND, "launcher inside it failed"),
        (81, AROUND, "no rendezvous"),
        (82, AROUND, "lost its store"),
        (83, HARDWARE, "unhealthy"),
        (84, AROUND, "too few nodes"),
        (85, HANG, "after a hang"),
        (86, TOLD, "told to end"),
        (87, TOLD, "told to end"),
        (88, UNSURE, ""),
        (93, USER, "would not help"),
        (94, HARDWARE, "exclude this node"),
        (95, USER, "end the job"),
        (120, AROUND, "could not write out"),
        (124, HANG, "timeout(1)"),
        (126, USER, "cannot be executed"),
        (127, USER, "not found"),
        (128, UNSURE, ""),
        (134, UNSURE, "SIGABRT"),
        (137, MEMORY, "a command in it died of SIGKILL: out of"),
        (143, TOLD, "a command in it died of SIGTERM"),
        (255, UNSURE, ""),
    ],
)
def test_exit_codes(code: int, fault_class: FaultClass, hint: str) -> None:
    found = of_exit(code, KILLS)
    assert found.fault_class is fault_class
    assert hint in found.hint and bool(hint) == bool(found.hint)


@pytest.mark.parametrize(
    ("frames", "state", "hint"),
    [
        (["train.py:9 in load"], "S", ""),
        (["train.py:9 in load"], "T", "stopped"),
        (["shutil.py:233 in copyfileobj"], "D", "in the kernel"),
        (["queue.py:171 in get", "dataloader.py:1151 in _try_get_data"], "S", "data loader"),
        (["distributed_c10d.py:899 in _store_based_barrier", "train.py:3 in main"], "S", "peers that did not come"),
        (["serialization.py:850 in save", "train.py:90 in save"], "R", "checkpoint"),
        ([*["train.py:1 in deep"] * 4, "serialization.py:850 in save"], "R", ""),
        ([], "", ""),
    ],
)
def test_hangs(frames: list[str], state: str, hint: str) -> None:
    found = of_hang(frames, state)
    assert found.fault_class is HANG
    assert hint in found.hint and bool(hint) == bool(found.hint)


@pytest.mark.parametrize(("words", "number"), [("Killed", 9), ("Bus error", 7), ("Nonsense", 0)])
def test_a_signal_by_the_words_of_the_c_library(words: str, number: int) -> None:
    assert number_of(words) == number
