"""The signal pipe: what came is read, and every signal is given back as it was."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from ft_launcher.processes.signals import RankSignal, SignalPipe, rank_signal
from ft_launcher.settings.job_settings import about_names, named_signals
from tests.program import python


def test_signals_are_read_and_handlers_given_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    pipe = SignalPipe([signal.SIGUSR1])
    os.kill(os.getpid(), signal.SIGUSR1)
    assert pipe.wait(60) == signal.SIGUSR1 and pipe.read() == []
    pipe.close()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_without_signals_it_can_be_made_in_any_thread() -> None:
    found: list[object] = []

    def use() -> None:
        pipe = SignalPipe(())
        found.append(pipe.read())
        pipe.close()

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert found == [[]]


def test_a_handler_of_c_is_given_back() -> None:
    code = (
        "import faulthandler, os, signal; from ft_launcher.processes.signals import SignalPipe;"
        "faulthandler.register(signal.SIGUSR1, file=2); pipe = SignalPipe([signal.SIGUSR1]);"
        "os.kill(os.getpid(), signal.SIGUSR1); assert pipe.read() == [signal.SIGUSR1]; pipe.close();"
        "os.kill(os.getpid(), signal.SIGUSR1)"
    )
    assert python(code).stderr.count("most recent call first") == 1


@pytest.mark.parametrize(
    ("got", "names", "reaches"),
    [
        ("SIGTERM", "", ("SIGUSR2", False)),
        ("SIGHUP", "", ("SIGUSR2", False)),
        ("SIGQUIT", "", ("SIGQUIT", False)),
        ("SIGUSR1", "", ("SIGUSR1", False)),
        ("SIGUSR1", "SIGTERM,SIGUSR1", ("SIGUSR1", True)),
        ("SIGTERM", "SIGTERM, SIGUSR1", ("SIGTERM", True)),
        ("SIGHUP", "SIGTERM,SIGUSR1", ("SIGUSR2", False)),
    ],
)
def test_what_the_ranks_get(got: str, names: str, reaches: tuple[str, bool]) -> None:
    name, always = reaches
    expected = RankSignal(getattr(signal, name), always)
    assert rank_signal(getattr(signal, got), named_signals(names), signal.SIGUSR2) == expected


def test_names_that_cannot_be() -> None:
    assert about_names("SIGTERM,SIGUSR") == [
        "--signals-to-handle: SIGUSR is not a signal, left out (did you mean SIGUSR2?)"
    ]
    assert about_names("SIGTERM, SIGUSR1") == [] and named_signals("SIGTERM,SIGUSR") == {signal.SIGTERM}
    with pytest.raises(ValueError, match="SIGKILL cannot be handled"):
        named_signals("SIGTERM,SIGKILL")
