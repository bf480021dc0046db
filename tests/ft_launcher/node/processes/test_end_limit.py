"""A launcher that no longer attends to its signals leaves in the end; one that does is left alone."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.patience import patient

STANDS_STILL = """
import os, signal, sys, threading, time
from ft_launcher.node.processes import end_limit
from ft_launcher.node.processes.signals import SignalPipe

end_limit._UNATTENDED_S = 0.5
pipe = SignalPipe({signal.SIGTERM, signal.SIGINT})
end_limit.EndLimit(pipe, limit_s=lambda arrived: 1.0 / len(arrived), leave=lambda number: os._exit(100 + number))
print("ready", flush=True)
if sys.argv[1] == "unread":
    threading.Event().wait()
if sys.argv[1] == "read":
    pipe.wait(1000.0)
    threading.Event().wait()
end = time.monotonic() + 1000.0
while time.monotonic() < end:
    if pipe.wait(0.1):
        end = min(end, time.monotonic() + 2.5)
os._exit(7)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("how", "more"), [("unread", 100), ("read", 100), ("attended", None)])
def test_who_stands_still_leaves(how: str, more: int | None, number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", STANDS_STILL, how], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        code = process.wait(patient(30.0))
    assert code == (7 if more is None else more + number)
