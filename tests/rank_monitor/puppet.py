"""A rank on strings: does what the lines on its standard input say, one answer each. Run as a script."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import time

connection = socket.socket()


def connect(path: str) -> str:
    global connection
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(60)
    connection.connect(path)
    return "connected"


def send(data: str = "") -> str:
    try:
        connection.send(bytes.fromhex(data))
    except OSError as error:
        return type(error).__name__
    return "sent"


def receive() -> str:
    """The next message in hex; `closed` at the end."""
    try:
        return connection.recv(70_000).hex() or "closed"
    except OSError as error:
        return type(error).__name__


def close() -> str:
    connection.close()
    return "closed"


def register(number: str, path: str) -> str:
    faulthandler.register(int(number), file=open(path, "a"), all_threads=True)  # noqa: PTH123, SIM115
    return "registered"


def on_signal(number: str, what: str) -> str:
    signal.signal(int(number), signal.SIG_IGN if what == "ignore" else lambda *_: os._exit(7))
    return "handled"


def fork() -> str:
    """A child that keeps every descriptor and sleeps."""
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    return str(pid)


def hang_in_sleep() -> str:
    time.sleep(600)
    return ""


def hang_with_the_interpreter_locked() -> str:
    ctypes.PyDLL(None).sleep(600)
    return ""


def hang_in_a_loop() -> str:
    while True:
        pass


def leave(code: str) -> str:
    os._exit(int(code))


if __name__ == "__main__":
    for line in sys.stdin:
        name, *arguments = line.split()
        print(globals()[name](*arguments), flush=True)
