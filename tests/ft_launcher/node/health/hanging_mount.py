"""A file system that never answers: the kernel's own FUSE, with a server that reads requests and keeps them.

A process that asks it for anything hangs inside the kernel, and SIGKILL does not end it, as with a dead NFS server
(hard mount) or a wedged driver. Needs root and /dev/fuse.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

_INIT = 26
_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def hanging(point: Path) -> Iterator[threading.Event]:
    """Mounts it at a folder, which is made. The event is set once somebody hangs in it; at the end all are let go."""
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("needs root and /dev/fuse")
    point.mkdir()
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
    if _libc.mount(b"hanging", bytes(point), b"fuse.hanging", 0, options.encode()) != 0:
        os.close(device)
        pytest.skip(f"FUSE cannot be mounted: {os.strerror(ctypes.get_errno())}")
    hangs, told, tell = threading.Event(), *os.pipe()
    server = threading.Thread(target=_serve, args=(device, told, hangs))
    server.start()
    try:
        yield hangs
    finally:
        _libc.umount2(bytes(point), _DETACH)
        os.close(tell)
        server.join()
        os.close(told)
        os.close(device)  # ends the connection, so that every request fails and who waits goes on


def _serve(device: int, told: int, hangs: threading.Event) -> None:
    while told not in select.select([device, told], [], [])[0]:
        try:
            request = os.read(device, 1 << 17)
        except OSError:
            return
        _, kind, number = struct.unpack_from("IIQ", request)
        if kind != _INIT:
            hangs.set()
            continue
        answer = struct.pack("IIIIHHIIHHI", 7, 31, 65536, 0, 12, 10, 65536, 1, 0, 0, 0) + bytes(28)
        os.write(device, struct.pack("IiQ", 16 + len(answer), 0, number) + answer)
