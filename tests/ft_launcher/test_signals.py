"""The signal pipe: what came is read, and every signal is given back as it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from ft_launcher.signals import SignalPipe


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
        "import faulthandler, os, signal; from ft_launcher.signals import SignalPipe;"
        "faulthandler.register(signal.SIGUSR1, file=2); pipe = SignalPipe([signal.SIGUSR1]);"
        "os.kill(os.getpid(), signal.SIGUSR1); assert pipe.read() == [signal.SIGUSR1]; pipe.close();"
        "os.kill(os.getpid(), signal.SIGUSR1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.count("most recent call first") == 1
