"""When a rank whose program has failed is ended: a table of what its processes do."""

from __future__ import annotations

import os

import pytest

from ft_launcher.agent.cycle.failed_programs import FailedPrograms, work_of
from ft_launcher.node.processes.rank_usage import Usage

IDLE_S, BUSY_S = 4.0, 10.0
PID = 7


def cpu(*seconds: float) -> list[Usage | None]:
    return [Usage(threads_cpu_s=each) for each in seconds]


@pytest.mark.parametrize(
    ("busy_s", "work", "ended_at", "why"),
    [
        (BUSY_S, cpu(*[0.0] * 20), 4, "did nothing for 4 s"),
        (BUSY_S, cpu(*[number * 0.001 for number in range(20)]), 4, "did nothing for 4 s"),
        (BUSY_S, cpu(0.5, 0.5, 1, 1, 1, 1, 1, 1), 7, "did nothing for 4 s"),
        (BUSY_S, cpu(*[float(number) for number in range(20)]), 10, "has not ended 10 s later"),
        (None, cpu(*[float(number) for number in range(20)]), None, ""),
        (0.0, cpu(*[float(number) for number in range(20)]), 4, "has not ended 4 s later"),
        (BUSY_S, [Usage(descendants_io_bytes=number << 20) for number in range(20)], 10, "has not ended"),
        (BUSY_S, [Usage(descendants=frozenset({number})) for number in range(20)], 10, "has not ended"),
        (BUSY_S, [None] * 20, None, ""),
        (BUSY_S, [None, None, *cpu(*[0.0] * 20)], 6, "did nothing for 4 s"),
    ],
    ids=[
        "idle",
        "polls",
        "worked and stopped",
        "works on",
        "works, no limit",
        "works, no linger",
        "reads and writes",
        "starts processes",
        "under a debugger",
        "was under a debugger",
    ],
)
def test_when_it_is_ended(busy_s: float | None, work: list[Usage | None], ended_at: int | None, why: str) -> None:
    seen = iter(work)
    failed = FailedPrograms(IDLE_S, busy_s, lambda pid: next(seen))
    failed.begin(0, PID, 3, now=0.0)
    for second in range(1, 20):
        assert failed.next_check() == second
        found = failed.due(float(second))
        if found:
            assert found[0][0] == 3 and why in found[0][1] and second == ended_at
            assert failed.next_check() is None
            return
    assert ended_at is None


@pytest.mark.parametrize(("told", "counts"), [(0, 1), (1, 1), (255, 255), (256, 1), (-2, -2), (-9, 1), (10**9, 1)])
def test_a_rank_cannot_choose_what_is_no_exit_code(told: int, counts: int) -> None:
    failed = FailedPrograms(IDLE_S, BUSY_S, lambda pid: Usage())
    failed.begin(0, PID, told, now=0.0)
    assert failed.due(IDLE_S)[0][0] == counts


def test_one_that_has_ended_is_forgotten() -> None:
    failed = FailedPrograms(IDLE_S, BUSY_S, lambda pid: Usage())
    failed.begin(0, PID, 1, now=0.0)
    failed.reset(0)
    assert failed.next_check() is None and failed.due(100.0) == {}


def test_the_work_of_a_process_and_of_one_that_is_gone() -> None:
    before = work_of(os.getpid())
    assert before is not None and before.main_cpu_s > 0
    assert work_of(2**22 + 1) == Usage()
