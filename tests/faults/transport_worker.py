"""A rank whose network is lost in the middle of its training: all ranks are in one collective then. Run as a script.

`transport_worker.py FOLDER`: the connections of gloo lose whatever comes in from the fourth step on, and stay open.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

import ft_client as ft

FAULTY_STEP, STEPS = 3, 8
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A program of the kernel's packet filter (`struct sock_filter`): it returns 0, so many bytes of a packet are kept."""
SO_ATTACH_FILTER = 26


def lose_the_network() -> None:
    """Drops all that arrives at connections of this process, but for that to the store."""
    store = int(os.environ["MASTER_PORT"])
    code = ctypes.create_string_buffer(DROP_ALL)
    program = struct.pack("HP", 1, ctypes.addressof(code))
    for entry in Path("/proc/self/fd").iterdir():
        # One that is no socket, or is not connected.
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as connection:
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and store not in (connection.getsockname()[1], connection.getpeername()[1]):
                connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def main() -> None:
    """Trains until nothing goes on."""
    dist.init_process_group("gloo")
    ft.init()
    for step in range(STEPS):
        with ft.section("step"):
            ft.report_iteration(step)
            if step == FAULTY_STEP:
                lose_the_network()
            dist.all_reduce(torch.ones(4))


main()
