"""Sets the command line and environment that /proc shows of this process, and so `ps` and the search by job tag.

A fork goes on showing those of the program it was forked from. `PR_SET_MM_MAP` (Linux 3.18, no privilege needed) sets
the addresses from which the kernel reads them. Where a kernel does not have it, nothing changes.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

# From linux/prctl.h.
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
# -1 as the unsigned `exe_fd` of struct prctl_mm_map: /proc/PID/exe stays as it is.
_NO_EXE = 0xFFFFFFFF
_FROM_STAT = (26, 27, 45, 46, 47, 28)
"""Code, data and heap of /proc/PID/stat, as `struct prctl_mm_map` has them: first and last two apart from the rest."""

# The kernel reads this memory whenever /proc is read, so it must never be freed.
_shown: list[mmap.mmap] = []


def show(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Sets what /proc/PID/cmdline and /proc/PID/environ show. A failure is ignored."""
    shown_command = b"".join(os.fsencode(argument) + b"\0" for argument in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environ.items())
    length = len(shown_command) + len(variables)
    memory = mmap.mmap(-1, max(1, length), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:length] = shown_command + variables
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    between, last = first + len(shown_command), first + length
    code, code_end, data, data_end, heap, stack = _layout()
    own = (code, code_end, data, data_end, heap, _libc().sbrk(0), stack)
    layout = struct.pack("11QQII", *own, first, between, between, last, 0, 0, _NO_EXE)
    if _libc().prctl(_PR_SET_MM, _PR_SET_MM_MAP, layout, len(layout), 0) == 0:
        _shown.append(memory)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_long]
    return libc


@functools.cache
def _layout() -> tuple[int, ...]:
    """Returns the addresses of code, data, heap and stack. Cached: a fork has the same ones as its parent."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    return tuple(int(fields[number - 3]) for number in _FROM_STAT)
