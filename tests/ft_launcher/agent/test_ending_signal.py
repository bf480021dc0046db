"""The signal that ends the launcher: the first one stands, waits end early, and the exit code says what it cost."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from ft_launcher.agent.cycle.cycle import CyclePhase
from ft_launcher.agent.ending_signal import EndingSignal
from ft_launcher.node.processes.signals import SignalPipe
from rank_monitor.contract.exit_codes import INTERRUPTED, ExitCode
from rank_monitor.contract.settings.config import Settings, StopSettings

LIMIT_S = 7.0


@pytest.fixture
def ranks() -> Iterator[Any]:
    """What it knows of the ranks of its node."""
    pipe = SignalPipe([signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT])
    settings = Settings(stop=StopSettings(workers_stop_timeout=LIMIT_S))
    recorder = SimpleNamespace(hurried=lambda number, left_s: None)
    parts = SimpleNamespace(signals=pipe, settings=settings, recorder=recorder)
    yield SimpleNamespace(parts=parts, were_started=True, reap_orphans=lambda: None)
    pipe.close()


@pytest.fixture
def ending(ranks: Any) -> EndingSignal:
    return EndingSignal(ranks)


def test_the_first_signal_stands_and_ends_the_cycle(ending: EndingSignal) -> None:
    assert ending.poll(set()) == [] and ending.number is None
    os.kill(os.getpid(), signal.SIGUSR2)
    assert ending.wait(60) == signal.SIGUSR2
    os.kill(os.getpid(), signal.SIGUSR1)
    assert ending.poll(ending.descriptors()) == [CyclePhase.SIGNALLED]
    assert ending.number == signal.SIGUSR2


def test_the_grace_of_a_preemption_ends_with_the_next_cycle(ending: EndingSignal) -> None:
    """The job may go on after the preemption of another node: a later end has a time of its own."""
    with ending.during_cycle():
        ending.grace_ends_at = 60.0  # as `preempt` sets it
    assert ending.grace_ends_at == 60.0, "until the job goes on"
    with ending.during_cycle():
        assert math.isinf(ending.grace_ends_at)


def test_signals_that_arrive_while_ranks_end_shorten_their_time(ending: EndingSignal, ranks: Any) -> None:
    """The first one stands all the same, and says how the launcher ends."""
    said: list[tuple[int, float]] = []
    ranks.parts.recorder.hurried = lambda number, left_s: said.append((number, left_s))
    assert ending.time_left() == math.inf
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        os.kill(os.getpid(), number)
        ending.time_left()
    assert said == [(signal.SIGUSR2, LIMIT_S)] and ending.number == signal.SIGUSR1


def test_a_signal_that_a_stop_has_noted_ends_the_next_call(ending: EndingSignal) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    ending.time_left()
    with pytest.raises(SignalException):
        ending.call(lambda: 1)


@pytest.mark.parametrize(
    ("number", "were_started", "code"),
    [
        (signal.SIGINT, False, INTERRUPTED),
        (signal.SIGINT, True, INTERRUPTED),
        (signal.SIGTERM, False, 128 + signal.SIGTERM),
        (signal.SIGTERM, True, ExitCode.PREEMPTED),
    ],
)
def test_the_exit_code_of_a_launcher_without_ranks(
    ending: EndingSignal, ranks: Any, number: int, were_started: bool, code: int
) -> None:
    ranks.were_started = were_started
    assert ending.error_without_ranks(number).sigval == number
    assert ending.exit_code == code


def test_a_call_returns_or_raises_as_without_a_thread(ending: EndingSignal) -> None:
    assert ending.call(lambda: 1) == 1
    with pytest.raises(ZeroDivisionError):
        ending.call(lambda: 1 // 0)


def test_a_signal_ends_the_wait_for_a_call(ending: EndingSignal) -> None:
    over = threading.Event()

    def work() -> bool:
        os.kill(os.getpid(), signal.SIGUSR1)
        return over.wait()

    with pytest.raises(SignalException) as told:
        ending.call(work)
    assert told.value.sigval == signal.SIGUSR1
    over.set()


def test_a_call_at_the_end_returns_or_raises_as_without_a_thread(ending: EndingSignal) -> None:
    done: list[int] = []
    assert ending.call_at_end(lambda: done.append(1), 0.0) and done == [1]
    with pytest.raises(ZeroDivisionError):
        ending.call_at_end(lambda: 1 // 0, 0.0)


@pytest.mark.parametrize("is_before", [True, False])
def test_a_signal_leaves_a_call_at_the_end_behind_and_is_noted(ending: EndingSignal, is_before: bool) -> None:
    over = threading.Event()

    def work() -> None:
        if not is_before:
            os.kill(os.getpid(), signal.SIGUSR1)
        over.wait()

    if is_before:
        os.kill(os.getpid(), signal.SIGUSR1)
        ending.time_left()
    assert not ending.call_at_end(work, 0.1)
    assert ending.number == signal.SIGUSR1 and ending.exit_code is None, "how the job has ended stays"
    over.set()


def test_a_third_ctrl_c_leaves_a_call_at_the_end_no_time(ending: EndingSignal) -> None:
    over = threading.Event()
    ending.note(signal.SIGINT, signal.SIGINT, signal.SIGINT)
    assert not ending.call_at_end(over.wait, 3600.0)
    over.set()


def test_a_call_at_the_end_is_made_where_no_thread_can_be_started(
    ending: EndingSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert ending.call_at_end(lambda: done.append(1), 0.0) and done == [1]
