"""The end of a check's process becomes a reading, and the readings one verdict on the node: tables."""

from __future__ import annotations

import pytest

from ft_launcher.decide.health.check import State
from ft_launcher.decide.health.reading import Order, Reading, node_state, reading_of_exit, reading_of_timeout

ASKED = Order("gpu", ("a",), answers=True, late="unknown")
COMMAND = Order("node_check", ("a",), answers=False, late="unhealthy")
ANSWER = b'GPU 0\n{"findings": [["unhealthy", "x"], ["ok", ""]], "memory": {"a": 1}}\n'


def readings(*states: State) -> list[Reading]:
    return [Reading(f"c{number}", state, f"r{number}", 0.0) for number, state in enumerate(states)]


@pytest.mark.parametrize(
    ("states", "healthy", "reason"),
    [
        ((), True, "nothing to check"),
        (("not present",), True, "nothing to check"),
        (("ok", "not present"), True, "c0 ok"),
        (("ok", "unknown"), True, "c0 ok, c1 unknown"),
        (("unknown",), True, "c0 unknown"),
        (("ok", "unhealthy", "unknown"), False, "c1: r1"),
        (("unhealthy", "unhealthy"), False, "c0: r0; c1: r1"),
    ],
)
def test_verdict(states: tuple[State, ...], healthy: bool, reason: str) -> None:
    verdict = node_state(readings(*states))
    assert (verdict.healthy, verdict.reason) == (healthy, reason)


@pytest.mark.parametrize(
    ("order", "output", "code", "state", "reason"),
    [
        (ASKED, ANSWER, 0, "unhealthy", "x"),
        (ASKED, b'{"findings": [], "memory": {}}\n', 0, "not present", ""),
        (ASKED, b"GPU 3\n", -11, "unknown", "the check itself failed (died of SIGSEGV): GPU 3"),
        (ASKED, b"ImportError: no\n", 1, "unknown", "the check itself failed (exit code 1): ImportError: no"),
        (ASKED, b"", 0, "unknown", "the check itself failed (exit code 0): "),
        (ASKED, b'["not", "ours"]\n', 0, "unknown", 'the check itself failed (exit code 0): ["not", "ours"]'),
        (COMMAND, b"", 0, "ok", ""),
        (COMMAND, b"a\nall fine\n\n", 0, "ok", "all fine"),
        (COMMAND, b"fan 3 stands\n", 7, "unhealthy", "exit code 7: fan 3 stands"),
        (COMMAND, b"", 1, "unhealthy", "exit code 1"),
        (COMMAND, b"\xff\x1b[31mred\n", 1, "unhealthy", "exit code 1: �?[31mred"),
        (COMMAND, b"", -9, "unhealthy", "died of SIGKILL"),
        (COMMAND, b"", -40, "unhealthy", "died of signal 40"),
    ],
)
def test_an_end(order: Order, output: bytes, code: int, state: str, reason: str) -> None:
    reading, memory = reading_of_exit(order, output, code, 1.5)
    assert (reading.check, reading.state, reading.reason, reading.took_s) == (order.check, state, reason, 1.5)
    assert memory == ({"a": 1} if output == ANSWER else {})


@pytest.mark.parametrize(
    ("order", "output", "pid", "state", "reason"),
    [
        (ASKED, b"GPU 1\n", None, "unknown", "no answer within 2 s; the last it said: GPU 1"),
        (ASKED, b"GPU 1\n", 77, "unhealthy", "process 77 hangs in the kernel"),
        (COMMAND, b"", None, "unhealthy", "no answer within 2 s"),
    ],
)
def test_no_answer(order: Order, output: bytes, pid: int | None, state: str, reason: str) -> None:
    reading = reading_of_timeout(order, output, 2.0, pid)
    assert reading.state == state
    assert reason in reading.reason
