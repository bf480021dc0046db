"""A handler that is not ours: one thread at a time uses it, and a signal leaves behind what it does not answer."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from ft_launcher.job.rendezvous.blocking_call import BlockingCall
from ft_launcher.job.rendezvous.guarded_handler import GuardedHandler, created
from ft_launcher.node.processes.signals import SignalPipe
from tests.patience import until


class Stuck:
    """A handler whose calls last until `go`, and of which one runs at a time or the test fails."""

    use_agent_store = True
    theirs = "its own attribute"

    def __init__(self) -> None:
        self.go = threading.Event()
        self.calls: list[str] = []
        self.most_at_once = self._at_once = 0

    def _call(self, name: str) -> None:
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        self.calls.append(name)
        self.go.wait()
        self._at_once -= 1

    def num_nodes_waiting(self) -> int:
        self._call("num_nodes_waiting")
        return 1

    def next_rendezvous(self) -> str:
        self._call("next_rendezvous")
        return "info"

    def shutdown(self) -> bool:
        self._call("shutdown")
        return True


@pytest.fixture
def signals() -> Iterator[SignalPipe]:
    pipe = SignalPipe([signal.SIGUSR1])
    yield pipe
    pipe.close()


def test_a_call_waits_for_the_one_before_it(signals: SignalPipe) -> None:
    theirs = Stuck()
    handler = GuardedHandler(theirs, signals)
    question = BlockingCall(handler.num_nodes_waiting)
    until(lambda: theirs.calls)
    formation = BlockingCall(handler.next_rendezvous)
    theirs.go.set()
    assert (question.result(), formation.result()) == (1, "info")
    assert theirs.most_at_once == 1 and theirs.calls == ["num_nodes_waiting", "next_rendezvous"]
    assert handler.shutdown() and handler.theirs == Stuck.theirs and handler.use_agent_store
    question.close()
    formation.close()


@pytest.mark.parametrize("is_read", [False, True], ids=["unread", "read before"])
def test_a_signal_leaves_a_shutdown_behind_and_stays_for_who_reads_it(signals: SignalPipe, is_read: bool) -> None:
    theirs = Stuck()
    os.kill(os.getpid(), signal.SIGUSR1)
    if is_read:
        assert signals.read() == [signal.SIGUSR1]
    assert not GuardedHandler(theirs, signals).shutdown()
    assert signals.read() == [signal.SIGUSR1] * (not is_read)
    theirs.go.set()


def test_a_signal_leaves_the_creation_behind(signals: SignalPipe) -> None:
    go = threading.Event()
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(SignalException, match="told to end by SIGUSR1"):
        created(go.wait, signals)
    go.set()


def test_an_error_of_the_creation_is_raised(signals: SignalPipe) -> None:
    def create() -> Any:
        raise ValueError("no store")

    with pytest.raises(ValueError, match="no store"):
        created(create, signals)
