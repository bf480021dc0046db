"""A rank that calls a function and has ended before anybody could watch it."""

from __future__ import annotations

import socket
import subprocess
import sys

from ft_launcher.node.ranks.function_context import FunctionProcess
from rank_monitor.contract.wire import sealed_pickle


def ended(code: int, value: bytes | None = None) -> FunctionProcess:
    """The process of a rank whose end a fork server has taken."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with theirs:
        if value is not None:
            sealed_pickle.send(theirs, value)
    return FunctionProcess(process.pid, lambda: code, ours, lambda: None)


def test_what_it_returned_is_taken() -> None:
    process = ended(0, value=b"7")
    process.give_up()
    assert process.poll() == 0
    assert process.value == b"7"
    process.close()


def test_its_exit_code_is_taken() -> None:
    process = ended(3)
    assert process.poll() == 3
    process.close()
